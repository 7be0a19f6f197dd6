"""Stacks of ranks with the states of their processes, and saving them in the run directory."""

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
from ddpdoctor.run.records.evidence import MAIN as MAIN
from ddpdoctor.run.records.evidence import Frame as Frame
from ddpdoctor.run.records.evidence import RankStacks as RankStacks
from ddpdoctor.run.records.evidence import Thread as Thread
from ddpdoctor.run.records.typed_json import decoder

ENDING = "its interpreter is shutting down"
"""The trouble of a rank that cannot answer because its Python is being taken down."""

CUT = Frame("...", 0, "...")
"""Stands for the outer frames of a stack of which only the innermost 100 are known."""


def to_record(stacks: RankStacks) -> JsonObject:
    """Stacks as JSON."""
    state = stacks.state
    return {
        **vars(stacks),
        "state": {**vars(state), "children": [vars(child) for child in state.children]},
        "native": list(stacks.native),
        "threads": [
            {**vars(thread), "frames": [frame._asdict() for frame in thread.frames]}
            for thread in stacks.threads
        ],
    }


from_record = decoder(RankStacks)
"""Make stacks of their JSON. What is damaged in it is left out."""


# -- the last stacks that were taken of a run, kept in its directory for when it is over


STACKS_FILE = "stacks.json"


@dataclass(frozen=True)
class Saved:
    """Stacks, and when they were taken."""

    time: int
    """Unix nanoseconds."""
    stacks: tuple[RankStacks, ...]


def stacks_record(stacks: Iterable[RankStacks], time: int) -> JsonObject:
    """Stacks of one moment as JSON; what ``ddpdoctor stacks --json`` prints, too."""
    return {"format": FORMAT, "time": time, "ranks": [to_record(each) for each in stacks]}


def save_stacks(directory: Path, stacks: Iterable[RankStacks], time: int) -> None:
    """Keep these stacks in place of those that were kept before.

    Raises:
        OSError: The run directory cannot be written.
    """
    rundir.put(directory / STACKS_FILE, json.dumps(stacks_record(stacks, time)).encode())


def load_stacks(directory: Path) -> Saved | None:
    """What was kept last, None if there is nothing that can be read."""
    try:
        record = opening.json_object(directory / STACKS_FILE, opening.MOST_RECORD)
        if integer(record, "format") > FORMAT:
            return None
        return Saved(integer(record, "time"), tuple(from_record(each) for each in record["ranks"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
