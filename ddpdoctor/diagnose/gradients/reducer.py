"""Read the exceptions of DDP's reducer, and group records by DDP module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import PATIENCE
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    DdpRecord,
    FindUnusedRecord,
    NeverUsedRecord,
    NoGradientRecord,
    NoSyncVainRecord,
    UnownedRecord,
)
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""DDP's message about a parameter without a gradient."""

STATIC = "training graph has changed in this iteration"
"""DDP's message about the same under static_graph=True (DDP306)."""

TWICE = "Expected to mark a variable ready only once"
"""DDP's message about a gradient that was ready twice in one backward."""

SHOWN = 4  # Maximum number of parameters in a message, which counts the rest.


def listed(names: Sequence[str], count: int | None = None) -> str:
    """List the first names, and the number of the others."""
    rest = (len(names) if count is None else count) - min(SHOWN, len(names))
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def reducer_complaints(run: Run, what: str) -> list[tuple[Rank, ErrorRecord]]:
    """Return the last attempt's ranks that failed with the reducer's message, and its records."""
    return [
        (rank, error)
        for rank in run.last
        for error in rank.records.of(ErrorRecord)
        if what in error.message and STATIC not in error.message
    ]


def is_explained(error: str) -> bool:
    """Return whether a rule of the DDP3xx family names the cause of an exception."""
    return (UNFINISHED in error and STATIC not in error) or TWICE in error


def named_parameters(rank: Rank, error: ErrorRecord) -> list[str]:
    """Return the names of the parameters that DDP's exception lists by index.

    With several DDP modules an index may belong to any of them, so it stays a number.
    """
    found = re.findall(r"did not receive grad for rank \d+: ([\d ]+)", error.message)
    found = found or re.findall(r"Parameter at index (\d+)", error.message)
    built = rank.records.of(DdpRecord)
    names = [each.name for each in built[0].parameters] if len(built) == 1 else []
    numbers = [whole(number) for text in found for number in text.split()]
    return [names[number] if number < len(names) else f"parameter {number}" for number in numbers]


R = TypeVar(
    "R", FindUnusedRecord, BatchNormRecord, NeverUsedRecord, NoSyncVainRecord, UnownedRecord
)


@dataclass(frozen=True)
class OfModule(Generic[R]):
    """The records of one class about one DDP module, by rank."""

    records: tuple[tuple[Rank, R], ...]  # The lowest rank first

    @property
    def record(self) -> R:
        """The first record of the lowest rank."""
        return self.records[0][1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, ascending."""
        return tuple(dict.fromkeys(rank.rank for rank, _ in self.records))

    @property
    def built(self) -> DdpRecord | None:
        """The record of the module's creation."""
        return self.records[0][0].ddp(self.record.ddp)

    @property
    def built_at(self) -> Location | None:
        """The line that created the module."""
        return self.built.location if self.built is not None else None


def by_module(run: Run, declared: type[R]) -> dict[int, OfModule[R]]:
    """Group the records of a class by the number of their DDP module, ascending."""
    found: dict[int, list[tuple[Rank, R]]] = {}
    for rank in run.last:
        for record in rank.records.of(declared):
            found.setdefault(record.ddp, []).append((rank, record))
    return {number: OfModule(tuple(found[number])) for number in sorted(found)}


@dataclass(frozen=True)
class Missing:
    """The parameters of a DDP module that got no gradient on some ranks."""

    ddp: int
    records: dict[int, NoGradientRecord]  # The probe's records, by rank
    errors: dict[int, ErrorRecord]  # DDP's exceptions, by rank
    silent: list[int]  # The ranks without missing gradients

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks without some gradients, ascending."""
        return tuple(sorted({*self.records, *self.errors}))

    @property
    def error(self) -> ErrorRecord | None:
        """DDP's exception on the lowest rank that has one."""
        return self.errors[min(self.errors)] if self.errors else None

    @property
    def altered(self) -> bool:
        """Whether the parameters were frozen or replaced after DDP was created."""
        return any(
            each.why in ("frozen", "replaced")
            for record in self.records.values()
            for each in record.parameters
        )

    def evidence(self) -> Iterator[str]:
        """Yield DDP's reaction as evidence."""
        for rank, error in sorted(self.errors.items())[:2]:
            yield (
                f"rank {rank}: DDP raised in step {error.step}, "
                f'"{UNFINISHED} before starting a new one"'
            )
        if not self.errors:
            yield "DDP has not reduced their bucket, and raises at the next synchronized forward"


def missing_gradients(run: Run) -> Iterator[Missing]:
    """Yield the modules with missing gradients, once every rank has had time to report them."""
    records: dict[int, dict[int, NoGradientRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(NoGradientRecord):
            records.setdefault(record.ddp, {}).setdefault(rank.rank, record)
    errors = {rank.rank: error for rank, error in reducer_complaints(run, UNFINISHED)}
    if errors and not records:
        records[0] = {}
    for number, found in sorted(records.items()):
        guilty = {*found, *errors}
        others = [
            rank
            for rank in run.last
            if rank.rank not in guilty
            and (built := rank.ddp(number)) is not None
            and not guilty.isdisjoint(built.group_ranks)
        ]
        last = max((record.step for record in found.values()), default=0)
        # Report DDP's exception even if the other ranks are unknown.
        known = bool(errors) or all(rank.watched(NoGradientRecord) for rank in others)
        if known and all(_has_reported(run, rank, last) for rank in others):
            yield Missing(number, found, errors, [rank.rank for rank in others])


def _has_reported(run: Run, rank: Rank, step: int) -> bool:
    """Return whether a rank would have reported a missing gradient of a step by now."""
    if run.exit_status is not None or rank.ended is not None or rank.status is None:
        return True
    # The status page is ahead of the journal, which holds the record.
    written = rank.steps[-1].step if rank.steps else -1
    return written >= step or run.waits_for(rank) > PATIENCE
