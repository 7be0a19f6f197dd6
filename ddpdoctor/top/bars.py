"""Bars of text: a line of levels on a given axis, a chart of several lines, a step as a stack."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpdoctor.top.line import Line
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import PHASES, Times

LETTERS = {
    "data": "d",
    "forward": "f",
    "backward": "b",
    "optimizer": "o",
    "other": ".",
    "wait": "w",
}
"""How a phase is called where there is one column for it."""


def axis(values: Sequence[float], typical: float | None = None) -> float:
    """The top of an axis: the largest value, but one outlier does not flatten all the others."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0
    top = max(finite)
    middle = sorted(finite)[len(finite) // 2] if typical is None else typical
    return min(top, 4 * middle) if middle > 0 else top


def sparkline(values: Sequence[float], top: float, room: int, marks: Marks) -> str:
    """The newest ``room`` values as bars, the newest on the right; ``top`` fills a bar."""
    if room <= 0:
        return ""
    shown = values[-room:]
    return "".join(_bar(value, top, marks) for value in shown).rjust(room)


def _bar(value: float, top: float, marks: Marks) -> str:
    if not math.isfinite(value) or value < 0:
        return " "
    if top <= 0:
        return marks.levels[1]
    if value > top * 1.001:
        return marks.over
    steps = len(marks.levels) - 1
    # What was measured is never an empty bar: that is what was not.
    return marks.levels[max(1, min(steps, math.ceil(value / top * steps - 1e-9)))]


def chart(values: Sequence[float], top: float, room: int, height: int, marks: Marks) -> list[str]:
    """The newest values as columns of ``height`` lines, the topmost line first."""
    shown = list(values[-room:])
    steps = len(marks.levels) - 1
    rows: list[str] = []
    for row in range(height - 1, -1, -1):
        cells = []
        for value in shown:
            if not math.isfinite(value) or value < 0 or top <= 0:
                cells.append(" ")
                continue
            filled = max(1, math.ceil(min(value / top, 1.0) * height * steps - 1e-9))
            cells.append(marks.levels[max(0, min(steps, filled - row * steps))])
        rows.append("".join(cells).rjust(room))
    return rows


def stacked(times: Times, room: int, longest: float, marks: Marks) -> Line:
    """A step as a bar, each phase with its letter and its share of ``longest``, the full width."""
    if longest <= 0 or room <= 0:
        return ()
    ends, sum_ = [], 0.0
    for phase in PHASES:
        sum_ += max(0.0, getattr(times, phase))
        ends.append(round(min(sum_ / longest, 1.0) * room))
    spans, start = [], 0
    for phase, end in zip(PHASES, ends, strict=True):
        if end > start:
            spans.append((LETTERS[phase] + marks.fill * (end - start - 1), phase))
        start = max(start, end)
    return tuple(spans)
