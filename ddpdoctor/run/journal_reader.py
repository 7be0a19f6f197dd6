"""Journals read back as they grow, in a room that all those of a run directory share.

A run directory may be anybody's, with as many journals as somebody made, each as long as they like,
of JSON that takes thirty times its size in memory. What does not fit is left out, the older half
of the largest journals first, and that is said.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from ddpdoctor.core import opening
from ddpdoctor.run.journal import SEGMENT_SIZE, segment_number
from ddpdoctor.run.records.base import EVERY, Record
from ddpdoctor.run.records.decode import RANK_RECORDS, parse
from ddpdoctor.run.snapshot import Records

WINDOW = 512
"""Step records that are kept of a journal; the newest ones."""

SPLIT_WINDOW = 128
"""Split step records that are kept of a journal."""

MOST_KEPT = 48 << 20
"""Bytes of memory that the records of all journals take, other than steps
(`ddpdoctor.core.opening.expanded`)."""

MOST_PARSED = 1 << 30
"""Bytes of memory that all records take which are parsed at once: it takes time to make them."""

MOST_NEW = 256 << 20
"""Bytes of a journal's segment that are read at once; of more, the last ones."""

MOST_NEW_OF_ALL = 2 << 30
"""The same of all journals, each of which has its share."""

MOST_LINE = 2 << 20
"""Bytes of a record; a longer one is left out."""

_LEAST_NEW = 1 << 20
_CHUNK = 1 << 20
_ENTRY = 300
"""Bytes of memory that keeping a record takes beside it."""
_MOST_STEP = 1 << 10
_STEP_LINE = b'{"kind":"step"'
_SPLIT = b',"split":true'
_SEGMENT_LINE = b'{"kind":"segment"'


class Room:
    """What the journals of a run directory may take together.

    Args:
        most: Bytes of memory for records.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self._journals: list[JournalReader] = []
        self._size = 0

    @property
    def parsed(self) -> int:
        """Bytes of records that each of the journals may parse at once."""
        return MOST_PARSED // (len(self._journals) or 1)

    @property
    def share(self) -> int:
        """Bytes of a segment that each of the journals may read at once."""
        return min(MOST_NEW, max(MOST_NEW_OF_ALL // (2 * len(self._journals) or 1), _LEAST_NEW))

    def add(self, journal: JournalReader) -> None:
        """One more journal."""
        self._journals.append(journal)

    def took(self, size: int) -> None:
        """A journal keeps ``size`` bytes more, or less; if that is too much, large ones let go."""
        self._size += size
        if self._size <= self.most:
            return
        # Down to half, so that it is not done for each record.
        while self._size > self.most // 2:
            largest = max(journal.size for journal in self._journals)
            for journal in self._journals:
                if 2 * journal.size >= largest:
                    self._size -= journal.thin()


class JournalReader:
    """Reads a journal as it grows, across rotation, without parsing steps that are not asked for.

    Args:
        path: The journal.
        window: Step records that are kept.
        room: What it shares with other journals; one for itself if not given.
        kinds: The records that it may hold.
    """

    def __init__(
        self,
        path: Path,
        window: int = WINDOW,
        room: Room | None = None,
        kinds: Mapping[str, type[Record]] = RANK_RECORDS,
    ) -> None:
        self.left_out = ""
        """What was not read, or not kept, because there is too much of it; in words."""
        self.thinned = 0
        """How often records were let go."""
        self.size = 0
        """Bytes of memory that the records take, about."""
        self._kinds = kinds
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._room = Room() if room is None else room
        self._room.add(self)
        self._segment: int | None = None
        self._offset = 0
        self._torn = b""
        self._step_lines: deque[bytes] = deque(maxlen=window)
        self._split_lines: deque[bytes] = deque(maxlen=min(window, SPLIT_WINDOW))
        self._parses = 0
        self._kept: dict[int, tuple[Record, int]] = {}
        """By the hash of their lines, which come again at the head of a segment; with sizes."""
        self._records: Records | None = None
        self._skips = False
        """Whether the rest of a line that is too long is passed over."""

    @property
    def records(self) -> Records:
        """Everything but steps."""
        if self._records is None:
            self._records = Records(record for record, _ in self._kept.values())
        return self._records

    def poll(self) -> bool:
        """Take in what was written since the last call; True if there was anything."""
        self._parses = self._room.parsed
        with contextlib.ExitStack() as stack:
            opened = self._open(stack)
            fresh = False
            for number, file in opened:
                if self._segment is not None and number < self._segment:
                    continue
                if number != self._segment:
                    self._segment, self._offset, self._torn = number, 0, b""
                    self._skips = False
                fresh |= self._take(file)
            return fresh

    def _open(self, stack: contextlib.ExitStack) -> list[tuple[int, BinaryIO]]:
        """The segments there are, ascending, none of them missing in between."""
        found: list[tuple[int, BinaryIO]] = []
        for _ in range(3):
            # The older one first: what is renamed in between is then seen as the newer one.
            found = [
                each
                for path in (self._older, self._path)
                if (each := self._open_segment(path, stack))
            ]
            numbers = [-1, *(number for number, _ in found)]
            if not found or numbers[-1] - 1 in numbers:
                break
            # Rotated between the two, the segment before the newest was missed: look again.
        return sorted(dict(found).items())

    def _open_segment(self, path: Path, stack: contextlib.ExitStack) -> tuple[int, BinaryIO] | None:
        """A segment's number and its open file; None if there is none, or not yet."""
        try:
            file = stack.enter_context(opening.file(path))
            head = file.read(SEGMENT_SIZE)
        except opening.ForeignError as error:
            self.left_out = f"{path.name} {error.strerror}"
            return None
        except OSError:
            return None
        if len(head) < SEGMENT_SIZE and not head.endswith(b"\n"):
            # Its first line is still being written.
            return None
        number = segment_number(head)
        # A journal without numbers, written by hand say, is its own first segment.
        return (0 if number is None else number), file

    def _take(self, file: BinaryIO) -> bool:
        size = os.fstat(file.fileno()).st_size
        share = self._room.share
        if size - self._offset > share:
            self.left_out = f"{self._path.name}: all but its last {share >> 20} MB"
            self._offset, self._torn, self._skips = size - share, b"", True
        file.seek(self._offset)
        begin = self._offset
        while self._offset < size and (data := file.read(min(_CHUNK, size - self._offset))):
            self._offset += len(data)
            self._take_lines(data)
        return self._offset > begin

    def _take_lines(self, data: bytes) -> None:
        lines = (self._torn + data).split(b"\n")
        self._torn = lines.pop()
        if lines and self._skips:
            self._skips = False
            del lines[0]
        if self._skips or len(self._torn) > MOST_LINE:
            self._torn, self._skips = b"", True
        for line in lines:
            if line.startswith(_STEP_LINE):
                if len(line) <= _MOST_STEP:
                    self._step_lines.append(line)
                    if _SPLIT in line:
                        self._split_lines.append(line)
            elif line and len(line) <= MOST_LINE and not line.startswith(_SEGMENT_LINE):
                self._take_record(line)

    def _take_record(self, line: bytes) -> None:
        known = hash(line)
        if self._parses < 0 or known in self._kept:
            return
        size = opening.expanded(line) + _ENTRY
        self._parses -= size
        # One that would take a quarter of all the room leaves none for others.
        if 4 * size > self._room.most or self._parses < 0:
            self.left_out = f"{self._path.name}: records of more than their share"
            return
        record = parse(line, self._kinds)
        if record is None:
            return
        self._kept[known] = record, size
        self._records = None
        self.size += size
        self._room.took(size)

    def thin(self) -> int:
        """Let go of the older half of what there is much of; what is rare is kept if it can be.

        Returns:
            Bytes of memory that are free now.
        """
        before, kept = self.size, set[int]()
        rare = newest = before // 4
        for key, (record, size) in self._kept.items():
            if size <= rare and record.kept == EVERY:
                rare -= size
                kept.add(key)
        for key, (_, size) in reversed(self._kept.items()):
            if key not in kept:
                newest -= size
                if newest < 0:
                    break
                kept.add(key)
        self._kept = {key: each for key, each in self._kept.items() if key in kept}
        self.size = sum(size for _, size in self._kept.values())
        self._records = None
        self.thinned += 1
        self.left_out = f"{self._path.name}: older records than fit"
        return before - self.size

    @property
    def step_lines(self) -> tuple[bytes, ...]:
        """The newest step records, oldest of them first, unparsed."""
        return tuple(self._step_lines)

    @property
    def split_lines(self) -> tuple[bytes, ...]:
        """The newest of them that were split."""
        return tuple(self._split_lines)
