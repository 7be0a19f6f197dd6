"""What the supervisor told of a run: findings, how ranks ended, who is in the debugger, the end."""

from __future__ import annotations

import os
import shlex
import signal
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from ddpdoctor.core.finding import from_record
from ddpdoctor.run.journals import JournalReader
from ddpdoctor.run.record import Record, integer
from ddpdoctor.top.snapshot import FindingRow
from ddpdoctor.top.stderr import clean

MOST_FINDINGS = 500
"""Findings that are kept; the newest."""

_IN_DEBUGGER = ("attached", "running", "stopped", "waits")


class Story:
    """Reads the supervisor's journal as it grows.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._reader = JournalReader(directory / "supervisor.jsonl")
        self._thinned = 0
        self._forget()

    def _forget(self) -> None:
        """Know nothing; what is not read is not known."""
        self._taken = 0
        self._findings: deque[tuple[int, FindingRow]] = deque(maxlen=MOST_FINDINGS)
        self.findings: tuple[FindingRow, ...] = ()
        """What was found and stands, oldest first."""
        self.left_out = 0
        """How many findings are too old to be kept."""
        self.exits: dict[tuple[int, int], Record] = {}
        """How processes ended, by rank and attempt."""
        self.debug: dict[int, Record] = {}
        """The newest word on each rank's debugger."""
        self.status: int | None = None
        """The job's exit status."""
        self.ended: int | None = None
        """Unix nanoseconds at which it ended."""
        self.asked = False
        """Whether somebody asked the job to stop."""

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
        if any(record.get("kind") in ("finding", "retraction") for record in fresh):
            self.findings = tuple(row for _, row in self._findings)

    def _take(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "finding":
            finding = from_record(record)
            if finding is not None:
                self.left_out += len(self._findings) == MOST_FINDINGS
                time = integer(record, "time")
                row = FindingRow(finding, time / 1e9 if time else None)
                self._findings.append((integer(record, "number"), row))
        elif kind == "retraction":
            number = integer(record, "retracts", -1)
            left = [each for each in self._findings if each[0] != number]
            self._findings = deque(left, MOST_FINDINGS)
        elif kind == "rank_exit":
            self.exits[integer(record, "rank", -1), integer(record, "restart")] = record
        elif kind == "debug" and isinstance(record.get("rank"), int):
            self.debug[record["rank"]] = record
        elif kind == "job":
            status = record.get("status")
            self.status = status if isinstance(status, int) else None
            self.ended = integer(record, "time") or None
        elif kind == "signal":
            self.asked = True

    @property
    def unread(self) -> str:
        """What was left out of the journal, in words."""
        return self._reader.left_out

    def debugged(self, rank: int) -> str:
        """What a rank does in the debugger, as the end of a sentence; empty if it is in none."""
        record = self.debug.get(rank, {})
        state = record.get("state")
        if state not in _IN_DEBUGGER:
            return ""
        place = str(record.get("place") or "")
        if not place and record.get("path"):
            place = f"{record['path']}:{integer(record, 'line')}"
        where = f" at {clean(place.rpartition('/')[2])}" if place else ""
        if state == "waits":
            return f"waits for a debugger{where}"
        return f"stands in the debugger{where}" if state == "stopped" else "is in the debugger"

    @property
    def held(self) -> tuple[int, ...]:
        """Ranks that wait for a debugger."""
        return tuple(rank for rank, each in self.debug.items() if each.get("state") == "waits")

    def port(self, rank: int) -> int | None:
        """Where a debugger attaches to a rank."""
        port = self.debug.get(rank, {}).get("port")
        return port if isinstance(port, int) else None


def died(record: Mapping[str, object], error: Mapping[str, object]) -> str:
    """How a process ended, in words: its exit record, and its uncaught exception if it had one."""
    status = record.get("status")
    words = ""
    if error:
        message = str(error.get("message") or "").partition("\n")[0]
        place = f" ({str(error.get('path')).rpartition('/')[2]}:{error.get('line')})"
        words = f"{error.get('exception')}: {message}" if message else str(error.get("exception"))
        words += place if error.get("path") else ""
    elif isinstance(status, int) and status < 0:
        words = f"killed by {_signal(-status)}"
    elif isinstance(status, int):
        words = f"exit status {status}"
    else:
        words = "its end was not seen"
    if record.get("oom"):
        words += ", out of memory"
    return clean(words)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def command(manifest: Mapping[str, object]) -> str:
    """The job's command as one would type it."""
    words = manifest.get("command")
    return clean(shlex.join(str(word) for word in words)) if isinstance(words, list) else ""


def job(manifest: Mapping[str, object]) -> str:
    """The script and its options: the command without its launcher."""
    words = manifest.get("command")
    if not isinstance(words, list):
        return ""
    named = [str(word) for word in words]
    start = next((at for at, word in enumerate(named) if word.endswith(".py")), 0)
    return clean(shlex.join([os.path.basename(named[start]), *named[start + 1 :]]))


def environment(manifest: Mapping[str, object], opened: Mapping[str, object]) -> dict[str, str]:
    """Versions and launch settings, in words."""
    told: dict[str, str] = {}
    for source in (manifest, opened):
        versions = source.get("versions")
        if isinstance(versions, Mapping):
            told |= {str(name): str(value) for name, value in versions.items() if value}
    for source, names in ((opened, ("backend",)), (manifest, ("launcher", "host", "cwd"))):
        told |= {name: str(source[name]) for name in names if source.get(name)}
    return {name: clean(value) for name, value in told.items()}
