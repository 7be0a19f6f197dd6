"""Write a journal: a JSON-lines file for each rank and one of the supervisor.

Its file descriptor has a high number, out of the way of the job's.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from ddpdoctor.run.records.base import EVERY, Record, encode

# -- keep ddpdoctor's file descriptors out of the way of a job's


ROOM = 64
"""Descriptors at the end of what a process may open, or of the first 1,024, that are ours."""


def move_up(descriptor: int) -> int:
    """Return a descriptor with a high number in place of this one, which is closed.

    A job's first ``open`` has the number that it has without us. And where a job closes all
    descriptors, as a daemon does, and opens files then, none of these gets a number that we still
    write to.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY or most > 1024:
        # `select` refuses descriptors of 1024 and above.
        most = 1024
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(most - ROOM, 3))
    except OSError:
        # None is free there.
        return descriptor
    os.close(descriptor)
    return moved


# -- the writing end of a journal: one JSON-lines file for each rank and one of the supervisor


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
        self._frequent_size = 0
        """Of them, those of kinds that are written often."""
        self._kept: Counter[str] = Counter()
        self._written = 0
        self._number = 0
        # One descriptor for all segments: `write_now` may use it at any moment.
        self._file: BinaryIO = os.fdopen(move_up(self._create()), "ab", buffering=0)
        self._begin(self._file.fileno())

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.path, flags, 0o600)

    def _begin(self, descriptor: int, sticky: Sequence[bytes] = ()) -> None:
        """Write the head of a segment."""
        # By its number a reader knows a segment again: inodes are reused.
        data = b"".join((segment_line(self._number), *sticky))
        self._written = len(data)
        self._check(os.write(descriptor, data), len(data))

    def write(self, records: Iterable[Record | bytes]) -> None:
        """Append records, or lines made already, in one write (two where a segment ends)."""
        chunk: list[bytes] = []
        size = 0
        for record in records:
            if isinstance(record, bytes):
                line = record
            else:
                line = encode(record)
                self._keep(record.kind, record.kept, line)
            if self._written + size + len(line) > self._half:
                self._append(chunk)
                chunk, size = [], 0
                self._rotate()
            chunk.append(line)
            size += len(line)
        self._append(chunk)

    def _keep(self, kind: str, first: int, line: bytes) -> None:
        """Remember a line for the heads of later segments, if its kind is to survive rotation.

        Such lines take a quarter of a segment at most, for rotation must free space; those of kinds
        that are written often take half of it.
        """
        room, size = self._half // 4, len(line)
        if self._kept[kind] >= first or self._sticky_size + size > room:
            return
        if first < EVERY:
            if self._frequent_size + size > room // 2:
                # One that is shorter must not take its place: the first ones are wanted.
                self._kept[kind] = first
                return
            self._frequent_size += size
        self._kept[kind] += 1
        self._sticky.append(line)
        self._sticky_size += size

    def _append(self, chunk: list[bytes]) -> None:
        if chunk:
            data = b"".join(chunk)
            written = self._file.write(data)
            self._written += len(data)
            self._check(written, len(data))

    def _check(self, written: int, size: int) -> None:
        if written != size:
            raise OSError(f"{self.path}: only {written} of {size} bytes were written")

    def write_now(self, line: bytes) -> None:
        """Append a line while another thread may be in `write`, which this does not wait for.

        It ends no segment, and is in no later one's head.
        """
        self._written += len(line)
        self._check(self._file.write(line), len(line))

    def _rotate(self) -> None:
        os.replace(self.path, self.path + ".1")
        self._number += 1
        descriptor = self._create()
        try:
            self._begin(descriptor, self._sticky)
            os.dup2(descriptor, self._file.fileno(), inheritable=False)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()
