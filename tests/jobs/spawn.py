"""Ranks that ``torch.multiprocessing.spawn`` makes; ``--fail`` lets rank 1 raise."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, port: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if number == 2 and "--fail" in sys.argv:
            if rank == 1:
                raise ValueError("the wrong sort of batch")
            # Not in a collective, whose own failure could be the first that the parent sees.
            time.sleep(60)
        optimizer.zero_grad()
        model(torch.ones(4, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(work, args=(sys.argv[1],), nprocs=2)  # type: ignore[no-untyped-call]
