"""Draw the chart of ``--plot``, and write it as SVG or, with Pillow installed, as PNG.

The chart shows throughput and efficiency over ranks, each with its ideal line; it is made of
lines, dots and texts alone, so the writers stay short.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from ddpdoctor.core import formatting
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import shown
from ddpdoctor.run.rundir import put
from ddpdoctor.scale.results import Row

# -- the chart of ``--plot``: throughput and efficiency over ranks, each with its ideal line


WIDTH, HEIGHT = 820, 400
"""Pixels."""

_TOP, _BOTTOM, _PANEL = 50, 340, 320
_LEFTS = (60, 470)
_DASH = 6.0
_QUARTER = 0.25
"""Between two ticks of the efficiency."""

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
    """A text; ``y`` is its middle, ``anchor`` where ``x`` is: ``start``, ``middle`` or ``end``."""

    x: float
    y: float
    text: str
    anchor: str
    colour: str


Shape = Stroke | Dot | Label


class _Panel(NamedTuple):
    """One of the two diagrams."""

    left: float
    most_ranks: int
    top_value: float
    ticks: int

    def at(self, ranks: float, value: float) -> tuple[float, float]:
        """The pixel of a point."""
        x = self.left + _PANEL * ranks / (self.most_ranks * 1.05)
        return x, _BOTTOM - (_BOTTOM - _TOP) * value / self.top_value


def chart(title: str, rows: Sequence[Row]) -> list[Shape]:
    """The shapes of the chart; without anything measured the title alone."""
    found: list[Shape] = [Label(WIDTH / 2, 16, title, "middle", _BLACK)]
    shown = [row for row in rows if row.measured is not None]
    if not shown:
        return found
    names = list(dict.fromkeys(row.variant.name for row in shown))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    return [*found, *_throughput(shown, colours), *_efficiency(shown, colours), *_legend(names)]


def _throughput(rows: Sequence[Row], colours: Mapping[str, str]) -> Iterator[Shape]:
    """What all ranks do in a second; ideally each does what it does at the smallest size."""
    measured = [(row, row.measured) for row in rows if row.measured is not None]
    most = max(row.size.ranks for row in rows)
    per_rank = next((each.rate / row.size.ranks for row, each in measured if row.is_base), 0.0)
    highest = max(*(each.rate for _, each in measured), per_rank * most, 1e-9)
    panel = _Panel(_LEFTS[0], most, _round_up(highest), 4)
    samples = any(each.samples for _, each in measured)
    yield from _axes(panel, "samples/s" if samples else "steps/s", rows, formatting.figures)
    yield from _dashes(*panel.at(0, 0), *panel.at(most, per_rank * most))
    for name, colour in colours.items():
        points = [(row.size.ranks, each.rate) for row, each in measured if row.variant.name == name]
        yield from _curve(panel, points, colour)


def _efficiency(rows: Sequence[Row], colours: Mapping[str, str]) -> Iterator[Shape]:
    """Throughput per rank, as a part of that at the smallest size; ideally all of it."""
    most = max(row.size.ranks for row in rows)
    highest = max((share for row in rows for share in row.efficiencies), default=1.0)
    quarters = max(4, math.ceil(highest / _QUARTER))
    panel = _Panel(_LEFTS[1], most, quarters * _QUARTER, quarters if quarters <= 8 else 1)
    yield from _axes(panel, "efficiency", rows, formatting.percent)
    yield from _dashes(*panel.at(0, 1.0), *panel.at(most, 1.0))
    for name, colour in colours.items():
        mine = [row for row in rows if row.variant.name == name]
        points = [(row.size.ranks, row.efficiency) for row in mine if row.efficiency is not None]
        yield from _curve(panel, points, colour)
        yield from _spreads(panel, mine, colour)


def _axes(
    panel: _Panel, title: str, rows: Sequence[Row], text: Callable[[float], str]
) -> Iterator[Shape]:
    yield Label(panel.left, _TOP - 14, title, "start", _BLACK)
    for tick in range(panel.ticks + 1):
        value = panel.top_value * tick / panel.ticks
        _, y = panel.at(0, value)
        yield Stroke(panel.left, y, panel.left + _PANEL, y, "#e8eaed", 1)
        yield Label(panel.left - 6, y, text(value), "end", _BLACK)
    yield Stroke(panel.left, _BOTTOM, panel.left + _PANEL, _BOTTOM, _GREY, 1)
    for ranks in sorted({row.size.ranks for row in rows}):
        x, y = panel.at(ranks, 0)
        yield Stroke(x, y, x, y + 4, _GREY, 1)
        yield Label(x, y + 13, str(ranks), "middle", _BLACK)
    yield Label(panel.left + _PANEL / 2, _BOTTOM + 28, "ranks", "middle", _BLACK)


def _curve(panel: _Panel, points: Sequence[tuple[int, float]], colour: str) -> Iterator[Shape]:
    placed = [panel.at(*point) for point in sorted(points)]
    for start, end in pairwise(placed):
        yield Stroke(*start, *end, colour, 2)
    for x, y in placed:
        yield Dot(x, y, 3.5, colour)


def _spreads(panel: _Panel, rows: Sequence[Row], colour: str) -> Iterator[Shape]:
    for row in rows:
        if row.spread is not None and not row.is_base:
            x, low = panel.at(row.size.ranks, row.spread[0])
            _, high = panel.at(row.size.ranks, row.spread[1])
            yield Stroke(x, low, x, high, colour, 1)
            yield Stroke(x - 4, low, x + 4, low, colour, 1)
            yield Stroke(x - 4, high, x + 4, high, colour, 1)


def _dashes(x1: float, y1: float, x2: float, y2: float) -> Iterator[Shape]:
    """The ideal line."""
    parts = max(1, int(math.hypot(x2 - x1, y2 - y1) / _DASH))
    for part in range(0, parts, 2):
        start, end = part / parts, min(1.0, (part + 1) / parts)
        yield Stroke(
            x1 + (x2 - x1) * start,
            y1 + (y2 - y1) * start,
            x1 + (x2 - x1) * end,
            y1 + (y2 - y1) * end,
            _GREY,
            1.5,
        )


def _legend(names: Sequence[str]) -> list[Shape]:
    found: list[Shape] = []
    x = float(_LEFTS[0])
    for place, name in enumerate([*names[: len(_COLOURS)], None]):
        text = "ideal" if name is None else name or "as it is"
        colour = _GREY if name is None else _COLOURS[place]
        if x + 30 + 7 * len(text) > WIDTH:
            break
        found.append(Stroke(x, HEIGHT - 14, x + 16, HEIGHT - 14, colour, 2))
        found.append(Label(x + 22, HEIGHT - 14, text, "start", _BLACK))
        x += 40 + 7 * len(text)
    return found


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 and their tens."""
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 4, 5, 8, 10) if step * size >= value * 0.9999)


# -- writes the chart into a file: SVG by hand, PNG by Pillow where that is installed


_FONT_SIZE = 12
_PNG_SCALE = 2
"""Pixels of a PNG for one of the chart."""

_PIL_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}
"""Pillow's names: left, middle and right, each at the middle of the height."""


def check_plot_file(name: str) -> Path:
    """The file of ``--plot``, if it can be written later.

    Raises:
        DoctorError: It cannot, which is worth knowing before hours of runs.
    """
    path = Path(name)
    if path.suffix.lower() not in (".svg", ".png"):
        raise DoctorError(f"--plot {name}: the name must end in .svg or .png")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise DoctorError(f"--plot {name}: there is no such directory to write a file to")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
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
    content = (
        chart_as_png(shapes) if path.suffix.lower() == ".png" else chart_as_svg(shapes).encode()
    )
    try:
        put(path, content)
    except OSError as error:
        raise DoctorError(f"cannot write {path}: {error.strerror}") from None


def chart_as_svg(shapes: Sequence[Shape]) -> str:
    """The chart as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="{_FONT_SIZE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *map(_svg_element, shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _svg_element(shape: Shape) -> str:
    if isinstance(shape, Stroke):
        return (
            f'<line x1="{shape.x1:.1f}" y1="{shape.y1:.1f}" x2="{shape.x2:.1f}" '
            f'y2="{shape.y2:.1f}" stroke="{shape.colour}" stroke-width="{shape.width:g}"/>'
        )
    if isinstance(shape, Dot):
        return (
            f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" '
            f'fill="{shape.colour}"/>'
        )
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" '
        f'dominant-baseline="middle" fill="{shape.colour}">{escape(shown(shape.text))}</text>'
    )


def chart_as_png(shapes: Sequence[Shape]) -> bytes:
    """The chart as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * _PNG_SCALE, HEIGHT * _PNG_SCALE), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT_SIZE * _PNG_SCALE)
    for shape in shapes:
        if isinstance(shape, Stroke):
            ends = [each * _PNG_SCALE for each in (shape.x1, shape.y1, shape.x2, shape.y2)]
            draw.line(ends, fill=shape.colour, width=max(1, round(shape.width * _PNG_SCALE)))
        elif isinstance(shape, Dot):
            x, y, radius = (each * _PNG_SCALE for each in shape[:3])
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.colour)
        else:
            place = (shape.x * _PNG_SCALE, shape.y * _PNG_SCALE)
            anchor = _PIL_ANCHORS[shape.anchor]
            draw.text(place, shown(shape.text), fill=shape.colour, font=font, anchor=anchor)
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()
