"""Rank 1 prepares its data for long while rank 0 is in a barrier already."""

# fix: Share the work among the ranks
# run: --hang-after 1

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def prepare(seconds: float) -> None:
    """Index the data."""
    end = time.process_time() + seconds
    index: dict[int, int] = {}
    while time.process_time() < end:  # or: DDP811 rank 1
        index[len(index) % 1000] = len(index)  # expect: DDP811 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1:
        prepare(14.0)
    dist.barrier()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
