"""Reads a run directory: a live run, a finished one, and a copy from another machine alike."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.journal_reader import WINDOW, JournalReader, Room
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject, Record
from ddpdoctor.run.records.decode import SUPERVISOR_RECORDS
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import RankExitRecord
from ddpdoctor.run.rundir import MANIFEST, STDERR, STDERR_SO_FAR
from ddpdoctor.run.snapshot import Rank, Records, Run
from ddpdoctor.run.status import Status, read_status

MOST_STEPS = 32 * WINDOW
"""Step records a snapshot keeps of all ranks."""

MOST_RANKS = 1024
"""Ranks that a snapshot holds, of all attempts, the newest of them first."""

MOST_TEXT = 8 << 20
"""Bytes of the ends of all texts that ``faulthandler`` wrote."""

_MOST_REMARKS = 20
_STATUS_NAME = re.compile(r"rank-(\d{4,})\.r(\d+)\.status$")
_SUPERVISOR = "supervisor.jsonl"


class RunReader:
    """Makes one snapshot after another of a run directory, reading each byte once.

    Args:
        path: The directory.
        window: Step records that are kept per rank.
        lenient: Read what is left of a directory whose ``run.json`` is missing or damaged.
        own: Take no ``run.json`` but this user's, since something is done by what it says.

    Raises:
        DoctorError: The directory is no run, is damaged, or has a newer format.
    """

    def __init__(
        self, path: Path, window: int = WINDOW, *, lenient: bool = False, own: bool = False
    ) -> None:
        self.path = path
        self._own = own
        self._window = window
        self._lenient = lenient
        self._damage: tuple[str, ...] = ()
        self._room = Room()
        self._journals: dict[str, JournalReader] = {}
        self._stderr_seen: tuple[str, int, int, int] | None = None
        self._stderr_text = ""
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
            reader = self._journals[name] = JournalReader(
                self.path / name,
                min(window, self._window),
                self._room,
                *([SUPERVISOR_RECORDS] if name == _SUPERVISOR else []),
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
        for name in (_SUPERVISOR, *strays):
            self._journal(name)
        for page in pages:
            self._journal(f"{page.stem}.jsonl", window)
        for journal in self._journals.values():
            journal.poll()
        supervisor = self._journal(_SUPERVISOR).records
        exits = {(each.rank, each.restart): each for each in supervisor.of(RankExitRecord)}
        ranks: list[Rank] = []
        for page in pages:
            rank = self._rank(page, exits, MOST_TEXT // len(pages), unreadable)
            if rank is not None:
                ranks.append(rank)
        self.manifest = self._read_manifest()
        strangers = [record for name in strays for record in self._journal(name).records]
        return Run(
            path=self.path,
            manifest=self.manifest,
            ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
            strays=Records(sorted(strangers, key=_time)),
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
        exits: dict[tuple[int, int], RankExitRecord],
        most_text: int,
        unreadable: list[str],
    ) -> Rank | None:
        """A rank; None if a newer version wrote it. What cannot be read goes to ``unreadable``."""
        stem = self.path / page.stem
        status: Status | None = None
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
            records=journal.records,
            exit=exits.get((page.rank, page.restart)),
            fault=_text(Path(f"{stem}.fault"), min(opening.MOST_TEXT, most_text)),
            partial=bool(journal.left_out),
            ring_file=Path(f"{stem}.collectives"),
        )


def _time(record: Record) -> int:
    return getattr(record, "time", 0)


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
            unreadable.append(_why(error))
    return Run(
        path=path,
        manifest=read_manifest(path),
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.restart, rank.rank))),
        taken=time.time_ns(),
        unreadable=tuple(_some(unreadable)),
    )


def _why(error: Exception) -> str:
    """Which file cannot be read, and why."""
    return f"{error.filename} {error.strerror}" if isinstance(error, OSError) else str(error)


def _text(path: Path, most: int = opening.MOST_TEXT) -> str:
    """The end of a text file, empty if there is none."""
    try:
        return opening.ending(path, most).decode("utf-8", "replace")
    except OSError:
        return ""


class DamagedError(DoctorError):
    """``run.json`` is missing or cannot be understood."""


def read_manifest(path: Path, *, own: bool = False) -> JsonObject:
    """The contents of ``run.json``.

    Args:
        path: The run directory.
        own: Take none but this user's, since something is done by what it says.

    Raises:
        DamagedError: It is missing or damaged.
        DoctorError: It is of a newer format.
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
