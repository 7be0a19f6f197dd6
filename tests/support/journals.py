"""Status pages, journals and run directories by the real writers, and a reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import JournalReader, RunReader
from ddpdoctor.run.records.base import JsonObject, Record, as_json, dataclass, json_line
from ddpdoctor.run.records.typed_json import RANK_RECORDS, SUPERVISOR_RECORDS
from ddpdoctor.run.snapshot import Rank
from ddpdoctor.run.status import StatusPage

PACKAGE = Path(__file__).parents[2] / "ddpdoctor"
SMALL = 1 << 15
"""The smallest limit of a journal: two segments of 16 KiB."""


def new_page(path: Path, rank: int = 3) -> StatusPage:
    return StatusPage(str(path), rank=rank, world_size=8, local_rank=1, restart=2, started=77)


def step(number: int, pad: int = 0) -> bytes:
    """A step's line, so many bytes longer than it has to be."""
    found = {"kind": "step", "step": number, "start": number, "total": 1, "pad": "x" * pad}
    return json_line(found)


def new_run(directory: Path, manifest: object = None) -> Path:
    content = {"format": FORMAT} if manifest is None else manifest
    (directory / "run.json").write_text(json.dumps(content))
    return directory


def new_journal(directory: Path) -> Path:
    """A run directory with the page of rank 0; the path where its journal belongs."""
    new_run(directory)
    new_page(directory / "rank-0000.r0.status", rank=0)
    return directory / "rank-0000.r0.jsonl"


class Numbered(dict[str, type[Record]]):
    """Kinds of records with a number, and with letters that need room: kept as the declared."""

    def get(self, kind: str, default: Any = None) -> Any:
        if kind == "of-a-later-version":
            return default
        if kind not in self:
            declared: type[Record] | None = {**SUPERVISOR_RECORDS, **RANK_RECORDS}.get(kind)
            namespace = {
                "kind": kind,
                "kept": declared.kept if declared is not None else 0,
                "number": 0,
                "pad": "",
                "__annotations__": {"number": int, "pad": str},
                "__module__": __name__,
            }
            kinds = type("Numbered", (Record,), namespace)
            self[kind] = dataclass(frozen=True, slots=False, kw_only=True)(kinds)
        return self[kind]


_numbered = Numbered()


def numbered(kind: str, number: int, pad: int = 0) -> Record:
    """A record with a number, and so many letters."""
    found: Record = _numbered.get(kind)(number=number, pad="x" * pad)
    return found


class Reader:
    """Reads the journal of rank 0, again and again."""

    def __init__(self, journal: Path, window: int = 10_000) -> None:
        self._reader = RunReader(journal.parent, window=window)
        self._numbers = JournalReader(journal, window, kinds=_numbered)
        self.rank: Rank

    def poll(self) -> None:
        (self.rank,) = self._reader.snapshot().ranks
        self._numbers.poll()

    @property
    def steps(self) -> list[int]:
        return [each.step for each in self.rank.steps]

    @property
    def records(self) -> list[JsonObject]:
        """The records but steps: kind and number of each."""
        return [{"number": 0, **as_json(each)} for each in self._numbers.records]
