"""Read steps from the journals of ranks and average them over steps and over ranks.

A journal may be long: steps are found at its ends or by number, without an index. Files are read
by position, never mapped, since others write, rotate and truncate them. A file that cannot be
read counts as empty.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from ddpdoctor.core import opening
from ddpdoctor.diagnose.speed.pace import WARM_UP, own_time
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.decode import parse
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.training import PassRecord, StepRecord
from ddpdoctor.run.status import Parts
from ddpdoctor.top.snapshot import PHASES, RankRow, Times

# -- steps in a journal

_STEP_LINE = b'{"kind":"step"'

_NUMBERED_LINE = re.compile(rb'(?<![^\n])\{"kind":"step","step":(\d{1,18})[,}][^\n]*\n')
"""The whole line of a step, which begins with its number."""

_MAX_STEP_LINE = 1 << 10
"""Length of a step's line in bytes. A longer line is damaged."""

_USUAL_STEP_LINE = 320

_MAX_SEARCHED = 1 << 20
"""Bytes read in search of steps."""

_RECORDS_SEARCHED = 1 << 18
"""Bytes at each end of a journal in which rare records are looked for."""

R = TypeVar("R", bound=Record)


def parse_step(line: bytes) -> StepRecord | None:
    """Decode a journal's line; None if it is torn, damaged, or no step."""
    step = parse(line) if len(line) <= _MAX_STEP_LINE else None
    if not isinstance(step, StepRecord) or min(step.step, *parts_of(step)[1:7]) < 0:
        return None
    return step


def parts_of(step: StepRecord) -> Parts:
    """Return where a step went, as its status page shows it."""
    return Parts(
        step.step, step.data, step.forward, step.backward, step.optimizer, step.other, step.wait,
        step.split, step.cpu or 0, step.waited or 0,
    )  # fmt: skip


class _File(NamedTuple):
    """A file that others write. What cannot be read of it is empty."""

    descriptor: int

    def size(self) -> int:
        """Return its size in bytes."""
        try:
            return os.fstat(self.descriptor).st_size
        except OSError:
            return 0

    def read(self, size: int, offset: int) -> bytes:
        """Read ``size`` bytes at an offset."""
        try:
            return os.pread(self.descriptor, size, max(0, offset))
        except OSError:
            return b""


@contextlib.contextmanager
def _opened(*paths: Path) -> Iterator[list[_File]]:
    """Open files. Skip those that cannot be opened."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            with contextlib.suppress(OSError):
                files.append(_File(opening.opened(path)))
                stack.callback(os.close, files[-1].descriptor)
        yield files


class StepLog:
    """Random access to the steps of one rank, in both segments of its journal.

    Args:
        path: The journal.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path.with_name(path.name + ".1"), path)

    def span(self) -> tuple[int, int] | None:
        """Return the numbers of the first and the last step; None without steps."""
        numbers: list[int] = []
        with _opened(*self._paths) as files:
            for file in files:
                first = _first_step(file, 0, file.size())
                numbers += [] if first is None else [first[0]]
                numbers += [step.step for step in _steps_before(file, file.size(), 1)]
        return (numbers[0], numbers[-1]) if numbers else None

    def newest(self, count: int) -> list[StepRecord]:
        """Return the last ``count`` steps, oldest first."""
        found: list[StepRecord] = []
        with _opened(*self._paths) as files:
            for file in reversed(files):
                if len(found) < count:
                    found = _steps_before(file, file.size(), count - len(found)) + found
        return found

    def until(self, number: int, count: int) -> list[StepRecord]:
        """Return the last ``count`` steps up to step ``number``, oldest first."""
        found: list[StepRecord] = []
        with _opened(*self._paths) as files:
            for file in reversed(files):
                end = _end_of_step(file, number) if len(found) < count else 0
                if end:
                    found = _steps_before(file, end, count - len(found)) + found
        return [step for step in found if step.step <= number]


def _steps_before(file: _File, end: int, count: int) -> list[StepRecord]:
    """Return the last ``count`` steps whose lines end before byte ``end``, oldest first."""
    size = count * _USUAL_STEP_LINE + 4096
    while True:
        begin = max(0, end - size)
        lines = file.read(end - begin, begin).split(b"\n")
        # The last line is torn or empty. The first one may lack its beginning.
        lines = lines[0 if begin == 0 else 1 : -1]
        found = [line for line in lines if line.startswith(_STEP_LINE)]
        if len(found) >= count or begin == 0 or size >= _MAX_SEARCHED:
            return [step for line in found[-count:] if (step := parse_step(line)) is not None]
        size *= 4


def _first_step(file: _File, offset: int, end: int) -> tuple[int, int] | None:
    """Find the first step whose line begins at or after byte ``offset``, and before ``end``.

    It may also be one that begins shortly after ``end``. Returns its number and where it ends.
    """
    # The byte before tells whether a line begins at the offset.
    at, size = max(0, offset - 1), 4096
    while True:
        data = file.read(size, at)
        match = _NUMBERED_LINE.search(data, min(offset, 1))
        if match is not None:
            return int(match[1]), at + match.end()
        if at + size >= end + _MAX_STEP_LINE or len(data) < size or size >= _MAX_SEARCHED:
            return None
        size *= 4


def _end_of_step(file: _File, number: int) -> int:
    """Return the byte after the line of the last step up to ``number``; 0 if there is none."""
    low, high, place = 0, file.size(), 0
    while low < high:
        middle = (low + high) // 2
        found = _first_step(file, middle, high)
        if found is None or found[0] > number:
            high = middle
        else:
            low = place = found[1]
    return place


# -- other records at the ends of a journal


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
    """Return a journal's ``open`` record; None if it is not there yet, or too large."""
    with _opened(path) as files:
        data = files[0].read(65536, 0) if files else b""
    return next(_records(data, OpenRecord, max_memory), None)


def ddp_group(path: Path, max_memory: int) -> tuple[int, ...]:
    """Return the ranks on GPUs with which a rank reduces gradients.

    Returns an empty tuple if its journal begins with several DDP groups, or with none.
    """
    with _opened(path) as files:
        data = files[0].read(_RECORDS_SEARCHED, 0) if files else b""
    records = _records(data, DdpRecord, max_memory)
    groups = {each.group_ranks for each in records if each.device.startswith("cuda")}
    return groups.pop() if len(groups) == 1 else ()


def last_error(path: Path, max_memory: int) -> ErrorRecord | None:
    """Return the last uncaught exception in a journal; None if there is none near its end."""
    with _opened(path) as files:
        data = (
            files[0].read(_RECORDS_SEARCHED, files[0].size() - _RECORDS_SEARCHED) if files else b""
        )
    return next(_records(data, ErrorRecord, max_memory), None)


def last_pass(path: Path, max_memory: int) -> PassRecord | None:
    """Return the newest pass over a loader that is trained on, if an end of the journal has it."""
    with _opened(path) as files:
        for file in files:
            for offset in (file.size() - _RECORDS_SEARCHED, 0):
                data = file.read(_RECORDS_SEARCHED, offset)
                for record in _records(data, PassRecord, max_memory):
                    if record.batches and record.marks:
                        return record
    return None


# -- means over the steps of one rank, medians over ranks

_PARTS = attrgetter(*PHASES)

WINDOW = 16
"""Steps of a rank that its means are taken of."""


def mean_times(steps: Sequence[Parts], apart: bool = True) -> Times | None:
    """Average steps. Means, since medians hide what is in every second step.

    Args:
        steps: The steps. If some of them were split, only those count.
        apart: Show the wait apart from the backward, where DDP timed it. If not, it is within the
            backward, as :func:`with_waits` needs it.
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
    """Split the backwards of ranks that reduce together into compute and wait.

    A rank waits for as long as its backward exceeds the shortest one of its group, as in
    `ddpdoctor.run.step_series`.

    Args:
        rows: The ranks. For those in groups, the wait is within the backward.
        groups: For each rank, the ranks that it reduces gradients with.
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
    """Return the mean loss of steps; None without finite ones."""
    losses = [step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)]
    return fmean(losses) if losses else None


def after_warm_up(steps: list[Parts]) -> list[Parts]:
    """Drop the first steps of a job, unless there are no others."""
    return [parts for parts in steps if parts.number >= WARM_UP] or steps


def median_times(times: Sequence[Times]) -> Times | None:
    """Return the median over ranks, phase by phase; None without ranks."""
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
    """Return a rank's own time per step, without a backward that may hold waits for others."""
    return times.own if times.split else times.own - times.backward


def skew(times: Sequence[Times]) -> float | None:
    """Return the largest own time as a ratio to the median one; None for fewer than two ranks."""
    if len(times) < 2:
        return None
    owns = [own_for_certain(each) for each in times]
    usual = median(owns)
    return max(owns) / usual if usual > 0 else None


def ordered_rows(rows: Iterable[RankRow], blamed: int | None) -> tuple[RankRow, ...]:
    """Sort ranks: the blamed one first, then by own time, last those that run nothing.

    Ranks within five per cent of the median stay in the order of their numbers, so that the rows
    of a healthy job do not move.
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
    """The newest steps of a rank, as its status page showed them."""

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
        """Return their means, as :func:`mean_times`."""
        if self._times is None and self._steps:
            self._times = mean_times(self._steps, apart)
        return self._times
