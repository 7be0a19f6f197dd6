"""A loop without a loader, in which each rank takes its part of another order."""

# fix: Cut the ranks' parts from one order

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(640, 32, generator=torch.Generator().manual_seed(1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        generator = torch.Generator().manual_seed(100 * epoch + rank)
        order = torch.randperm(len(inputs), generator=generator)
        mine = order[rank::world]
        for at in range(0, len(mine), 16):
            batch = inputs[mine[at : at + 16]]
            optimizer.zero_grad()
            outputs = model(batch)[:, 0]  # expect: DDP117 ranks 0,1
            (outputs - batch.sum(1)).square().mean().backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
