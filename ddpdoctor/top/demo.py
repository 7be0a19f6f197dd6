"""A made-up job for people without one: two nodes, a straggler, and what it is blamed for.

Everything follows from the seed and the time, so that pictures and tests are the same each time.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from zlib import crc32

from ddpdoctor.core.finding import Finding, Location, Severity
from ddpdoctor.run.status import Parts
from ddpdoctor.top import headline, times, verdict
from ddpdoctor.top.snapshot import FindingRow, Gpu, Job, Machine, RankRow, Snapshot, Verdict
from ddpdoctor.top.source import Want

STEP = 0.222
"""Seconds that a step of the job takes."""

AGE = 600.0
"""Seconds for which the job has run when it is first looked at."""

_EPOCH, _EPOCHS = 1250, 90
"""Steps of an epoch, and epochs."""

_BATCH = 64
"""Samples of a rank in a step."""

_POINTS = 48
_PER_NODE = 4
_MS = 1_000_000
_GIB = 2**30


class DemoSource:
    """Frames of the made-up job.

    Args:
        interval: Seconds between frames.
        ranks: How many.
        seed: Makes another job of the kind.
        clock: Unix seconds.
    """

    def __init__(
        self,
        interval: float,
        ranks: int = 8,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval = interval
        self.replay = None
        self._ranks = ranks
        self._seed = seed
        self._clock = clock
        self._start = clock()

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        now = self._clock()
        return at(now - self._start + AGE, now, want, ranks=self._ranks, seed=self._seed)

    def history(self) -> Iterator[Snapshot]:
        """Frames from the job's beginning until now."""
        now = self._clock()
        age = now - self._start + AGE
        for number in range(1, _POINTS):
            then = age * number / _POINTS
            yield at(then, now - age + then, Want(), ranks=self._ranks, seed=self._seed)

    def close(self) -> None:
        """Nothing is held."""


def at(age: float, now: float, want: Want, *, ranks: int = 8, seed: int = 0) -> Snapshot:
    """The job at an age in seconds, which is Unix time ``now``."""
    number = max(0, int(age / STEP) - 1)
    slow = (5 + seed) % ranks
    rows, found = [], []
    for rank in range(ranks):
        first = max(0, number - times.WINDOW + 1)
        steps = [_step(seed, rank, each, slow) for each in range(first, number + 1)]
        gpu = _gpu(seed, rank, number, slow)
        found.append(gpu)
        rows.append(_row(rank, number, steps, gpu, age))
    findings = (FindingRow(_finding(slow), now - age + 30),) if ranks > 1 else ()
    seen = min(number, times.WINDOW)
    facts = verdict.Facts(
        live=True, since_start=age, seen=seen, world_size=ranks, findings=findings
    )
    snapshot = Snapshot(
        time=now,
        kind="demo",
        verdict=Verdict(""),
        run="demo",
        command="torchrun --nnodes 2 --nproc-per-node 4 train.py --epochs 90",
        started=now - age,
        live=True,
        world_size=ranks,
        job=_job(seed, number, ranks),
        gpus=tuple(found),
        machine=Machine("node-a", 0.31, 96, 212 * _GIB, 1024 * _GIB),
        findings=findings,
        output=(f"[rank{slow}]: UserWarning: slow storage: 3 of 8 workers wait",),
        environment={"torch": "2.13.0", "cuda": "13.0", "backend": "nccl", "launcher": "torchrun"},
    )
    return headline.judged(snapshot, rows, facts)


def _job(seed: int, number: int, ranks: int) -> Job:
    steps = _EPOCH * _EPOCHS
    return Job(
        script="train.py --epochs 90",
        step=number + 1,
        steps=steps,
        epoch=number // _EPOCH,
        epochs=_EPOCHS,
        rate=1 / STEP,
        samples_rate=ranks * _BATCH / STEP,
        loss=round(1.8 + 5.1 / (1 + number / 400) + 0.1 * _noise(seed, 0, number, 5), 3),
        left=max(0, steps - number) * STEP,
    )


def _noise(seed: int, rank: int, step: int, what: int) -> float:
    """A number from 0 to 1."""
    return crc32(struct.pack("<4q", seed, rank, step, what)) / 2**32


def _step(seed: int, rank: int, number: int, slow: int) -> Parts:
    """A step: whoever is first waits for the last."""

    def own(who: int) -> tuple[int, ...]:
        data, forward, backward, optimizer, other = 6, 52, 104, 11, 3
        data += 41 if who == slow else 0
        lengths = (data, forward, backward, optimizer, other)
        return tuple(
            int(length * _MS * (0.97 + 0.06 * _noise(seed, who, number, what)))
            for what, length in enumerate(lengths)
        )

    mine = own(rank)
    wait = max(4 * _MS, sum(own(slow)) + 4 * _MS - sum(mine))
    return Parts._make((number, *mine, wait, True, 0, 0))


def _gpu(seed: int, rank: int, number: int, slow: int) -> Gpu:
    swing = _noise(seed, rank, number // 4, 9)
    return Gpu(
        node=_node(rank),
        index=rank % _PER_NODE,
        uuid=f"GPU-{seed:08x}-0000-4000-8000-{rank:012x}",
        name="NVIDIA H100 80GB HBM3",
        utilization=round(0.96 + 0.04 * swing, 2),
        memory_used=int((61.5 + 0.4 * swing) * _GIB),
        memory_total=80 * _GIB,
        # Waiting keeps a GPU busy and cool.
        power=round((612.0 if rank == slow else 498.0) + 24 * swing, 1),
        power_limit=700.0,
        temperature=round(58 + rank % _PER_NODE + 3 * swing),
        clock=1.98e9,
        clock_max=1.98e9,
        ecc_errors=0,
        pcie=round((2.1 + 0.3 * swing) * 1e9),
        nvlink=round((118 + 6 * swing) * 1e9),
        processes=((4100 + rank, int(61.0 * _GIB)),),
    )


def _node(rank: int) -> str:
    return f"node-{'abcdefghijklmnopqrstuvwxyz'[rank // _PER_NODE % 26]}"


def _row(rank: int, number: int, steps: list[Parts], gpu: Gpu, age: float) -> RankRow:
    within = age % STEP
    phases = (("data", 0.03), ("forward", 0.06), ("backward", 0.2), ("optimizer", STEP))
    phase = next((name for name, until in phases if within <= until), "optimizer")
    return RankRow(
        rank=rank,
        node=_node(rank),
        local_rank=rank % _PER_NODE,
        pid=4100 + rank,
        phase=phase,
        since=round(within, 3),
        site={"data": "train.py:57", "optimizer": "train.py:66"}.get(phase, "train.py:61"),
        step=number + 1,
        epoch=number // _EPOCH,
        times=times.of_steps(steps[-times.WINDOW :]),
        heartbeat=round(within, 3),
        rss=int((9.2 + 0.1 * _noise(0, rank, 0, 7)) * _GIB),
        allocated=int(31.4 * _GIB),
        reserved=int(58.2 * _GIB),
        peak=int(55.1 * _GIB),
        gpu=gpu,
        debug_port=5678 + rank % _PER_NODE,
    )


def _finding(slow: int) -> Finding:
    return Finding(
        code="DDP610",
        severity=Severity.WARNING,
        message=f"rank {slow} holds the others up by 41.0 ms a step, in its data loading",
        ranks=(slow,),
        location=Location("train.py", 57),
        evidence=(
            "own time 217 ms a step; the others 176 ms (medians of 502 steps)",
            "data loading: 47.0 ms against 6.0 ms",
            f"the others wait 45.0 ms a step in the all-reduce, rank {slow} 4.0 ms",
        ),
        fix="Look at this rank's data: its storage, its workers, the cost of its samples.",
    )
