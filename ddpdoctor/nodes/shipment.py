"""Collect the files that a node sends: status pages, journals, rings and a few others.

The files are the queue: unsent data stays in them. If a rank writes faster than its share of the
link, its older steps are thinned out, the same steps on every node.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.nodes.alignment import Alignment, parsed
from ddpdoctor.nodes.messages import Piece
from ddpdoctor.run.journal import SEGMENT_SIZE, segment_number
from ddpdoctor.run.names import CODE
from ddpdoctor.run.ring import SIZE as RING_SIZE
from ddpdoctor.run.rundir import STDERR, STDERR_SO_FAR
from ddpdoctor.run.status import PAGE_SIZE

RATE = 4096
"""Maximum bytes of a rank's journal to send each second. On the wire they take a third."""

BURST = 96 << 10  # Maximum bytes of a journal to send at once after a pause
MAX_BACKLOG = 512 << 10  # Maximum unsent bytes of a journal. With more, only some steps are sent.
STEP_STRIDE = 16  # Then only steps with numbers divisible by this
MAX_MESSAGE = 2 << 20  # Maximum bytes of all files in one message
RING_EVERY = 10.0  # Seconds between two copies of a rank's ring
WHOLE_EVERY = 2.0  # Seconds between two copies of another file
MAX_STDERR = 64 << 10  # Maximum bytes to send of the end of the job's stderr
MAX_LINE = 1 << 20  # Maximum bytes of a record

SUPERVISOR_KINDS = frozenset(
    {"rank_exit", "no_core", "gpus", "signal", "unwatched", "debug", "link"}
)
"""Records of the node's supervisor that the head needs. It makes the others itself."""

NODE = "node.jsonl"  # The file name under which these records are sent

RANK = re.compile(r"rank-\d{4,7}\.r(\d{1,4})\.(status|jsonl|collectives|fault)")
GPUS = re.compile(r"gpus-[A-Za-z0-9._-]{1,80}\.json")
PROCESS = re.compile(r"process-([a-z0-9-]{1,48}\.jsonl)")
_STEP = b'{"kind":"step"'
_ENDS = tuple(b'{"kind":"%s"' % each for each in (b"end", b"error", b"exit", b"rank_exit"))
_NUMBER = re.compile(rb'"step":(\d+)')


@dataclass
class _Tail:
    """A reader of a journal, which continues across rotations."""

    path: Path
    segment: int | None = None
    offset: int = 0
    credit: float = BURST
    when: float = field(default_factory=time.monotonic)

    def lines(self, room: int, *, limited: bool) -> list[bytes]:
        """Return complete new lines of at most ``room`` bytes."""
        now = time.monotonic()
        self.credit = min(BURST, self.credit + RATE * (now - self.when))
        self.when = now
        room = min(room, int(self.credit)) if limited else room
        found = self._older(room)
        if not found:
            found = self._read(self.path, room)
        self.credit -= sum(map(len, found))
        return found

    def _older(self, room: int) -> list[bytes]:
        """Return the rest of the segment before the current one."""
        if self.segment is None:
            return []
        older = self.path.with_name(f"{self.path.name}.1")
        number = _segment(older)
        return self._read(older, room) if number == self.segment else []

    def _read(self, path: Path, room: int) -> list[bytes]:
        try:
            with opening.file(path, owners=(os.getuid(),)) as file:
                number = segment_number(file.read(SEGMENT_SIZE)) or 0
                if number != self.segment:
                    self.segment, self.offset = number, 0
                size = os.fstat(file.fileno()).st_size
                backlog = size - self.offset
                file.seek(self.offset)
                data = file.read(min(backlog, MAX_BACKLOG if backlog > MAX_BACKLOG else room))
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= MAX_LINE:
            # Skip a line that is too long to send.
            self.offset += len(data)
        self.offset += end
        lines = data[:end].splitlines(keepends=True)
        if backlog > MAX_BACKLOG:
            lines = [each for each in lines if not each.startswith(_STEP) or _kept(each)]
        return [each for each in lines if len(each) <= MAX_LINE]


def _kept(line: bytes) -> bool:
    """Return whether to send a step although there are too many."""
    found = _NUMBER.search(line)
    return found is not None and int(found[1]) % STEP_STRIDE == 0


def _segment(path: Path) -> int | None:
    try:
        with opening.file(path, owners=(os.getuid(),)) as file:
            return segment_number(file.read(SEGMENT_SIZE))
    except OSError:
        return None


class Shipment:
    """Collects new content of a node's run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[str, _Tail] = {}
        self._sent: dict[str, bytes | tuple[int, int]] = {}
        """The last page that was sent, or the size and time of the file."""
        self._due: dict[str, float] = {}
        self.ended = False
        """Whether the job's command has ended, so that the rest is sent without limits."""

    def collect(self, alignment: Alignment) -> tuple[list[Piece], bytes]:
        """Return the new pieces of files, and their contents one after the other.

        Raises:
            OSError: The run directory is gone.
        """
        pieces: list[Piece] = []
        contents: list[bytes] = []
        left = MAX_MESSAGE
        for name, data, append in self._new(alignment):
            pieces.append(Piece(name=name, size=len(data), append=append))
            contents.append(data)
            left -= len(data)
            if left <= 0:
                break
        return pieces, b"".join(contents)

    def _new(self, alignment: Alignment) -> Iterator[tuple[str, bytes, bool]]:
        # In this order a rank's end, from its supervisor or its journal, is sent before the rings.
        for name in reversed(opening.names(self._directory)):
            match = RANK.fullmatch(name)
            if match is not None:
                restart = int(match[1])
                if restart in alignment.attempts:
                    yield from self._of_rank(name, restart, match[2], alignment)
            elif name == "supervisor.jsonl" or PROCESS.fullmatch(name):
                lines = self._lines(name, alignment, limited=False)
                sent = NODE if name == "supervisor.jsonl" else name
                if lines:
                    yield sent, b"".join(lines), True
            elif GPUS.fullmatch(name) or name == CODE:
                yield from self._whole(name, WHOLE_EVERY, opening.MOST_TEXT)
        name = STDERR if (self._directory / STDERR).exists() else STDERR_SO_FAR
        for _, data, append in self._whole(name, 0 if self.ended else RING_EVERY, MAX_STDERR):
            yield STDERR, data, append

    def _of_rank(
        self, name: str, restart: int, kind: str, alignment: Alignment
    ) -> Iterator[tuple[str, bytes, bool]]:
        there = name.replace(f".r{restart}.", f".r{alignment.attempts[restart]}.")
        if kind == "status":
            page = self._page(name, PAGE_SIZE)
            if page is not None:
                yield there, alignment.page(page, restart), False
        elif kind == "jsonl":
            if lines := self._lines(name, alignment, limited=not self.ended):
                yield there, b"".join(lines), True
        elif kind == "collectives":
            if self._is_due(name, RING_EVERY):
                ring = self._page(name, RING_SIZE)
                if ring is not None:
                    yield there, alignment.ring(ring), False
        else:
            for _, data, append in self._whole(name, 0, opening.MOST_TEXT):
                yield there, data, append

    def hurry(self) -> None:
        """Send the rings at once, because ranks are examined or end."""
        self._due.clear()

    def _is_due(self, name: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + seconds
        return True

    def _page(self, name: str, size: int) -> bytes | None:
        """Return the content of a mapped file if it has changed and is complete."""
        try:
            page = opening.contents(self._directory / name, size, owners=(os.getuid(),))
        except OSError:
            return None
        if len(page) < size or self._sent.get(name) == page:
            return None
        self._sent[name] = page
        return page

    def _whole(self, name: str, every: float, most: int) -> Iterator[tuple[str, bytes, bool]]:
        if not self._is_due(name, every):
            return
        path = self._directory / name
        try:
            facts = path.lstat()
            mark = (facts.st_size, facts.st_mtime_ns)
            if not facts.st_size or self._sent.get(name) == mark:
                return
            data = opening.ending(path, most)
        except OSError:
            return
        self._sent[name] = mark
        yield name, data, False

    def _lines(self, name: str, alignment: Alignment, *, limited: bool) -> list[bytes]:
        tail = self._tails.get(name)
        if tail is None:
            tail = self._tails[name] = _Tail(self._directory / name)
        found = []
        lines = tail.lines(MAX_MESSAGE, limited=limited)
        if any(line.startswith(_ENDS) for line in lines):
            self.hurry()
        for line in lines:
            if line.startswith(_STEP):
                found.append(alignment.step(line))
            elif line.startswith(b'{"kind":"segment"'):
                continue
            elif name != "supervisor.jsonl" or _is_needed(line):
                record = alignment.record(line)
                if record is not None:
                    found.append(record)
        return found


def _is_needed(line: bytes) -> bool:
    found = parsed(line)
    return found is not None and found.get("kind") in SUPERVISOR_KINDS
