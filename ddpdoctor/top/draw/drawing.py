"""Define what is drawn, with which characters, and draw bars and charts of text.

Each character has a twin for terminals that only have ASCII.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.render.terminal import Line, Span, merged, shortened, text_width
from ddpdoctor.top.frames import Point
from ddpdoctor.top.snapshot import PHASES, RankRow, Snapshot, Times
from ddpdoctor.top.view import View, chosen_rank

if TYPE_CHECKING:
    from ddpdoctor.top.actions import TakenStacks


# -- the signs on the board, each with a twin for terminals that only have ASCII


@dataclass(frozen=True)
class Marks:
    """A set of signs; all but the ellipsis are one column wide."""

    ascii_only: bool
    letters: bool
    """Whether phases are letters, since there are no colours."""
    levels: str
    """Bars of rising height; the first is an empty one."""
    fill: str
    """What a stretch of a stacked bar is drawn with."""
    waiting: str
    """The same for waiting."""
    ellipsis: str
    rule: str
    dot: str
    """Between parts of a line."""
    cursor: str
    dead: str
    debugger: str
    ended: str
    ok: str
    error: str
    stale: str = "?"
    starting: str = "*"
    blamed: str = "!"
    info: str = "i"
    warning: str = "!"

    def level(self, name: str) -> str:
        """The sign of a verdict's or a finding's level."""
        return str(getattr(self, name)) if name in LEVELS else self.info

    def state(self, name: str, blamed: bool) -> str:
        """The sign in front of a rank."""
        if name in ("dead", "stale", "debugger", "starting") or (name == "ended" and not blamed):
            return str(getattr(self, name))
        return self.blamed if blamed else " "


LEVELS = ("ok", "info", "warning", "error")

UNICODE = Marks(
    ascii_only=False,
    letters=False,
    levels=" ▁▂▃▄▅▆▇█",
    fill="▇",
    waiting="░",
    ellipsis="…",
    rule="─",
    dot="·",
    cursor="▸",
    dead="✗",
    debugger="‖",
    ended="·",
    ok="✓",
    error="✗",
)

_UNICODE_LETTERS = replace(UNICODE, letters=True)

ASCII = Marks(
    ascii_only=True,
    letters=True,
    levels=" _.-=+*%#",
    fill="=",
    waiting=".",
    ellipsis="...",
    rule="-",
    dot="-",
    cursor=">",
    dead="x",
    debugger="D",
    ended=".",
    ok="+",
    error="x",
)


def marks_for(ascii_only: bool, colour: bool = True) -> Marks:
    """The signs that a terminal can show."""
    return ASCII if ascii_only else UNICODE if colour else _UNICODE_LETTERS


# -- what is drawn, and for which terminal


@dataclass(frozen=True)
class Material:
    """What a screen shows beside the snapshot: it was asked for, or was seen over time."""

    points: tuple[Point, ...] = ()
    """The run over time, oldest first."""
    asked: tuple[str, ...] = ()
    """The lines that a key asked for: processes below a rank, how to attach, live runs."""
    taken: TakenStacks | None = None
    """The stacks; None until they were taken."""
    outlier: TakenStacks | None = None
    """Those of the rank that is blamed, as a wide screen shows them."""


@dataclass(frozen=True)
class Scene:
    """A snapshot, how it is looked at, and the columns there are."""

    snapshot: Snapshot
    view: View
    room: int
    marks: Marks
    material: Material = field(default_factory=Material)

    @cached_property
    def row(self) -> RankRow | None:
        """The rank that the keys are about."""
        return chosen_rank(self.snapshot, self.view)

    def cut(self, text: str, room: int | None = None) -> str:
        """A text of at most so many columns, all of them unless said."""
        return shortened(text, self.room if room is None else room, self.marks.ellipsis)

    def rule(self, text: str) -> Line:
        """A title with a line through the rest of the screen."""
        text = f"{self.marks.rule * 2} {text} "
        return ((text + self.marks.rule * max(self.room - text_width(text), 0), "bold"),)


# -- bars of text: a step as a stack of its phases, steps over time, and numbers over time


T = TypeVar("T")

PHASE_LETTERS = dict(zip(PHASES, "dfbo.w", strict=True))
"""How a phase is drawn where there are no colours."""


_PARTS = attrgetter(*PHASES)

_SHORTEST = 1e-12
"""What an axis can end with; no time is as short."""


def glyph(phase: str, marks: Marks) -> str:
    """What a phase's stretch of a bar is made of."""
    if marks.letters:
        return PHASE_LETTERS[phase]
    return marks.waiting if phase == "wait" else marks.fill


def axis_end(longest: float) -> float:
    """The end of an axis: a little above the longest, so that it seldom changes."""
    if longest < _SHORTEST or not math.isfinite(longest):
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(longest)) - 1)
    return math.ceil(longest / digit / 2 - 1e-9) * 2 * digit


def axis_end_without_outlier(values: Sequence[float]) -> float:
    """The end of an axis for values of which one outlier must not flatten all the others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 0.0
    middle = finite[len(finite) // 2]
    return axis_end(min(finite[-1], 4 * middle) if middle > 0 else finite[-1])


def evenly_spread(values: Sequence[T], room: int) -> Sequence[T]:
    """So many values, evenly spread; the last one is always there."""
    every = math.ceil(len(values) / max(room, 1))
    if every <= 1:
        return values
    kept = [*values[every - 1 :: every]]
    return kept if len(values) % every == 0 or len(kept) >= room else [*kept, values[-1]]


def _bounds(times: Times) -> list[float]:
    """Where each phase ends, in seconds from the step's beginning."""
    return list(accumulate([max(0.0, each) for each in _PARTS(times)]))


def step_bar(times: Times, room: int, longest: float, marks: Marks) -> Line:
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


def step_chart(
    steps: Sequence[Times], longest: float, size: tuple[int, int], marks: Marks
) -> list[Line]:
    """Steps as columns, the first on the left, each a stack of its phases; the top line first."""
    room, height = size
    # Columns that touch have no lines between them.
    cells: list[Span] = [
        (glyph(phase, marks).replace(marks.fill, marks.levels[-1]), phase) for phase in PHASES
    ]
    cells.append((" ", ""))
    bounds = [_bounds(times) for times in evenly_spread(steps, room)]
    lines = []
    for row in range(height - 1, -1, -1):
        level = (row + 0.5) / height * longest
        lines.append(merged(tuple([cells[bisect_right(each, level)] for each in bounds])))
    return lines


def bar_chart(
    values: Sequence[float | None], top: float, size: tuple[int, int], marks: Marks
) -> list[Line]:
    """Numbers as columns, the first on the left; the top line first."""
    room, height = size
    steps = len(marks.levels) - 1
    filled = [_levels(value, top, height * steps) for value in evenly_spread(values, room)]
    return [
        (("".join(marks.levels[max(0, min(steps, each - row * steps))] for each in filled), "bar"),)
        for row in range(height - 1, -1, -1)
    ]


def _levels(value: float | None, top: float, most: int) -> int:
    """The levels that a bar fills; what was measured is never an empty bar."""
    if value is None or not math.isfinite(value) or value < 0 or top <= 0:
        return 0
    return max(1, min(most, math.ceil(value / top * most - 1e-9)))


def framed_chart(title: str, top: str, drawn: Sequence[Line]) -> list[Line]:
    """A chart below its title, with the ends of its axis; 0 is at the bottom."""
    gutter = text_width(top)
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
