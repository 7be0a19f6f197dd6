"""What DDP's reducer says of a backward that it had not prepared for, and records by module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    DdpRecord,
    FindUnusedRecord,
    NoSyncVainRecord,
    UnownedRecord,
)
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""Some parameter got no gradient."""

STATIC = "training graph has changed in this iteration"
"""What it says instead under static_graph=True, in the same sentence (DDP306)."""

TWICE = "Expected to mark a variable ready only once"
"""Some parameter's gradient was ready a second time in one backward."""

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_INDEX = re.compile(r"Parameter at index (\d+)")


def reducer_complaints(run: Run, what: str) -> Iterator[tuple[Rank, ErrorRecord]]:
    """The ranks of the last attempt that ended with that exception, and its record."""
    for rank in run.last:
        for error in rank.records.of(ErrorRecord):
            if what in error.message and STATIC not in error.message:
                yield rank, error


def is_explained(error: str) -> bool:
    """Whether a rule of the DDP3xx family names the cause of an exception that says this."""
    return (UNFINISHED in error and STATIC not in error) or TWICE in error


def parameter_names(record: DdpRecord | None) -> list[str]:
    """The names of the parameters that a DDP module reduces, in its own order."""
    return [each.name for each in record.parameters] if record is not None else []


def without_gradient(rank: Rank, error: ErrorRecord) -> list[str]:
    """The names of the parameters that DDP's exception gives by index; empty if it gives none.

    With several DDP modules the indices may be any of theirs.
    """
    return _named(rank, _INDICES.findall(error.message))


def ready_twice(rank: Rank, error: ErrorRecord) -> list[str]:
    """The names of the parameters that were ready twice."""
    return _named(rank, _INDEX.findall(error.message))


def _named(rank: Rank, indices: list[str]) -> list[str]:
    built = rank.records.of(DdpRecord)
    names = parameter_names(built[0]) if len(built) == 1 else []
    numbers = [whole(number) for text in indices for number in text.split()]
    return [names[number] if number < len(names) else f"parameter {number}" for number in numbers]


R = TypeVar("R", FindUnusedRecord, BatchNormRecord, NoSyncVainRecord, UnownedRecord)


@dataclass(frozen=True)
class OfModule(Generic[R]):
    """The records of one class about one DDP module, one or more of each rank that has any."""

    records: tuple[tuple[Rank, R], ...]
    """The lowest rank first."""

    @property
    def record(self) -> R:
        """The first of the lowest rank."""
        return self.records[0][1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(dict.fromkeys(rank.rank for rank, _ in self.records))

    @property
    def built(self) -> DdpRecord | None:
        """How the module was built."""
        return self.records[0][0].ddp(self.record.ddp)

    @property
    def built_at(self) -> Location | None:
        """Where it was."""
        return self.built.location if self.built is not None else None


def by_module(run: Run, declared: type[R]) -> dict[int, OfModule[R]]:
    """The records of a class by the number of the DDP module that they are about, ascending."""
    found: dict[int, list[tuple[Rank, R]]] = {}
    for rank in run.last:
        for record in rank.records.of(declared):
            found.setdefault(record.ddp, []).append((rank, record))
    return {number: OfModule(tuple(found[number])) for number in sorted(found)}
