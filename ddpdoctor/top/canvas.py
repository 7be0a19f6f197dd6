"""The one widget: lines of text, of which only the changed stretches are written again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ddpdoctor.render.lines import Line, columns, look, merged


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
            first, last = changed(before[y] if y < len(before) else (), line)
            regions.append(Region(first, y, max(last - first, 1), 1))
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


def changed(before: Line, after: Line) -> tuple[int, int]:
    """The first column that differs, and the one behind the last."""
    start = 0
    count = min(len(before), len(after))
    head = 0
    while head < count and before[head] == after[head]:
        start += columns(after[head][0])
        head += 1
    end = sum(columns(text) for text, _ in after)
    if sum(columns(text) for text, _ in before) != end:
        return start, end
    tail = 0
    while tail < count - head and before[-1 - tail] == after[-1 - tail]:
        end -= columns(after[-1 - tail][0])
        tail += 1
    return start, end
