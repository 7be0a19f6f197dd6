"""The one widget: lines of text, of which only the changed stretches are written again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ddpdoctor.render.lines import Line, Span, columns, look, merged

_NEAR = 6
"""Columns between two stretches that are written as one."""


class Canvas(Widget, can_focus=True):
    """Shows lines that are as wide as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Line, ...] = ()
        self._strips: list[Strip] = []

    def show(self, lines: Sequence[Line]) -> None:
        """Show these lines in place of the last ones."""
        before, self._lines = self._lines, tuple(lines)
        regions: list[Region] = []
        strips: list[Strip] = []
        for y, line in enumerate(lines):
            if y < len(before) and before[y] == line:
                strips.append(self._strips[y])
                continue
            strips.append(_strip(line))
            stretches = changed(before[y] if y < len(before) else (), line)
            regions += [Region(first, y, last - first, 1) for first, last in stretches]
        self._strips = strips
        if len(before) != len(lines):
            self.refresh()
        elif regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        """A line, as textual wants it."""
        width = self.size.width
        if y >= len(self._strips):
            return Strip.blank(width)
        strip = self._strips[y]
        return strip if strip.cell_length == width else strip.adjust_cell_length(width)


def _strip(line: Line) -> Strip:
    return Strip([Segment(text, look(style)) for text, style in merged(line)])


def changed(before: Line, after: Line) -> list[tuple[int, int]]:
    """The stretches of columns that differ, each with the column behind its last."""
    old, new = _cells(before), _cells(after)
    if old is None or new is None or len(old) != len(new):
        return [(0, max(1, sum(columns(text) for text, _ in after)))]
    found: list[tuple[int, int]] = []
    for column, (one, other) in enumerate(zip(old, new, strict=True)):
        if one == other:
            continue
        if found and column - found[-1][1] <= _NEAR:
            # To go on for a few columns costs less than to move the cursor.
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


def _cells(line: Line) -> list[Span] | None:
    """Each column of a line with its style; None if a character takes two of them, or none."""
    cells = [(each, style) for text, style in line for each in text]
    return cells if len(cells) == sum(columns(text) for text, _ in line) else None
