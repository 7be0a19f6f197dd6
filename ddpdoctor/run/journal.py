"""Write a journal: a JSON-lines file for each rank, and one for the supervisor."""

from __future__ import annotations

import fcntl
import os
import resource
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from ddpdoctor.run.records.base import EVERY, Record, encode

RESERVED_DESCRIPTORS = 64
"""Descriptors reserved for ddpdoctor at the end of a process's limit, or of the first 1,024."""


def move_up(descriptor: int) -> int:
    """Duplicate a descriptor to a high number, close it, and return the new one.

    So the job's files get the same numbers as without ddpdoctor. And if a job closes all
    descriptors, as a daemon does, its next files do not get a number that ddpdoctor writes to.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY or most > 1024:
        # `select` refuses descriptors of 1024 and above.
        most = 1024
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(most - RESERVED_DESCRIPTORS, 3))
    except OSError:
        # No high number is free.
        return descriptor
    os.close(descriptor)
    return moved


_SEGMENT = b'{"kind":"segment","number":"%012d"}\n'
SEGMENT_SIZE = len(_SEGMENT % 0)  # Bytes of a segment's first line


def segment_line(number: int) -> bytes:
    """Return the first line of a journal's segment."""
    return _SEGMENT % number


def segment_number(head: bytes) -> int | None:
    """Parse the first `SEGMENT_SIZE` bytes of a segment. None if they are not its head."""
    digits = head[-15:-3]
    return int(digits) if digits.isdigit() and head == _SEGMENT % int(digits) else None


class Journal:
    """Writes whole lines to a journal of bounded size.

    Once half of ``limit`` bytes is written, the file becomes the older segment (``NAME.1``), and a
    new one starts with the sticky records. So at most ``limit`` bytes stay on disk.

    Args:
        path: The journal's path, which must not exist.
        limit: Maximum bytes of both segments together.

    Raises:
        OSError: The disk refused a write, in any method.
    """

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self._half = max(limit // 2, 1 << 14)
        self._sticky: list[bytes] = []  # Lines that each new segment repeats
        self._sticky_size = 0
        self._frequent_size = 0  # Bytes of the sticky lines whose kinds are written often
        self._kept: Counter[str] = Counter()
        self._written = 0
        self._number = 0
        # One descriptor for all segments, because `write_now` may use it at any time.
        self._file: BinaryIO = os.fdopen(move_up(self._create()), "ab", buffering=0)
        self._begin(self._file.fileno())

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.path, flags, 0o600)

    def _begin(self, descriptor: int, sticky: Sequence[bytes] = ()) -> None:
        """Write the head of a segment."""
        # Readers recognize a segment by its number, since inodes are reused.
        data = b"".join((segment_line(self._number), *sticky))
        self._written = len(data)
        self._check(os.write(descriptor, data), len(data))

    def write(self, records: Iterable[Record | bytes]) -> None:
        """Append records, or encoded lines, in one write (two if a segment ends)."""
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
        """Keep a line for later segments, if its kind survives rotation.

        Sticky lines take at most a quarter of a segment, since rotation must free space. Kinds that
        are written often take at most half of that quarter.
        """
        room, size = self._half // 4, len(line)
        if self._kept[kind] >= first or self._sticky_size + size > room:
            return
        if first < EVERY:
            if self._frequent_size + size > room // 2:
                # A shorter, later line must not replace it, because the first ones matter.
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
        """Append a line without waiting for another thread that may be in `write`.

        It never ends a segment, and later segments do not repeat it.
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
        """Close the file."""
        self._file.close()
