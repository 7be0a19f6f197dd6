"""What the hooks of one step cost: blocks of steps with the hooks awake and asleep, in turn.

Run it under ``ddpdoctor run``; without, both kinds of block are the same.
"""

from __future__ import annotations

import gc
import sys
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, PAIRS = 100, 60


def measure() -> float:
    """The median extra time of a step, in seconds."""
    layers = [nn.Linear(64, 64) for _ in range(8)]
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(64, 64)

    def block() -> float:
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    rank: Any = sys.modules["ddpdoctor.probe.runtime.rank"]
    tracker = rank.active
    for _ in range(5):
        block()
    extra = []
    for _ in range(PAIRS):
        rank.active = tracker
        awake = block()
        rank.active = None
        extra.append(awake - block())
    rank.active = tracker
    return median(extra)


def measure_collective() -> float:
    """The median extra time of a collective that is called from Python, in seconds."""
    tensor = torch.ones(64)

    def block() -> float:
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            seconds.append(time.perf_counter() - start)
        return median(seconds)

    rank: Any = sys.modules["ddpdoctor.probe.runtime.rank"]
    tracker = rank.active
    extra = []
    for _ in range(PAIRS):
        rank.active = tracker
        awake = block()
        rank.active = None
        extra.append(awake - block())
    rank.active = tracker
    return median(extra)


def main() -> None:
    """Print what the functions above find, in microseconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(f"extra {measure() * 1e6:.2f}")
    print(f"collective {measure_collective() * 1e6:.2f}")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
