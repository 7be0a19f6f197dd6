"""A rank ends its process once its own loss is low enough."""

# fix: Exit on all ranks together
# status: 1

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(40):
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, 16)).square().mean() / (1 + step * dist.get_rank())
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            sys.exit()  # expect: DDP801 rank 1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
