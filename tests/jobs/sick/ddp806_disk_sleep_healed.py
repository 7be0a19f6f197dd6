"""The program's input is there."""

# run: --hang-after 5

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def sort(path: str) -> None:
    """Start a program that reads a file."""
    source = [(os.POSIX_SPAWN_OPEN, 0, path, os.O_RDONLY, 0)]
    os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=source), 0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
            sort(os.devnull)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
