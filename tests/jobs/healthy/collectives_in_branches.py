"""Collectives under conditions on the rank that fit together; rank 0 validates alone meanwhile."""

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()
    time.sleep(0.5)  # the first one prepares, then the others
    if rank == 0:
        dist.barrier()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().reshape(1)
        if rank == 0:
            dist.all_reduce(mean)
        else:
            dist.all_reduce(mean.reshape(1, 1))
        if step == 5 and rank == 0:
            time.sleep(20)
    dist.barrier()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
