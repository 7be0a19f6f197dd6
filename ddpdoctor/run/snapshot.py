"""A run directory read back: one immutable snapshot for rules and renderers.

The same code reads a live run, a finished one, and a copy on another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.record import (
    EVERY,
    FORMAT,
    KINDS,
    SEGMENT_SIZE,
    Record,
    Status,
    UnreadableError,
    integer,
    read_status,
    segment_number,
)
from ddpdoctor.run.ring import Ring, read_ring
from ddpdoctor.run.rundir import MANIFEST, STDERR, STDERR_SO_FAR

WINDOW = 512
"""Step records a snapshot keeps per rank; the newest ones."""

SPLIT_WINDOW = 128
"""Split step records a snapshot keeps per rank."""

MOST_NEW = 256 << 20
"""Bytes of a journal's segment that are read at once; of more, the last ones."""

MOST_LINE = 2 << 20
"""Bytes of a record; a longer one is left out."""

MOST_RECORDS = 16 << 20
"""Bytes of the records of a journal that are kept, other than steps."""

HANG = "hang-*.json"
"""The files with what was gathered while a job stood still, in alphabetical order."""

_STATUS_NAME = re.compile(r"rank-(\d{4,})\.r(\d+)\.status$")
_CHUNK = 1 << 20
_MOST_STEP = 1 << 14
_STEP_LINE = b'{"kind":"step"'
_SPLIT = b',"split":true'
_SEGMENT_LINE = b'{"kind":"segment"'

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""The phases whose sum is a rank's own time; ``wait`` is the rest of a step."""


@dataclass(frozen=True)
class Step:
    """One step of one rank; durations in nanoseconds.

    ``data``, ``forward``, ``backward``, ``optimizer``, ``other`` and ``wait`` add up to ``total``.
    ``split`` says that ``backward`` is compute alone, because DDP's own timers told how long its
    all-reduce was exposed; without it ``backward`` holds that wait, too.
    """

    step: int
    epoch: int | None
    start: int
    data: int
    forward: int
    backward: int
    optimizer: int
    other: int
    wait: int
    total: int
    split: bool
    samples: int | None = None
    loss: float | None = None
    backwards: int = 1
    skipped: bool = False
    outside: int = 0
    cpu: int | None = None
    """For how long the training thread ran; None if the kernel does not tell."""
    waited: int | None = None
    """For how long it was ready to run and had no CPU core."""

    @property
    def own(self) -> int:
        """What this rank spent itself: all of the step but the wait for others."""
        return self.total - self.wait


@dataclass(frozen=True)
class Rank:
    """What is known of one rank in one attempt (``restart``)."""

    rank: int
    restart: int
    status: Status | None
    opened: Record = field(default_factory=dict)
    step_lines: tuple[bytes, ...] = field(default=(), repr=False)
    """The newest step records as they stand in the journal; :attr:`steps` parses them."""
    split_lines: tuple[bytes, ...] = field(default=(), repr=False)
    """The newest of them whose backward was split, which on a GPU are few and far between."""
    records: tuple[Record, ...] = ()
    """Everything in the journal but steps, oldest first."""
    exit: Record | None = None
    """The supervisor's word on how the process ended, if it saw it."""
    fault: str = ""
    """What ``faulthandler`` wrote on a fatal signal."""
    ring_file: Path | None = None
    """Where the collectives stand that it called from Python; :attr:`ring` reads them."""

    def of_kind(self, kind: str) -> Iterator[Record]:
        """The records of one kind, oldest first."""
        return (record for record in self.records if record.get("kind") == kind)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The newest steps, oldest of them first; parsed when first asked for."""
        return tuple(step for line in self.step_lines if (step := _step(line)) is not None)

    @cached_property
    def split_steps(self) -> tuple[Step, ...]:
        """The newest steps whose backward was split into compute and wait."""
        return tuple(step for line in self.split_lines if (step := _step(line)) is not None)

    @cached_property
    def ring(self) -> Ring | None:
        """The newest collectives called from Python, read when first asked for."""
        if self.ring_file is None:
            return None
        try:
            return read_ring(str(self.ring_file))
        except (OSError, UnreadableError):
            return None

    @property
    def ended(self) -> Record | None:
        """The record of an interpreter that came to its regular end."""
        return next(self.of_kind("end"), None)


@dataclass(frozen=True)
class Run:
    """One launch, as its directory tells it."""

    path: Path
    manifest: Record
    ranks: tuple[Rank, ...]
    """Ascending by restart, then by rank."""
    strays: tuple[Record, ...] = ()
    """Errors of processes that never became a rank, oldest first."""
    supervisor: tuple[Record, ...] = ()
    """The supervisor's own records, oldest first."""
    taken: int = 0
    """Unix nanoseconds at which the snapshot was taken."""
    stderr: str = ""
    """The end of the job's stderr, a megabyte; while the job lives, the last 64 KB."""
    unreadable: tuple[str, ...] = ()
    """What could not be read, in words."""

    @property
    def restarts(self) -> tuple[int, ...]:
        """The attempts seen, ascending; at least ``(0,)``."""
        strays = {integer(record, "restart") for record in self.strays}
        return tuple(sorted({rank.restart for rank in self.ranks} | strays)) or (0,)

    def attempt(self, restart: int) -> tuple[Rank, ...]:
        """The ranks of one attempt."""
        return tuple(rank for rank in self.ranks if rank.restart == restart)

    @property
    def last(self) -> tuple[Rank, ...]:
        """The ranks of the last attempt."""
        return self.attempt(self.restarts[-1])

    @property
    def exit_status(self) -> int | None:
        """The job's exit status (negative: a signal's number), None while it runs or if unknown."""
        return self._told("job", "status")

    @property
    def stopped_at(self) -> int | None:
        """Unix nanoseconds at which a person or a scheduler asked the job to stop, if one did."""
        return self._told("signal", "time")

    @property
    def ended_for_hang(self) -> bool:
        """Whether ddpdoctor ended the job because it hung."""
        return any(
            record.get("kind") == "signal" and record.get("hang") for record in self.supervisor
        )

    @property
    def ended_by_debugger(self) -> bool:
        """Whether the job was ended because its debugger was stopped."""
        return any(
            record.get("kind") == "signal" and record.get("debugger") for record in self.supervisor
        )

    @cached_property
    def hang(self) -> Record | None:
        """The newest examination of a job that stands still, or stood still to its end.

        None if it moves, or went on. What was seen of each rank is under ``ranks``. What is seen
        while ranks give up, one by one, tells less than what was seen before.
        """
        newest: Record | None = None
        ends = [
            integer(record, "time")
            for rank in self.last
            for record in (*rank.of_kind("error"), *([rank.exit] if rank.exit else ()))
        ]
        for record in self.supervisor:
            if record.get("kind") == "hang":
                before = integer(newest, "time") if newest is not None else 0
                now = integer(record, "time")
                if newest is None or not any(before < end <= now for end in ends):
                    newest = record
            elif record.get("kind") == "hang_over":
                newest = None
        if newest is None or integer(newest, "restart") != self.restarts[-1]:
            return None
        name = newest.get("file")
        if not isinstance(name, str) or os.path.basename(name) != name:
            return newest
        try:
            return opening.json_object(self.path / name, opening.MOST_RECORD)
        except (OSError, ValueError):
            return newest

    @cached_property
    def _lost(self) -> dict[tuple[int, int, int], int]:
        found: dict[tuple[int, int, int], int] = {}
        for record in self.supervisor:
            if record.get("kind") == "no_core":
                rank, restart = integer(record, "rank"), integer(record, "restart")
                found[rank, restart, integer(record, "since")] = integer(record, "lost")
        return found

    def waits_for(self, rank: Rank, until: int | None = None) -> int:
        """Nanoseconds that a rank has been in its phase, less those in which it had no core.

        Args:
            rank: One with a status page.
            until: Unix nanoseconds; the moment of the snapshot if not said.
        """
        status = rank.status
        if status is None:
            return 0
        lost = self._lost.get((rank.rank, rank.restart, status.since), 0)
        return (self.taken if until is None else until) - status.since - lost

    @cached_property
    def debug_states(self) -> dict[int, Record]:
        """The newest ``debug`` record of each rank: its port, process and state."""
        return {
            record["rank"]: record
            for record in self.supervisor
            if record.get("kind") == "debug" and isinstance(record.get("rank"), int)
        }

    @cached_property
    def debugged(self) -> tuple[tuple[int, int], ...]:
        """Spans in which a rank was in the debugger or waited for one: from, to, Unix nanoseconds.

        What is slow then says nothing about the job, on any rank.
        """
        spans: list[tuple[int, int]] = []
        since: dict[object, int] = {}
        attached: set[object] = set()
        for record in self.supervisor:
            if record.get("kind") != "debug":
                continue
            rank, state, when = record.get("rank"), record.get("state"), integer(record, "time")
            if state in ("attached", "waits"):
                since.setdefault(rank, when)
                if state == "attached":
                    attached.add(rank)
            elif state in ("detached", "gone") or (state == "goes on" and rank not in attached):
                attached.discard(rank)
                if rank in since:
                    spans.append((since.pop(rank), when))
        return (*spans, *((start, 1 << 63) for start in since.values()))

    def undisturbed(self, step: Step) -> bool:
        """Whether no rank was in the debugger during a step."""
        return not any(
            start < step.start + step.total and step.start < end for start, end in self.debugged
        )

    def _told(self, kind: str, key: str) -> int | None:
        """The first number that the supervisor's records of a kind have under ``key``."""
        numbers = (record.get(key) for record in self.supervisor if record.get("kind") == kind)
        return next((number for number in numbers if isinstance(number, int)), None)


def step_from(record: Record) -> Step:
    """A step record as a :class:`Step`; keys that are absent take the field's default."""
    known: dict[str, Any] = {
        name: record[name] for name in Step.__dataclass_fields__ if name in record
    }
    for name in (*PHASES, "wait", "total", "start"):
        known.setdefault(name, 0)
    known.setdefault("epoch", None)
    known.setdefault("split", False)
    return Step(**known)


class JournalReader:
    """Reads a journal as it grows, across rotation, without parsing steps nobody asks for."""

    def __init__(self, path: Path, window: int = WINDOW) -> None:
        self.left_out = ""
        """What was not read, or not kept, because there is too much of it; in words."""
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._segment: int | None = None
        self._offset = 0
        self._torn = b""
        self._step_lines: deque[bytes] = deque(maxlen=window)
        self._split_lines: deque[bytes] = deque(maxlen=min(window, SPLIT_WINDOW))
        self.records: list[Record] = []
        self._size = 0
        """Bytes of their lines, about."""
        self._seen: set[int] = set()
        self._skips = False
        """Whether the rest of a line that is too long is passed over."""

    def poll(self) -> bool:
        """Take in what was written since the last call; True if there was anything."""
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
            found = [each for path in (self._older, self._path) if (each := _segment(path, stack))]
            numbers = [-1, *(number for number, _ in found)]
            if not found or numbers[-1] - 1 in numbers:
                break
            # Rotated between the two, the segment before the newest was missed: look again.
        return sorted(dict(found).items())

    def _take(self, file: BinaryIO) -> bool:
        size = os.fstat(file.fileno()).st_size
        if size - self._offset > MOST_NEW:
            self.left_out = f"{self._path.name}: all but its last {MOST_NEW >> 20} MB"
            self._offset, self._torn, self._skips = size - MOST_NEW, b"", True
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
        if known in self._seen:
            return
        self._seen.add(known)
        record = _parse(line)
        if record is None:
            return
        self.records.append(record)
        self._size += len(line)
        while self._size > MOST_RECORDS:
            self._thin()

    def _thin(self) -> None:
        """Let go of the older half of what there is much of; what is rare is kept if it can be."""
        half = len(self.records) // 2
        rare = [record for record in self.records[:half] if _is_rare(record)]
        kept = [*rare[: half // 2], *self.records[half + (half == 0) :]]
        self.left_out = f"{self._path.name}: older records than {MOST_RECORDS >> 20} MB of them"
        self._size = self._size * len(kept) // len(self.records)
        self.records = kept

    @property
    def step_lines(self) -> tuple[bytes, ...]:
        """The newest step records, oldest of them first, unparsed."""
        return tuple(self._step_lines)

    @property
    def split_lines(self) -> tuple[bytes, ...]:
        """The newest of them that were split."""
        return tuple(self._split_lines)


def _is_rare(record: Record) -> bool:
    """Whether a record is of a kind that cannot become many."""
    return record["kind"] in KINDS and KINDS[record["kind"]].first == EVERY


def _segment(path: Path, stack: contextlib.ExitStack) -> tuple[int, BinaryIO] | None:
    """A segment's number and its open file; None if there is none, or not yet."""
    try:
        file = stack.enter_context(opening.file(path))
        head = file.read(SEGMENT_SIZE)
    except OSError:
        return None
    if len(head) < SEGMENT_SIZE and not head.endswith(b"\n"):
        # Its first line is still being written.
        return None
    number = segment_number(head)
    # A journal without numbers, written by hand say, is its own first segment.
    return (0 if number is None else number), file


def _step(line: bytes) -> Step | None:
    """A step from its line, or None if the line is torn or not to be understood."""
    record = _parse(line)
    try:
        return None if record is None else step_from(record)
    except TypeError:
        return None


def _parse(line: bytes) -> Record | None:
    """A journal line, or None if it is torn or no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


class RunReader:
    """Makes one snapshot after another of a run directory, reading each byte once.

    Args:
        path: The directory.
        window: Step records that are kept per rank.
        lenient: Read what is left of a directory whose ``run.json`` is missing or damaged.

    Raises:
        DoctorError: The directory is no run, is damaged, or has a newer format.
    """

    def __init__(self, path: Path, window: int = WINDOW, *, lenient: bool = False) -> None:
        self.path = path
        self._window = window
        self._lenient = lenient
        self._damage: tuple[str, ...] = ()
        self._journals: dict[Path, JournalReader] = {}
        self._stderr_seen: tuple[str, int, int, int] | None = None
        self._stderr_text = ""
        self.manifest = self._read_manifest()

    def _read_manifest(self) -> Record:
        self._damage = ()
        try:
            return read_manifest(self.path)
        except DamagedError as error:
            if not self._lenient:
                raise
            self._damage = (error.message,)
            return {"format": FORMAT}

    def _journal(self, name: str) -> JournalReader:
        path = self.path / name
        reader = self._journals.get(path)
        if reader is None:
            reader = self._journals[path] = JournalReader(path, self._window)
        reader.poll()
        return reader

    def _stderr(self, names: Collection[str]) -> str:
        """The end of stderr, read again only when it has changed."""
        name = STDERR if STDERR in names else STDERR_SO_FAR
        path = self.path / name
        try:
            facts = path.lstat()
        except OSError:
            return ""
        seen = (name, facts.st_ino, facts.st_mtime_ns, facts.st_size)
        if seen != self._stderr_seen:
            self._stderr_seen, self._stderr_text = seen, _text(path)
        return self._stderr_text

    def snapshot(self) -> Run:
        """Read what is new and return the whole picture."""
        names = sorted(os.listdir(self.path))
        supervisor = tuple(self._journal("supervisor.jsonl").records)
        exits = {
            (integer(record, "rank", -1), integer(record, "restart")): record
            for record in supervisor
            if record["kind"] == "rank_exit"
        }
        ranks: list[Rank] = []
        unreadable: list[str] = []
        for name in names:
            match = _STATUS_NAME.match(name)
            if not match:
                continue
            number, restart = int(match[1]), int(match[2])
            status: Status | None = None
            try:
                status = read_status(str(self.path / name))
            except (UnreadableError, OSError) as error:
                unreadable.append(str(error))
            journal = self._journal(name.removesuffix("status") + "jsonl")
            opened = next((r for r in journal.records if r["kind"] == "open"), {})
            version = integer(opened, "format", FORMAT)
            if version > FORMAT:
                unreadable.append(
                    f"{name}: format {version}, newer than this ddpdoctor reads ({FORMAT})"
                )
                continue
            ranks.append(
                Rank(
                    rank=number,
                    restart=restart,
                    status=status,
                    opened=opened,
                    step_lines=journal.step_lines,
                    split_lines=journal.split_lines,
                    records=tuple(journal.records),
                    exit=exits.get((number, restart)),
                    fault=_text(self.path / (name.removesuffix("status") + "fault")),
                    ring_file=self.path / (name.removesuffix("status") + "collectives"),
                )
            )
        strays = [
            record
            for name in names
            if name.startswith("process-") and name.endswith(".jsonl")
            for record in self._journal(name).records
        ]
        self.manifest = self._read_manifest()
        left_out = [each.left_out for each in self._journals.values() if each.left_out]
        return Run(
            path=self.path,
            manifest=self.manifest,
            ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
            strays=tuple(sorted(strays, key=lambda record: integer(record, "time"))),
            supervisor=supervisor,
            taken=time.time_ns(),
            stderr=self._stderr(names),
            unreadable=(*self._damage, *unreadable, *left_out),
        )


def glance(path: Path) -> Run:
    """A snapshot of the status pages alone: no journal is read, and those of a long job are long.

    Raises:
        DoctorError: The directory is no run, is damaged, or has a newer format.
        OSError: It cannot be listed.
    """
    ranks: list[Rank] = []
    unreadable: list[str] = []
    for name in os.listdir(path):
        match = _STATUS_NAME.match(name)
        if match is None:
            continue
        try:
            status = read_status(str(path / name))
            ranks.append(Rank(rank=int(match[1]), restart=int(match[2]), status=status))
        except (UnreadableError, OSError) as error:
            unreadable.append(str(error))
    return Run(
        path=path,
        manifest=read_manifest(path),
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
        taken=time.time_ns(),
        unreadable=tuple(unreadable),
    )


def _text(path: Path) -> str:
    """The end of a text file, empty if there is none."""
    try:
        return opening.ending(path, opening.MOST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""


class DamagedError(DoctorError):
    """``run.json`` is missing or cannot be understood."""


def read_manifest(path: Path) -> Record:
    """The contents of ``run.json``.

    Raises:
        DamagedError: It is missing or damaged.
        DoctorError: It is of a newer format.
    """
    file = path / MANIFEST
    try:
        manifest = opening.json_object(file, opening.MOST_MANIFEST)
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
