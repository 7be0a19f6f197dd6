"""The metrics of each batch are reduced, and rank 0 has more batches."""

# fix: Give the loop the same number of rounds
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
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    total = torch.zeros(1)
    for batch in torch.randn(6 - dist.get_rank(), 16, 16):  # expect: DDP803 rank 1
        with torch.no_grad():
            score = ddp.module(batch).mean()
        dist.all_reduce(score)
        total += score
    counts = torch.ones(2)
    dist.all_reduce(counts)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
