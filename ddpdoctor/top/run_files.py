"""Follow the files of a run directory: status pages, the supervisor's journal, and stderr."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.formatting import shown, without_formatting
from ddpdoctor.core.opening import whole
from ddpdoctor.diagnose.crashes.rank_endings import signal_name
from ddpdoctor.run import rundir
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.reader import JournalReader
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
from ddpdoctor.run.status import PAGE_SIZE, Status, parse_status
from ddpdoctor.top.snapshot import FindingRow

# -- the last lines of a job's stderr, and which rank each is of


STDERR_LINES = 100
"""Lines that are shown of the whole job."""

STDERR_LINES_OF_RANK = 40
"""Lines that are shown of a rank."""

_STDERR_TAIL = 64 << 10
_BANNER = re.compile(
    r"(?:[A-Z]\d{4} [\d:.]+ \d+ \S*torch/distributed/run\.py:\d+\]"
    r"|\[[\d :,-]+\] torch\.distributed\.run: \[WARNING\]"
    r"|WARNING:torch\.distributed\.run:|WARNING:__main__:)?"
    r"\s*(?:\*{41}|Setting OMP_NUM_THREADS environment variable .*)?\s*"
)
"""What torchrun says of OMP_NUM_THREADS at the start of each job, in torch 1.13 to 2.13."""
_RANK_PREFIX = re.compile(r"\[(rank|default)(\d+)\]:\s?")


class Stderr:
    """Reads the end of stderr when it has changed.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / rundir.STDERR, directory / rundir.STDERR_SO_FAR)
        self._seen: tuple[int, int, int] | None = None
        self.lines: tuple[str, ...] = ()
        self._marked: dict[tuple[str, int], tuple[str, ...]] = {}

    def read(self) -> None:
        """Look at it."""
        for path in self._paths:
            try:
                facts = path.lstat()
                seen = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
                if seen == self._seen:
                    return
                data = opening.ending(path, _STDERR_TAIL)
            except OSError:
                continue
            self._seen = seen
            self._take(data)
            return

    def _take(self, data: bytes) -> None:
        marked: dict[tuple[str, int], deque[str]] = defaultdict(
            lambda: deque(maxlen=STDERR_LINES_OF_RANK)
        )
        last: deque[str] = deque(maxlen=STDERR_LINES)
        for raw in data.decode("utf-8", "replace").split("\n"):
            # Of a progress bar what was drawn last counts.
            line = without_control_characters(raw.rstrip("\r").rpartition("\r")[2]).rstrip()
            if _BANNER.fullmatch(line):
                continue
            last.append(line)
            match = _RANK_PREFIX.match(line)
            if match:
                marked[match[1], whole(match[2])].append(line[match.end() :])
        self.lines = tuple(last)
        self._marked = {key: tuple(lines) for key, lines in marked.items()}

    def of(self, rank: int, local_rank: int | None, here: bool) -> tuple[str, ...]:
        """A rank's lines: torch marks them by rank, torchrun by the local rank on its node."""
        by_rank = self._marked.get(("rank", rank), ())
        if local_rank is None or not here:
            return by_rank
        return by_rank or self._marked.get(("default", local_rank), ())


def without_control_characters(text: str) -> str:
    """Text that cannot steer a terminal: without its colours, and all else is shown."""
    return shown(without_formatting(text.replace("\t", " ")))


# -- pages


MOST_OPEN = 256
"""Pages whose files stay open; the others are opened for each reading."""

MOST_RANKS = 4096
"""Ranks whose pages are read."""

_PAGE_NAME = re.compile(r"rank-(\d{4,})\.r(\d+)\.status$")


class StatusPages:
    """The pages of a run directory.

    They are read, not mapped: a file that somebody cuts short under a map is a SIGBUS.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, int] = {}
        self._last: dict[int, Status] = {}
        self._raw: dict[int, bytes] = {}
        self.restart = 0
        """The newest attempt."""
        self.ranks: tuple[int, ...] = ()
        """Its ranks, ascending."""
        self.left_out = 0
        """How many more there are than are read."""
        self.unreadable: dict[int, str] = {}
        """Why a rank's page cannot be read, in words."""

    def refresh(self) -> bool:
        """List the directory again; False if it cannot be."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return False
        matches = [match for name in names if (match := _PAGE_NAME.match(name))]
        restart = max((int(match[2]) for match in matches), default=0)
        if restart != self.restart:
            self.close()
            self.restart, self._last, self._raw = restart, {}, {}
        ranks = sorted(int(m[1]) for m in matches if int(m[2]) == restart)
        self.ranks, self.left_out = tuple(ranks[:MOST_RANKS]), len(ranks[MOST_RANKS:])
        for gone in self._open.keys() - set(self.ranks):
            os.close(self._open.pop(gone))
            self._last.pop(gone, None)
            self._raw.pop(gone, None)
        return True

    def path(self, rank: int, suffix: str) -> Path:
        """One of a rank's files."""
        return self._directory / f"{rank_stem(rank, self.restart)}.{suffix}"

    def read(self, but: Collection[int] = ()) -> dict[int, Status]:
        """What the pages say; of one that is unreadable now, or in ``but``, what it said last."""
        self.unreadable = {rank: why for rank, why in self.unreadable.items() if rank in but}
        for rank in self.ranks:
            if rank in but:
                continue
            try:
                self._read(rank)
            except (OSError, UnreadableError) as error:
                self.unreadable[rank] = (
                    str(error) if isinstance(error, UnreadableError) else error.strerror or ""
                )
        return {rank: self._last[rank] for rank in self.ranks if rank in self._last}

    def _read(self, rank: int) -> None:
        descriptor = self._open.get(rank)
        if descriptor is None:
            path = self.path(rank, "status")
            descriptor = opening.opened(path)
            if len(self._open) < MOST_OPEN:
                self._open[rank] = descriptor
        try:
            page = os.pread(descriptor, PAGE_SIZE, 0)
            # The writer takes no lock; two equal readings in a row cannot be a torn one.
            for _ in range(4):
                again = os.pread(descriptor, PAGE_SIZE, 0)
                if again == page:
                    break
                page = again
        finally:
            if rank not in self._open:
                os.close(descriptor)
        if page != self._raw.get(rank):
            self._last[rank] = parse_status(page, f"{rank_stem(rank, self.restart)}.status")
            self._raw[rank] = page

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])


class StampAges:
    """How long ago stamps changed, by this process's clock where it can.

    The clocks of ranks jump, and differ by node.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, float, float]] = {}

    def age(self, key: Hashable, stamp: int, now: int, ticks: float) -> float:
        """Seconds since ``stamp`` was set.

        Args:
            key: Whose stamp.
            stamp: Unix nanoseconds by the clock of who set it.
            now: Unix nanoseconds here.
            ticks: Seconds of a clock here that never jumps.
        """
        known = self._known.get(key)
        elapsed = max(0.0, (now - stamp) / 1e9)
        if known is not None and known[0] == stamp:
            since = known[1]
        elif known is not None:
            # It changed after the last look.
            since = max(known[2], ticks - elapsed)
        else:
            since = ticks - elapsed
        self._known[key] = (stamp, since, ticks)
        return ticks - since


# -- what the supervisor reports of a run: findings, how ranks ended, debuggers, the job's end


MOST_FINDINGS = 500
"""Findings that are kept; the newest."""

_IN_DEBUGGER = ("attached", "running", "stopped", "waits")


class SupervisorEvents:
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
        where = (
            f" at {without_control_characters(record.at.rpartition('/')[2])}" if record.at else ""
        )
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


def how_it_ended(ending: RankExitRecord | None, error: ErrorRecord | None) -> str:
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
    return without_control_characters(words)


def command_line(manifest: Mapping[str, object]) -> str:
    """The job's command as one would type it."""
    words = manifest.get("command")
    return (
        without_control_characters(shlex.join(str(word) for word in words))
        if isinstance(words, list)
        else ""
    )


def job_command(manifest: Mapping[str, object]) -> str:
    """The script and its options: the command without its launcher."""
    words = manifest.get("command")
    if not isinstance(words, list) or not words:
        return ""
    named = [str(word) for word in words]
    start = next((at for at, word in enumerate(named) if word.endswith(".py")), 0)
    return without_control_characters(
        shlex.join([os.path.basename(named[start]), *named[start + 1 :]])
    )


def environment_facts(manifest: Mapping[str, object], opened: OpenRecord | None) -> dict[str, str]:
    """Versions and launch settings, in words."""
    facts: dict[str, str] = {}
    for each in (manifest.get("versions"), opened.versions if opened is not None else None):
        if isinstance(each, Mapping):
            facts |= {str(name): str(value) for name, value in each.items() if value}
    if opened is not None and opened.backend:
        facts["backend"] = opened.backend
    names = ("launcher", "host", "cwd")
    facts |= {name: str(manifest[name]) for name in names if manifest.get(name)}
    return {name: without_control_characters(value) for name, value in facts.items()}
