"""Read a run directory: of a live run, a finished one, or a copy from another machine.

Journals are read as they grow, within a memory limit that all journals of a run directory share. A
run directory may come from anybody, with any number of journals of any length, whose JSON takes
thirty times its size in memory. Records beyond the limit are left out, the older half of the
largest journals first, and reported.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.journal import SEGMENT_SIZE, segment_number
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import EVERY, JsonObject, Record
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import DebugRecord, RankExitRecord
from ddpdoctor.run.records.typed_json import RANK_RECORDS, SUPERVISOR_RECORDS, parse
from ddpdoctor.run.rundir import MANIFEST, STDERR, STDERR_SO_FAR
from ddpdoctor.run.snapshot import MAX_EXPANDED, Rank, Records, Run
from ddpdoctor.run.status import read_status

# -- Journals


WINDOW = 512  # Number of newest step records kept of a journal
SPLIT_WINDOW = 128  # Number of newest split step records kept of a journal

MAX_KEPT = 48 << 20
"""Maximum bytes of memory for the records of all journals, without steps
(:func:`ddpdoctor.core.opening.expanded`)."""

MAX_PARSED = 1 << 30
"""Maximum bytes of memory for all records parsed in one poll, which limits its time."""

MAX_NEW = 256 << 20
"""Maximum bytes of a journal's segment that are read in one poll: its last ones."""

MAX_NEW_OF_ALL = 2 << 30  # The same for all journals together. Each has its share.
MAX_LINE = 2 << 20  # Maximum bytes of a record. Longer ones are left out.

_MIN_NEW = 1 << 20
_CHUNK = 1 << 20
_ENTRY = 300  # Bytes of memory for keeping a record, besides the record
_MAX_STEP = 1 << 10
_STEP_LINE = b'{"kind":"step"'
_SPLIT = b',"split":true'
_SEGMENT_LINE = b'{"kind":"segment"'


class MemoryBudget:
    """The memory that the journals of a run directory share: at most ``most`` bytes for records."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self.most = most
        self._journals: list[JournalReader] = []
        self._size = 0

    @property
    def parsed(self) -> int:
        """Bytes of records that each journal may parse in one poll."""
        return MAX_PARSED // (len(self._journals) or 1)

    @property
    def share(self) -> int:
        """Bytes of a segment that each journal may read in one poll."""
        return min(MAX_NEW, max(MAX_NEW_OF_ALL // (2 * len(self._journals) or 1), _MIN_NEW))

    def add(self, journal: JournalReader) -> None:
        """Add a journal."""
        self._journals.append(journal)

    def took(self, size: int) -> None:
        """Add ``size`` bytes, which may be negative. If that is too much, thin large journals."""
        self._size += size
        if self._size <= self.most:
            return
        # Down to half, so that the next record does not trigger it again.
        while self._size > self.most // 2:
            largest = max(journal.size for journal in self._journals)
            for journal in self._journals:
                if 2 * journal.size >= largest:
                    self._size -= journal.thin()


class JournalReader:
    """Reads a journal as it grows, across rotations. Steps are parsed only on demand.

    It keeps the last ``window`` step records, in a ``room`` that journals may share.
    """

    def __init__(
        self,
        path: Path,
        window: int = WINDOW,
        room: MemoryBudget | None = None,
        kinds: Mapping[str, type[Record]] = RANK_RECORDS,
    ) -> None:
        self.left_out = ""  # Describes the records left out because there are too many
        self.thinned = 0  # Number of times that records were dropped
        self.size = 0  # Estimated bytes of memory of the records
        self._kinds = kinds
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._room = MemoryBudget() if room is None else room
        self._room.add(self)
        self._segment: int | None = None
        self._offset = 0
        self._torn = b""
        self._step_lines: deque[bytes] = deque(maxlen=window)
        self._split_lines: deque[bytes] = deque(maxlen=min(window, SPLIT_WINDOW))
        self._parses = 0
        self._kept: dict[int, tuple[Record, int]] = {}
        """Records with sizes, by the hash of the line: lines are repeated in new segments."""
        self._records: Records | None = None
        self._skips = False  # Whether the rest of a line that is too long is skipped

    @property
    def records(self) -> Records:
        """All records except steps."""
        if self._records is None:
            self._records = Records(record for record, _ in self._kept.values())
        return self._records

    @property
    def step_lines(self) -> tuple[bytes, ...]:
        """The newest step records, oldest of them first, unparsed."""
        return tuple(self._step_lines)

    @property
    def split_lines(self) -> tuple[bytes, ...]:
        """The newest step records that were split."""
        return tuple(self._split_lines)

    def poll(self) -> bool:
        """Read the data written since the last call. Return whether there was any."""
        self._parses = self._room.parsed
        with contextlib.ExitStack() as stack:
            fresh = False
            for number, file in self._open(stack):
                if self._segment is not None and number < self._segment:
                    continue
                if number != self._segment:
                    self._segment, self._offset, self._torn = number, 0, b""
                    self._skips = False
                fresh |= self._read(file)
            return fresh

    def _open(self, stack: contextlib.ExitStack) -> list[tuple[int, BinaryIO]]:
        """Open the segments, ascending, without a gap."""
        found: list[tuple[int, BinaryIO]] = []
        for _ in range(3):
            # The older one first: a segment that is renamed meanwhile is still found.
            found = [
                each
                for path in (self._older, self._path)
                if (each := self._open_segment(path, stack))
            ]
            numbers = [-1, *(number for number, _ in found)]
            if not found or numbers[-1] - 1 in numbers:
                break
            # A rotation between the two opens hid the last segment but one. Try again.
        return sorted(dict(found).items())

    def _open_segment(self, path: Path, stack: contextlib.ExitStack) -> tuple[int, BinaryIO] | None:
        """Open a segment and return its number. None if there is none yet."""
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
        # A journal without numbers, such as a handwritten one, is its own first segment.
        return (0 if number is None else number), file

    def _read(self, file: BinaryIO) -> bool:
        size = os.fstat(file.fileno()).st_size
        share = self._room.share
        if size - self._offset > share:
            self.left_out = f"{self._path.name}: all but its last {share >> 20} MiB"
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
        if self._skips or len(self._torn) > MAX_LINE:
            self._torn, self._skips = b"", True
        for line in lines:
            if line.startswith(_STEP_LINE):
                if len(line) <= _MAX_STEP:
                    self._step_lines.append(line)
                    if _SPLIT in line:
                        self._split_lines.append(line)
            elif line and len(line) <= MAX_LINE and not line.startswith(_SEGMENT_LINE):
                self._take_record(line)

    def _take_record(self, line: bytes) -> None:
        known = hash(line)
        if self._parses < 0 or known in self._kept:
            return
        size = opening.expanded(line) + _ENTRY
        self._parses -= size
        # A record as large as a quarter of the room would leave too little for others.
        if 4 * size > self._room.most or self._parses < 0:
            self.left_out = f"{self._path.name}: records beyond its share of memory"
            return
        record = parse(line, self._kinds)
        if record is None:
            return
        self._kept[known] = record, size
        self._records = None
        self.size += size
        self._room.took(size)

    def thin(self) -> int:
        """Drop the older half of the records, rare kinds last. Return the freed bytes."""
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
        self.left_out = f"{self._path.name}: older records that do not fit"
        return before - self.size


# -- Run directories


MAX_STEPS = 32 * WINDOW  # Maximum number of step records of all ranks in a snapshot
MAX_RANKS = 1024  # Maximum number of ranks of all attempts in a snapshot, newest first
MIN_EXPANDED = 64  # Minimum number of steps that a rank's lines may be expanded to
MAX_EXPANDED_OF_ALL = 1 << 16  # Maximum number for all ranks together
MAX_TEXT = 8 << 20  # Maximum bytes read from the ends of all outputs of ``faulthandler``

_MAX_REMARKS = 20
STATUS_PAGE = re.compile(r"rank-(\d{4,})\.r(\d+)\.status$")
_SUPERVISOR = "supervisor.jsonl"
_STDERR_OF_NODE = re.compile(r"stderr-n\d{1,6}\.log$")
_OF_SUPERVISORS = re.compile(r"(supervisor|nodes|head|node-\d{1,6})\.jsonl$")
"""The journals of the supervisor, of the exchange with other nodes, and of other supervisors."""


class RunReader:
    """Makes snapshots of a run directory. Each byte of a journal is read once.

    Args:
        path: The directory.
        window: Number of step records to keep per rank.
        lenient: Read the rest of a directory whose ``run.json`` is missing or damaged.
        own: Refuse a ``run.json`` of another user, because the caller acts on its contents.

    Raises:
        DoctorError: The directory is not a run, is damaged, or has a newer format.
    """

    def __init__(
        self, path: Path, window: int = WINDOW, *, lenient: bool = False, own: bool = False
    ) -> None:
        self.path = path
        self._own = own
        self._window = window
        self._lenient = lenient
        self._damage: tuple[str, ...] = ()
        self._room = MemoryBudget()
        self._journals: dict[str, JournalReader] = {}
        self._stderr_seen: dict[str, tuple[tuple[int, int, int], str]] = {}
        self.manifest = self._read_manifest()

    def _read_manifest(self) -> JsonObject:
        self._damage = ()
        try:
            return read_manifest(self.path, own=self._own)
        except DamagedError as error:
            if not self._lenient:
                raise
            self._damage = (error.message,)
            return {"format": FORMAT}

    def _journal(self, name: str, window: int = WINDOW) -> JournalReader:
        reader = self._journals.get(name)
        if reader is None:
            kinds = SUPERVISOR_RECORDS if _OF_SUPERVISORS.match(name) else RANK_RECORDS
            reader = self._journals[name] = JournalReader(
                self.path / name, min(window, self._window), self._room, kinds
            )
        return reader

    def _stderr(self, names: Collection[str]) -> tuple[str, str]:
        """Return the end of stderr, and those of other nodes. Read changed files again."""
        found = []
        own = STDERR if STDERR in names else STDERR_SO_FAR
        for each in ([own], [name for name in names if _STDERR_OF_NODE.match(name)]):
            text = ""
            for name in each:
                with contextlib.suppress(OSError):
                    facts = (self.path / name).lstat()
                    seen = facts.st_ino, facts.st_mtime_ns, facts.st_size
                    if name not in self._stderr_seen or self._stderr_seen[name][0] != seen:
                        self._stderr_seen[name] = seen, _text(self.path / name)
                    text += self._stderr_seen[name][1]
            found.append(text)
        return found[0], found[1]

    def snapshot(self) -> Run:
        """Read new data and return the whole run."""
        names = opening.names(self.path)
        pages, more = _pages(names)
        strays = [each for each in names if each.startswith("process-") and each.endswith(".jsonl")]
        unreadable: list[str] = []
        crowd = [*_too_many_files(names, more, strays)]
        del strays[MAX_RANKS:]
        # All journals exist before the first is read, because they share the room.
        window = MAX_STEPS // (len(pages) or 1)
        others = [each for each in names if _OF_SUPERVISORS.match(each) and each != _SUPERVISOR]
        for name in (_SUPERVISOR, *others, *strays):
            self._journal(name)
        for page in pages:
            self._journal(f"{page.stem}.jsonl", window)
        for journal in self._journals.values():
            journal.poll()
        supervisor = self._of_supervisors(others)
        exits = {(each.rank, each.restart): each for each in supervisor.of(RankExitRecord)}
        ranks: list[Rank] = []
        for page in pages:
            rank = self._rank(page, exits, len(pages), unreadable)
            if rank is not None:
                ranks.append(rank)
        self.manifest = self._read_manifest()
        stray_records = [record for name in strays for record in self._journal(name).records]
        left_out = [each.left_out for each in self._journals.values() if each.left_out]
        if left_out:
            rest = f", and the same in {len(left_out) - 1} more" if len(left_out) > 1 else ""
            left_out = [f"{left_out[0]}{rest}"]
        stderr, stderr_elsewhere = self._stderr(names)
        return Run(
            path=self.path,
            manifest=self.manifest,
            ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
            strays=Records(sorted(stray_records, key=lambda each: getattr(each, "time", 0))),
            supervisor=supervisor,
            taken=time.time_ns(),
            stderr=stderr,
            stderr_elsewhere=stderr_elsewhere,
            unreadable=(*self._damage, *crowd, *left_out, *_first_remarks(unreadable)),
        )

    def _of_supervisors(self, others: Sequence[str]) -> Records:
        """Return the supervisor's records together with those of other such journals, by time."""
        own = self._journal(_SUPERVISOR).records
        if not others:
            return own
        every = [*own]
        for name in others:
            every += map(_of_node, self._journal(name).records)
        return Records(sorted(every, key=lambda each: getattr(each, "time", 0)))

    def _rank(
        self,
        page: _Page,
        exits: dict[tuple[int, int], RankExitRecord],
        ranks: int,
        unreadable: list[str],
    ) -> Rank | None:
        """Return a rank, or None if a newer version wrote it. Add failures to ``unreadable``."""
        stem = self.path / page.stem
        status = None
        try:
            status = read_status(f"{stem}.status")
        except (UnreadableError, OSError) as error:
            unreadable.append(_why(error))
        journal = self._journal(f"{page.stem}.jsonl")
        opened = journal.records.first(OpenRecord) or OpenRecord(format=FORMAT, rank=page.rank)
        if opened.format > FORMAT:
            unreadable.append(
                f"{page.stem}.status: format {opened.format}, newer than this ddpdoctor reads "
                f"({FORMAT})"
            )
            return None
        return Rank(
            rank=page.rank,
            restart=page.restart,
            status=status,
            opened=opened,
            step_lines=journal.step_lines,
            split_lines=journal.split_lines,
            max_steps=max(MIN_EXPANDED, min(MAX_EXPANDED, MAX_EXPANDED_OF_ALL // ranks)),
            records=journal.records,
            exit=exits.get((page.rank, page.restart)),
            fault=_text(Path(f"{stem}.fault"), min(opening.MOST_TEXT, MAX_TEXT // ranks)),
            partial=bool(journal.left_out),
            ring_file=Path(f"{stem}.collectives"),
        )


class _Page(NamedTuple):
    restart: int
    rank: int
    stem: str


def _pages(names: Iterable[str]) -> tuple[list[_Page], int]:
    """Return the ranks with a status page, ascending, and the number of those left out."""
    matches = [match for name in names if (match := STATUS_PAGE.match(name))]
    found = sorted(
        _Page(int(match[2]), int(match[1]), match[0].removesuffix(".status")) for match in matches
    )
    left = max(0, len(found) - MAX_RANKS)
    if left:
        # Keep the newest attempts, and of an attempt the lowest ranks.
        found.sort(key=lambda page: (-page.restart, page.rank))
        found = sorted(found[:MAX_RANKS])
    return found, left


def _too_many_files(names: Sequence[str], ranks: int, strays: Sequence[str]) -> Iterator[str]:
    """Yield remarks on the files left out of a directory with too many."""
    if len(names) >= opening.MOST_NAMES:
        yield f"more than {opening.MOST_NAMES} files: the others are left out"
    if ranks:
        yield f"more than {MAX_RANKS} ranks: {ranks} others are left out"
    if len(strays) > MAX_RANKS:
        yield f"more than {MAX_RANKS} processes that failed: the others are left out"


def _of_node(record: Record) -> Record:
    """Return another supervisor's record without its port, which means nothing on this node."""
    return replace(record, port=None) if isinstance(record, DebugRecord) else record


def _first_remarks(remarks: Sequence[str]) -> Iterator[str]:
    yield from remarks[:_MAX_REMARKS]
    if len(remarks) > _MAX_REMARKS:
        yield f"and {len(remarks) - _MAX_REMARKS} more files like these"


def glance(path: Path) -> Run:
    """Make a snapshot of the status pages alone, since journals of a long job take long to read.

    Raises:
        DoctorError: The directory is not a run, is damaged, or has a newer format.
        OSError: It cannot be listed.
    """
    ranks: list[Rank] = []
    names = opening.names(path)
    pages, more = _pages(names)
    unreadable = [*_too_many_files(names, more, ())]
    for page in pages:
        try:
            status = read_status(f"{path / page.stem}.status")
            ranks.append(Rank(rank=page.rank, restart=page.restart, status=status))
        except (UnreadableError, OSError) as error:
            unreadable.append(_why(error))
    return Run(
        path=path,
        manifest=read_manifest(path),
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
        taken=time.time_ns(),
        unreadable=tuple(_first_remarks(unreadable)),
    )


def _why(error: Exception) -> str:
    """Say which file cannot be read, and why."""
    return f"{error.filename} {error.strerror}" if isinstance(error, OSError) else str(error)


def _text(path: Path, most: int = opening.MOST_TEXT) -> str:
    """Read the end of a text file. Empty if there is none."""
    try:
        return opening.ending(path, most).decode("utf-8", "replace")
    except OSError:
        return ""


class DamagedError(DoctorError):
    """``run.json`` is missing or damaged."""


def read_manifest(path: Path, *, own: bool = False) -> JsonObject:
    """Read ``run.json``. ``own`` refuses another user's, because the caller acts on its contents.

    Raises:
        DamagedError: It is missing or damaged.
        DoctorError: It has a newer format.
    """
    file = path / MANIFEST
    try:
        owners = (os.getuid(),) if own else None
        manifest = opening.json_object(file, opening.MOST_MANIFEST, owners=owners)
        version = int(manifest["format"])
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is not a run directory: {error.strerror}") from None
    except OSError as error:
        raise DamagedError(f"{file} {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError):
        raise DamagedError(
            f"{file} is damaged", "the run cannot be read; name another run directory"
        ) from None
    if version > FORMAT:
        raise DoctorError(
            f"{path} was written by a newer ddpdoctor (format {version}; this one reads {FORMAT})",
            "update ddpdoctor: pip install --upgrade ddpdoctor",
        )
    return dict(manifest)
