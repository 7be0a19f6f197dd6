"""Rank 0 saves the model at the end and waits for the others, which have ended."""

# fix: Call it on every rank of the group: move it out of the branch
# status: 1

import gc
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), io.BytesIO())
        dist.barrier()  # expect: DDP401 rank 0
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
