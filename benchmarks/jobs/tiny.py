"""A step of a given length: what the probe adds to it is seen here.

Rank 0 prints seconds as JSON: the steps' wall times and the CPU times of the process in them, by
blocks of steps, the lower quartile over the blocks and the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BLOCK = 10
"""Steps whose CPU time is read together: the clock of a process ticks coarsely on some kernels."""


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--work", type=int, default=0, help="more products of matrices in a step")
    parser.add_argument("--peer", choices=("profiler-off", "profiler-on", "traceml"))
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with NCCL")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(8)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(options.device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(64, options.width, device=options.device)
    ballast = torch.randn(256, 256, device=options.device) / 256
    wall, cpu = [], []
    with peer(options.peer, options.iterations, ddp) as around_step:
        for iteration in range(options.iterations):
            if iteration % BLOCK == 0:
                wall.append(time.perf_counter())
                cpu.append(time.process_time())
            with around_step():
                optimizer.zero_grad()
                with torch.no_grad():
                    for _ in range(options.work):
                        torch.mm(ballast, ballast)
                ddp(batch).square().mean().backward()
                optimizer.step()
    if dist.get_rank() == 0:
        skipped = options.warmup // BLOCK
        marks = {"wall": wall[skipped:], "cpu": cpu[skipped:]}
        found = {what: lower(each) for what, each in marks.items()}
        print(json.dumps(found | {f"mean {what}": mean(each) for what, each in marks.items()}))
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


def lower(marks: list[float]) -> float:
    """Seconds of a step: the lower quartile over the blocks between the marks."""
    blocks = sorted((b - a) / BLOCK for a, b in itertools.pairwise(marks))
    return blocks[len(blocks) // 4]


def mean(marks: list[float]) -> float:
    """Seconds of a step: all of them between the first and the last mark."""
    return (marks[-1] - marks[0]) / BLOCK / (len(marks) - 1)


@contextlib.contextmanager
def peer(name: str | None, iterations: int, ddp: Any) -> Iterator[Callable[[], Any]]:
    """What surrounds each step: nothing, or what another tool wants there."""
    if name is None:
        yield contextlib.nullcontext
        return
    if name == "traceml":
        traceml = importlib.import_module("traceml_ai")
        traceml.init(mode="auto")
        yield lambda: traceml.trace_step(ddp)
        return
    waits = 0 if name == "profiler-on" else iterations + 1
    schedule = torch.profiler.schedule(wait=waits, warmup=0, active=50, repeat=0)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule) as running:

        @contextlib.contextmanager
        def step() -> Iterator[None]:
            yield
            running.step()

        yield step


if __name__ == "__main__":
    main()
