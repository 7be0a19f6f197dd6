"""Rank 1 starts a program whose input is a pipe that nobody opens, and sleeps in the kernel."""

# fix: Look at the file system
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def sort(path: str) -> None:
    """Start a program that reads a file."""
    source = [(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)]
    name = "/bin/true"
    os.posix_spawn(name, ["true"], os.environ, file_actions=source)  # expect: DDP806 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pipe = os.path.join(tempfile.mkdtemp(), "pipe")
    os.mkfifo(pipe)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # or: DDP806 rank 1
        if step == 5 and rank == 1:
            sort(pipe)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
