"""A loop over files without a loader, of which one rank has fewer."""

# fix: Give all ranks the same number of iterations
# status: 1

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
    for file in files:  # expect: DDP109 rank 0
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
