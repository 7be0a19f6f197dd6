"""The last stacks that were taken of a run, kept in its directory for when it is over."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.stacks.model import RankStacks, from_record, to_record

NAME = "stacks.json"


@dataclass(frozen=True)
class Saved:
    """Stacks, and when they were taken."""

    time: int
    """Unix nanoseconds."""
    stacks: tuple[RankStacks, ...]


def as_record(stacks: Iterable[RankStacks], time: int) -> JsonObject:
    """Stacks of one moment as JSON; what ``ddpdoctor stacks --json`` prints, too."""
    return {"format": FORMAT, "time": time, "ranks": [to_record(each) for each in stacks]}


def save(directory: Path, stacks: Iterable[RankStacks], time: int) -> None:
    """Keep these stacks in place of those that were kept before.

    Raises:
        OSError: The run directory cannot be written.
    """
    rundir.put(directory / NAME, json.dumps(as_record(stacks, time)).encode())


def load(directory: Path) -> Saved | None:
    """What was kept last, None if there is nothing that can be read."""
    try:
        record = opening.json_object(directory / NAME, opening.MOST_RECORD)
        if integer(record, "format") > FORMAT:
            return None
        return Saved(integer(record, "time"), tuple(from_record(each) for each in record["ranks"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
