"""Neighbours exchange their borders, and wait for what they receive before they send."""

# fix: Start all sends and receives (isend, irecv)
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
    other = 1 - dist.get_rank()
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    theirs = torch.empty(4)
    receives = dist.irecv(theirs, src=other)
    assert receives is not None
    receives.wait()  # expect: DDP814 ranks 0,1
    dist.isend(torch.ones(4), dst=other)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
