"""Rank 1 compresses its log when training is over."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPRESS = "import os, zlib; zlib.compress(os.urandom(1 << 16))"


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    network = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(130):
        loss = model(torch.randn(256, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 1:
        subprocess.run([sys.executable, "-c", COMPRESS], check=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
