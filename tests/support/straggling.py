"""Ranks on written runs of which one is slower than the others."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT, rank_stem
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.status import Phase, StatusPage
from tests.support.written import MS, T0, Written, writable

STEPS = 120


def steps(
    own: float, wait: float, cpu: float, waited: float, *, phase: str = "other", last: int = STEPS
) -> Iterable[JsonObject]:
    """Steps of milliseconds; what waits for a core does so in its own time first."""
    length = own + wait
    for number in range(last):
        yield {
            "kind": "step", "step": number, "start": T0 + int(number * length * MS), "split": True,
            phase: int(own * MS), "wait": int(wait * MS), "total": int(length * MS),
            "cpu": int(cpu * MS), "waited": int(waited * MS),
        }  # fmt: skip


def rank(written: Written, number: int, records: Iterable[JsonObject]) -> None:
    """A rank that trains on the CPU."""
    stem = written.path / rank_stem(number, 0)
    StatusPage(
        f"{stem}.status", rank=number, world_size=3, local_rank=number, restart=0, started=T0
    ).show(Phase.ENDED, T0, 0)
    journal = Journal(f"{stem}.jsonl", 1 << 20)
    opened = OpenRecord(format=FORMAT, rank=number, backend="gloo")
    journal.write([opened, *map(writable, records)])
    journal.close()


def stack(
    count: int, *frames: tuple[str, int, str], letter: str = "R", waits: Sequence[str] = ("", "")
) -> list[Any]:
    """A stack that was seen, its frames outermost first."""
    return [count, [list(frame) for frame in reversed(frames)], list(waits), letter, 1]


def profile(*stacks: list[Any], **counted: object) -> JsonObject:
    counters = {"steps": 20, "wall": 2_000 * MS, "threads": 1, "affinity": [0, 1], "children": 0}
    return {
        "kind": "profile", "time": time.time_ns(), "asked": 1, "step": 40, "stacks": list(stacks),
        **counters, **counted,
    }  # fmt: skip


def asked(written: Written, number: int = 1) -> None:
    written.supervisor.append(
        {"kind": "profile", "time": T0, "restart": 0, "asked": 1, "rank": number}
    )


MAIN = ("/job/train.py", 90, "<module>")


def loop(line: int) -> tuple[str, int, str]:
    return ("/job/train.py", line, "main")


BACKWARD = stack(40, MAIN, loop(33), letter="S", waits=("graph.py", "_engine_run_backward"))


def sick(
    written: Written, mine: JsonObject, theirs: JsonObject | None = None, *, cpu: float = 45.0
) -> Finding:
    """The finding on a rank that takes 40 ms longer than the other two, on a calm machine."""
    asked(written)
    for number in (0, 2):
        quick = theirs or profile(BACKWARD, stack(4, MAIN, loop(31)))
        rank(written, number, [*steps(10, 40, 9, 0), quick])
    rank(written, 1, [*steps(50, 1, cpu, 0), mine])
    (finding,) = written.findings(status=0)
    assert (finding.code, finding.ranks, finding.severity) == ("DDP610", (1,), Severity.WARNING)
    return finding
