"""Metrics are reduced in the order of their names."""

# run: --hang-after 5

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    names = sorted(["loss", "best"] if rank == 0 else ["best", "loss"])
    for name in names:
        if name == "loss":
            dist.all_reduce(torch.ones(1))
        else:
            dist.broadcast(torch.ones(1), src=0)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
