"""The loss is averaged over the ranks only where there is a log to write it to."""

# ranks: 2
# run: --hang-after 3
# status: 1
# fix: Call it on every rank of the group

import gc
import sys
from datetime import timedelta
from io import StringIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def averaged(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def train(ddp, optimizer, rank, writer=None):
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if writer is not None:
            writer.write(f"{step} {averaged(loss)}")  # expect: DDP401 rank 0


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    log_writer = None
    if rank == 0 and len(sys.argv) < 9:
        log_writer = StringIO()
    train(ddp, optimizer, rank, writer=log_writer)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
