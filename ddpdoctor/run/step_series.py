"""The steps of a whole run as a table of fixed size, and the ranks' waits for each other.

A journal of 100,000 steps has 30 MB, and those of 1,024 ranks 30 GB. Large journals are therefore
sampled: a few neighbouring steps of each column are read by their position in the file.

DDP times every hundredth backward on a GPU, and some of the short ones on a CPU. In the other steps
the slowest rank does not wait, so the time by which another rank's backward is longer than the
shortest one is its wait. This does not find a rank whose backward itself is slow. DDP's timers have
to show that.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.records.typed_json import parse
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import PHASES, Parts

# -- Waits in backwards that DDP did not time


def on_gpu(rank: Rank) -> bool:
    """Return whether the rank's steps were timed on a GPU."""
    return any(record.device.startswith("cuda") for record in rank.records.of(DdpRecord))


def unclocked(rank: Rank) -> str:
    """Return the kind of a rank's device if its time is not measured, such as ``xpu``.

    Such a device runs behind its host, so the host's times do not show the device's.
    """
    kinds = (record.device.partition(":")[0] for record in rank.records.of(DdpRecord))
    return next((kind for kind in kinds if kind not in ("cpu", "cuda")), "")


def reducing_together(ranks: Sequence[Rank]) -> list[tuple[Rank, ...]]:
    """Group the ranks whose backwards end together by DDP group. Skip groups of one."""
    groups: dict[tuple[int, ...], list[Rank]] = {}
    for rank in ranks:
        reduced = {record.group_ranks for record in rank.records.of(DdpRecord)}
        if len(reduced) == 1:
            groups.setdefault(next(iter(reduced)), []).append(rank)
    return [
        tuple(found)
        for group, found in groups.items()
        if len(found) > 1 and {rank.rank for rank in found} <= set(group)
    ]


def split_steps(run: Run) -> dict[int, tuple[StepRecord, ...]]:
    """Return the newest steps of the last attempt's ranks, split as far as possible."""
    return split_backwards(run.last, {rank.rank: rank.steps for rank in run.last})


def split_backwards(
    ranks: Sequence[Rank], steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split backwards that DDP did not time into compute and wait. ``steps`` are by rank.

    With ``lines``, they are lines of journals, which may cover several steps.
    """
    found = {number: tuple(each) for number, each in steps.items()}
    for group in reducing_together(ranks):
        found |= split_by_comparison({rank.rank: found[rank.rank] for rank in group}, lines=lines)
    return found


def split_by_comparison(
    steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split the backwards of ranks that reduce together, in steps that all of them have."""
    took = {
        # Duration of each reduced backward, including waits.
        rank: {
            number: each.backward + each.wait
            for each in found
            if each.wait or not each.split
            for number in _numbers(each, lines)
        }
        for rank, found in steps.items()
    }
    common = set.intersection(*(set(each) for each in took.values()))
    least = {number: min(each[number] for each in took.values()) for number in common}
    return {
        rank: tuple(_waited(each, _numbers(each, lines), least) for each in found)
        for rank, found in steps.items()
    }


def _numbers(line: StepRecord, lines: bool) -> range:
    return range(max(0, line.step + 1 - (line.steps if lines else 1)), line.step + 1)


def _waited(line: StepRecord, numbers: range, least: Mapping[int, int]) -> StepRecord:
    if not line.split and all(number in least for number in numbers):
        compute = sum(least[number] for number in numbers) // len(numbers)
        wait = line.backward + line.wait - compute
        line = replace(line, backward=compute, wait=wait, split=True)
    return line.settled if line.split else line


# -- Series of steps


PARTS = (*PHASES, "wait")  # The parts of a step, in the order of :attr:`RankSeries.parts`

MAX_READ = 512 << 20
"""Maximum bytes of all journals that are read completely. Larger ones are sampled."""

_SAMPLE = 2048  # Number of bytes read per column: half a dozen steps

_CHUNK = 1 << 20

_STEP = re.compile(
    rb'\{"kind":"step","step":(\d{1,15}),"start":(\d{1,19})(?:,"epoch":\d{1,18})?'
    rb',"data":(\d{1,18}),"forward":(\d{1,18}),"backward":(\d{1,18}),"optimizer":(\d{1,18})'
    rb',"other":(\d{1,18}),"wait":(\d{1,18}),"total":(\d{1,18}),"split":(true|false)'
    rb'(?:,"cpu":\d{1,18},"waited":\d{1,18})?(?:,"host":\d{1,18})?(?:,"steps":(\d{1,4}))?(?:,"samples":\d{1,18})?'
    rb'(?:,"loss":([-+.\deEaNInfity]{1,24}))?(?:,"norm":([-+.\deEaNInfity]{1,24}))?[,}]'
)
"""A line as the probe writes it (`ddpdoctor.probe.observers.steps`). Matching takes a third of the
time of parsing JSON. tests/probe/test_recorded_facts.py compares both on lines of the probe."""

NAN = math.nan


@dataclass
class RankSeries:
    """The steps of one rank. Each array has a value per column, NaN if not known."""

    rank: int
    parts: tuple[array[float], ...]  # Mean nanoseconds per step, by `PARTS`
    worst: array[float]  # Nanoseconds of the longest step
    loss: array[float]  # The last loss of each column
    norm: array[float]  # The last norm of the gradients of each column
    starts: array[float]  # Start of the first step in Unix nanoseconds
    steps: int = 0  # Number of steps that were read
    split: int = 0  # Number of those whose wait DDP's timers separated from the backward
    unsplit: set[int] = field(default_factory=set)  # The columns without such a step


@dataclass
class Series:
    """The steps of an attempt. Column ``c`` covers ``range(edges[c], edges[c + 1])``."""

    edges: list[int] = field(default_factory=lambda: [0])
    ranks: list[RankSeries] = field(default_factory=list)
    sampled: bool = False  # Whether only some steps of each column were read

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.edges) - 1


def series(run: Run, ranks: Sequence[Rank], most_cells: int, most_columns: int = 2000) -> Series:
    """Return the steps of ranks of one attempt, in as many columns as the limits allow.

    Cells are columns times ranks.
    """
    journals = {rank.rank: _Journal(run.path, rank) for rank in ranks}
    spans = [span for each in journals.values() if (span := each.span) is not None]
    if not spans:
        return Series()
    first, last = min(span[0] for span in spans), max(span[1] for span in spans) + 1
    columns = max(1, min(last - first, most_columns, most_cells // len(journals)))
    edges = [first + (last - first) * each // columns for each in range(columns + 1)]
    whole = sum(each.size for each in journals.values()) <= MAX_READ
    found = Series(edges, sampled=not whole)
    for number, journal in journals.items():
        table = _Table(edges)
        for match in journal.all() if whole else journal.some(columns):
            table.add(match)
        found.ranks.append(table.rank(number))
    _split(ranks, found)
    return found


def _split(ranks: Sequence[Rank], found: Series) -> None:
    """Split the columns without a timed step as :func:`split_backwards` splits steps."""
    of = {each.rank: each for each in found.ranks}
    backward, wait = (PARTS.index(name) for name in ("backward", "wait"))
    for group in reducing_together(ranks):
        series = [of[rank.rank] for rank in group]
        for column in set.intersection(*(each.unsplit for each in series)):
            least = min(each.parts[backward][column] for each in series)
            for each in series:
                each.parts[wait][column] = each.parts[backward][column] - least
                each.parts[backward][column] = least
                each.unsplit.remove(column)


class _Table:
    """Collects one rank's steps by column."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._first, self._last, self._columns = edges[0], edges[-1], len(edges) - 1
        self._edges = edges
        # Backwards that include the wait are averaged separately.
        self._sums = {
            split: [array("d", [0.0]) * self._columns for _ in PARTS] for split in (True, False)
        }
        self._counts = {split: array("q", [0]) * self._columns for split in (True, False)}
        self._worst, self._loss, self._norm, self._starts = (
            array("d", [NAN]) * self._columns for _ in range(4)
        )

    def add(self, match: re.Match[bytes]) -> None:
        """Add a line: a step, or the means of several, which may span columns."""
        last, count = int(match[1]), int(match[11] or 1)
        if not self._first <= last < self._last:
            return
        total, start = float(match[9]), float(match[2])
        durations = [int(text) for text in match.group(3, 4, 5, 6, 7, 8)]
        split = match[10] == b"true"
        step = max(self._first, last + 1 - count)
        column = self._column(step)
        while step <= last:
            end = min(last + 1, self._edges[column + 1])
            steps = end - step
            self._counts[split][column] += steps
            for sums, each in zip(self._sums[split], durations, strict=True):
                sums[column] += each * steps
            if not total <= self._worst[column]:
                self._worst[column] = total
            begins = start + (step + count - 1 - last) * total
            if not begins >= self._starts[column]:
                self._starts[column] = begins
            step, column = end, column + 1
        for kept, text in ((self._loss, match[12]), (self._norm, match[13])):
            if text is not None:
                kept[column - 1] = _real(text)

    def _column(self, step: int) -> int:
        column = (step - self._first) * self._columns // (self._last - self._first)
        # Integer division in `edges` rounds down, so it may be the next column.
        return column + (self._edges[column + 1] <= step)

    def rank(self, number: int) -> RankSeries:
        """Return the series of the rank."""
        parts = tuple(array("d", [NAN]) * self._columns for _ in PARTS)
        unsplit = set()
        for column in range(self._columns):
            split = bool(self._counts[True][column])
            if count := self._counts[split][column]:
                for values, sums in zip(parts, self._sums[split], strict=True):
                    values[column] = sums[column] / count
                if not split:
                    unsplit.add(column)
        return RankSeries(
            number, parts, self._worst, self._loss, self._norm, self._starts,
            steps=sum(map(sum, self._counts.values())), split=sum(self._counts[True]),
            unsplit=unsplit,
        )  # fmt: skip


def _real(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return NAN


class _Journal:
    """The two segments of a rank's journal. An unreadable one is treated as empty."""

    def __init__(self, directory: Path, rank: Rank) -> None:
        path = directory / f"{rank_stem(rank.rank, rank.restart)}.jsonl"
        self._paths = (path.with_name(path.name + ".1"), path)
        with open_files(*self._paths) as files:
            self.size = sum(file.size() for file in files)
        self.span = StepLog(path).span()

    def all(self) -> Iterator[re.Match[bytes]]:
        """Read every step."""
        with open_files(*self._paths) as files:
            for file in files:
                rest = b""
                for place in range(0, file.size(), _CHUNK):
                    data = rest + file.read(_CHUNK, place)
                    whole = data.rfind(b"\n") + 1
                    yield from _STEP.finditer(data, 0, whole)
                    rest = data[whole:][-_CHUNK:]

    def some(self, columns: int) -> Iterator[re.Match[bytes]]:
        """Read some steps of each column, and the last ones."""
        with open_files(*self._paths) as files:
            for file in files:
                size = file.size()
                places = max(1, columns * size // max(1, self.size))
                for place in range(places):
                    # At the start of its column. Truncated lines do not match.
                    yield from _STEP.finditer(file.read(_SAMPLE, size * place // places))
                yield from _STEP.finditer(file.read(_SAMPLE, size - _SAMPLE))


# -- Steps of a rank by their numbers

_STEP_LINE = b'{"kind":"step"'

_NUMBERED_LINE = re.compile(rb'(?<![^\n])\{"kind":"step","step":(\d{1,18})[,}][^\n]*\n')
"""The whole line of a step, which begins with its number."""

_MAX_STEP_LINE = 1 << 10  # Length of a step's line in bytes. A longer line is damaged.

_USUAL_STEP_LINE = 400  # Usual maximum length of a step's line in bytes
_MAX_SEARCHED = 1 << 20  # Maximum bytes read in search of steps

_MAX_HEAD = 64 << 20
"""Maximum bytes read to find the first step: repeated records may fill a quarter of a segment."""


def parse_step(line: bytes) -> StepRecord | None:
    """Decode a journal's line. None if it is torn, damaged, or not a step."""
    step = parse(line) if len(line) <= _MAX_STEP_LINE else None
    if not isinstance(step, StepRecord) or min(step.step, *parts_of(step)[1:7]) < 0:
        return None
    return step


def parts_of(step: StepRecord) -> Parts:
    """Return the parts of a step's time, as a status page stores them."""
    return Parts(
        step.step, step.data, step.forward, step.backward, step.optimizer, step.other, step.wait,
        step.split, step.cpu or 0, step.waited or 0,
    )  # fmt: skip


class File(NamedTuple):
    """A file that others write. Reading returns nothing after an error."""

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
def open_files(*paths: Path) -> Iterator[list[File]]:
    """Open files. Skip those that cannot be opened."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            with contextlib.suppress(OSError):
                files.append(File(opening.opened(path)))
                stack.callback(os.close, files[-1].descriptor)
        yield files


class StepLog:
    """Random access to the steps of one rank, in both segments of its journal."""

    def __init__(self, path: Path) -> None:
        self._paths = (path.with_name(path.name + ".1"), path)

    def span(self) -> tuple[int, int] | None:
        """Return the numbers of the first and the last step. None without steps."""
        numbers: list[int] = []
        with open_files(*self._paths) as files:
            for file in files:
                first = _first_step(file, 0, file.size(), _MAX_HEAD)
                numbers += [] if first is None else [first[0]]
                numbers += [step.step for step in _steps_before(file, file.size(), 1)]
        return (numbers[0], numbers[-1]) if numbers else None

    def newest(self, count: int) -> list[StepRecord]:
        """Return the last ``count`` steps, oldest first."""
        found: list[StepRecord] = []
        with open_files(*self._paths) as files:
            for file in reversed(files):
                if len(found) < count:
                    found = _steps_before(file, file.size(), count - len(found)) + found
        return found

    def until(self, number: int, count: int) -> list[StepRecord]:
        """Return the last ``count`` steps up to step ``number``, oldest first."""
        found: list[StepRecord] = []
        with open_files(*self._paths) as files:
            for file in reversed(files):
                end = _end_of_step(file, number) if len(found) < count else 0
                if end:
                    found = _steps_before(file, end, count - len(found)) + found
        return [step for step in found if step.step <= number]


def _steps_before(file: File, end: int, count: int) -> list[StepRecord]:
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


def _first_step(
    file: File, offset: int, end: int, most: int = _MAX_SEARCHED
) -> tuple[int, int] | None:
    """Find the first step whose line begins at or after byte ``offset``, and before ``end``.

    It may also be one that begins shortly after ``end``. At most about ``most`` bytes are searched.
    Return its number and the offset of its end.
    """
    # The byte before tells whether a line begins at the offset.
    at, size = max(0, offset - 1), 4096
    while True:
        data = file.read(size, at)
        match = _NUMBERED_LINE.search(data, min(offset, 1))
        if match is not None:
            return int(match[1]), at + match.end()
        if at + size >= end + _MAX_STEP_LINE or len(data) < size or size >= most:
            return None
        size *= 4


def _end_of_step(file: File, number: int) -> int:
    """Return the byte after the line of the last step up to ``number``. 0 if there is none."""
    low, high, place = 0, file.size(), 0
    while low < high:
        middle = (low + high) // 2
        found = _first_step(file, middle, high)
        if found is None or found[0] > number:
            high = middle
        else:
            low = place = found[1]
    return place
