"""Read the files of a running job as they grow, and the times of its steps.

A journal may be long: steps are found at its ends or by number, without an index. Files are read
by position, never mapped, because others write, rotate and truncate them. A file that cannot be
read counts as empty.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from ddpdoctor.core import opening
from ddpdoctor.core.formatting import shown, without_formatting
from ddpdoctor.core.opening import whole
from ddpdoctor.diagnose.crashes.rank_endings import signal_name
from ddpdoctor.diagnose.speed.pace import WARM_UP, own_time
from ddpdoctor.run import rundir
from ddpdoctor.run.mapped import UnreadableError, steady
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.reader import STATUS_PAGE, JournalReader
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import DdpRecord
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
from ddpdoctor.run.records.training import PassRecord, StepRecord
from ddpdoctor.run.records.typed_json import SUPERVISOR_RECORDS, parse
from ddpdoctor.run.reported import from_journal
from ddpdoctor.run.snapshot import command_words
from ddpdoctor.run.status import PAGE_SIZE, Parts, Status, parse_status
from ddpdoctor.run.step_series import open_files
from ddpdoctor.top.snapshot import PHASES, FindingRow, RankRow, Times

# -- follow the files of a run directory: status pages, the supervisor's journal, and stderr


MAX_STDERR_LINES, MAX_STDERR_LINES_OF_RANK = 100, 40
"""Maximum lines of stderr shown for the whole job, and for a rank."""

_STDERR_TAIL = 64 << 10
_BANNER = re.compile(
    r"(?:[A-Z]\d{4} [\d:.]+ \d+ \S*torch/distributed/run\.py:\d+\]"
    r"|\[[\d :,-]+\] torch\.distributed\.run: \[WARNING\]"
    r"|WARNING:torch\.distributed\.run:|WARNING:__main__:)?"
    r"\s*(?:\*{41}|Setting OMP_NUM_THREADS environment variable .*)?\s*"
)
"""torchrun's message about OMP_NUM_THREADS at the start of each job, in torch 1.13 to 2.13."""
_RANK_PREFIX = re.compile(r"\[(rank|default)(\d+)\]:\s?")


class Stderr:
    """The last lines of a job's stderr, and the rank of each."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / rundir.STDERR, directory / rundir.STDERR_SO_FAR)
        self._seen: tuple[int, int, int] | None = None
        self.lines: tuple[str, ...] = ()
        self._by_prefix: dict[tuple[str, int], tuple[str, ...]] = {}

    def read(self) -> None:
        """Read its end if it has changed."""
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
            self._parse(data)
            return

    def _parse(self, data: bytes) -> None:
        by_prefix: dict[tuple[str, int], deque[str]] = defaultdict(
            lambda: deque(maxlen=MAX_STDERR_LINES_OF_RANK)
        )
        last: deque[str] = deque(maxlen=MAX_STDERR_LINES)
        for raw in data.decode("utf-8", "replace").split("\n"):
            # Show the last state of a progress bar.
            line = without_control_characters(raw.rstrip("\r").rpartition("\r")[2]).rstrip()
            if _BANNER.fullmatch(line):
                continue
            last.append(line)
            match = _RANK_PREFIX.match(line)
            if match:
                by_prefix[match[1], whole(match[2])].append(line[match.end() :])
        self.lines = tuple(last)
        self._by_prefix = {key: tuple(lines) for key, lines in by_prefix.items()}

    def of(self, rank: int, local_rank: int | None, here: bool) -> tuple[str, ...]:
        """Return a rank's lines. torch marks them by rank, torchrun by local rank."""
        by_rank = self._by_prefix.get(("rank", rank), ())
        if by_rank or local_rank is None or not here:
            return by_rank
        return self._by_prefix.get(("default", local_rank), ())


def without_control_characters(text: str) -> str:
    """Return a text without colours in which other control characters are visible."""
    return shown(without_formatting(text.replace("\t", " ")))


MAX_OPEN_PAGES = 256  # Maximum number of status pages whose files stay open
MAX_RANKS = 4096  # Maximum number of ranks whose pages are read


class StatusPages:
    """The status pages of a run directory.

    They are read, not mapped: truncating a mapped file causes a SIGBUS.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, int] = {}
        self._last: dict[int, Status] = {}
        self._raw: dict[int, bytes] = {}
        self.restart = 0  # The newest attempt
        self.ranks: tuple[int, ...] = ()  # Its ranks, ascending
        self.left_out = 0  # Number of ranks that are not read
        self.unreadable: dict[int, str] = {}  # Why a rank's page cannot be read, in words

    def refresh(self) -> bool:
        """List the directory again. Returns False if it cannot be listed."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return False
        matches = [match for name in names if (match := STATUS_PAGE.match(name))]
        restart = max((int(match[2]) for match in matches), default=0)
        if restart != self.restart:
            self.close()
            self.restart, self._last, self._raw = restart, {}, {}
        ranks = sorted(int(m[1]) for m in matches if int(m[2]) == restart)
        self.ranks, self.left_out = tuple(ranks[:MAX_RANKS]), len(ranks[MAX_RANKS:])
        for gone in self._open.keys() - set(self.ranks):
            os.close(self._open.pop(gone))
            self._last.pop(gone, None)
            self._raw.pop(gone, None)
        return True

    def path(self, rank: int, suffix: str) -> Path:
        """Return the path of one of a rank's files."""
        return self._directory / f"{rank_stem(rank, self.restart)}.{suffix}"

    def read(self, skipped: Collection[int] = ()) -> dict[int, Status]:
        """Read the pages. An unreadable or ``skipped`` page keeps its last content."""
        self.unreadable = {rank: why for rank, why in self.unreadable.items() if rank in skipped}
        for rank in self.ranks:
            if rank in skipped:
                continue
            try:
                self._read(rank)
            except UnreadableError as error:
                self.unreadable[rank] = str(error)
            except OSError as error:
                self.unreadable[rank] = error.strerror or ""
        return {rank: self._last[rank] for rank in self.ranks if rank in self._last}

    def _read(self, rank: int) -> None:
        descriptor = self._open.get(rank)
        if descriptor is None:
            descriptor = opening.opened(self.path(rank, "status"))
            if len(self._open) < MAX_OPEN_PAGES:
                self._open[rank] = descriptor
        try:
            page = steady(lambda: os.pread(descriptor, PAGE_SIZE, 0))
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
    """The time since timestamps changed, by this process's clock if possible.

    The clocks of ranks jump, and differ between nodes.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, float, float]] = {}

    def age(self, key: Hashable, stamp: int, now: int, ticks: float) -> float:
        """Return the seconds since ``stamp`` (Unix nanoseconds of another clock) was set.

        ``now`` is the time of our clock in the same unit, ``ticks`` that of a clock that never
        jumps.
        """
        known = self._known.get(key)
        since = ticks - max(0.0, (now - stamp) / 1e9)
        if known is not None:
            # A new timestamp was set after the last check.
            since = known[1] if known[0] == stamp else max(known[2], since)
        self._known[key] = (stamp, since, ticks)
        return ticks - since


_HELD = {"waits": "waits for a debugger", "stopped": "has stopped in the debugger"}
"""States of a rank that does not run because of the debugger, in words."""

MAX_FINDINGS = 500  # Maximum number of kept findings, the newest ones


class SupervisorEvents:
    """The supervisor's reports: findings, ends of ranks, debuggers, the job's end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._readers: dict[str, JournalReader] = {}
        self._thinned = 0
        self._reset()

    def _reset(self) -> None:
        self._taken: dict[str, int] = {}  # Number of processed records of each journal
        self._findings: deque[tuple[int, FindingRow]] = deque(maxlen=MAX_FINDINGS)
        self.findings: tuple[FindingRow, ...] = ()  # Findings that were not withdrawn, oldest first
        self.left_out = 0  # Number of findings that are too old to be kept
        self.exits: dict[tuple[int, int], RankExitRecord] = {}
        """How processes ended, by rank and attempt."""
        self.debug: dict[int, DebugRecord] = {}  # The last event of each rank's debugger
        self.status: int | None = None  # The job's exit status
        self.ended: int | None = None  # Unix nanoseconds at which it ended
        self.asked = False  # Whether the job was asked to stop
        self._hung: int | None = None

    def poll(self) -> None:
        """Process new records."""
        others = (path.name for path in self._directory.glob("node-*.jsonl"))
        for name in ("supervisor.jsonl", *others):
            if name not in self._readers:
                path = self._directory / name
                self._readers[name] = JournalReader(path, kinds=SUPERVISOR_RECORDS)
        for reader in self._readers.values():
            reader.poll()
        thinned = sum(reader.thinned for reader in self._readers.values())
        if thinned != self._thinned:
            # The reader has dropped old records, so process the remaining ones again.
            self._thinned = thinned
            self._reset()
        fresh: list[Record] = []
        for name, reader in self._readers.items():
            fresh += reader.records[self._taken.get(name, 0) :]
            self._taken[name] = len(reader.records)
        for record in fresh:
            self._take(record)
        if any(isinstance(record, (FindingRecord, RetractionRecord)) for record in fresh):
            self.findings = tuple(row for _, row in self._findings)

    def _take(self, record: Record) -> None:
        if isinstance(record, FindingRecord):
            finding = from_journal(record)
            if finding is not None:
                self.left_out += len(self._findings) == MAX_FINDINGS
                when = record.time / 1e9 if record.time else None
                row = FindingRow(finding, when, record.restart)
                self._findings.append((record.number or 0, row))
        elif isinstance(record, RetractionRecord):
            left = [each for each in self._findings if each[0] != record.retracts]
            self._findings = deque(left, MAX_FINDINGS)
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
        """The skipped part of the journal, in words."""
        return next((each.left_out for each in self._readers.values() if each.left_out), "")

    def debugged(self, rank: int) -> str:
        """Describe a rank's state in the debugger, as the end of a sentence. Empty without one."""
        record = self.debug.get(rank)
        if record is None or record.state not in _HELD:
            attached = record is not None and record.state in ("attached", "running")
            return "is in the debugger" if attached else ""
        at = without_control_characters(record.at.rpartition("/")[2])
        return f"{_HELD[record.state]} at {at}" if at else _HELD[record.state]

    def holds(self, rank: int) -> bool:
        """Return whether a rank does not run because of the debugger."""
        return rank in self.debug and self.debug[rank].state in _HELD

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that wait for a debugger."""
        return tuple(rank for rank, each in self.debug.items() if each.state == "waits")

    def hung(self, attempt: int) -> bool:
        """Return whether by the last examination no rank of this attempt makes progress."""
        return self._hung == attempt

    def port(self, rank: int) -> int | None:
        """Return the port at which a debugger attaches to a rank."""
        return self.debug[rank].port if rank in self.debug else None


def how_it_ended(ending: RankExitRecord | None, error: ErrorRecord | None) -> str:
    """Describe how a process ended: by its uncaught exception or its exit status."""
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
    """Return the job's command as a user would type it."""
    return without_control_characters(shlex.join(command_words(manifest)))


def job_command(manifest: Mapping[str, object]) -> str:
    """Return the script and its options: the command without its launcher."""
    words = command_words(manifest)
    start = next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
    named = [os.path.basename(word) for word in words[start : start + 1]]
    return without_control_characters(shlex.join([*named, *words[start + 1 :]]))


def environment_facts(manifest: Mapping[str, object], opened: OpenRecord | None) -> dict[str, str]:
    """Return versions and launch settings, in words."""
    facts: dict[str, str] = {}
    for each in (manifest.get("versions"), opened.versions if opened is not None else None):
        if isinstance(each, Mapping):
            facts |= {str(name): str(value) for name, value in each.items() if value}
    if opened is not None and opened.backend:
        facts["backend"] = opened.backend
    names = ("launcher", "host", "cwd")
    facts |= {name: str(manifest[name]) for name in names if manifest.get(name)}
    return {name: without_control_characters(value) for name, value in facts.items()}


# -- other records at the ends of a journal

_RECORDS_SEARCHED = 1 << 18  # Bytes at each end of a journal that are searched for rare records

R = TypeVar("R", bound=Record)


def _records(data: bytes, declared: type[R], max_memory: int) -> Iterator[R]:
    """Yield the records of one kind in a piece of a journal, newest first.

    Skip records that take more than ``max_memory`` bytes of memory once parsed.
    """
    kind = f'{{"kind":"{declared.kind}"'.encode()
    for line in reversed(data.split(b"\n")):
        if line.startswith(kind) and opening.expanded(line) <= max_memory:
            record = parse(line)
            if isinstance(record, declared):
                yield record


def open_record(path: Path, max_memory: int) -> OpenRecord | None:
    """Return a journal's ``open`` record. None if missing or too large."""
    with open_files(path) as files:
        data = files[0].read(65536, 0) if files else b""
    return next(_records(data, OpenRecord, max_memory), None)


def ddp_group(path: Path, max_memory: int, searched: int = 0) -> tuple[tuple[int, ...], int]:
    """Return the ranks on GPUs with which a rank reduces gradients, and the bytes searched.

    Empty if its journal begins with several DDP groups, or without one. The journal is searched
    again once it is twice as long as the part ``searched`` before.
    """
    with open_files(path) as files:
        size = min(files[0].size(), _RECORDS_SEARCHED) if files else 0
        if searched and size < 2 * searched:
            return (), searched
        data = files[0].read(size, 0) if files else b""
    records = _records(data, DdpRecord, max_memory)
    groups = {each.group_ranks for each in records if each.device.startswith("cuda")}
    return groups.pop() if len(groups) == 1 else (), size


def last_error(path: Path, max_memory: int) -> ErrorRecord | None:
    """Return the last uncaught exception in a journal. None if there is none near its end."""
    with open_files(path) as files:
        data = (
            files[0].read(_RECORDS_SEARCHED, files[0].size() - _RECORDS_SEARCHED) if files else b""
        )
    return next(_records(data, ErrorRecord, max_memory), None)


def last_pass(path: Path, max_memory: int) -> PassRecord | None:
    """Return the newest pass over a training loader, if it is near an end of the journal."""
    with open_files(path) as files:
        for file in files:
            for offset in (file.size() - _RECORDS_SEARCHED, 0):
                data = file.read(_RECORDS_SEARCHED, offset)
                for record in _records(data, PassRecord, max_memory):
                    if record.batches and record.marks:
                        return record
    return None


# -- means over the steps of one rank, medians over ranks

_PARTS = attrgetter(*PHASES)

WINDOW = 16  # Number of steps for the means of a rank


def mean_times(steps: Sequence[Parts], apart: bool = True) -> Times | None:
    """Average steps by means, because medians hide events in every second step.

    If some of them were split, only those are used. With ``apart``, the wait is separate from the
    backward if DDP timed it. Otherwise it is part of the backward, as :func:`with_waits` needs it.
    """
    if apart:
        steps = [parts for parts in steps if parts.split] or steps
    if not steps:
        return None
    _, *columns, _, _, _ = zip(*steps, strict=True)
    data, forward, backward, optimizer, other, wait = (
        sum(column) / len(steps) / 1e9 for column in columns
    )
    if not apart:
        backward, wait = backward + wait, 0.0
    total = data + forward + backward + optimizer + other + wait
    lacked = sum(
        (own := parts.total - parts.wait) - own_time(own, parts.cpu, parts.waited)
        for parts in steps
    )
    split = apart and steps[0].split
    return Times(
        data, forward, backward, optimizer, other, wait, total, split, lacked / len(steps) / 1e9
    )


def with_waits(rows: Sequence[RankRow], groups: Mapping[int, Sequence[int]]) -> list[RankRow]:
    """Split the backwards of ranks that reduce gradients together into compute and wait.

    ``groups`` has these ranks for each rank. A rank's wait is the excess of its backward over the
    shortest one of its group, as in `ddpdoctor.run.step_series`.
    """
    backwards: dict[Sequence[int], list[float]] = {}
    for row in rows:
        if row.rank in groups and row.times is not None:
            backwards.setdefault(groups[row.rank], []).append(row.times.backward)
    shortest = {group: min(each) for group, each in backwards.items() if len(each) > 1}
    found = []
    for row in rows:
        least = shortest.get(groups.get(row.rank, ()))
        if row.times is not None and least is not None:
            wait = row.times.backward - least
            row = replace(row, times=replace(row.times, backward=least, wait=wait, split=True))
        found.append(row)
    return found


def mean_loss(steps: Sequence[StepRecord]) -> float | None:
    """Return the mean loss of steps. None without finite losses."""
    losses = [step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)]
    return fmean(losses) if losses else None


def after_warm_up(steps: list[Parts]) -> list[Parts]:
    """Drop the first steps of a job, unless there are no others."""
    return [parts for parts in steps if parts.number >= WARM_UP] or steps


def median_times(times: Sequence[Times]) -> Times | None:
    """Return the median over ranks of each phase. None without ranks."""
    if not times:
        return None
    data, forward, backward, optimizer, other, wait = map(
        median, zip(*map(_PARTS, times), strict=True)
    )
    total = data + forward + backward + optimizer + other + wait
    split = all(each.split for each in times)
    lacked = median(each.lacked for each in times)
    return Times(data, forward, backward, optimizer, other, wait, total, split, lacked)


def own_for_certain(times: Times) -> float:
    """Return a rank's own time per step. Exclude a backward that may contain waits for others."""
    return times.own if times.split else times.own - times.backward


def skew(times: Sequence[Times]) -> float | None:
    """Return the largest own time as a ratio to the median one. None for fewer than two ranks."""
    if len(times) < 2:
        return None
    owns = [own_for_certain(each) for each in times]
    usual = median(owns)
    return max(owns) / usual if usual > 0 else None


def ordered_rows(rows: Iterable[RankRow], blamed: int | None) -> tuple[RankRow, ...]:
    """Sort ranks: the blamed one first, then by own time, finally those that do not run.

    Ranks within five per cent of the median are sorted by number, so that the rows of a healthy job
    do not move.
    """
    rows = tuple(rows)
    owns = {row.rank: own_for_certain(row.times) for row in rows if row.times is not None}
    usual = median(owns.values()) if owns else 0.0

    def key(row: RankRow) -> tuple[bool, bool, float, int]:
        own = owns.get(row.rank, 0.0)
        idle = row.rank not in owns or row.state in ("ended", "dead")
        close = abs(own - usual) <= 0.05 * usual
        return row.rank != blamed, idle, -(usual if close else own), row.rank

    return tuple(sorted(rows, key=key))


class RecentSteps:
    """The newest steps of a rank, as shown on its status page."""

    __slots__ = ("_steps", "_times")

    def __init__(self, steps: Iterable[Parts] = ()) -> None:
        self._steps: deque[Parts] = deque(steps, maxlen=WINDOW)
        self._times: Times | None = None

    def add(self, parts: Parts | None) -> None:
        """Add the step that the page shows, unless it is known."""
        if parts is not None and (not self._steps or parts.number > self._steps[-1].number):
            self._steps.append(parts)
            self._times = None

    def __len__(self) -> int:
        return len(self._steps)

    def times(self, apart: bool) -> Times | None:
        """Return the means of the steps, as :func:`mean_times` does."""
        if self._times is None and self._steps:
            self._times = mean_times(self._steps, apart)
        return self._times
