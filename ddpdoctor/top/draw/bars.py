"""Bars of text: a line of levels on a given axis, a chart of several lines, a step as a stack."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddpdoctor.render.lines import Line, columns
from ddpdoctor.top.draw.marks import Marks
from ddpdoctor.top.snapshot import PHASES, Times

LETTERS = dict(zip(PHASES, "dfbo.w", strict=True))
"""How a phase is called where there is one column for it."""


def axis(values: Sequence[float]) -> float:
    """The top of an axis: the largest value, but one outlier does not flatten all the others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 0.0
    middle = finite[len(finite) // 2]
    return min(finite[-1], 4 * middle) if middle > 0 else finite[-1]


def sparkline(values: Sequence[float], top: float, room: int, marks: Marks) -> str:
    """The newest ``room`` values as bars, the newest on the right; ``top`` fills a bar."""
    if room <= 0:
        return ""
    return "".join(_bar(value, top, marks) for value in values[-room:]).rjust(room)


def _bar(value: float, top: float, marks: Marks) -> str:
    if not math.isfinite(value) or value < 0:
        return " "
    if top <= 0:
        return marks.levels[1]
    return marks.over if value > top * 1.001 else marks.levels[_levels(value / top, 1, marks)]


def _levels(share: float, lines: int, marks: Marks) -> int:
    """The levels that a bar of several lines fills; what was measured is never an empty bar."""
    most = lines * (len(marks.levels) - 1)
    return max(1, min(most, math.ceil(share * most - 1e-9)))


def bars(values: Sequence[float], top: float, room: int, height: int, marks: Marks) -> list[str]:
    """The newest values as columns of ``height`` lines, the topmost line first."""
    filled = [
        _levels(min(value / top, 1.0), height, marks)
        if math.isfinite(value) and value >= 0 and top > 0
        else 0
        for value in values[-room:]
    ]
    steps = len(marks.levels) - 1
    return [
        "".join(marks.levels[max(0, min(steps, each - row * steps))] for each in filled).rjust(room)
        for row in range(height - 1, -1, -1)
    ]


def chart(
    title: str,
    values: Sequence[float],
    top: float,
    end: str,
    size: tuple[int, int],
    marks: Marks,
) -> list[Line]:
    """Values over time below a title.

    Args:
        title: What they are.
        values: Oldest first; as many of the newest as there is room for are drawn.
        top: The end of the axis, which begins at 0.
        end: The same in words.
        size: Columns, and lines with the title.
        marks: To draw with.
    """
    room, height = size
    gutter = columns(end) + 1
    lines: list[Line] = [((title, "dim"),)]
    drawn = bars(values, top, max(room - gutter, 1), height - 1, marks)
    labels = [end, *[""] * (height - 3), "0"]
    for label, row in zip(labels, drawn, strict=True):
        lines.append(((f"{label:>{gutter - 1}} ", "dim"), (row, "bar")))
    return lines


def stacked(times: Times, room: int, longest: float, marks: Marks) -> Line:
    """A step as a bar, each phase with its letter and its share of ``longest``, the full width."""
    if longest <= 0 or room <= 0:
        return ()
    spans, start, total = [], 0, 0.0
    for phase in PHASES:
        total += max(0.0, getattr(times, phase))
        end = round(min(total / longest, 1.0) * room)
        if end > start:
            spans.append((LETTERS[phase] + marks.fill * (end - start - 1), phase))
            start = end
    return tuple(spans)
