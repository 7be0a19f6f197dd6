"""Stacks of ranks with the states of their processes, and saving them in the run directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject, Part, document
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.system.process_activity import ProcessState

MAIN = "MainThread"  # The name of a process's main thread, as in ``threading``


class Frame(NamedTuple):
    """One frame of Python code."""

    path: str  # The file, absolute if known. ``<string>`` and the like for code without a file.
    line: int  # 0 if not known
    function: str


ENDING = "its interpreter is shutting down"
"""The trouble of a rank that cannot respond because its Python is shutting down."""

CUT = Frame("...", 0, "...")
"""Stands for the outer frames of a stack if only the innermost 100 are known."""


@dataclass(frozen=True)
class Thread(Part):
    """The stack of one thread."""

    ident: int  # ``threading.get_ident()`` of the thread. 0 if not known.
    name: str  # Its name. Empty if not known.
    current: bool  # This thread ran the signal handler of ``faulthandler``
    frames: tuple[Frame, ...]  # Outermost first
    awaited: bool = False  # The interpreter waits for it at the end: it is no daemon


@dataclass(frozen=True)
class RankStacks(Part):
    """The stacks of one rank, or the reason why there are none."""

    rank: int
    restart: int
    pid: int  # 0 if not known
    host: str
    threads: tuple[Thread, ...] = ()  # The main thread first, if known
    native: tuple[str, ...] = ()
    """Native frames of the main thread below its innermost Python frame, outermost first. Empty
    unless py-spy provided them."""
    state: ProcessState = field(default_factory=ProcessState)
    gil_held: bool = False
    """Native code held the GIL for so long that no Python could run in the rank."""
    trouble: str = ""  # Why there are no stacks: ``stopped (SIGSTOP)``. Empty if there are.
    note: str = ""  # What is missing although there are stacks, such as native frames
    world_size: int = 0
    """World size of the ``init_process_group`` call that it is in. 0 without one."""

    @property
    def main(self) -> Thread | None:
        """The main thread, which trains."""
        return next((thread for thread in self.threads if thread.name == MAIN), None)


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
