"""Neighbours exchange their borders, and each waits for the other one first."""

# fix: Let one of the two {} first
# status: 4
# run: --hang-after 3 --kill-on-hang

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def exchange(mine: torch.Tensor, other: int) -> torch.Tensor:
    theirs = torch.empty_like(mine)
    dist.recv(theirs, src=other)  # expect: DDP803 ranks 0,1
    dist.send(mine, dst=other)
    return theirs


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    exchange(torch.ones(4), 1 - dist.get_rank())
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
