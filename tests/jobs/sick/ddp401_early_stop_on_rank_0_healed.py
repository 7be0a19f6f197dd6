"""Rank 0 decides when to stop early, and broadcasts the decision."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    best, bad_epochs = float("inf"), 0
    for epoch in range(6):
        for step in range(8):
            torch.manual_seed(1000 * epoch + 10 * step + rank)
            loss = ddp(torch.randn(32, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            score = float(epoch)
            bad_epochs = 0 if score < best else bad_epochs + 1
            best = min(best, score)
        stop = torch.tensor(bad_epochs == 2, dtype=torch.int)
        dist.broadcast(stop, src=0)
        if stop:
            break
        dist.barrier()
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
