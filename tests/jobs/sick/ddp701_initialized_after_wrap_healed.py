"""Two networks are initialized before DDP broadcasts rank 0's weights."""

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
    parts = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)]
    for part in parts:
        part.apply(init_weights)
    forth, back = map(DistributedDataParallel, parts)
    optimizer = torch.optim.Adam([*forth.parameters(), *back.parameters()], lr=1e-3)
    for _ in range(120):
        inputs = torch.randn(8, 16)
        optimizer.zero_grad()
        nn.functional.mse_loss(back(forth(inputs)), inputs).backward()
        optimizer.step()
    del forth, back, parts, part, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
