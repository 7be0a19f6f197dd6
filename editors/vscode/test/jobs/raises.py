"""Rank 1 raises in its third step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(10, 4))
for step in range(1000):
    batch = torch.ones(32, 10)
    if rank == 1 and step == 3:
        batch = batch[:, :9]
    model(batch).sum().backward()  # here
