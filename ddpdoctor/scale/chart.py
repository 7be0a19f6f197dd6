"""Draw the chart of ``--plot``, and write it as SVG or, with Pillow installed, as PNG.

The chart shows throughput and efficiency over ranks, each with its ideal line. It consists of
lines, dots and texts alone, so that both writers stay short.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from ddpdoctor.core import formatting
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import shown
from ddpdoctor.run.rundir import put
from ddpdoctor.scale.results import Row

WIDTH, HEIGHT = 820, 400  # Size of the chart in pixels

_TOP, _BOTTOM, _PANEL = 50, 340, 320
_LEFTS = (60, 470)
_DASH = 6.0
_EFFICIENCY_TICK = 0.25

_GREY, _BLACK = "#9aa0a6", "#202124"
_COLOURS = ("#1a73e8", "#d93025", "#188038", "#e37400", "#9334e6", "#007b83", "#a0522d", "#5f6368")


class Stroke(NamedTuple):
    """A straight line, in pixels from the upper left corner."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float


class Dot(NamedTuple):
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str


class Label(NamedTuple):
    """A text.

    ``y`` is its middle, ``anchor`` the position of ``x``: ``start``, ``middle`` or ``end``.
    """

    x: float
    y: float
    text: str
    anchor: str
    colour: str


Shape = Stroke | Dot | Label

Point = tuple[float, float]


class _Panel(NamedTuple):
    """One of the two diagrams."""

    left: float
    title: str
    ranks: Sequence[int]  # The sizes, ascending
    top: float  # The value at the top
    ticks: int
    text: Callable[[float], str]

    def at(self, ranks: float, value: float) -> Point:
        """Return the pixel of a point."""
        x = self.left + _PANEL * ranks / (self.ranks[-1] * 1.05)
        return x, _BOTTOM - (_BOTTOM - _TOP) * value / self.top

    def axes(self) -> Iterator[Shape]:
        """Draw the axes with their labels."""
        right = self.left + _PANEL
        yield Label(self.left, _TOP - 14, self.title, "start", _BLACK)
        for tick in range(self.ticks + 1):
            value = self.top * tick / self.ticks
            _, y = self.at(0, value)
            yield Stroke(self.left, y, right, y, "#e8eaed", 1)
            yield Label(self.left - 6, y, self.text(value), "end", _BLACK)
        yield Stroke(self.left, _BOTTOM, right, _BOTTOM, _GREY, 1)
        for ranks in self.ranks:
            x, y = self.at(ranks, 0)
            yield Stroke(x, y, x, y + 4, _GREY, 1)
            yield Label(x, y + 13, str(ranks), "middle", _BLACK)
        yield Label(self.left + _PANEL / 2, _BOTTOM + 28, "ranks", "middle", _BLACK)

    def ideal(self, start: float, end: float) -> Iterator[Shape]:
        """Draw the ideal line, dashed, from no ranks to the maximum number of ranks."""
        (x1, y1), (x2, y2) = self.at(0, start), self.at(self.ranks[-1], end)
        parts = max(1, int(math.hypot(x2 - x1, y2 - y1) / _DASH))

        def point(share: float) -> Point:
            return x1 + (x2 - x1) * share, y1 + (y2 - y1) * share

        for part in range(0, parts, 2):
            yield Stroke(*point(part / parts), *point(min(1.0, (part + 1) / parts)), _GREY, 1.5)

    def curve(self, points: Sequence[Point], colour: str) -> Iterator[Shape]:
        """Draw points and the lines between them."""
        placed = [self.at(*point) for point in sorted(points)]
        for start, end in pairwise(placed):
            yield Stroke(*start, *end, colour, 2)
        for x, y in placed:
            yield Dot(x, y, 3.5, colour)


def chart(title: str, rows: Sequence[Row]) -> list[Shape]:
    """Return the shapes of the chart. Without measurements it is the title alone."""
    found: list[Shape] = [Label(WIDTH / 2, 16, title, "middle", _BLACK)]
    measured = [(row, row.measured) for row in rows if row.measured is not None]
    if not measured:
        return found
    rows = [row for row, _ in measured]
    names = list(dict.fromkeys(row.variant.name for row in rows))
    sizes = sorted({row.size.ranks for row in rows})
    per_rank = next((each.rate / row.size.ranks for row, each in measured if row.is_base), 0.0)
    top = _round_up(max(*(each.rate for _, each in measured), per_rank * sizes[-1], 1e-9))
    unit = "samples/s" if any(each.samples for _, each in measured) else "steps/s"
    rates = _Panel(_LEFTS[0], unit, sizes, top, 4, formatting.figures)
    best = max((share for row in rows for share in row.efficiencies), default=1.0)
    ticks = max(4, math.ceil(best / _EFFICIENCY_TICK))
    top = ticks * _EFFICIENCY_TICK
    shares = _Panel(
        _LEFTS[1], "efficiency", sizes, top, ticks if ticks <= 8 else 1, formatting.percent
    )
    found += [*rates.axes(), *rates.ideal(0, per_rank * sizes[-1])]
    found += [*shares.axes(), *shares.ideal(1.0, 1.0)]
    for name, colour in zip(names, cycle(_COLOURS), strict=False):
        mine = [(row, each) for row, each in measured if row.variant.name == name]
        found += rates.curve([(row.size.ranks, each.rate) for row, each in mine], colour)
        found += _efficiency_curve(shares, [row for row, _ in mine], colour)
    return [*found, *_legend(names)]


def _round_up(value: float) -> float:
    """Round up to 1, 2, 4, 5 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * 0.9999)


def _efficiency_curve(panel: _Panel, rows: Sequence[Row], colour: str) -> Iterator[Shape]:
    known = [(row.size.ranks, row.efficiency) for row in rows if row.efficiency is not None]
    yield from panel.curve(known, colour)
    for row in rows:
        if row.spread is not None and not row.is_base:
            (x, low), (_, high) = (panel.at(row.size.ranks, each) for each in row.spread)
            yield Stroke(x, low, x, high, colour, 1)
            yield Stroke(x - 4, low, x + 4, low, colour, 1)
            yield Stroke(x - 4, high, x + 4, high, colour, 1)


def _legend(names: Sequence[str]) -> list[Shape]:
    found: list[Shape] = []
    x = float(_LEFTS[0])
    entries = [(name or "as it is", colour) for name, colour in zip(names, _COLOURS, strict=False)]
    for text, colour in [*entries, ("ideal", _GREY)]:
        if x + 30 + 7 * len(text) > WIDTH:
            break
        found.append(Stroke(x, HEIGHT - 14, x + 16, HEIGHT - 14, colour, 2))
        found.append(Label(x + 22, HEIGHT - 14, text, "start", _BLACK))
        x += 40 + 7 * len(text)
    return found


# -- the file

_FONT_SIZE = 12
_PNG_SCALE = 2  # Pixels of a PNG per pixel of the chart

_PIL_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}
"""Pillow's names: left, middle and right, each at the middle of the height."""


def check_plot_file(name: str) -> Path:
    """Check before hours of runs that the file of ``--plot`` can be written.

    Raises:
        DoctorError: It cannot.
    """
    path = Path(name)
    folder = path.absolute().parent
    if path.suffix.lower() not in (".svg", ".png"):
        raise DoctorError(f"--plot {name}: the name must end in .svg or .png")
    if not folder.is_dir() or path.is_dir():
        raise DoctorError(f"--plot {name}: there is no such directory to write a file to")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DoctorError(
            f"--plot {name}: no file can be written there: {error.strerror}"
        ) from None
    if path.suffix.lower() == ".png":
        try:
            chart_as_png(())
        except (ImportError, OSError, TypeError):
            # Before 10.1 its font has one size.
            raise DoctorError(
                f"--plot {name}: PNG needs Pillow 10.1 or later, which is not installed",
                "pip install 'ddpdoctor[plot]', or name a file that ends in .svg",
            ) from None
    return path


def write_chart(path: Path, shapes: Sequence[Shape]) -> None:
    """Write the chart.

    Raises:
        DoctorError: The file cannot be written.
    """
    png = path.suffix.lower() == ".png"
    try:
        put(path, chart_as_png(shapes) if png else chart_as_svg(shapes).encode())
    except OSError as error:
        raise DoctorError(f"cannot write {path}: {error.strerror}") from None


def chart_as_svg(shapes: Sequence[Shape]) -> str:
    """Return the chart as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="{_FONT_SIZE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Stroke):
            x1, y1, x2, y2, colour, width = shape
            lines.append(
                f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                f'stroke="{colour}" stroke-width="{width:g}"/>'
            )
        elif isinstance(shape, Dot):
            x, y, radius, colour = shape
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>')
        else:
            x, y, text, anchor, colour = shape
            lines.append(
                f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
                f'dominant-baseline="middle" fill="{colour}">{escape(shown(text))}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def chart_as_png(shapes: Sequence[Shape]) -> bytes:
    """Return the chart as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    scale = _PNG_SCALE
    image = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT_SIZE * scale)
    for shape in shapes:
        if isinstance(shape, Stroke):
            ends = [each * scale for each in shape[:4]]
            draw.line(ends, fill=shape.colour, width=max(1, round(shape.width * scale)))
        elif isinstance(shape, Dot):
            x, y, radius = (each * scale for each in shape[:3])
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.colour)
        else:
            place = (shape.x * scale, shape.y * scale)
            anchor = _PIL_ANCHORS[shape.anchor]
            draw.text(place, shown(shape.text), fill=shape.colour, font=font, anchor=anchor)
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()
