"""Results are reduced in a finally, also while an exception is on its way."""

# fix: Fix this exception first. Call no collective in a `finally`
# status: 1
# run: --hang-after 3

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    labels = {0: "cat", 1: "dog"}
    seen = torch.zeros(1)
    try:
        for step in range(12):
            optimizer.zero_grad()
            ddp(torch.randn(16, 16)).square().mean().backward()
            optimizer.step()
            seen += len(labels[step // 8 if rank else 0])
            if rank == 1 and step == 7:
                seen += len(labels[2])  # expect: DDP901 rank 1
    finally:
        dist.all_reduce(seen)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
