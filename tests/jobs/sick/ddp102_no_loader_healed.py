"""A loop without a loader, in which every rank takes its batches."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(640, 32, generator=generator)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        order = torch.randperm(len(inputs), generator=generator)
        mine = order[dist.get_rank() :: dist.get_world_size()]
        for at in range(0, len(mine), 16):
            batch = inputs[mine[at : at + 16]]
            optimizer.zero_grad()
            (model(batch)[:, 0] - batch.sum(1)).square().mean().backward()
            optimizer.step()
    del model, optimizer


if __name__ == "__main__":
    main()
    gc.collect()
    dist.destroy_process_group()
