"""Steps out of journals that may be long: their ends, and the place of any step, without an index.

Everything is read by position from a file that others write, rotate and cut short: nothing here
maps it, since a store that is gone is a SIGBUS, and nothing raises.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run.journal import SEGMENT_SIZE, segment_number
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.decoder import decoder
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.status import Parts

_STEP = re.compile(rb'\{"kind":"step","step":(\d{1,18})[,}]')
_FAST = re.compile(
    rb'\{"kind":"step","step":(\d{1,18}),"start":(\d{1,18})(?:,"epoch":(\d{1,18}))?'
    rb',"data":(\d{1,18}),"forward":(\d{1,18}),"backward":(\d{1,18}),"optimizer":(\d{1,18})'
    rb',"other":(\d{1,18}),"wait":(\d{1,18}),"total":\d{1,18},"split":(?:(true)|false)'
    rb'(?:,"cpu":(\d{1,18}),"waited":(\d{1,18}))?'
)
"""A step as the probe writes it, which comes many times a second; other orders are read, too."""

_DURATIONS = ("data", "forward", "backward", "optimizer", "other", "wait")
_STEP_LINE = b'{"kind":"step"'
_ERROR_LINE = b'{"kind":"error"'

_LONGEST = 1 << 10
"""Bytes of a step; what is longer is none."""

_LINE = 320
"""Bytes that a step takes, about."""

_MOST = 1 << 20
"""Bytes that are read at most in search of steps."""


Seconds = tuple[float, float, bool]
"""Own time and duration of a step, and whether its backward was split from the wait."""


def seconds(parts: Parts) -> Seconds:
    """A step as series of numbers are made of it."""
    total = parts.total
    return (total - parts.wait) / 1e9, total / 1e9, parts.split


class StepLine(NamedTuple):
    """A step as its journal has it."""

    parts: Parts
    start: int
    """Unix nanoseconds."""
    epoch: int | None

    @property
    def end(self) -> int:
        """Unix nanoseconds at which it was closed."""
        return self.start + self.parts.total


def parse(line: bytes) -> StepLine | None:
    """A journal's line as a step, None if it is none, or torn."""
    match = _FAST.match(line)
    if match is not None and line.endswith(b"}"):
        number, start, epoch, *durations, split, cpu, waited = match.groups()
        cores = int(cpu or 0), int(waited or 0)
        return StepLine(
            Parts._make((int(number), *map(int, durations), split is not None, *cores)),
            int(start),
            None if epoch is None else int(epoch),
        )
    short = line.startswith(_STEP_LINE) and len(line) <= _LONGEST
    told = _record(line, opening.MOST_EXPANDED) if short else {}
    step = integer(told, "step", -1)
    if step < 0:
        return None
    numbers = [integer(told, name) for name in _DURATIONS]
    cores = integer(told, "cpu"), integer(told, "waited")
    if min(numbers) < 0:
        return None
    epoch = integer(told, "epoch", -1)
    parts = Parts._make((step, *numbers, told.get("split") is True, *cores))
    return StepLine(parts, integer(told, "start"), None if epoch < 0 else epoch)


def _open(path: Path) -> int | None:
    try:
        return opening.opened(path)
    except OSError:
        return None


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError:
        return b""


def _size(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_size
    except OSError:
        return 0


def _lines_before(descriptor: int, end: int, count: int) -> list[StepLine]:
    """The last ``count`` steps whose lines end before byte ``end``, oldest first."""
    size = count * _LINE + 4096
    while True:
        begin = max(0, end - size)
        lines = _pread(descriptor, end - begin, begin).split(b"\n")
        # The last is torn, or empty; the first may have lost its beginning.
        lines = lines[0 if begin == 0 else 1 : -1]
        found = [line for line in lines if line.startswith(_STEP_LINE)]
        if len(found) >= count or begin == 0 or size >= _MOST:
            return [step for line in found[-count:] if (step := parse(line)) is not None]
        size *= 4


class StepTail:
    """The newest steps of a journal that grows.

    Args:
        path: The journal.
        keep: How many steps.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._segment: int | None = None
        self._offset = 0
        self.keep = keep
        self.steps: deque[StepLine] = deque(maxlen=keep)
        self.seconds: deque[Seconds] = deque(maxlen=keep)
        """Of the same steps: own time, duration, and whether the step was split."""

    def poll(self) -> None:
        """Take in what is new, and of that no more than is kept."""
        descriptor = _open(self._path)
        if descriptor is None:
            return
        try:
            self._poll(descriptor)
        finally:
            os.close(descriptor)

    def _poll(self, descriptor: int) -> None:
        number = segment_number(_pread(descriptor, SEGMENT_SIZE, 0)) or 0
        size = _size(descriptor)
        if number != self._segment or size < self._offset:
            self._segment, self._offset = number, 0
        if size - self._offset > self.keep * _LINE + 4096:
            fresh = _lines_before(descriptor, size, self.keep)
            tail = _pread(descriptor, min(size, 65536), max(0, size - 65536))
            self._offset = size - (len(tail) - tail.rfind(b"\n") - 1)
        else:
            data = _pread(descriptor, size - self._offset, self._offset)
            whole = data.rfind(b"\n") + 1
            self._offset += whole
            lines = data[:whole].split(b"\n")
            fresh = [step for line in lines if (step := parse(line)) is not None]
        last = self.steps[-1].parts.number if self.steps else -1
        if fresh and fresh[0].parts.number > last + 1:
            # What lies in between was skipped, or is in the segment before.
            self.steps.clear()
            self.seconds.clear()
        # A segment begins with what must not be lost, but with no step of the one before.
        for step in fresh:
            if step.parts.number > last:
                self.steps.append(step)
                self.seconds.append(seconds(step.parts))


class StepLog:
    """Random access to the steps of one rank, in both segments of its journal.

    Args:
        path: The journal.
    """

    def __init__(self, path: Path) -> None:
        self._paths = (path.with_name(path.name + ".1"), path)

    def span(self) -> tuple[int, int] | None:
        """The first and the last step there are; None if there is none."""
        first = last = None
        with contextlib.ExitStack() as stack:
            for descriptor in self._opened(stack):
                size = _size(descriptor)
                begin = _step_from(descriptor, 0, size)
                if begin is not None and first is None:
                    first = begin[1]
                end = _lines_before(descriptor, size, 1)
                if end:
                    last = end[-1].parts.number
        return None if first is None or last is None else (first, last)

    def until(self, number: int, count: int) -> list[StepLine]:
        """The last ``count`` steps up to step ``number``, oldest first."""
        found: list[StepLine] = []
        with contextlib.ExitStack() as stack:
            for descriptor in reversed(self._opened(stack)):
                place = _place(descriptor, number)
                if place:
                    found = _lines_before(descriptor, place, count - len(found)) + found
                if len(found) >= count:
                    break
        return [step for step in found if step.parts.number <= number]

    def _opened(self, stack: contextlib.ExitStack) -> list[int]:
        descriptors = []
        for path in self._paths:
            descriptor = _open(path)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                descriptors.append(descriptor)
        return descriptors


def _step_from(descriptor: int, offset: int, end: int) -> tuple[int, int, int] | None:
    """The first step's line that begins at or after a byte: where, its number, where it ends."""
    # A line begins where the byte before it is a newline.
    at = max(0, offset - 1)
    data = b""
    while at + len(data) < end and len(data) < _MOST:
        data += _pread(descriptor, 4096 if not data else len(data), at + len(data)) or b""
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


def _place(descriptor: int, number: int) -> int:
    """The byte behind the line of the last step up to ``number``; 0 if there is none."""
    low, high, place = 0, _size(descriptor), 0
    while low < high:
        middle = (low + high) // 2
        found = _step_from(descriptor, middle, high)
        if found is None or found[1] > number:
            high = middle
        else:
            low = place = found[2]
    return place


def head(path: Path, most: int) -> OpenRecord | None:
    """A journal's ``open`` record; None if it is not there yet, or takes more memory."""
    for line in _read(path, 65536).split(b"\n")[:8]:
        if line.startswith(b'{"kind":"open"'):
            return decoder(OpenRecord)(_record(line, most))
    return None


def last_error(path: Path, most: int) -> ErrorRecord | None:
    """The last uncaught exception in a journal; None if there is none near its end.

    One that takes more than ``most`` bytes of memory is none.
    """
    descriptor = _open(path)
    if descriptor is None:
        return None
    try:
        size = _size(descriptor)
        data = _pread(descriptor, 1 << 18, max(0, size - (1 << 18)))
    finally:
        os.close(descriptor)
    lines = [line for line in data.split(b"\n") if line.startswith(_ERROR_LINE)]
    found = _record(lines[-1], most) if lines else {}
    return decoder(ErrorRecord)(found) if found else None


def _read(path: Path, size: int) -> bytes:
    descriptor = _open(path)
    if descriptor is None:
        return b""
    try:
        return _pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def _record(line: bytes, most: int) -> JsonObject:
    try:
        told = opening.loads(line) if opening.expanded(line) <= most else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
