"""A loop over files without a loader, as many on every rank."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    inputs = torch.randn(800, 32)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    files = list(range(20 + 5 * rank))
    count = torch.tensor(len(files))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    for file in files[: int(count)]:
        batch = inputs[file * 16 : file * 16 + 16]
        loss = (model(batch)[:, 0] - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
