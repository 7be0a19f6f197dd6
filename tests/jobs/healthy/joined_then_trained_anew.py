"""Uneven inputs within `join()`, then another model in even steps: the ranks' numbers differ."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    ddp(inputs).square().mean().backward()
    optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp]):
        for inputs in torch.randn(40 + 24 * rank, 16).split(8):
            step(ddp, optimizer, inputs)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    torch.manual_seed(rank)
    for _ in range(30):
        step(ddp, optimizer, torch.randn(8, 16))
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
