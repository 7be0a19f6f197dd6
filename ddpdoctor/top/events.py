"""What the supervisor reports of a run: findings, how ranks ended, debuggers, the job's end."""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from ddpdoctor.analysis.exit_statuses import signal_name
from ddpdoctor.run.journal_reader import JournalReader
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.decode import SUPERVISOR_RECORDS
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.supervisor import (
    DebugRecord,
    FindingRecord,
    HangOverRecord,
    HangRecord,
    JobRecord,
    RankExitRecord,
    RetractionRecord,
    SignalRecord,
)
from ddpdoctor.run.reported import from_journal
from ddpdoctor.top.snapshot import FindingRow
from ddpdoctor.top.stderr import clean

MOST_FINDINGS = 500
"""Findings that are kept; the newest."""

_IN_DEBUGGER = ("attached", "running", "stopped", "waits")


class Events:
    """Reads the supervisor's journal as it grows.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._reader = JournalReader(directory / "supervisor.jsonl", kinds=SUPERVISOR_RECORDS)
        self._thinned = 0
        self._forget()

    def _forget(self) -> None:
        """Know nothing; what is not read is not known."""
        self._taken = 0
        self._findings: deque[tuple[int, FindingRow]] = deque(maxlen=MOST_FINDINGS)
        self.findings: tuple[FindingRow, ...] = ()
        """What was found and not withdrawn, oldest first."""
        self.left_out = 0
        """How many findings are too old to be kept."""
        self.exits: dict[tuple[int, int], RankExitRecord] = {}
        """How processes ended, by rank and attempt."""
        self.debug: dict[int, DebugRecord] = {}
        """What each rank's debugger did last."""
        self.status: int | None = None
        """The job's exit status."""
        self.ended: int | None = None
        """Unix nanoseconds at which it ended."""
        self.asked = False
        """Whether the job was asked to stop."""
        self._hung: int | None = None

    def poll(self) -> None:
        """Take in what is new."""
        self._reader.poll()
        if self._reader.thinned != self._thinned:
            # What was let go there is let go here.
            self._thinned = self._reader.thinned
            self._forget()
        fresh = self._reader.records[self._taken :]
        self._taken += len(fresh)
        for record in fresh:
            self._take(record)
        if any(isinstance(record, (FindingRecord, RetractionRecord)) for record in fresh):
            self.findings = tuple(row for _, row in self._findings)

    def _take(self, record: Record) -> None:
        if isinstance(record, FindingRecord):
            finding = from_journal(record)
            if finding is not None:
                self.left_out += len(self._findings) == MOST_FINDINGS
                when = record.time / 1e9 if record.time else None
                row = FindingRow(finding, when, record.restart)
                self._findings.append((record.number or 0, row))
        elif isinstance(record, RetractionRecord):
            left = [each for each in self._findings if each[0] != record.retracts]
            self._findings = deque(left, MOST_FINDINGS)
        elif isinstance(record, RankExitRecord):
            self.exits[record.rank, record.restart] = record
        elif isinstance(record, DebugRecord) and record.rank is not None:
            self.debug[record.rank] = record
        elif isinstance(record, JobRecord):
            self.status = record.status
            self.ended = record.time or None
        elif isinstance(record, SignalRecord):
            self.asked = True
        elif isinstance(record, HangRecord):
            self._hung = record.restart if record.everybody else None
        elif isinstance(record, HangOverRecord):
            self._hung = None

    @property
    def unread(self) -> str:
        """What was left out of the journal, in words."""
        return self._reader.left_out

    def debugged(self, rank: int) -> str:
        """What a rank does in the debugger, as the end of a sentence; empty if it is in none."""
        record = self.debug.get(rank)
        if record is None or record.state not in _IN_DEBUGGER:
            return ""
        state = record.state
        where = f" at {clean(record.at.rpartition('/')[2])}" if record.at else ""
        if state == "waits":
            return f"waits for a debugger{where}"
        return f"stands in the debugger{where}" if state == "stopped" else "is in the debugger"

    @property
    def held(self) -> tuple[int, ...]:
        """Ranks that wait for a debugger."""
        return tuple(rank for rank, each in self.debug.items() if each.state == "waits")

    def hung(self, attempt: int) -> bool:
        """Whether no rank of this attempt made progress when that was looked at last."""
        return self._hung == attempt

    def port(self, rank: int) -> int | None:
        """Where a debugger attaches to a rank."""
        return self.debug[rank].port if rank in self.debug else None


def died(ending: RankExitRecord | None, error: ErrorRecord | None) -> str:
    """How a process ended, in words: its exit record, and its uncaught exception if it had one."""
    status = ending.status if ending is not None else None
    words = "its end was not seen"
    if error is not None:
        message = error.message.partition("\n")[0]
        words = f"{error.exception}: {message}" if message else error.exception
        words += f" ({error.path.rpartition('/')[2]}:{error.line})" if error.path else ""
    elif status is not None:
        words = f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
    if ending is not None and ending.oom:
        words += ", out of memory"
    return clean(words)


def command(manifest: Mapping[str, object]) -> str:
    """The job's command as one would type it."""
    words = manifest.get("command")
    return clean(shlex.join(str(word) for word in words)) if isinstance(words, list) else ""


def job(manifest: Mapping[str, object]) -> str:
    """The script and its options: the command without its launcher."""
    words = manifest.get("command")
    if not isinstance(words, list) or not words:
        return ""
    named = [str(word) for word in words]
    start = next((at for at, word in enumerate(named) if word.endswith(".py")), 0)
    return clean(shlex.join([os.path.basename(named[start]), *named[start + 1 :]]))


def environment(manifest: Mapping[str, object], opened: OpenRecord | None) -> dict[str, str]:
    """Versions and launch settings, in words."""
    facts: dict[str, str] = {}
    for each in (manifest.get("versions"), opened.versions if opened is not None else None):
        if isinstance(each, Mapping):
            facts |= {str(name): str(value) for name, value in each.items() if value}
    if opened is not None and opened.backend:
        facts["backend"] = opened.backend
    names = ("launcher", "host", "cwd")
    facts |= {name: str(manifest[name]) for name in names if manifest.get(name)}
    return {name: clean(value) for name, value in facts.items()}
