"""The steps of a whole run as a table of fixed size, and how long ranks waited for each other.

A journal of 100,000 steps has 30 MB, and those of 1,024 ranks 30 GB. So large ones are not read
through: of each column a few neighbouring steps are read by their place in the file.

On a GPU, DDP times every hundredth backward; on a CPU, some of the short ones. In all of them the
rank that the others wait for does not wait itself: what their backward takes longer than the
shortest one is their wait. A rank whose backward itself is slow is not found this way; DDP's
timers have to show it.
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
from ddpdoctor.run.records.decode import parse
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import PHASES

# -- how long ranks wait for each other in backwards that DDP did not time


def on_gpu(rank: Rank) -> bool:
    """Whether the rank's steps were timed on a GPU."""
    return any(record.device.startswith("cuda") for record in rank.records.of(DdpRecord))


def reducing_together(ranks: Sequence[Rank]) -> list[tuple[Rank, ...]]:
    """The ranks whose backwards end together, by DDP group; groups of one are left out."""
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
    """The newest steps of the ranks of the last attempt, split as far as possible."""
    return split_backwards(run.last, {rank.rank: rank.steps for rank in run.last})


def split_backwards(
    ranks: Sequence[Rank], steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split the backwards that DDP did not time into compute and wait.

    Args:
        ranks: The ranks.
        steps: Their steps by rank.
        lines: These are lines of the journals, which may stand for several steps.
    """
    found = {number: tuple(each) for number, each in steps.items()}
    for group in reducing_together(ranks):
        found |= split_by_comparison({rank.rank: found[rank.rank] for rank in group}, lines=lines)
    return found


def split_by_comparison(
    steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split the backwards of ranks that reduce together, in the steps that all of them have.

    Args:
        steps: Steps by rank.
        lines: As :func:`split` has it.
    """
    took = {
        # How long the backward of each step took, waits included, where it was reduced.
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
    if line.split or not all(number in least for number in numbers):
        return line
    compute = sum(least[number] for number in numbers) // len(numbers)
    wait = line.backward + line.wait - compute
    return replace(line, backward=compute, wait=wait, split=True)


# -- step series


PARTS = (*PHASES, "wait")
"""What a step is divided into, in the order of :attr:`RankSeries.parts`."""

MOST_READ = 512 << 20
"""Bytes of all journals that are read through; of larger ones some steps of each column."""

_SAMPLE = 2048
"""Bytes that are read of a column: half a dozen steps."""

_MOST_HEAD = 64 << 20
"""Bytes in which the first step of a journal is looked for."""

_CHUNK = 1 << 20
_OVERLAP = 1 << 10
"""Bytes of the longest line of a step."""

_USUAL = 400
"""Bytes that the line of a step takes at most, about."""

_STEP = re.compile(
    rb'\{"kind":"step","step":(\d{1,15}),"start":(\d{1,19})(?:,"epoch":\d{1,18})?'
    rb',"data":(\d{1,18}),"forward":(\d{1,18}),"backward":(\d{1,18}),"optimizer":(\d{1,18})'
    rb',"other":(\d{1,18}),"wait":(\d{1,18}),"total":(\d{1,18}),"split":(true|false)'
    rb'(?:,"cpu":\d{1,18},"waited":\d{1,18})?(?:,"steps":(\d{1,4}))?(?:,"samples":\d{1,18})?'
    rb'(?:,"loss":([-+.\deEaNInfity]{1,24}))?(?:,"norm":([-+.\deEaNInfity]{1,24}))?[,}]'
)
"""A step, or several short ones, as the probe writes it (`ddpdoctor.probe.observers.steps`)."""

_NUMBER = re.compile(rb'\{"kind":"step","step":(\d{1,15}),')
NAN = math.nan


@dataclass
class RankSeries:
    """One rank; each array has a value for each column, and NaN where nothing is known."""

    rank: int
    parts: tuple[array[float], ...]
    """Nanoseconds a step, means, by `PARTS`."""
    worst: array[float]
    """Nanoseconds of the longest step."""
    loss: array[float]
    """The last one."""
    norm: array[float]
    """Of the gradients; the last one."""
    starts: array[float]
    """Unix nanoseconds at which the first step began."""
    steps: int = 0
    """How many were read."""
    split: int = 0
    """How many of them had their wait apart from the backward, by DDP's timers."""
    unsplit: set[int] = field(default_factory=set)
    """The columns of which no step had."""


@dataclass
class Series:
    """The ranks of an attempt over its steps.

    Column ``c`` holds the steps from ``edges[c]`` up to but without ``edges[c + 1]``.
    """

    edges: list[int] = field(default_factory=lambda: [0])
    ranks: list[RankSeries] = field(default_factory=list)
    sampled: bool = False
    """Whether only some steps of each column were read."""

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return len(self.edges) - 1


def series(run: Run, ranks: Sequence[Rank], most_cells: int, most_columns: int = 2000) -> Series:
    """The steps of ranks, in as many columns as there is room for.

    Args:
        run: The run.
        ranks: Those of one attempt.
        most_cells: Columns times ranks.
        most_columns: Columns.
    """
    journals = {rank.rank: _Journal(run.path, rank) for rank in ranks}
    spans = [span for each in journals.values() if (span := each.span()) is not None]
    if not spans:
        return Series()
    first, last = min(span[0] for span in spans), max(span[1] for span in spans) + 1
    columns = max(1, min(last - first, most_columns, most_cells // len(journals)))
    edges = [first + (last - first) * each // columns for each in range(columns + 1)]
    whole = sum(each.size for each in journals.values()) <= MOST_READ
    found = Series(edges, sampled=not whole)
    for number, journal in journals.items():
        table = _Table(edges)
        for match in journal.all() if whole else journal.some(columns):
            table.add(match)
        found.ranks.append(table.rank(number))
    _split(ranks, found)
    return found


def _split(ranks: Sequence[Rank], found: Series) -> None:
    """Split the columns without a step that DDP timed, as `split` does steps."""
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
    """Gathers one rank's steps by column."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._first, self._last, self._columns = edges[0], edges[-1], len(edges) - 1
        self._edges = edges
        # A backward that holds the wait is not averaged with one that does not.
        self._sums = {
            split: [array("d", [0.0]) * self._columns for _ in PARTS] for split in (True, False)
        }
        self._counts = {split: array("q", [0]) * self._columns for split in (True, False)}
        self._worst, self._loss, self._norm, self._starts = (
            array("d", [NAN]) * self._columns for _ in range(4)
        )

    def add(self, match: re.Match[bytes]) -> None:
        """Take in a line: a step, or the means of several, which may reach over columns."""
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
        # Integer division in `edges` rounds down: the column may be the one before.
        return column + (self._edges[column + 1] <= step)

    def rank(self, number: int) -> RankSeries:
        """What was gathered."""
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
    """The two segments of a rank's journal; what cannot be read of them is empty."""

    def __init__(self, directory: Path, rank: Rank) -> None:
        path = directory / f"{rank_stem(rank.rank, rank.restart)}.jsonl"
        self._paths = (path.with_name(path.name + ".1"), path)
        self.size = sum(map(_size, self._paths))

    def span(self) -> tuple[int, int] | None:
        """The numbers of the first and the last step."""
        numbers: list[int] = []
        for path in self._paths:
            size = _size(path)
            # The head of a segment has what must not be lost, a quarter of it at most.
            for place in range(0, min(size, _MOST_HEAD), _CHUNK):
                head = _NUMBER.search(_part(path, place, _CHUNK))
                if head is not None:
                    numbers.append(int(head[1]))
                    break
            tail = _NUMBER.findall(_part(path, max(0, size - 64 * _OVERLAP), 64 * _OVERLAP))
            numbers += [int(each) for each in tail[-1:]]
        return (min(numbers), max(numbers)) if numbers else None

    def all(self) -> Iterator[re.Match[bytes]]:
        """Every step."""
        for path in self._paths:
            rest = b""
            for place in range(0, _size(path), _CHUNK):
                data = rest + _part(path, place, _CHUNK)
                whole = data.rfind(b"\n") + 1
                yield from _STEP.finditer(data, 0, whole)
                rest = data[whole:][-_CHUNK:]

    def some(self, columns: int) -> Iterator[re.Match[bytes]]:
        """Some steps of each column, and the last ones."""
        for path in self._paths:
            size = _size(path)
            places = max(1, columns * size // max(1, self.size))
            for place in range(places):
                # Early in its column: a line that is cut off at either end is left out.
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
    """At most so many steps, the newest ones, oldest of them first.

    Args:
        directory: The run directory.
        rank: The rank.
        most: How many.
    """
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
