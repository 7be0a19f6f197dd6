"""Rank 0 makes up the name, and the others take it."""

import gc
import os
import tempfile
import uuid

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    name = uuid.uuid4().hex
    names = [name]
    dist.broadcast_object_list(names, src=0)
    name = names[0]
    folder = os.path.join(tempfile.gettempdir(), f"run-{name}")
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        os.makedirs(folder)
        torch.save(ddp.module.state_dict(), os.path.join(folder, "best.pt"))
    dist.barrier()
    best = torch.load(os.path.join(folder, "best.pt"))
    ddp.module.load_state_dict(best)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
