"""Read steps from the journals of ranks and average them over steps and over ranks.

A journal may be long: steps are found at its ends or by number, without an index. Files are read
by position, never mapped, since others write, rotate and truncate them; a file that cannot be
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
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.diagnose.speed.pace import WARM_UP, own_time
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.training import PassRecord
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.status import Parts
from ddpdoctor.top.snapshot import PHASES, RankRow, Times

# -- steplog


_STEP = re.compile(rb'\{"kind":"step","step":(\d{1,18})[,}]')
_FAST = re.compile(
    rb'\{"kind":"step","step":(\d{1,18}),"start":(\d{1,18})(?:,"epoch":(\d{1,18}))?'
    rb',"data":(\d{1,18}),"forward":(\d{1,18}),"backward":(\d{1,18}),"optimizer":(\d{1,18})'
    rb',"other":(\d{1,18}),"wait":(\d{1,18}),"total":\d{1,18},"split":(?:(true)|false)'
    rb'(?:,"cpu":(\d{1,18}),"waited":(\d{1,18}))?(?:,"steps":(\d{1,4}))?'
    rb'(?:,"samples":(\d{1,18}))?(?:,"loss":(-?\d[\d.e+-]{0,30}))?'
    rb'(?:,"backwards":(\d{1,9}))?'
)
"""A step as the probe writes it, which comes many times a second; other orders are read, too."""

_DURATIONS = ("data", "forward", "backward", "optimizer", "other", "wait")
_STEP_LINE = b'{"kind":"step"'

_PASS_LINE = b'{"kind":"pass"'

_GROUP = re.compile(
    rb'^\{"kind":"ddp",[^\n]{0,4096}?"device":"cuda[^\n]{0,4096}?"group_ranks":\[([\d,]{1,16384})\]',
    re.MULTILINE,
)
"""A DDP module on a GPU, and the ranks that share it."""

_ENDS = 1 << 18
"""Bytes at an end of a journal in which rare records are looked for."""

_LONGEST_STEP_LINE = 1 << 10
"""Bytes of a step; what is longer is none."""

_USUAL_LINE = 320
"""Bytes that a step takes, about."""

_MOST_STEPS = 9999
"""Steps that a line is taken to stand for at most."""

_MOST_BYTES = 1 << 20
"""Bytes that are read at most in search of steps."""


class StepLine(NamedTuple):
    """A step as its journal has it."""

    parts: Parts
    start: int
    """Unix nanoseconds."""
    epoch: int | None
    samples: int | None = None
    loss: float | None = None
    backwards: int = 1
    steps: int = 1
    """How many steps the line stands for: the last is `parts.number`, the rest is their mean."""

    @property
    def end(self) -> int:
        """Unix nanoseconds at which it was closed."""
        return self.start + self.steps * self.parts.total


def parse_step(line: bytes) -> StepLine | None:
    """A journal's line as a step, None if it is none, or torn."""
    match = _FAST.match(line)
    if match is not None and line.endswith(b"}"):
        number, start, epoch, *durations, split, cpu, waited, steps, samples, loss, backwards = (
            match.groups()
        )
        cores = int(cpu or 0), int(waited or 0)
        return StepLine(
            Parts._make((int(number), *map(int, durations), split is not None, *cores)),
            int(start),
            None if epoch is None else int(epoch),
            None if samples is None else int(samples),
            None if loss is None else _real(loss),
            int(backwards or 1),
            max(1, int(steps or 1)),
        )
    short = line.startswith(_STEP_LINE) and len(line) <= _LONGEST_STEP_LINE
    record = _json(line, opening.MOST_EXPANDED) if short else {}
    step = integer(record, "step", -1)
    if step < 0:
        return None
    numbers = [integer(record, name) for name in _DURATIONS]
    cores = integer(record, "cpu"), integer(record, "waited")
    if min(numbers) < 0:
        return None
    epoch = integer(record, "epoch", -1)
    parts = Parts._make((step, *numbers, record.get("split") is True, *cores))
    samples = integer(record, "samples", -1)
    return StepLine(
        parts,
        integer(record, "start"),
        None if epoch < 0 else epoch,
        None if samples < 0 else samples,
        _real(record.get("loss")),
        integer(record, "backwards", 1),
        min(max(1, integer(record, "steps")), _MOST_STEPS),
    )


def _real(value: object) -> float | None:
    """A number, None if it is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, bytes)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class _File:
    """A file that others write; what cannot be read of it is empty."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def size(self) -> int:
        """Bytes that there are."""
        try:
            return os.fstat(self._descriptor).st_size
        except OSError:
            return 0

    def read(self, size: int, offset: int) -> bytes:
        """Bytes from a place on."""
        try:
            return os.pread(self._descriptor, size, max(0, offset))
        except OSError:
            return b""


@contextlib.contextmanager
def _opened(*paths: Path) -> Iterator[list[_File]]:
    """Those files that can be opened."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            with contextlib.suppress(OSError):
                descriptor = opening.opened(path)
                stack.callback(os.close, descriptor)
                files.append(_File(descriptor))
        yield files


def _lines_before(file: _File, end: int, count: int) -> list[StepLine]:
    """The last ``count`` steps whose lines end before byte ``end``, oldest first."""
    size = count * _USUAL_LINE + 4096
    while True:
        begin = max(0, end - size)
        lines = file.read(end - begin, begin).split(b"\n")
        # The last is torn, or empty; the first may have lost its beginning.
        lines = lines[0 if begin == 0 else 1 : -1]
        found = [line for line in lines if line.startswith(_STEP_LINE)]
        if len(found) >= count or begin == 0 or size >= _MOST_BYTES:
            return [step for line in found[-count:] if (step := parse_step(line)) is not None]
        size *= 4


class StepLog:
    """Random access to the steps of one rank, in both segments of its journal.

    Args:
        path: The journal.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path.with_name(path.name + ".1"), path)

    def span(self) -> tuple[int, int] | None:
        """The first and the last step there are; None if there is none."""
        numbers: list[int] = []
        with _opened(*self._paths) as files:
            for file in files:
                first = _step_from(file, 0, file.size)
                numbers += [] if first is None else [first[1]]
                numbers += [step.parts.number for step in _lines_before(file, file.size, 1)]
        return (numbers[0], numbers[-1]) if numbers else None

    def newest(self, count: int) -> list[StepLine]:
        """The last ``count`` steps, oldest first."""
        found: list[StepLine] = []
        with _opened(*self._paths) as files:
            for file in reversed(files):
                if len(found) < count:
                    found = _lines_before(file, file.size, count - len(found)) + found
        return found

    def until(self, number: int, count: int) -> list[StepLine]:
        """The last ``count`` steps up to step ``number``, oldest first."""
        found: list[StepLine] = []
        with _opened(*self._paths) as files:
            for file in reversed(files):
                place = _place(file, number) if len(found) < count else 0
                if place:
                    found = _lines_before(file, place, count - len(found)) + found
        return [step for step in found if step.parts.number <= number]


def _step_from(file: _File, offset: int, end: int) -> tuple[int, int, int] | None:
    """The first step's line that begins at or after a byte: where, its number, where it ends."""
    # A line begins where the byte before it is a newline.
    at = max(0, offset - 1)
    data = b""
    while at + len(data) < end and len(data) < _MOST_BYTES:
        data += file.read(4096 if not data else len(data), at + len(data))
        begin = 0 if offset == 0 else data.find(b"\n") + 1
        while begin > 0 or (begin == 0 and offset == 0):
            newline = data.find(b"\n", begin)
            if newline < 0:
                break
            match = _STEP.match(data, begin, newline)
            if match:
                return at + begin, int(match[1]), at + newline + 1
            begin = newline + 1
        if len(data) < 4096:
            break
    return None


def _place(file: _File, number: int) -> int:
    """The byte behind the line of the last step up to ``number``; 0 if there is none."""
    low, high, place = 0, file.size, 0
    while low < high:
        middle = (low + high) // 2
        found = _step_from(file, middle, high)
        if found is None or found[1] > number:
            high = middle
        else:
            low = place = found[2]
    return place


def open_record(path: Path, most: int) -> OpenRecord | None:
    """A journal's ``open`` record; None if it is not there yet, or takes more memory."""
    with _opened(path) as files:
        lines = [line for file in files for line in file.read(65536, 0).split(b"\n")[:8]]
    found = next((line for line in lines if line.startswith(b'{"kind":"open"')), None)
    return None if found is None else decoder(OpenRecord)(_json(found, most))


def ddp_group(path: Path) -> tuple[int, ...]:
    """The ranks on GPUs with which a rank reduces, if its journal begins with one DDP group."""
    with _opened(path) as files:
        found = {each for file in files for each in _GROUP.findall(file.read(_ENDS, 0))}
    return tuple(map(int, found.pop().split(b","))) if len(found) == 1 else ()


def last_error(path: Path, most: int) -> ErrorRecord | None:
    """The last uncaught exception in a journal; None if there is none near its end.

    One that takes more than ``most`` bytes of memory is none.
    """
    with _opened(path) as files:
        lines = [line for file in files for line in _near_end(file, b'{"kind":"error"')]
    found = _json(lines[-1], most) if lines else {}
    return decoder(ErrorRecord)(found) if found else None


def last_pass(path: Path, most: int) -> PassRecord | None:
    """The newest pass over a loader that is trained on, as far as a look at both ends shows it."""
    with _opened(path) as files:
        lines = [line for file in files for line in _near_end(file, _PASS_LINE)]
        for file in files if not lines else ():
            lines += file.read(_ENDS, 0).split(b"\n")[:-1]
    for line in reversed(lines):
        found = _json(line, most) if line.startswith(_PASS_LINE) else {}
        record = decoder(PassRecord)(found) if found else None
        if record is not None and record.batches and record.marks:
            return record
    return None


def _near_end(file: _File, kind: bytes) -> list[bytes]:
    """The whole lines of a kind near the end of a file."""
    lines = file.read(_ENDS, file.size - _ENDS).split(b"\n")
    return [line for line in lines if line.startswith(kind)]


def _json(line: bytes, most: int) -> JsonObject:
    try:
        found = opening.loads(line) if opening.expanded(line) <= most else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# -- means over steps of one rank, medians over ranks


_PARTS = attrgetter(*PHASES)

WINDOW = 16
"""Steps of a rank that its means are taken of."""


def median_of(values: Iterable[float]) -> float:
    """The median."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def mean_times(steps: Sequence[Parts]) -> Times | None:
    """Means of steps, of those that were split if any was; None without steps.

    Means, since medians hide what is in every second step.
    """
    return _mean_parts([parts for parts in steps if parts.split] or steps, True)


def mean_times_unsplit(steps: Sequence[Parts]) -> Times | None:
    """Means of steps with the wait within the backward, as :func:`compared` needs them."""
    return _mean_parts(steps, False)


def _mean_parts(steps: Sequence[Parts], apart: bool) -> Times | None:
    if not steps:
        return None
    _, *columns, _, _, _ = zip(*steps, strict=True)
    data, forward, backward, optimizer, other, wait = (
        sum(column) / len(steps) / 1e9 for column in columns
    )
    if not apart:
        backward, wait = backward + wait, 0.0
    total = data + forward + backward + optimizer + other + wait
    lacked = sum(map(_lacked, steps)) / len(steps) / 1e9
    split = apart and steps[0].split
    return Times(data, forward, backward, optimizer, other, wait, total, split, lacked)


def with_waits(rows: Sequence[RankRow], groups: Mapping[int, Sequence[int]]) -> list[RankRow]:
    """Ranks whose backwards end together, with what each of them waited in its own.

    What it takes longer than the shortest one, as in `ddpdoctor.run.step_series`.

    Args:
        rows: The ranks; of those in groups the wait is within the backward.
        groups: By rank, the ranks that it reduces gradients with.
    """
    backwards: dict[Sequence[int], list[float]] = {}
    for row in rows:
        if row.rank in groups and row.times is not None:
            backwards.setdefault(groups[row.rank], []).append(row.times.backward)
    least = {group: min(each) for group, each in backwards.items() if len(each) > 1}
    return [_waited(row, least.get(groups.get(row.rank, ()))) for row in rows]


def _waited(row: RankRow, least: float | None) -> RankRow:
    if row.times is None or least is None:
        return row
    wait = row.times.backward - least
    return replace(row, times=replace(row.times, backward=least, wait=wait, split=True))


def after_warm_up(steps: list[Parts]) -> list[Parts]:
    """Steps without the first ones of a job, if there are any others."""
    later = [parts for parts in steps if parts.number >= WARM_UP]
    return later or steps


def median_times(times: Sequence[Times]) -> Times | None:
    """The median rank, part by part; None without any."""
    if not times:
        return None
    columns = zip(*map(_PARTS, times), strict=True)
    data, forward, backward, optimizer, other, wait = map(median_of, columns)
    total = data + forward + backward + optimizer + other + wait
    split = all(each.split for each in times)
    lacked = median_of(each.lacked for each in times)
    return Times(data, forward, backward, optimizer, other, wait, total, split, lacked)


def _lacked(parts: Parts) -> float:
    own = parts.total - parts.wait
    return own - own_time(own, parts.cpu, parts.waited)


def blamable(times: Times) -> float:
    """What a rank spent itself for certain: of a backward that was not split, nothing."""
    return times.own if times.split else times.own - times.backward


def skew(times: Sequence[Times]) -> float | None:
    """The largest own time, as a ratio to the median one; None for fewer than two ranks."""
    if len(times) < 2:
        return None
    owns = [blamable(each) for each in times]
    usual = median_of(owns)
    return max(owns) / usual if usual > 0 else None


def ordered_rows(rows: Iterable[RankRow], blamed: int | None) -> tuple[RankRow, ...]:
    """The blamed rank first, then by own time, at last ranks that run nothing.

    Ranks within five per cent of the median keep the order of their numbers, so that the rows of a
    healthy job stay where they are.
    """
    rows = tuple(rows)
    owns = {row.rank: blamable(row.times) for row in rows if row.times is not None}
    usual = median_of(owns.values()) if owns else 0.0

    def key(row: RankRow) -> tuple[bool, bool, float, int]:
        own = owns.get(row.rank)
        idle = own is None or row.state in ("ended", "dead")
        own = own or 0.0
        return (
            row.rank != blamed,
            idle,
            -(usual if abs(own - usual) <= 0.05 * usual else own),
            row.rank,
        )

    return tuple(sorted(rows, key=key))


class RecentSteps:
    """The newest steps of a rank, as its status page showed them."""

    __slots__ = ("_steps", "_times")

    def __init__(self, steps: Iterable[Parts] = ()) -> None:
        self._steps: deque[Parts] = deque(steps, maxlen=WINDOW)
        self._times: Times | None = None

    def saw(self, parts: Parts | None) -> None:
        """The page shows this step."""
        if parts is not None and (not self._steps or parts.number > self._steps[-1].number):
            self._steps.append(parts)
            self._times = None

    def __len__(self) -> int:
        return len(self._steps)

    def times(self, apart: bool) -> Times | None:
        """Their means; with the wait in its own column only if it is to be ``apart``."""
        if self._times is None and self._steps:
            self._times = mean_times(self._steps) if apart else mean_times_unsplit(self._steps)
        return self._times
