"""Two networks are initialized after DDP has broadcast rank 0's weights, each rank by itself."""

# fix: Initialize the weights before DistributedDataParallel

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.05)


def main() -> None:
    dist.init_process_group("gloo")
    forth = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    back = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    for part in (forth, back):
        part.apply(init_weights)  # expect: DDP701
    optimizer = torch.optim.Adam([*forth.parameters(), *back.parameters()], lr=1e-3)
    for _ in range(120):
        inputs = torch.randn(8, 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(back(forth(inputs)), inputs).backward()
        optimizer.step()
    del forth, back, part, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
