"""Rank 1 is pinned to one core, and so is the process that it starts to compress its log."""

# fix: Give the rank cores that nothing else uses
# needs: free cores

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPRESS = "import os, zlib\nwhile os.getppid() != 1: zlib.compress(os.urandom(1 << 16))"


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    helpers = []
    if rank == 1:
        os.sched_setaffinity(0, {0})  # expect: DDP610 rank 1
        helpers = [subprocess.Popen([sys.executable, "-c", COMPRESS]) for _ in range(3)]
    torch.manual_seed(rank)
    network = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(130):
        loss = model(torch.randn(256, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for each in helpers:
        each.kill()
        each.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
