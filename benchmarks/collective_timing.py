"""What it costs on GPUs to know which collective has begun: torch's start events, and an answer.

    python benchmarks/collective_timing.py [--pairs 8] [--steps 2000]

Needs a GPU and NCCL; two ranks share one GPU where there is no other. Jobs with
``TORCH_NCCL_ENABLE_TIMING`` and without it follow each other in pairs. Printed are the host's time
for a small all-reduce and the job's wall time for one, each as the median of the differences within
the pairs with its 95 % interval; and for one rank what an examination asks of it: torch's dump of a
full Flight Recorder, and how far the markers of 64 steps have come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.intervals import interval
from ddpdoctor.probe.observers.collective_calls import _read_dump, reported_calls
from ddpdoctor.probe.runtime import torch_groups
from ddpdoctor.probe.runtime.phases import MAX_PENDING, CudaClock
from ddpdoctor.run.status import Phase

MICRO = 1e-3
"""Microseconds in a nanosecond."""


def job(steps: int) -> None:
    """One rank: print what a small all-reduce took, and what an answer takes."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        os.environ.update(NCCL_HOSTID=os.environ["RANK"], NCCL_SOCKET_IFNAME="lo")
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    tensor = torch.ones(1024, device=device)
    for _ in range(200):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    hosts, began = [], time.perf_counter_ns()
    for _ in range(steps):
        start = time.perf_counter_ns()
        dist.all_reduce(tensor)
        hosts.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    wall = (time.perf_counter_ns() - began) / steps
    if dist.get_rank() == 0:
        figures = {"host": median(hosts), "wall": wall, **answer(device)}
        print(json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def answer(device: torch.device) -> dict[str, float]:
    """Nanoseconds of what an examination asks of a rank."""
    clock = CudaClock(torch.cuda, device)
    for _ in range(MAX_PENDING):
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
            clock.charge(phase)
        clock.cut()
    start = time.perf_counter_ns()
    clock.standing()
    asked = time.perf_counter_ns()
    entries = [each for dump in torch_groups.flight_recorders(torch) for each in _read_dump(dump())]
    json.dumps(reported_calls(entries, lambda _: ()), default=str)
    return {"standing": asked - start, "dump": time.perf_counter_ns() - asked}


def figures(timing: str, steps: int) -> dict[str, float]:
    """The figures of one run of the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", __file__, "--job", "--steps", str(steps)],
        env={**os.environ, "TORCH_NCCL_ENABLE_TIMING": timing, "TORCH_FR_BUFFER_SIZE": "2000"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of collectives' start events.")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.steps)
        return
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (figures("0", options.steps), figures("1", options.steps)) for _ in range(options.pairs)
    ]
    for name in ("host", "wall"):
        differences = [(timed[name] - plain[name]) * MICRO for plain, timed in pairs]
        without = median(plain[name] for plain, _ in pairs) * MICRO
        more = interval(differences).text(" us", 2)
        print(f"{name} time of an all_reduce: {without:.2f} us, with start events longer by {more}")
    for name in ("standing", "dump"):
        taken = median(each[name] for pair in pairs for each in pair) * MICRO
        print(f"{name}: {taken:.0f} us")


if __name__ == "__main__":
    main()
