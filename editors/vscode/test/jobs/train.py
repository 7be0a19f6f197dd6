"""Trains until it is stopped."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(10, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100_000):
    batch = torch.full((32, 10), float(rank))
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    time.sleep(0.05)  # here
