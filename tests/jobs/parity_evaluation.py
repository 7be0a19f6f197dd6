"""Trains and evaluates, for comparisons of sizes.

Words: ``dropped`` leaves out the last batch of an evaluation; ``shard`` prints what a rank counted;
``hand`` gives each rank a part of whole length; else all samples count, on all ranks together.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

Batches = Iterable[Any]


def print_own(model: DistributedDataParallel, tests: Batches) -> None:
    right, seen = 0, 0
    with torch.no_grad():
        for inputs, labels in tests:
            right += int((model.module(inputs).argmax(1) == labels).sum())
            seen += len(labels)
    if dist.get_rank() == 0:
        print(f"accuracy {right / seen:.3f}")


def print_all(model: DistributedDataParallel, tests: Batches) -> None:
    counts = torch.zeros(2)
    with torch.no_grad():
        for inputs, labels in tests:
            counts[0] += (model.module(inputs).argmax(1) == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"accuracy {float(counts[0] / counts[1]):.3f}")


def main() -> None:
    words = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(0)
    features = torch.randn(264, 16, generator=made)
    data = TensorDataset(features, (features.sum(1) > 0).long())
    held_out = Subset(data, range(70))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4 // world, sampler=sampler)
    if "hand" in words:
        part = len(held_out) // 3 // world
        own = Subset(data, range(rank * part, (rank + 1) * part))
        tests = DataLoader(own, batch_size=14)
    else:
        tests = DataLoader(
            held_out,
            batch_size=14,
            sampler=DistributedSampler(held_out, shuffle=False),
            drop_last="dropped" in words,
        )
    model = DistributedDataParallel(nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss: Any = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if "shard" in words:
        print_own(model, tests)
    else:
        print_all(model, tests)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
