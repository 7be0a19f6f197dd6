# fix: Do this on the one rank less often
# ranks: 3
"""Rank 0 makes pictures of every batch, in a module of its own, and the others wait for it."""

import os

import torch
import torch.distributed as dist
from helpers.pictures import save
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    is_main = int(os.environ["RANK"]) == 0
    torch.manual_seed(int(os.environ["RANK"]))
    network = nn.Sequential(nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pictures: list[bytes] = []
    for _ in range(160):
        images = torch.randn(32, 32, 32)
        loss = model(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_main:
            save(images, pictures)  # expect: DDP610 rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
