"""Stacks of ranks with the states of their processes, and saving them in the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.system.process_activity import ChildState, ProcessState

# -- stacks of ranks, and the state of their processes


MAIN = "MainThread"
"""The name of a process's main thread, as ``threading`` has it."""


class Frame(NamedTuple):
    """One frame of Python code."""

    path: str
    """The file, absolute where that is known; ``<string>`` and the like for code without one."""
    line: int
    """0 if it is not known."""
    function: str


ENDING = "its interpreter is shutting down"
"""The trouble of a rank that cannot answer because its Python is being taken down."""

CUT = Frame("...", 0, "...")
"""Stands for the outer frames of a stack of which only the innermost 100 are known."""


@dataclass(frozen=True)
class Thread:
    """The stack of one thread."""

    ident: int
    """``threading.get_ident()`` of the thread; 0 if it is not known."""
    name: str
    """Its name, empty if it is not known."""
    current: bool
    """Whether ``faulthandler`` said that this thread wrote the stacks; False in all others."""
    frames: tuple[Frame, ...]
    """Outermost first."""
    awaited: bool = False
    """Whether the interpreter is known to wait for it at the end: it is no daemon."""


@dataclass(frozen=True)
class RankStacks:
    """The stacks of one rank, or why there are none."""

    rank: int
    restart: int
    pid: int
    """0 if it is not known."""
    host: str
    threads: tuple[Thread, ...] = ()
    """The main thread first, if it is known."""
    native: tuple[str, ...] = ()
    """Native frames of the main thread below its innermost Python frame, outermost first, from
    py-spy; empty if it was not asked for or could not be had."""
    state: ProcessState = field(default_factory=ProcessState)
    gil_held: bool = False
    """Whether native code held the GIL for so long that no Python could run in the rank."""
    trouble: str = ""
    """Why there are no stacks, in a few words: ``stopped (SIGSTOP)``. Empty where there are."""
    note: str = ""
    """What is missing although there are stacks, in a few words: why there are no native frames."""
    world_size: int = 0
    """Of the ``init_process_group`` that it is in; 0 if it is in none, or that is not known."""

    @property
    def main(self) -> Thread | None:
        """The main thread, which is the one that trains."""
        return next((thread for thread in self.threads if thread.name == MAIN), None)


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


def from_record(record: JsonObject) -> RankStacks:
    """Stacks from their JSON; what is missing or damaged in it is left out."""
    state = _mapping(record.get("state"))
    return RankStacks(
        rank=integer(record, "rank", -1),
        restart=integer(record, "restart"),
        pid=integer(record, "pid"),
        host=_text(record, "host"),
        gil_held=record.get("gil_held") is True,
        world_size=integer(record, "world_size"),
        trouble=_text(record, "trouble"),
        note=_text(record, "note"),
        native=tuple(each for each in _list(record.get("native")) if isinstance(each, str)),
        state=ProcessState(
            letter=_text(state, "letter"),
            cpu_seconds=_number(state, "cpu_seconds"),
            wchan=_text(state, "wchan"),
            children=tuple(
                ChildState(
                    integer(child, "pid"),
                    _text(child, "letter"),
                    _number(child, "cpu_seconds"),
                    _text(child, "command"),
                )
                for child in _mappings(state.get("children"))
            ),
        ),
        threads=tuple(
            Thread(
                integer(thread, "ident"),
                _text(thread, "name"),
                thread.get("current") is True,
                tuple(
                    Frame(_text(frame, "path"), integer(frame, "line"), _text(frame, "function"))
                    for frame in _mappings(thread.get("frames"))
                ),
                thread.get("awaited") is True,
            )
            for thread in _mappings(record.get("threads"))
        ),
    )


def _mapping(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _mappings(value: Any) -> Iterable[JsonObject]:
    return (each for each in _list(value) if isinstance(each, dict))


def _text(record: JsonObject, key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""


def _number(record: JsonObject, key: str) -> float:
    value = record.get(key)
    return (
        value if isinstance(value, float) and math.isfinite(value) else float(integer(record, key))
    )


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
