"""Snapshots of runs that never were, for the tests of what draws them.

    python -m tests.support.top_snapshots

writes the goldens again: look at the difference before you commit it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.render.terminal import plain
from ddpdoctor.top.draw import screen
from ddpdoctor.top.draw.drawing import ScreenData
from ddpdoctor.top.frames import Point, point
from ddpdoctor.top.snapshot import (
    FindingRow,
    Gpu,
    Job,
    Machine,
    RankRow,
    Snapshot,
    Times,
    Verdict,
)
from ddpdoctor.top.view import View

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = ((80, 24), (60, 15), (120, 30), (200, 60), (20, 5))
NOW = 1_800_000_000.0
GIB = 1 << 30
SLOW = 1
"""The rank that is slow."""


def times(rank: int, split: bool = True) -> Times:
    """A step of 200 ms of which most ranks wait for half."""
    forward = 0.030 + 0.001 * math.sin(rank)
    backward = 0.040 + (0.080 if rank == SLOW else 0.0)
    own = 0.010 + forward + backward + 0.006 + 0.002
    if not split:
        return Times(0.010, forward, 0.2 - 0.018 - forward, 0.006, 0.002, 0.0, 0.2, False)
    return Times(0.010, forward, backward, 0.006, 0.002, 0.2 - own, 0.2, True)


def gpu(rank: int, node: str) -> Gpu:
    return Gpu(
        node, rank % 8, f"GPU-{rank:04d}", "NVIDIA H100 80GB HBM3", 0.97 - 0.01 * (rank % 3),
        (60 + rank % 8) * GIB, 80 * GIB, 600.0 + rank % 7, 700.0, 61.0, 1.7e9, 1.98e9,
    )  # fmt: skip


def row(rank: int, *, per_node: int = 8, gpus: bool = True, split: bool = True) -> RankRow:
    node = f"node{rank // per_node}"
    step = times(rank, split)
    return RankRow(
        rank=rank,
        node=node,
        local_rank=rank % per_node,
        pid=4000 + rank,
        phase="backward",
        since=0.012,
        site="/data/train.py:61" if rank != SLOW else "/data/model.py:17",
        collective="all_reduce" if rank != SLOW else "",
        step=1234,
        epoch=3,
        times=step,
        heartbeat=0.4,
        rss=3 * GIB,
        allocated=40 * GIB if gpus else None,
        reserved=48 * GIB if gpus else None,
        peak=52 * GIB if gpus else None,
        cost=0.0041,
        gpu=gpu(rank, node) if gpus else None,
        debug_port=5678 + rank,
        output=(f"[rank{rank}]: step 1234 loss 2.31",) if rank < 2 else (),
    )


FINDING = Finding(
    "DDP610",
    Severity.WARNING,
    "rank 1 is the straggler: 158 ms of its own per step against 88 ms, in backward",
    (SLOW,),
    Location("/data/model.py", 17),
    ("rank 0 waits 112 ms of 200 ms",),
    "Give all ranks the same work, or look at what slows rank 1 down in backward.",
)


JOB = Job(
    script="train.py --lr 0.1",
    step=1234,
    steps=5000,
    epoch=3,
    epochs=12,
    rate=5.0,
    samples_rate=5.0 * 32,
    loss=2.31,
    left=753.2,
)


def history(snapshot: Snapshot) -> tuple[Point, ...]:
    """The same run for ten minutes before, with one slow rank less in the beginning."""
    last = point(snapshot)
    return tuple(
        replace(
            last,
            time=NOW - 600 + 20 * n,
            times=last.times if n > 10 else dict.fromkeys(last.times, last.median or times(0)),
            skew=1.0 if n < 10 or last.skew is None else last.skew,
            loss=6.0 / (1 + n / 10),
        )
        for n in range(30)
    )


def run(ranks: int, *, gpus: bool = True, split: bool = True) -> Snapshot:
    """A live run with rank 1 slowed down (a run of one rank has none that is)."""
    rows = sorted(
        (row(rank, gpus=gpus, split=split) for rank in range(ranks)),
        key=lambda each: (-(each.times.own if each.times else 0.0), each.rank),
    )
    verdict = Verdict("rank 1 holds the others up: backward 120 ms, median 40 ms", "warning", SLOW)
    if ranks == 1:
        verdict = Verdict("no problem: one rank, 200 ms a step")
    typical = rows[len(rows) // 2].times
    return Snapshot(
        time=NOW,
        kind="run",
        verdict=verdict,
        run="20270115-080000-c0ffee",
        path="/tmp/ddpdoctor-0/20270115-080000-c0ffee",
        command="torchrun train.py --lr 0.1",
        started=NOW - 600,
        live=True,
        world_size=ranks,
        job=JOB,
        ranks=tuple(rows),
        median=typical,
        skew=None if ranks == 1 or typical is None else 158 / 88,
        gpus=tuple(each.gpu for each in rows if each.gpu is not None),
        findings=() if ranks == 1 else (FindingRow(FINDING, NOW - 75),),
        nvml="" if gpus else "no NVIDIA driver",
        environment={"torch": "2.13.0", "NCCL_DEBUG": "WARN"},
    )


def changed(snapshot: Snapshot, rank: int, **fields: object) -> Snapshot:
    """With another row for a rank."""
    return replace(
        snapshot,
        ranks=tuple(
            replace(each, **fields) if each.rank == rank else each  # type: ignore[arg-type]
            for each in snapshot.ranks
        ),
    )


def dead() -> Snapshot:
    died = changed(run(4), 2, state="dead", said="killed by SIGKILL: out of memory", step=1200)
    others = [each for each in died.ranks if each.rank != 2]
    last = next(each for each in died.ranks if each.rank == 2)
    return replace(
        died,
        ranks=(*others, last),
        state="failing",
        verdict=Verdict("rank 2 died: killed by SIGKILL, out of memory", "error", 2),
    )


def stale() -> Snapshot:
    hung = changed(run(4), 3, state="stale", heartbeat=43.0, since=43.0, dropped=7)
    return replace(hung, verdict=Verdict("no heartbeat from rank 3 for 43 s", "error", 3))


def held() -> Snapshot:
    return changed(run(4), 0, state="debugger", said="in the debugger at train.py:61")


HANG = Finding(
    "DDP401",
    Severity.ERROR,
    "ranks 0, 2 and 3 alone called barrier #1 (group of ranks 0-3) at `dist.barrier(metrics)` "
    "train.py:30, under `if step == 5 and rank != 1:` (line 29): the other rank never reaches it",
    (0, 2, 3),
    Location("/data/train.py", 30),
    ("rank 0 waits in barrier #1 at train.py:30 for 43 s",),
    "Call it on every rank of the group: move it out of the branch.",
)


def hung() -> Snapshot:
    still = run(4)
    for rank in (0, 2, 3):
        still = changed(still, rank, phase="wait", collective="barrier", since=43.0)
    still = changed(still, 1, since=43.0)
    verdict = Verdict(f"DDP401: {HANG.message}", "error", 0)
    found = (*still.findings, FindingRow(HANG, NOW - 30))
    return replace(still, state="hung", verdict=verdict, findings=found)


def over() -> Snapshot:
    """A run that ended well, with its last numbers."""
    done = run(4)
    for rank in range(4):
        done = changed(
            done, rank, state="ended", phase="", since=None, heartbeat=None, rss=None,
            allocated=None, reserved=None, gpu=Gpu("node0", rank, f"GPU-{rank:04d}"),
        )  # fmt: skip
    text = "the job succeeded after 10 min; DDP610: rank 1 is the straggler"
    return replace(
        done, live=False, state="ended", exit_status=0, gpus=(), verdict=Verdict(text, "warning", 1)
    )


def mig() -> Snapshot:
    whole = run(2)
    for rank in (0, 1):
        part = replace(
            gpu(rank, "node0"), mig=True, utilization=None, power=None, memory_used=4 * GIB,
            memory_total=10 * GIB, name="NVIDIA H100 MIG 1g.10gb", problem="MIG: not per instance",
        )  # fmt: skip
        whole = changed(whole, rank, gpu=part)
    return whole


def machine() -> Snapshot:
    return Snapshot(
        time=NOW,
        kind="machine",
        verdict=Verdict("no run is live on this machine", "info"),
        gpus=tuple(gpu(rank, "node0") for rank in range(4)),
        machine=Machine("node0", 0.31, 64, 100 * GIB, 512 * GIB),
    )


CASES: dict[str, Callable[[], tuple[Snapshot, View]]] = {
    "1-rank": lambda: (run(1), View()),
    "2-ranks": lambda: (run(2), View()),
    "8-ranks": lambda: (run(8), View()),
    "64-ranks": lambda: (run(64), View()),
    "1024-ranks": lambda: (run(1024), View()),
    "1024-ranks-by-node": lambda: (run(1024), View(grouped=True)),
    "dead": lambda: (dead(), View()),
    "stale": lambda: (stale(), View()),
    "debugger": lambda: (held(), View()),
    "hung": lambda: (hung(), View()),
    "ended": lambda: (over(), View(position=(99, 100))),
    "no-colour": lambda: (run(8), View(colour=False)),
    "paused": lambda: (run(8), View(paused=True, position=(3, 9))),
    "no-gpu": lambda: (run(4, gpus=False), View()),
    "unsplit": lambda: (run(4, split=False), View()),
    "mig": lambda: (mig(), View()),
    "machine": lambda: (machine(), View()),
    "ascii": lambda: (dead(), View(ascii_only=True)),
    "expanded": lambda: (run(8), View(expanded=True, cursor=SLOW)),
    "findings": lambda: (run(8), View(panel="findings", opened=True)),
    "help": lambda: (run(8), View(panel="help")),
}
"""What the goldens show."""


def picture(name: str) -> str:
    """A case at all sizes; a bar marks where a line ends."""
    snapshot, view = CASES[name]()
    parts = []
    for width, height in SIZES:
        material = ScreenData(points=history(snapshot))
        drawn = screen.draw_screen(snapshot, view, width, height, material)
        parts.append(f"{width}x{height}\n" + "".join(f"{plain(x)}|\n" for x in drawn.lines))
    return "\n".join(parts)


if __name__ == "__main__":
    for case in CASES:
        (GOLDENS / f"{case}.txt").write_text(picture(case), "utf-8")
