"""Replicas that stop being equal: rank 1 changes one parameter after a step that it is told."""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, and print that it was done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--at", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(64, 64)
    for iteration in range(options.iterations):
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        loss.backward()
        optimizer.step()
        if iteration == options.at and dist.get_rank() == 1:
            # Behind autograd's back: nothing but the bits tells it.
            next(ddp.parameters()).data[0, 0] += 1e-6
    if dist.get_rank() == 0:
        print("done")
    del ddp, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
