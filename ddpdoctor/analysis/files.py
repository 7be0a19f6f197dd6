"""What lies behind an exception about a file: a full disk, a limit, several writers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddpdoctor.analysis.endings import Ending, first_failure
from ddpdoctor.failures import Failure, recognise
from ddpdoctor.failures.lines import shortened
from ddpdoctor.run.records.data import SaveRecord
from ddpdoctor.run.snapshot import Run

DISK_FULL = "DDP935"
NO_NETWORK = "DDP936"
UNREADABLE = ("DDP944", "DDP945")
"""Codes of checkpoints that cannot be read; what torch says of a torn one fits either."""

_FULL = 0.002
"""The part of a file system that is as good as nothing: some of it is kept for root."""

_LITTLE = 1 << 20


@dataclass(frozen=True)
class Facts:
    """What more can be said of a failure than its text does; empty where that is all."""

    said: str = ""
    fix: str = ""
    evidence: tuple[str, ...] = ()


def described(cause: Ending, failure: Failure) -> Facts:
    """What is known of the file that an exception is about."""
    path = cause.file.path
    if failure.code == DISK_FULL:
        return _unwritten(cause, path)
    url = shortened(cause.file.url)
    if failure.code == NO_NETWORK and url:
        return Facts(f"has no network for a download from {url}")
    if failure.code in UNREADABLE and path:
        return Facts(evidence=(f"the file is {path}, {_size(cause.file.size)}",))
    return Facts()


def _unwritten(cause: Ending, path: str) -> Facts:
    name = path or "a file"
    free, total = cause.file.free, cause.file.total
    limit, size = cause.file.limit, cause.file.size
    if limit is not None and size >= 0.9 * limit:
        return Facts(
            f"could not write {name}: files may be {_size(limit)} at most (`ulimit -f`)",
            "Raise the limit in the shell or the scheduler's script that starts the job.",
            (f"{path} has {_size(size)}",),
        )
    if free is None or total is None:
        return Facts(f"could not write {path}: no room is left for it" if path else "")
    room = f"{_size(free)} of {_size(total)} are free in {os.path.dirname(path) or '.'}"
    if free <= max(_LITTLE, _FULL * total):
        return Facts(f"could not write {name}: the disk is full", evidence=(room,))
    return Facts(
        f"could not write {name}: a quota is reached, or the disk was full at that moment",
        evidence=(f"{room} now",),
    )


def writers(run: Run, path: str) -> tuple[int, ...]:
    """The ranks that wrote a file with ``torch.save`` in the last attempt."""
    return tuple(
        rank.rank
        for rank in run.last
        if path and any(record.file == path for record in rank.records.of(SaveRecord))
    )


def torn(run: Run) -> Ending | None:
    """The end of a rank that could not read a checkpoint which several ranks had written."""
    cause = first_failure(run, run.restarts[-1])
    if cause is None or cause.file.access != "read":
        return None
    known = recognise(cause.printed, cause.traceback)
    if known is None or known[0].code not in UNREADABLE:
        return None
    return cause if len(writers(run, cause.file.path)) > 1 else None


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
