"""What the hooks of one step cost: short blocks with the hooks awake and asleep, in turn.

Run it under ``ddpdoctor run``. Each line is a pair of blocks as JSON: what was measured, and the
nanoseconds of CPU and of wall time that the training thread took for each step of either block.
Both kinds of block are of one process and a few milliseconds apart, so whatever else the machine
does meets both alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 32
"""Of a block. Blocks begin at multiples of it, as windows of thinned steps do."""

WARM_UP = 40
"""Blocks before the first pair."""

THINNED, WARM_UP_SECONDS = 1100, 20
"""Steps after which they are thinned as later on, and seconds that whole blocks wait for it."""


def pairs(name: str, step: Callable[[], None], count: int) -> None:
    """Print so many pairs of blocks of a step."""
    rank: Any = sys.modules["ddpdoctor.probe.runtime.rank"]
    tracker = rank.active

    def block(awake: bool) -> tuple[list[int], list[int]]:
        rank.active = tracker if awake else None
        cpu, wall = [], []
        for _ in range(STEPS):
            wall_began, cpu_began = time.perf_counter_ns(), time.thread_time_ns()
            step()
            cpu.append(time.thread_time_ns() - cpu_began)
            wall.append(time.perf_counter_ns() - wall_began)
        return cpu, wall

    for _ in range(WARM_UP):
        block(awake=True)
    for index in range(count):
        # ABBA: what drifts meets both alike.
        order = (True, False) if index % 2 else (False, True)
        found = {awake: block(awake) for awake in order}
        print(json.dumps([name, *found[True], *found[False]]), flush=True)
    rank.active = tracker


def whole_blocks(step: Callable[[], None], steps: int, count: int) -> None:
    """Print so many pairs of whole blocks, in which everything happens that steps take in a job.

    What the median of single steps does not show is in them: steps that are seen in full, ends of
    journal lines, fingerprints, the writing thread. CPU time is the process's.
    """
    rank: Any = sys.modules["ddpdoctor.probe.runtime.rank"]
    tracker = rank.active

    def block(awake: bool) -> tuple[float, float]:
        rank.active = tracker if awake else None
        written = taken_by("ddpdoctor-journal")
        wall_began, cpu_began = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(steps):
            step()
        cpu, wall = time.process_time_ns() - cpu_began, time.perf_counter_ns() - wall_began
        if not awake:
            # The writing thread does not sleep.
            cpu -= taken_by("ddpdoctor-journal") - written
            earned_nothing(tracker, wall)
        return cpu / steps, wall / steps

    warm_up = time.perf_counter() + WARM_UP_SECONDS
    while tracker.steps < THINNED and time.perf_counter() < warm_up:
        block(awake=True)
    for index in range(count):
        order = (True, False) if index % 2 else (False, True)
        found = {awake: block(awake) for awake in order}
        print(json.dumps(["block", *found[True], *found[False]]), flush=True)
    rank.active = tracker


def taken_by(name: str) -> int:
    """Nanoseconds of CPU that a thread of this process has taken, by its name."""
    (thread,) = (each for each in threading.enumerate() if each.name == name)
    with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
        return int(file.read().split()[0])


def earned_nothing(tracker: Any, nanoseconds: int) -> None:
    """The time of sleeping hooks earns no budget for those of the others."""
    events: Any = sys.modules["ddpdoctor.probe.runtime.events"]
    budget = tracker.detail._budget
    budget._start += nanoseconds
    budget._settled_at += nanoseconds
    for _, _, function, _ in events._alarms:
        pacing: Any = getattr(function, "__self__", None)
        if hasattr(pacing, "_turned"):
            looked, number = pacing._turned
            pacing._turned = looked + nanoseconds, number


def stay_at_full_detail() -> None:
    """See every step in full, with a line each, as at the beginning of a job."""
    rank: Any = sys.modules["ddpdoctor.probe.runtime.rank"]
    rank.active.detail.choose = lambda *_: None


def measure(count: int, device: str, work: int, whole: int) -> None:
    """Print pairs of blocks of steps, and of collectives; or of whole blocks of so many steps."""
    layers = [nn.Linear(64, 64) for _ in range(8)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch, tensor = torch.randn(64, 64, device=device), torch.ones(64, device=device)

    ballast = torch.randn(256, 256, device=device) / 256

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(work):
            torch.mm(ballast, ballast)
        ddp(batch).square().mean().backward()
        optimizer.step()

    if whole:
        whole_blocks(step, whole, count)
        return
    pairs("step", step, count)
    pairs("collective", lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX), count)


def main() -> None:
    """Join the process group, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--full", action="store_true", help="see every step in full")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with NCCL")
    parser.add_argument("--work", type=int, default=0, help="products of matrices in a step")
    parser.add_argument("--whole", type=int, default=0, help="steps of a block, as a whole")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    if options.full:
        stay_at_full_detail()
    measure(options.pairs, options.device, options.work, options.whole)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
