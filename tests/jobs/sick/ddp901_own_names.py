"""Each rank makes up a name for the run, and looks for the checkpoint in its own folder."""

# fix: Make the path on one rank and broadcast it
# status: 1

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
    best = torch.load(os.path.join(folder, "best.pt"))  # expect: DDP901 rank 1
    ddp.module.load_state_dict(best)
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
