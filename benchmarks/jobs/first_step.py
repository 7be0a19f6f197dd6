"""Prints the time of its first step's end: start-up is that minus the launch."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
ddp(torch.ones(4, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    print(f"first {time.time():.6f}")
del ddp, optimizer
gc.collect()
dist.destroy_process_group()
