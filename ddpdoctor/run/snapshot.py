"""A run directory read back: one immutable snapshot for rules and renderers.

The same code reads a live run, a finished one, and a copy on another machine.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.journals import WINDOW, JournalReader, Room, parse
from ddpdoctor.run.record import FORMAT, Record, Status, UnreadableError, integer, read_status
from ddpdoctor.run.records import base
from ddpdoctor.run.records.decode import decode
from ddpdoctor.run.ring import Ring, read_ring
from ddpdoctor.run.rundir import MANIFEST, STDERR, STDERR_SO_FAR

R = TypeVar("R", bound=base.Record)

MOST_STEPS = 32 * WINDOW
"""Step records a snapshot keeps of all ranks."""

MOST_RANKS = 1024
"""Ranks that a snapshot holds, of all attempts, the newest of them first."""

MOST_TEXT = 8 << 20
"""Bytes of the ends of all texts that ``faulthandler`` wrote."""

HANG = "hang-*.json"
"""The files with what was gathered while a job stood still, in alphabetical order."""

_MOST_REMARKS = 20
_STATUS_NAME = re.compile(r"rank-(\d{4,})\.r(\d+)\.status$")

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""The phases whose sum is a rank's own time; ``wait`` is the rest of a step."""


@dataclass(frozen=True, slots=True)
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

    def records_of(self, declared: type[R]) -> Iterator[R]:
        """The records of one class, oldest first."""
        for record in self.of_kind(declared.kind):
            found = decode(record)
            if isinstance(found, declared):
                yield found

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
    """A step record as a :class:`Step`; keys that are absent take the field's default.

    Raises:
        ValueError: A value is no number that a writer has.
    """
    known: dict[str, Any] = {name: record[name] for name in _STEP_FIELDS if name in record}
    if not isinstance(known.get("loss"), (int, float, type(None))):
        raise ValueError("loss is no number")
    for name, value in known.items():
        if name != "loss" and value is not None and integer(known, name, -1) != value:
            raise ValueError(f"{name} is no number")
    for name in (*PHASES, "wait", "total", "start"):
        known.setdefault(name, 0)
    known.setdefault("epoch", None)
    known.setdefault("split", False)
    return Step(**known)


_STEP_FIELDS = tuple(Step.__dataclass_fields__)


def _step(line: bytes) -> Step | None:
    """A step from its line, or None if the line is torn or not to be understood."""
    record = parse(line)
    try:
        return None if record is None else step_from(record)
    except (TypeError, ValueError):
        return None


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
        self._room = Room()
        self._journals: dict[str, JournalReader] = {}
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

    def _journal(self, name: str, window: int = WINDOW) -> JournalReader:
        reader = self._journals.get(name)
        if reader is None:
            path = self.path / name
            reader = self._journals[name] = JournalReader(
                path, min(window, self._window), self._room
            )
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
        names = opening.names(self.path)
        pages, more = _pages(names)
        strays = [each for each in names if each.startswith("process-") and each.endswith(".jsonl")]
        unreadable: list[str] = []
        crowd = [*_crowd(names, more, strays)]
        del strays[MOST_RANKS:]
        # All of them are known before the first is read: each has its share of the room.
        window = MOST_STEPS // (len(pages) or 1)
        for name in ("supervisor.jsonl", *strays):
            self._journal(name)
        for page in pages:
            self._journal(f"{page.stem}.jsonl", window)
        for journal in self._journals.values():
            journal.poll()
        supervisor = self._journal("supervisor.jsonl").records
        exits = {
            (integer(record, "rank", -1), integer(record, "restart")): record
            for record in supervisor
            if record["kind"] == "rank_exit"
        }
        ranks: list[Rank] = []
        for page in pages:
            rank = self._rank(page, exits, MOST_TEXT // len(pages), unreadable)
            if rank is not None:
                ranks.append(rank)
        self.manifest = self._read_manifest()
        errors = [record for name in strays for record in self._journal(name).records]
        return Run(
            path=self.path,
            manifest=self.manifest,
            ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
            strays=tuple(sorted(errors, key=lambda record: integer(record, "time"))),
            supervisor=supervisor,
            taken=time.time_ns(),
            stderr=self._stderr(names),
            unreadable=(*self._damage, *crowd, *self._left_out(), *_some(unreadable)),
        )

    def _left_out(self) -> Iterator[str]:
        """What of the journals is left out, in words."""
        found = [each.left_out for each in self._journals.values() if each.left_out]
        if found:
            more = f", and so of {len(found) - 1} more" if len(found) > 1 else ""
            yield f"{found[0]}{more}"

    def _rank(
        self,
        page: _Page,
        exits: dict[tuple[int, int], Record],
        most_text: int,
        unreadable: list[str],
    ) -> Rank | None:
        """A rank; None if a newer version wrote it. What cannot be read goes to ``unreadable``."""
        stem = self.path / page.stem
        status: Status | None = None
        try:
            status = read_status(f"{stem}.status")
        except (UnreadableError, OSError) as error:
            unreadable.append(str(error))
        journal = self._journal(f"{page.stem}.jsonl")
        opened = next((r for r in journal.records if r["kind"] == "open"), {})
        version = integer(opened, "format", FORMAT)
        if version > FORMAT:
            unreadable.append(
                f"{page.stem}.status: format {version}, newer than this ddpdoctor reads ({FORMAT})"
            )
            return None
        return Rank(
            rank=page.rank,
            restart=page.restart,
            status=status,
            opened=opened,
            step_lines=journal.step_lines,
            split_lines=journal.split_lines,
            records=journal.records,
            exit=exits.get((page.rank, page.restart)),
            fault=_text(Path(f"{stem}.fault"), min(opening.MOST_TEXT, most_text)),
            ring_file=Path(f"{stem}.collectives"),
        )


class _Page(NamedTuple):
    restart: int
    rank: int
    stem: str


def _pages(names: Iterable[str]) -> tuple[list[_Page], int]:
    """The ranks that have a status page, ascending; and how many old ones are left out."""
    matches = [match for name in names if (match := _STATUS_NAME.match(name))]
    found = sorted(
        _Page(int(match[2]), int(match[1]), match[0].removesuffix(".status")) for match in matches
    )
    left = max(0, len(found) - MOST_RANKS)
    if left:
        # The first ones of an attempt are kept: of the newest attempts.
        found.sort(key=lambda page: (-page.restart, page.rank))
        found = sorted(found[:MOST_RANKS])
    return found, left


def _crowd(names: Sequence[str], ranks: int, strays: Sequence[str]) -> Iterator[str]:
    """What is left out of a directory with too much in it, in words."""
    if len(names) >= opening.MOST_NAMES:
        yield f"more than {opening.MOST_NAMES} files: the others are left out"
    if ranks:
        yield f"more than {MOST_RANKS} ranks: {ranks} others are left out"
    if len(strays) > MOST_RANKS:
        yield f"more than {MOST_RANKS} processes that failed: the others are left out"


def _some(remarks: Sequence[str]) -> Iterator[str]:
    """The first remarks, and how many more there are."""
    yield from remarks[:_MOST_REMARKS]
    if len(remarks) > _MOST_REMARKS:
        yield f"and so of {len(remarks) - _MOST_REMARKS} more files"


def glance(path: Path) -> Run:
    """A snapshot of the status pages alone: no journal is read, and those of a long job are long.

    Raises:
        DoctorError: The directory is no run, is damaged, or has a newer format.
        OSError: It cannot be listed.
    """
    ranks: list[Rank] = []
    names = opening.names(path)
    pages, more = _pages(names)
    unreadable = [*_crowd(names, more, ())]
    for page in pages:
        try:
            status = read_status(f"{path / page.stem}.status")
            ranks.append(Rank(rank=page.rank, restart=page.restart, status=status))
        except (UnreadableError, OSError) as error:
            unreadable.append(str(error))
    return Run(
        path=path,
        manifest=read_manifest(path),
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
        taken=time.time_ns(),
        unreadable=tuple(_some(unreadable)),
    )


def _text(path: Path, most: int = opening.MOST_TEXT) -> str:
    """The end of a text file, empty if there is none."""
    try:
        return opening.ending(path, most).decode("utf-8", "replace")
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
