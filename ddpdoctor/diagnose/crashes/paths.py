"""Explain an exception about a path: the ranks used different paths, or raced for one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ddpdoctor.core import opening
from ddpdoctor.diagnose.crashes.rank_endings import Ending
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Run

_PATH = re.compile(r"\[Errno \d+\][^']*'([^']+)'")

MAX_RACE = 1_000_000_000
"""Maximum time in nanoseconds from a path's creation to an exception that it exists."""


@dataclass(frozen=True)
class PathFault:
    """The cause of an exception about a path, to add to its message, and the fix."""

    said: str
    fix: str


def path_fault(run: Run, cause: Ending) -> PathFault | None:
    """Return what the other ranks did with the path of an exception, if that explains it."""
    name = cause.text.partition(":")[0].rpartition(".")[2]
    found = _PATH.search(cause.message or cause.text)
    if found is None or len(run.last) < 2:
        return None
    if name == "FileNotFoundError":
        return _other_path(run, cause, found[1])
    return _race(cause, found[1]) if name == "FileExistsError" else None


def _other_path(run: Run, cause: Ending, path: str) -> PathFault | None:
    for rank in run.last:
        for record in rank.records.of(SaveRecord) if rank.rank != cause.rank else ():
            same = os.path.basename(record.file) == os.path.basename(path)
            if same and os.path.realpath(path) != record.file and record.time <= cause.time:
                return PathFault(
                    f"; rank {rank.rank} wrote it to another path, {record.file}",
                    "Make the path on one rank and broadcast it (dist.broadcast_object_list): a "
                    "name with the time, a random part or the process differs between the ranks.",
                )
    return None


def _race(cause: Ending, path: str) -> PathFault | None:
    try:
        made = opening.facts(path).st_ctime_ns
    except OSError:
        return None
    before = cause.time - made
    if not 0 <= before <= MAX_RACE:
        return None
    return PathFault(
        f"; it was created or changed {before / 1e6:.0f} ms earlier",
        "Let one rank make it and the others wait in a barrier, or pass exist_ok=True.",
    )
