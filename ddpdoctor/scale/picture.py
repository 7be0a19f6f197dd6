"""Writes the chart into a file: SVG by hand, PNG by Pillow where that is installed."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.rundir import put
from ddpdoctor.scale.chart import HEIGHT, WIDTH, Dot, Shape, Stroke

_FONT = 12
_SCALE = 2
"""Pixels of a PNG for one of the chart."""

_ANCHORS = {"start": "lm", "middle": "mm", "end": "rm"}
"""Pillow's names: left, middle and right, each at the middle of the height."""


def check(name: str) -> Path:
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
            png(())
        except (ImportError, OSError, TypeError):
            # Before 10.1 its font has one size.
            raise DoctorError(
                f"--plot {name}: PNG needs Pillow 10.1 or later, which is not installed",
                "pip install 'ddpdoctor[plot]', or name a file that ends in .svg",
            ) from None
    return path


def write(path: Path, shapes: Sequence[Shape]) -> None:
    """Write the chart.

    Raises:
        DoctorError: The file cannot be written.
    """
    content = png(shapes) if path.suffix.lower() == ".png" else svg(shapes).encode()
    try:
        put(path, content)
    except OSError as error:
        raise DoctorError(f"cannot write {path}: {error.strerror}") from None


def svg(shapes: Sequence[Shape]) -> str:
    """The chart as SVG."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="{_FONT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *map(_element, shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _element(shape: Shape) -> str:
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


def png(shapes: Sequence[Shape]) -> bytes:
    """The chart as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * _SCALE), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(_FONT * _SCALE)
    for shape in shapes:
        if isinstance(shape, Stroke):
            ends = [each * _SCALE for each in (shape.x1, shape.y1, shape.x2, shape.y2)]
            draw.line(ends, fill=shape.colour, width=max(1, round(shape.width * _SCALE)))
        elif isinstance(shape, Dot):
            x, y, radius = (each * _SCALE for each in shape[:3])
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shape.colour)
        else:
            place = (shape.x * _SCALE, shape.y * _SCALE)
            anchor = _ANCHORS[shape.anchor]
            draw.text(place, shown(shape.text), fill=shape.colour, font=font, anchor=anchor)
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()
