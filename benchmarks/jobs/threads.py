"""What the probe's own threads take from a rank: the writing thread, and answers with stacks.

Run it under ``ddpdoctor run``, and ask for its stacks meanwhile. Rank 0 prints as JSON how often
the writing thread wakes in a second, and in milliseconds of CPU the longest times for which it held
the GIL (until it offers it, or writes) and in which it answered.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = 20.0
MILLISECOND = 1e6


def main() -> None:
    """Train for some seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recorder: Any = sys.modules["ddpdoctor.probe.runtime.recorder"]
    stacks: Any = sys.modules["ddpdoctor.probe.runtime.stacks"]
    held: list[float] = []
    answers: list[float] = []
    wakes = 0
    since = 0

    def offers() -> None:
        nonlocal since
        now = time.thread_time_ns()
        held.append((now - since) / MILLISECOND)
        since = now

    def sleep(seconds: float) -> None:
        offers()
        time.sleep(seconds)

    drain, call, write = (
        recorder.Recorder._drain,
        recorder.Recorder._call,
        recorder.Journal._append,
    )

    def timed_drain(self: Any, last: bool) -> None:
        nonlocal since
        since = time.thread_time_ns()
        drain(self, last)
        offers()

    def timed_call(self: Any, calls: list[Any]) -> None:
        nonlocal since, wakes
        wakes += calls is self.each_round
        since = time.thread_time_ns()
        call(self, calls)
        offers()

    def timed_write(self: Any, chunk: list[bytes]) -> None:
        offers()
        write(self, chunk)

    answer = stacks._answer

    def timed_answer() -> Any:
        began = time.thread_time_ns()
        found = answer()
        stacks.json_line(found)
        answers.append((time.thread_time_ns() - began) / MILLISECOND)
        return found

    recorder.time = SimpleNamespace(sleep=sleep)
    recorder.Recorder._drain, recorder.Recorder._call = timed_drain, timed_call
    recorder.Journal._append = timed_write
    stacks._answer = timed_answer
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    batch = torch.randn(64, 64)
    began, wakes = time.monotonic(), 0
    ends = torch.zeros(1)
    while not ends.item():
        for _ in range(100):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
        ends.fill_(float(time.monotonic() - began > SECONDS))
        dist.broadcast(ends, 0)
    if dist.get_rank() == 0:
        seconds = time.monotonic() - began
        longest = sorted(held)[-3:]
        print(json.dumps({"wakes": wakes / seconds, "held": longest, "answers": sorted(answers)}))
    del ddp, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
