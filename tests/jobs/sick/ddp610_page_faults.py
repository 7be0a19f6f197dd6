"""Rank 1 gives its scratch memory back to the kernel after each step, and so gets it again, page by
page; rank 0 keeps it.
"""

import mmap
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE, PAGE = 1 << 26, 4096


def mark(scratch: torch.Tensor) -> None:
    scratch[::PAGE].fill_(1)  # expect: DDP610 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    memory = mmap.mmap(-1, SIZE)
    # Of the size that the kernel counts and fills one by one.
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    scratch = torch.frombuffer(memory, dtype=torch.uint8)
    for _ in range(400):
        mark(scratch)
        loss = model(torch.randn(64, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1:
            memory.madvise(mmap.MADV_DONTNEED)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
