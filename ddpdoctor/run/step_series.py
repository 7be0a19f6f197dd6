"""The steps of a whole run as a table of fixed size, and how long ranks waited for each other.

A journal of 100,000 steps has 30 MB, and those of 1,024 ranks 30 GB. Large journals are therefore
sampled: a few neighbouring steps of each column are read by their position in the file.

DDP times every hundredth backward on a GPU, and some of the short ones on a CPU. In the other steps
the slowest rank does not wait, so the time by which another rank's backward is longer than the
shortest one is its wait. This does not find a rank whose backward itself is slow. DDP's timers have
to show that.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.records.typed_json import parse
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import PHASES

# -- Waits in backwards that DDP did not time


def on_gpu(rank: Rank) -> bool:
    """Return whether the rank's steps were timed on a GPU."""
    return any(record.device.startswith("cuda") for record in rank.records.of(DdpRecord))


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
    """Split backwards that DDP did not time into compute and wait.

    Args:
        ranks: The ranks.
        steps: Their steps by rank.
        lines: The steps are lines of journals, which may stand for several steps.
    """
    found = {number: tuple(each) for number, each in steps.items()}
    for group in reducing_together(ranks):
        found |= split_by_comparison({rank.rank: found[rank.rank] for rank in group}, lines=lines)
    return found


def split_by_comparison(
    steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split the backwards of ranks that reduce together, in steps that all of them have.

    Args:
        steps: Steps by rank.
        lines: As in :func:`split_backwards`.
    """
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

_SAMPLE = 2048  # Bytes that are read per column: half a dozen steps
_MAX_HEAD = 64 << 20  # Bytes that are searched for the first step of a journal

_CHUNK = 1 << 20
_OVERLAP = 1 << 10  # Maximum bytes of a step's line
_USUAL = 400  # Usual maximum bytes of a step's line

_STEP = re.compile(
    rb'\{"kind":"step","step":(\d{1,15}),"start":(\d{1,19})(?:,"epoch":\d{1,18})?'
    rb',"data":(\d{1,18}),"forward":(\d{1,18}),"backward":(\d{1,18}),"optimizer":(\d{1,18})'
    rb',"other":(\d{1,18}),"wait":(\d{1,18}),"total":(\d{1,18}),"split":(true|false)'
    rb'(?:,"cpu":\d{1,18},"waited":\d{1,18})?(?:,"host":\d{1,18})?(?:,"steps":(\d{1,4}))?(?:,"samples":\d{1,18})?'
    rb'(?:,"loss":([-+.\deEaNInfity]{1,24}))?(?:,"norm":([-+.\deEaNInfity]{1,24}))?[,}]'
)
"""A line as the probe writes it (`ddpdoctor.probe.observers.steps`). Matching takes a third of the
time of parsing JSON. tests/probe/test_recorded_facts.py compares both on lines of the probe."""

_NUMBER = re.compile(rb'\{"kind":"step","step":(\d{1,15}),')
NAN = math.nan


@dataclass
class RankSeries:
    """The steps of one rank. Each array has a value per column, NaN if not known."""

    rank: int
    parts: tuple[array[float], ...]  # Mean nanoseconds per step, by `PARTS`
    worst: array[float]  # Nanoseconds of the longest step
    loss: array[float]  # The last loss of each column
    norm: array[float]  # The last norm of the gradients of each column
    starts: array[float]  # Begin of the first step in Unix nanoseconds
    steps: int = 0  # Number of steps that were read
    split: int = 0  # Number of those whose wait DDP's timers separated from the backward
    unsplit: set[int] = field(default_factory=set)  # The columns without such a step


@dataclass
class Series:
    """The steps of an attempt. Column ``c`` covers ``range(edges[c], edges[c + 1])``."""

    edges: list[int] = field(default_factory=lambda: [0])
    ranks: list[RankSeries] = field(default_factory=list)
    sampled: bool = False  # Only some steps of each column were read

    @property
    def columns(self) -> int:
        """Number of columns."""
        return len(self.edges) - 1


def series(run: Run, ranks: Sequence[Rank], most_cells: int, most_columns: int = 2000) -> Series:
    """Return the steps of ranks, in as many columns as the limits allow.

    Args:
        run: The run.
        ranks: The ranks of one attempt.
        most_cells: Maximum of columns times ranks.
        most_columns: Maximum number of columns.
    """
    journals = {rank.rank: _Journal(run.path, rank) for rank in ranks}
    spans = [span for each in journals.values() if (span := each.span()) is not None]
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
    """Split the columns without a timed step as :func:`split_backwards` does steps."""
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
            count = self._counts[split][column]
            if count:
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
        self.size = sum(map(_size, self._paths))

    def span(self) -> tuple[int, int] | None:
        """Return the numbers of the first and the last step."""
        numbers: list[int] = []
        for path in self._paths:
            size = _size(path)
            # Repeated records take up to a quarter of the segment before the first step.
            for place in range(0, min(size, _MAX_HEAD), _CHUNK):
                head = _NUMBER.search(_part(path, place, _CHUNK))
                if head is not None:
                    numbers.append(int(head[1]))
                    break
            tail = _NUMBER.findall(_part(path, max(0, size - 64 * _OVERLAP), 64 * _OVERLAP))
            numbers += [int(each) for each in tail[-1:]]
        return (min(numbers), max(numbers)) if numbers else None

    def all(self) -> Iterator[re.Match[bytes]]:
        """Read every step."""
        for path in self._paths:
            rest = b""
            for place in range(0, _size(path), _CHUNK):
                data = rest + _part(path, place, _CHUNK)
                whole = data.rfind(b"\n") + 1
                yield from _STEP.finditer(data, 0, whole)
                rest = data[whole:][-_CHUNK:]

    def some(self, columns: int) -> Iterator[re.Match[bytes]]:
        """Read some steps of each column, and the last ones."""
        for path in self._paths:
            size = _size(path)
            places = max(1, columns * size // max(1, self.size))
            for place in range(places):
                # At the begin of its column. Truncated lines do not match.
                yield from _STEP.finditer(_part(path, size * place // places, _SAMPLE))
            yield from _STEP.finditer(_part(path, max(0, size - _SAMPLE), _SAMPLE))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _part(path: Path, place: int, size: int) -> bytes:
    try:
        with opening.file(path) as file:
            return os.pread(file.fileno(), size, place)
    except OSError:
        return b""


def newest_steps(directory: Path, rank: Rank, most: int) -> list[StepRecord]:
    """Return at most ``most`` of the newest steps, oldest of them first."""
    path = directory / f"{rank_stem(rank.rank, rank.restart)}.jsonl"
    newest = _last_steps(path, most)
    older = _last_steps(path.with_name(path.name + ".1"), most - len(newest))
    return [*older, *newest]


def _last_steps(path: Path, most: int) -> list[StepRecord]:
    if most <= 0:
        return []
    try:
        lines = opening.ending(path, most * _USUAL).split(b"\n")
    except OSError:
        return []
    wanted = [each for each in lines if each.startswith(b'{"kind":"step"')][-most:]
    found = (parse(line) for line in wanted)
    return [each for each in found if isinstance(each, StepRecord) and each.step >= 0]
