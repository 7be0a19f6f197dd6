"""Rank 1 polls for something that its loop never asks for again."""

# fix: Nothing in the loop changes what its condition tests
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wait_for(queue: list[int]) -> None:
    ready = len(queue) > 3
    polls = 0
    while not ready:  # expect: DDP807 rank 1
        queue.append(polls)
        polls += 1
        queue.pop()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    queue: list[int] = []
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 5 and rank == 1:
            wait_for(queue)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
