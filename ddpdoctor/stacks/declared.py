"""The processes of a run that can be asked for their stacks, as they declare it.

A process that declares nothing is never asked, and never sent a signal
(`ddpdoctor.probe.runtime.stacks`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run.names import STACKS_SUFFIX
from ddpdoctor.run.records.base import JsonObject

_NAME = re.compile(rf"stacks-(\d+)-(\d+){re.escape(STACKS_SUFFIX)}$")
_MOST_HEAD = 1 << 14


@dataclass(frozen=True)
class Declared:
    """One process's word on how it is asked."""

    path: Path
    """Its answers are appended to this file, after :attr:`head`."""
    head: int
    """Bytes of the file's first line, in which all of this stands."""
    pid: int
    start: int
    """When the process started, in ticks since boot."""
    pipe: int
    """Descriptor, in the process, of the pipe that takes requests."""
    pipe_inode: int
    thread: int
    """Native id of the thread that answers."""
    signal: int
    """The signal that ``faulthandler`` answers; 0 for none."""
    file: int
    """Descriptor, in the process, of the file at :attr:`path`."""
    main_thread: int
    """Native id of the main thread."""
    main_ident: int
    rank: int | None
    """As its environment said at the start."""
    restart: int
    host: str
    namespace: str
    """Where its pid is valid: a boot and a pid namespace."""
    cwd: str


def read_declared(directory: Path) -> list[Declared]:
    """All declarations in a run directory, the newest last; damaged ones are left out."""
    found: list[tuple[int, Declared]] = []
    try:
        names = opening.names(directory)
    except OSError:
        return []
    for name in names:
        match = _NAME.match(name)
        if match is None:
            continue
        path = directory / name
        head = _first_line(path)
        try:
            record = opening.loads(head)
            declared = _from_record(record, path, len(head), int(match[1]), int(match[2]))
            found.append((integer(record, "time"), declared))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            # Still being written, or damaged.
            continue
    return [declared for _, declared in sorted(found, key=lambda each: each[0])]


def _from_record(record: JsonObject, path: Path, head: int, pid: int, start: int) -> Declared:
    rank = record["rank"]
    return Declared(
        path=path,
        head=head,
        pid=pid,
        start=start,
        pipe=int(record["pipe"]),
        pipe_inode=int(record["pipe_inode"]),
        thread=int(record["thread"]),
        signal=int(record["signal"]),
        file=int(record["file"]),
        main_thread=int(record["main_thread"]),
        main_ident=int(record["main_ident"]),
        rank=rank if isinstance(rank, int) else None,
        restart=integer(record, "restart"),
        host=str(record["host"]),
        namespace=str(record["namespace"]),
        cwd=str(record["cwd"]),
    )


def _first_line(path: Path) -> bytes:
    try:
        with opening.file(path) as file:
            head, newline, _ = file.read(_MOST_HEAD).partition(b"\n")
    except OSError:
        return b""
    return head + newline if newline else b""
