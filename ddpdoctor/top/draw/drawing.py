"""Define scenes and their characters, and draw bars and charts of text."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
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

T = TypeVar("T")

LEVELS = ("ok", "info", "warning", "error")


@dataclass(frozen=True)
class Marks:
    """The characters of the board. All but the ellipsis are one column wide."""

    ascii_only: bool
    letters: bool  # Whether phases are letters, for lack of colours
    levels: str  # Bars by height, from empty to full
    fill: str  # A part of a stacked bar
    waiting: str  # Waiting in a stacked bar
    ellipsis: str
    rule: str
    dot: str  # Between parts of a line
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
        """Return the sign of a verdict's or a finding's level."""
        return str(getattr(self, name)) if name in LEVELS else self.info

    def state(self, name: str, blamed: bool) -> str:
        """Return the sign before a rank."""
        if name in ("dead", "stale", "debugger", "starting") or (name == "ended" and not blamed):
            return str(getattr(self, name))
        return self.blamed if blamed else " "


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


@dataclass(frozen=True)
class Frame:
    """Lines of a screen or of a part of it, and their subjects."""

    lines: tuple[Line, ...]
    ranks: Mapping[int, int] = field(default_factory=dict)  # The rank of each line
    entries: Mapping[int, int] = field(default_factory=dict)
    """The entry of a panel's list on each line."""
    visible: frozenset[int] | None = None  # The ranks on screen. None behind a panel.
    top: int = 0  # The first row of the board on screen
    item: int = 0  # The scroll position of the panel, at most its end

    def below(self, lines: Sequence[Line]) -> Frame:
        """Return the frame moved below other lines."""
        return replace(
            self,
            lines=(*lines, *self.lines),
            ranks={line + len(lines): rank for line, rank in self.ranks.items()},
            entries={line + len(lines): entry for line, entry in self.entries.items()},
        )


@dataclass(frozen=True)
class ScreenData:
    """The content of a screen besides the snapshot."""

    points: tuple[Point, ...] = ()  # The run over time, oldest first
    asked: tuple[str, ...] = ()
    """Lines that a key opened: a rank's processes, how to attach, live runs."""
    taken: TakenStacks | None = None  # The stacks. None until they were taken.
    outlier: TakenStacks | None = None  # The stacks of the blamed rank, as a wide screen shows them


@dataclass(frozen=True)
class Scene:
    """A snapshot, the view of it, and the available columns."""

    snapshot: Snapshot
    view: View
    room: int
    marks: Marks
    material: ScreenData = field(default_factory=ScreenData)

    @cached_property
    def row(self) -> RankRow | None:
        """The rank that keys apply to."""
        return chosen_rank(self.snapshot, self.view)

    def cut(self, text: str, room: int | None = None) -> str:
        """Shorten a text to at most ``room`` columns, or to the screen."""
        return shortened(text, self.room if room is None else room, self.marks.ellipsis)

    def rule(self, text: str) -> Line:
        """Return a title with a line through the rest of the screen."""
        text = f"{self.marks.rule * 2} {text} "
        return ((text + self.marks.rule * max(self.room - text_width(text), 0), "bold"),)


def scene_of(snapshot: Snapshot, view: View, room: int, material: ScreenData | None) -> Scene:
    """Return a scene with the characters that the terminal can show."""
    marks = ASCII if view.ascii_only else UNICODE if view.colour else replace(UNICODE, letters=True)
    return Scene(snapshot, view, room, marks, material or ScreenData())


# -- bars and charts of text

PHASE_LETTERS = dict(zip(PHASES, "dfbo.w", strict=True))  # The letter of a phase without colours

_PARTS = attrgetter(*PHASES)

_MIN_AXIS = 1e-12


def glyph(phase: str, marks: Marks) -> str:
    """Return the character for a phase in a bar."""
    if marks.letters:
        return PHASE_LETTERS[phase]
    return marks.waiting if phase == "wait" else marks.fill


def axis_end(longest: float) -> float:
    """Return the end of an axis: slightly above the longest value, so that it rarely changes."""
    if longest < _MIN_AXIS or not math.isfinite(longest):
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(longest)) - 1)
    return math.ceil(longest / digit / 2 - 1e-9) * 2 * digit


def axis_end_without_outlier(values: Sequence[float]) -> float:
    """Return the end of an axis on which one outlier does not flatten all the others."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return 0.0
    middle = finite[len(finite) // 2]
    return axis_end(min(finite[-1], 4 * middle) if middle > 0 else finite[-1])


def evenly_spread(values: Sequence[T], room: int) -> Sequence[T]:
    """Return at most ``room`` values, evenly spread. The last one is always kept."""
    every = math.ceil(len(values) / max(room, 1))
    if every <= 1:
        return values
    kept = [*values[every - 1 :: every]]
    return kept if len(values) % every == 0 or len(kept) >= room else [*kept, values[-1]]


def _bounds(times: Times) -> list[float]:
    """Return the end of each phase, in seconds from the step's beginning."""
    return list(accumulate([max(0.0, each) for each in _PARTS(times)]))


def step_bar(times: Times, room: int, longest: float, marks: Marks) -> Line:
    """Draw a step as a bar on an axis that ends at ``longest``."""
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
    """Draw steps as columns, each a stack of its phases. Returns the top line first."""
    room, height = size
    # Columns that touch have no lines between them.
    cells: list[Span] = [
        (glyph(phase, marks).replace(marks.fill, marks.levels[-1]), phase) for phase in PHASES
    ]
    cells.append((" ", ""))
    bounds = [_bounds(times) for times in evenly_spread(steps, room)]
    levels = [(row + 0.5) / height * longest for row in range(height - 1, -1, -1)]
    return [merged(tuple(cells[bisect_right(each, level)] for each in bounds)) for level in levels]


def bar_chart(
    values: Sequence[float | None], top: float, size: tuple[int, int], marks: Marks
) -> list[Line]:
    """Draw numbers as columns. Returns the top line first."""
    room, height = size
    steps = len(marks.levels) - 1
    most = height * steps

    def filled(value: float | None) -> int:
        if value is None or not math.isfinite(value) or value < 0 or top <= 0:
            return 0
        # Never draw a measured value as an empty bar.
        return max(1, min(most, math.ceil(value / top * most - 1e-9)))

    bars = [filled(value) for value in evenly_spread(values, room)]
    return [
        (("".join(marks.levels[max(0, min(steps, each - row * steps))] for each in bars), "bar"),)
        for row in range(height - 1, -1, -1)
    ]


def framed_chart(title: str, top: str, drawn: Sequence[Line]) -> list[Line]:
    """Put a chart below its title, with the ends of its axis: ``top`` and 0."""
    gutter = text_width(top)
    labels = [top, *[""] * (len(drawn) - 2), "0"]
    rows = [
        ((f"{label:>{gutter}} ", "dim"), *row)
        for label, row in zip(labels, drawn, strict=len(drawn) > 1)
    ]
    return [((title, "dim"),), *rows]


def meter(text: str, share: float | None, room: int, style: str) -> Line:
    """Draw a text in a cell of ``room`` columns, and fill a share of the cell."""
    text = f"{text:>{room}}"
    filled = 0 if share is None else round(max(0.0, min(share, 1.0)) * room)
    return ((text[:filled], f"{style} meter"), (text[filled:], ""))
