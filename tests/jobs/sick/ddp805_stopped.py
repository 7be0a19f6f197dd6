"""Somebody stops rank 1."""

# fix: Continue it with `kill -CONT {}`
# run: --hang-after 3 --kill-on-hang
# status: 4

import gc
import os
import signal

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
    for step in range(12):
        torch.manual_seed(1000 * step + rank)
        loss = ddp(torch.randn(32, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # or: DDP805 rank 1
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # expect: DDP805 rank 1
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
