"""Bars of text: a step as a stack of its phases, steps over time, and numbers over time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from ddpdoctor.render.lines import Line, Span, columns, merged
from ddpdoctor.top.draw.marks import Marks
from ddpdoctor.top.snapshot import PHASES, Times

T = TypeVar("T")

LETTERS = dict(zip(PHASES, "dfbo.w", strict=True))
"""How a phase is drawn where there are no colours."""


_PARTS = attrgetter(*PHASES)

_SHORTEST = 1e-12
"""What an axis can end with; no time is as short."""


def glyph(phase: str, marks: Marks) -> str:
    """What a phase's stretch of a bar is made of."""
    if marks.letters:
        return LETTERS[phase]
    return marks.waiting if phase == "wait" else marks.fill


def end(longest: float) -> float:
    """The end of an axis: a little above the longest, so that it seldom changes."""
    if longest < _SHORTEST or not math.isfinite(longest):
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(longest)) - 1)
    return math.ceil(longest / digit / 2 - 1e-9) * 2 * digit


def axis(values: Sequence[float]) -> float:
    """The end of an axis for values of which one outlier must not flatten all the others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 0.0
    middle = finite[len(finite) // 2]
    return end(min(finite[-1], 4 * middle) if middle > 0 else finite[-1])


def spread(values: Sequence[T], room: int) -> Sequence[T]:
    """So many values, evenly spread; the last one is always there."""
    every = math.ceil(len(values) / max(room, 1))
    if every <= 1:
        return values
    kept = [*values[every - 1 :: every]]
    return kept if len(values) % every == 0 or len(kept) >= room else [*kept, values[-1]]


def _bounds(times: Times) -> list[float]:
    """Where each phase ends, in seconds from the step's beginning."""
    return list(accumulate([max(0.0, each) for each in _PARTS(times)]))


def stacked(times: Times, room: int, longest: float, marks: Marks) -> Line:
    """A step as a bar on an axis to ``longest``, the full width."""
    if longest <= 0 or room <= 0:
        return ()
    spans: list[Span] = []
    start = 0
    for phase, bound in zip(PHASES, _bounds(times), strict=True):
        stop = round(min(bound / longest, 1.0) * room)
        if stop > start:
            spans.append((glyph(phase, marks) * (stop - start), phase))
            start = stop
    return tuple(spans)


def stacks(
    steps: Sequence[Times], longest: float, size: tuple[int, int], marks: Marks
) -> list[Line]:
    """Steps as columns, the first on the left, each a stack of its phases; the top line first."""
    room, height = size
    # Columns that touch have no lines between them.
    cells: list[Span] = [
        (glyph(phase, marks).replace(marks.fill, marks.levels[-1]), phase) for phase in PHASES
    ]
    cells.append((" ", ""))
    bounds = [_bounds(times) for times in spread(steps, room)]
    lines = []
    for row in range(height - 1, -1, -1):
        level = (row + 0.5) / height * longest
        lines.append(merged(tuple([cells[bisect_right(each, level)] for each in bounds])))
    return lines


def numbers(
    values: Sequence[float | None], top: float, size: tuple[int, int], marks: Marks
) -> list[Line]:
    """Numbers as columns, the first on the left; the top line first."""
    room, height = size
    steps = len(marks.levels) - 1
    filled = [_levels(value, top, height * steps) for value in spread(values, room)]
    return [
        (("".join(marks.levels[max(0, min(steps, each - row * steps))] for each in filled), "bar"),)
        for row in range(height - 1, -1, -1)
    ]


def _levels(value: float | None, top: float, most: int) -> int:
    """The levels that a bar fills; what was measured is never an empty bar."""
    if value is None or not math.isfinite(value) or value < 0 or top <= 0:
        return 0
    return max(1, min(most, math.ceil(value / top * most - 1e-9)))


def framed(title: str, top: str, drawn: Sequence[Line]) -> list[Line]:
    """A chart below its title, with the ends of its axis; 0 is at the bottom."""
    gutter = columns(top)
    labels = [top, *[""] * (len(drawn) - 2), "0"]
    rows = [
        ((f"{label:>{gutter}} ", "dim"), *row)
        for label, row in zip(labels, drawn, strict=len(drawn) > 1)
    ]
    return [((title, "dim"),), *rows]


def meter(text: str, share: float | None, room: int, style: str) -> Line:
    """A text in a cell of ``room`` columns that is filled from the left by a share."""
    text = f"{text:>{room}}"
    filled = 0 if share is None else round(max(0.0, min(share, 1.0)) * room)
    return ((text[:filled], f"{style} meter"), (text[filled:], ""))
