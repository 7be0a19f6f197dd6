"""Rank 1 keeps a graph of objects that refer to each other, and Python collects all the time."""

from __future__ import annotations

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Node:
    """A sample in a graph of neighbours."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.neighbours: list[Node] = []


def graph(size: int) -> list[Node]:
    nodes = [Node(number) for number in range(size)]
    for one, other in itertools.pairwise(nodes):
        one.neighbours.append(other)
        other.neighbours.append(one)
    return nodes


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    known = graph(100_000 if rank == 1 else 100)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(160):
        batch = graph(200)  # expect: DDP610 rank 1
        features = torch.randn(len(batch), 64)
        target = torch.tensor([[float(known[step % len(known)].number)]])
        loss = (model(features) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
