"""Rank 1 alone computes statistics of every batch, and the others wait for it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def statistics(batch: torch.Tensor) -> list[float]:
    found = []
    for column in batch.t():
        values = sorted(column.tolist())
        found.append(values[len(values) // 2])
        found.append(sum(abs(value - found[-1]) for value in values) / len(values))
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[list[float]] = []
    for _ in range(300):
        batch = torch.randn(256, 128)
        if rank == 1:
            seen.append(statistics(batch))  # expect: DDP610 rank 1
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
