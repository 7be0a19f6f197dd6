"""Stacks of ranks with the states of their processes, and saving them in the run directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject, document
from ddpdoctor.run.records.evidence import MAIN as MAIN
from ddpdoctor.run.records.evidence import Frame as Frame
from ddpdoctor.run.records.evidence import RankStacks as RankStacks
from ddpdoctor.run.records.evidence import Thread as Thread
from ddpdoctor.run.records.typed_json import decoder

ENDING = "its interpreter is shutting down"
"""The trouble of a rank that cannot respond because its Python is shutting down."""

CUT = Frame("...", 0, "...")
"""Stands for the outer frames of a stack if only the innermost 100 are known."""


def to_record(stacks: RankStacks) -> JsonObject:
    """Return stacks as JSON."""
    return cast(JsonObject, document(stacks))


def from_record(record: JsonObject) -> RankStacks:
    """Return the stacks of a JSON object. Skip what is missing or damaged."""
    return decoder(RankStacks)({"rank": -1, **record})


# -- The last stacks taken of a run, kept in its directory


STACKS_FILE = "stacks.json"


@dataclass(frozen=True)
class Saved:
    """Stacks, and the time at which they were taken."""

    time: int  # Unix nanoseconds
    stacks: tuple[RankStacks, ...]


def stacks_record(stacks: Iterable[RankStacks], time: int) -> JsonObject:
    """Return the stacks of one time as JSON, which ``ddpdoctor stacks --json`` prints, too."""
    return {"format": FORMAT, "time": time, "ranks": [to_record(each) for each in stacks]}


def save_stacks(directory: Path, stacks: Iterable[RankStacks], time: int) -> None:
    """Keep these stacks in place of the earlier ones.

    Raises:
        OSError: The run directory cannot be written.
    """
    rundir.put(directory / STACKS_FILE, json.dumps(stacks_record(stacks, time)).encode())


def load_stacks(directory: Path) -> Saved | None:
    """Return the kept stacks, or None if they cannot be read."""
    try:
        record = opening.json_object(directory / STACKS_FILE, opening.MOST_RECORD)
        if integer(record, "format") > FORMAT:
            return None
        return Saved(integer(record, "time"), tuple(from_record(each) for each in record["ranks"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
