"""Rank 0 counts its tensors after every step, and looks for garbage first."""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def tensors() -> int:
    gc.collect()
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    most = 0
    for _ in range(70):
        loss = model(torch.randn(64, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            most = max(most, tensors())  # expect: DDP610 rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
