"""What DDP's reducer says when a backward did not go as it had prepared for."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddpdoctor.run.record import Record, whole
from ddpdoctor.run.snapshot import Rank, Run

UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""Some parameter got no gradient."""

STATIC = "training graph has changed in this iteration"
"""What it says instead under static_graph=True, in the same sentence (DDP306)."""

TWICE = "Expected to mark a variable ready only once"
"""Some parameter's gradient was ready a second time in one backward."""

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_INDEX = re.compile(r"Parameter at index (\d+)")


def complaints(run: Run, what: str) -> Iterator[tuple[Rank, Record]]:
    """The ranks of the last attempt that ended with that exception, and its record."""
    for rank in run.last:
        for error in rank.of_kind("error"):
            message = str(error.get("message"))
            if what in message and STATIC not in message:
                yield rank, error


def explained(error: str) -> bool:
    """Whether a rule of the DDP3xx family names the cause of an exception that says this."""
    return (UNFINISHED in error and STATIC not in error) or TWICE in error


def ddp_record(rank: Rank, number: int) -> Record | None:
    """How a rank's DDP module was built; they are numbered in the order in which they were."""
    built = list(rank.of_kind("ddp"))
    return built[number] if 0 <= number < len(built) else None


def parameter_names(record: Record | None) -> list[str]:
    """The names of the parameters that a DDP module reduces, in its own order."""
    parameters = record.get("parameters") if record is not None else None
    return [str(each[0]) for each in parameters or []]


def without_gradient(rank: Rank, error: Record) -> list[str]:
    """The names of the parameters that DDP's exception gives by index; empty if it gives none.

    With several DDP modules the indices may be any of theirs.
    """
    return _named(rank, _INDICES.findall(str(error.get("message"))))


def ready_twice(rank: Rank, error: Record) -> list[str]:
    """The names of the parameters that were ready twice."""
    return _named(rank, _INDEX.findall(str(error.get("message"))))


def _named(rank: Rank, indices: list[str]) -> list[str]:
    built = list(rank.of_kind("ddp"))
    names = parameter_names(built[0]) if len(built) == 1 else []
    numbers = [whole(number) for text in indices for number in text.split()]
    return [names[number] if number < len(names) else f"parameter {number}" for number in numbers]
