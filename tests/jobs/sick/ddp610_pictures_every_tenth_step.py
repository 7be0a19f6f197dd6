"""Rank 0 draws pictures in every 10th step, which takes as long as dozens of steps."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def draw_pictures() -> None:
    time.sleep(0.25)  # a plotting service


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(500):
        loss = model(torch.randn(64, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            draw_pictures()  # expect: DDP610 rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
