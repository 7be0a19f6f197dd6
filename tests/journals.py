"""Status pages, journals and run directories by the real writers, and a reader."""

from __future__ import annotations

import json
from pathlib import Path

import ddpdoctor.rules  # noqa: F401 (registers the rules)
from ddpdoctor.run.record import (
    FORMAT,
    Record,
    StatusPage,
)
from ddpdoctor.run.snapshot import Rank, RunReader

PACKAGE = Path(__file__).parent.parent / "ddpdoctor"
SMALL = 1 << 15
"""The smallest limit of a journal: two segments of 16 KiB."""


def new_page(path: Path, rank: int = 3) -> StatusPage:
    return StatusPage(str(path), rank=rank, world_size=8, local_rank=1, restart=2, started=77)


def step(number: int, pad: int = 0) -> Record:
    return {"kind": "step", "step": number, "start": number, "total": 1, "pad": "x" * pad}


def new_run(directory: Path, manifest: object = None) -> Path:
    content = {"format": FORMAT} if manifest is None else manifest
    (directory / "run.json").write_text(json.dumps(content))
    return directory


def new_journal(directory: Path) -> Path:
    """A run directory with the page of rank 0; the path where its journal belongs."""
    new_run(directory)
    new_page(directory / "rank-0000.r0.status", rank=0)
    return directory / "rank-0000.r0.jsonl"


class Reader:
    """Reads the journal of rank 0, again and again."""

    def __init__(self, journal: Path, window: int = 10_000) -> None:
        self._reader = RunReader(journal.parent, window=window)
        self.rank: Rank

    def poll(self) -> None:
        (self.rank,) = self._reader.snapshot().ranks

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.rank.steps]

    @property
    def records(self) -> list[Record]:
        return list(self.rank.records)
