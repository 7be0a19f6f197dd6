"""Metrics are reduced in the order of a set, which differs between processes."""

# fix: Let every rank call the same collectives in the same order.
# status: 4
# run: --hang-after 3 --kill-on-hang

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
    names = ["loss", "best"] if rank == 0 else ["best", "loss"]
    for name in names:
        if name == "loss":
            dist.all_reduce(torch.ones(1))  # or: DDP803 ranks 0,1
        else:
            dist.broadcast(torch.ones(1), src=0)  # expect: DDP803 ranks 0,1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
