"""The wire between a rank and its readers: phases, the status page, the journal.

Standard library only: the probe imports this module inside interpreters that have nothing of
ours installed. Readers and writers meet here and nowhere else.

A *status page* is one fixed-size file per rank, mapped into its memory: what the rank does now.
A *journal* is one JSON-lines file per rank: what it did. Both carry a format version; a reader
refuses a newer one.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import Any, BinaryIO, NamedTuple

FORMAT = 1
"""Version of every file in a run directory; raised when an old reader would misread a new file."""

Record = dict[str, Any]
"""One journal line. ``kind`` is always there; readers skip kinds and keys they do not know."""

STICKY = frozenset(
    {
        "open",
        "ddp",
        "site",
        "fault",
        "error",
        "exit",
        "pass",
        "tensors",
        "no_gradient",
        "unreduced",
        "no_sync_vain",
        "find_unused",
        "batchnorm",
        "unowned",
        "remade",
    }
)
"""Kinds that are written again at the head of each new segment: rotation never loses them."""


class Phase(IntEnum):
    """What the training thread of a rank is doing."""

    STARTING = 0
    OTHER = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6
    ENDED = 7

    @property
    def label(self) -> str:
        """The phase as a person reads it."""
        return self.name.lower()


class Status(NamedTuple):
    """One reading of a status page. Times are Unix nanoseconds, durations nanoseconds."""

    pid: int
    rank: int
    world_size: int
    local_rank: int
    restart: int
    started: int
    phase: Phase
    since: int
    step: int
    """Steps closed so far, which is the number of the step under way."""
    epoch: int | None
    armed: int
    """Forward passes whose backward will be all-reduced: equal on all ranks of a healthy group."""
    last_total: int
    """Duration of the last closed step; 0 before the first."""
    dropped: int
    unwritten: bool
    """The disk refused the journal: records are missing from then on."""
    collective: str
    """Name of the collective under way, empty outside one."""
    site: str
    """``path:line`` of the user's code that entered the phase, empty when unknown."""


_MAGIC = b"DDPDOCT\0"
_HEAD = struct.Struct("<8sII q ii ii q")
_LIVE = struct.Struct("<qqq")
_LIVE_AT = 128
_TOTALS = struct.Struct("<qqqq")
_TOTALS_AT = 160
_FLAGS = struct.Struct("<q")
_FLAGS_AT = 200
_COLLECTIVE_AT, _COLLECTIVE_SIZE = 256, 64
_SITE_AT, _SITE_SIZE = 320, 704
PAGE_SIZE = 1024
"""Bytes of a status page."""

NO_EPOCH = -1


class StatusPage:
    """The writing end of a status page: a few stores into mapped memory, which survive SIGKILL."""

    def __init__(
        self, path: str, *, rank: int, world_size: int, local_rank: int, restart: int, started: int
    ) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Real blocks, not a sparse file: a store into a hole on a full disk is a SIGBUS.
            os.write(descriptor, bytes(PAGE_SIZE))
            self._memory = mmap.mmap(descriptor, PAGE_SIZE)
        finally:
            os.close(descriptor)
        _HEAD.pack_into(
            self._memory, 0, _MAGIC, FORMAT, PAGE_SIZE,
            os.getpid(), rank, world_size, local_rank, restart, started,
        )  # fmt: skip
        self.show: Callable[[int, int, int], None] = partial(
            _LIVE.pack_into, self._memory, _LIVE_AT
        )
        """Store phase, since and armed, which change several times a step (`Status`: units)."""
        self.totals: Callable[[int, int, int, int], None] = partial(
            _TOTALS.pack_into, self._memory, _TOTALS_AT
        )
        """Store step, epoch, last_total and dropped, which change once a step."""
        self.totals(0, NO_EPOCH, 0, 0)

    def set_unwritten(self) -> None:
        """Say that the disk refused the journal."""
        _FLAGS.pack_into(self._memory, _FLAGS_AT, 1)

    def set_site(self, site: bytes) -> None:
        """Store a call site, made by :func:`page_text`."""
        self._memory[_SITE_AT : _SITE_AT + len(site)] = site

    def set_collective(self, name: bytes) -> None:
        """Store the name of the collective under way, made by :func:`page_name`."""
        self._memory[_COLLECTIVE_AT : _COLLECTIVE_AT + len(name)] = name


def _terminated(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[-(size - 1) :] + b"\0"


def page_text(site: str) -> bytes:
    """A call site as the page stores it; of a path that is too long the end is kept."""
    return _terminated(site, _SITE_SIZE)


def page_name(name: str) -> bytes:
    """A collective's name as the page stores it."""
    return _terminated(name, _COLLECTIVE_SIZE)


class UnreadableError(Exception):
    """A file of a run directory that this version cannot read; the text is for a person."""


def read_status(path: str) -> Status:
    """Read a status page, live or left behind.

    Raises:
        UnreadableError: The file is too short, not a status page, or of a newer format.
        OSError: The file cannot be opened.
    """
    with open(path, "rb") as file:
        page = file.read(PAGE_SIZE)
        # The writer takes no lock; two equal readings in a row cannot be a torn one.
        for _ in range(4):
            file.seek(0)
            again = file.read(PAGE_SIZE)
            if again == page:
                break
            page = again
    if len(page) < PAGE_SIZE or page[:8] != _MAGIC:
        raise UnreadableError(f"{path} is not a status page, or was cut short")
    _, version, _, pid, rank, world, local_rank, restart, started = _HEAD.unpack_from(page, 0)
    if version > FORMAT:
        raise UnreadableError(
            f"{path} has format {version}; this ddpdoctor reads up to format {FORMAT}"
        )
    phase, since, armed = _LIVE.unpack_from(page, _LIVE_AT)
    step, epoch, last_total, dropped = _TOTALS.unpack_from(page, _TOTALS_AT)

    def text(at: int, size: int) -> str:
        return page[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")

    return Status(
        pid=pid,
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        restart=restart,
        started=started,
        phase=Phase(phase) if phase in Phase._value2member_map_ else Phase.OTHER,
        since=since,
        step=step,
        epoch=None if epoch == NO_EPOCH else epoch,
        armed=armed,
        last_total=last_total,
        dropped=dropped,
        unwritten=bool(_FLAGS.unpack_from(page, _FLAGS_AT)[0]),
        collective=text(_COLLECTIVE_AT, _COLLECTIVE_SIZE),
        site=text(_SITE_AT, _SITE_SIZE),
    )


def integer(record: Record, key: str, default: int = 0) -> int:
    """A number of a record that may be damaged; ``default`` if it is missing or no number."""
    value = record.get(key)
    return value if isinstance(value, int) else default


def encode(record: Record) -> bytes:
    """One journal line; a value JSON has no word for becomes its ``repr``.

    A record that cannot be said at all becomes one of its kind that says so.
    """
    try:
        text = json.dumps(record, separators=(",", ":"), default=repr)
    except Exception as error:
        lost = {"kind": str(record.get("kind")), "unsayable": type(error).__name__}
        text = json.dumps(lost, separators=(",", ":"))
    return text.encode() + b"\n"


_SEGMENT = b'{"kind":"segment","number":"%012d"}\n'
SEGMENT_SIZE = len(_SEGMENT % 0)
"""Bytes of a segment's first line."""


def segment_line(number: int) -> bytes:
    """The first line of a journal's segment."""
    return _SEGMENT % number


def segment_number(head: bytes) -> int | None:
    """The number in a segment's first `SEGMENT_SIZE` bytes, None if that is no segment's."""
    digits = head[-15:-3]
    return int(digits) if digits.isdigit() and head == _SEGMENT % int(digits) else None


class Journal:
    """The writing end of a journal: whole lines, bounded, never a surprise for the caller.

    When half of ``limit`` bytes is written the file becomes the older segment (``NAME.1``) and a
    new one starts with the sticky records, so at most ``limit`` bytes stay on disk.

    Args:
        path: The journal's path; it must not exist.
        limit: Most bytes of both segments together.

    Raises:
        OSError: From any method, when the disk says no.
    """

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self._half = max(limit // 2, 1 << 14)
        self._sticky: list[bytes] = []
        self._sticky_size = 0
        self._written = 0
        self._number = -1
        self._file: BinaryIO
        self._create()

    def _create(self) -> None:
        descriptor = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._number += 1
        # By its number a reader knows a segment again: inodes are given away anew.
        self._append([segment_line(self._number)])

    def write(self, records: Iterable[Record | bytes]) -> None:
        """Append records, or lines made already, in one write (two where a segment ends)."""
        chunk: list[bytes] = []
        size = 0
        for record in records:
            line = record if isinstance(record, bytes) else encode(record)
            # Sticky lines may take a quarter of a segment at most: rotation must free space.
            sticky = not isinstance(record, bytes) and record["kind"] in STICKY
            if sticky and self._sticky_size + len(line) <= self._half // 4:
                self._sticky.append(line)
                self._sticky_size += len(line)
            if self._written + size + len(line) > self._half:
                self._append(chunk)
                chunk, size = [], 0
                self._rotate()
            chunk.append(line)
            size += len(line)
        self._append(chunk)

    def _append(self, chunk: list[bytes]) -> None:
        if chunk:
            data = b"".join(chunk)
            written = self._file.write(data)
            self._written += len(data)
            if written != len(data):
                raise OSError(f"{self.path}: only {written} of {len(data)} bytes were written")

    def _rotate(self) -> None:
        self._file.close()
        os.replace(self.path, self.path + ".1")
        self._written = 0
        self._create()
        self._append(self._sticky)

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()


def rank_stem(rank: int, restart: int) -> str:
    """The common beginning of a rank's file names: ``rank-0003.r0``."""
    return f"rank-{rank:04d}.r{restart}"
