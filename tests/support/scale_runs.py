"""Runs of ``ddpdoctor scale`` written by hand, with the real writers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT, rank_stem
from ddpdoctor.run.records.base import JsonObject, Record
from ddpdoctor.run.records.model import DdpRecord, Parameter
from ddpdoctor.run.records.process import EndRecord, OpenRecord
from ddpdoctor.run.records.supervisor import JobRecord
from ddpdoctor.run.status import Phase, StatusPage
from ddpdoctor.scale.results import AS_IT_IS, Measured, Outcome, Planned, Size, Variant
from tests.support.written import MS, T0, writable

STEPS = 20
SMALL = {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 2.0, "other": 1.0}
"""Milliseconds of the parts of an iteration on one rank."""

PARAMETERS = (Parameter("weight", (1000, 1000), "float32"), Parameter("bias", (1000,), "float16"))


def steps(
    *,
    count: int = STEPS,
    wait: float = 0.0,
    split: bool = True,
    samples: int | None = 8,
    waited: float = 0.0,
    warmup_factor: float = 10.0,
    **parts: float,
) -> Iterable[JsonObject]:
    """Steps with these parts in milliseconds; the first five take much longer."""
    for number in range(count):
        factor = warmup_factor if number < 5 else 1.0
        times = {name: int(ms * MS * factor) for name, ms in {**SMALL, **parts}.items()}
        total = sum(times.values()) + int(wait * MS)
        yield {
            "kind": "step", "step": number, "start": T0 + number * total, **times,
            "wait": int(wait * MS), "total": total, "split": split, "waited": int(waited * MS),
            **({} if samples is None else {"samples": samples}),
        }  # fmt: skip


def write_run(
    path: Path,
    ranks: int,
    records: Iterable[Record | JsonObject],
    *,
    slow: Iterable[JsonObject] = (),
    status: int | None = 0,
    device: str = "cpu",
    ddp: bool = True,
    ended: bool = True,
    stderr: str = "",
) -> Path:
    """Write a run's directory.

    Args:
        records: What each rank wrote.
        slow: What the last rank wrote instead.
    """
    path.mkdir(parents=True, exist_ok=True)
    records, slow = list(records), list(slow)
    for number in range(ranks):
        stem = path / rank_stem(number, 0)
        page = StatusPage(
            f"{stem}.status",
            rank=number,
            world_size=ranks,
            local_rank=number,
            restart=0,
            started=T0,
        )
        page.show(Phase.ENDED, T0, 0)
        built = DdpRecord(
            device=device,
            group_ranks=tuple(range(ranks)),
            parameters=PARAMETERS,
            bucket_cap_bytes=25 << 20,
        )
        journal = Journal(f"{stem}.jsonl", 1 << 20)
        journal.write([OpenRecord(format=FORMAT, rank=number, world_size=ranks, backend="gloo")])
        journal.write([built] if ddp else [])
        journal.write(map(writable, slow if slow and number == ranks - 1 else records))
        journal.write([EndRecord(time=T0)] if ended else [])
        journal.close()
    (path / "run.json").write_text(f'{{"format": {FORMAT}, "launcher": "torchrun"}}')
    (path / "stderr.log").write_text(stderr)
    journal = Journal(str(path / "supervisor.jsonl"), 1 << 20)
    journal.write([] if status is None else [JobRecord(time=T0, status=status)])
    journal.close()
    return path


def planned(
    ranks: int = 1, repeat: int = 1, variant: Variant = AS_IT_IS, *, nodes: int = 1
) -> Planned:
    return Planned(1, Size(nodes, ranks // nodes), variant, repeat)


def measured(ranks: int = 1, **values: Any) -> Measured:
    """An iteration of 64 ms with nothing lost, but for ``values`` in seconds."""
    parts = {name: ms / 1000 for name, ms in SMALL.items()}
    found = {"exposed": 0.0, "samples": 8.0, **parts, **values}
    own = sum(found[name] for name in SMALL)
    found.setdefault("step", own + (found["exposed"] or 0.0))
    return Measured(ranks=ranks, local=ranks, steps=15, **found)


def outcome(of: Planned, result: Measured | None, *, failure: str = "", status: int = 0) -> Outcome:
    place = Path("/runs") / of.directory
    return Outcome(of, place, place.with_suffix(".log"), status, result, failure)
