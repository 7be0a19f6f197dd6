"""Each rank takes as many batches, by next(), as the rank with the fewest files has."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    own = torch.tensor(20 + 4 * rank)
    dist.all_reduce(own, op=dist.ReduceOp.MIN)
    files = int(own)
    batches = iter(DataLoader(TensorDataset(torch.randn(400, 16)), batch_size=8))
    for _ in range(files):
        (batch,) = next(batches)
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
