"""A model so small that a step takes about a millisecond: what the probe adds is seen here."""

from __future__ import annotations

import argparse
import gc
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train and print rank 0's seconds per step: the median, and the process's CPU time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(8)]
    ddp = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(64, options.width)
    seconds = []
    cpu = 0.0
    for iteration in range(options.iterations):
        if iteration == options.warmup:
            cpu = time.process_time()
        start = time.perf_counter()
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        timed = sorted(seconds[options.warmup :])
        cpu = (time.process_time() - cpu) / len(timed)
        print(f"median {timed[len(timed) // 2]:.9f} cpu {cpu:.9f}")
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
