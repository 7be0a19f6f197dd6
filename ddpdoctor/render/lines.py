"""Styled lines of text for a terminal of any width.

Styles are names of meanings (``error``, ``dim``). What they look like is said here alone: the
sixteen colours of the terminal's palette, on its background. So a light background, a person's
palette and ``NO_COLOR`` are all respected, and nothing is said by colour alone.
"""

from __future__ import annotations

import textwrap
from functools import lru_cache

from rich.cells import cell_len, set_cell_size
from rich.style import Style

from ddpdoctor.core.control_characters import shown
from ddpdoctor.render.colours import PHASES, SEVERITIES

Span = tuple[str, str]
"""A text, and its style's name; empty: plain."""

Line = tuple[Span, ...]

_STYLES = {
    "": "",
    "dim": "dim",
    "bold": "bold",
    "head": "dim",
    "key": "bold",
    "cursor": "reverse",
    "ok": "green",
    "info": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "status": "reverse",
    "bar": "cyan",
    "guilty": "bold reverse yellow",
    **{phase: colour.ansi for phase, colour in PHASES.items()},
    **{f"{name} meter": f"reverse {colour.ansi}" for name, colour in SEVERITIES.items()},
    "grave": f"bold reverse {SEVERITIES['error'].ansi}",
}


@lru_cache(maxsize=64)
def look(name: str) -> Style:
    """What a style looks like."""
    return Style.parse(_STYLES[name])


def columns(text: str) -> int:
    """The columns a text takes on a terminal."""
    return len(text) if text.isascii() else cell_len(text)


def plain(line: Line) -> str:
    """A line's text."""
    return "".join(text for text, _ in line)


def fitted(line: Line, room: int) -> Line:
    """A line of exactly ``room`` columns: cut, or filled up with spaces."""
    spans: list[Span] = []
    left = room
    for text, style in line:
        if left <= 0:
            break
        taken = columns(text)
        if taken > left:
            text, taken = fit(text, left), left
        if text:
            spans.append((text, style))
        left -= taken
    if left > 0:
        spans.append((" " * left, ""))
    return tuple(spans)


def fit(text: str, room: int) -> str:
    """A text of exactly ``room`` columns."""
    return text[:room].ljust(room) if text.isascii() else set_cell_size(text, room)


def shortened(text: str, room: int, ellipsis: str) -> str:
    """A text of at most ``room`` columns, with an ellipsis where it was cut."""
    room = max(room, 0)
    if columns(text) <= room:
        return text
    if room <= columns(ellipsis):
        return fit(text, room)
    return fit(text, room - columns(ellipsis)).rstrip() + ellipsis


def clean(text: str, ascii_only: bool) -> str:
    """A text for a line: what would steer a terminal is shown, tabs and newlines are spaces."""
    if not text.isprintable():
        text = shown(text.replace("\t", " ").replace("\n", " "))
    if ascii_only and not text.isascii():
        text = text.encode("ascii", "replace").decode()
    return text


def cleaned(line: Line, ascii_only: bool) -> Line:
    """A line all of whose texts are `clean`."""
    return tuple((clean(text, ascii_only), style) for text, style in line)


def merged(line: Line) -> Line:
    """The same line in as few spans as it has changes of style."""
    spans: list[Span] = []
    for text, style in line:
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + text, style)
        else:
            spans.append((text, style))
    return tuple(spans)


def wrapped(text: str, room: int, style: str = "", indent: str = "") -> list[Line]:
    """A text in lines of at most ``room`` columns, each behind ``indent``."""
    width = max(room - len(indent), 1)
    return [
        ((f"{indent}{row}", style),)
        for paragraph in text.splitlines() or [""]
        for row in textwrap.wrap(paragraph, width) or [""]
    ]


def labelled(label: str, text: str, room: int, width: int, style: str = "") -> list[Line]:
    """A text behind a label of ``width`` columns, wrapped beside it."""
    if room < width + 12:
        return [((label, "dim"),), *wrapped(text, room, style, " ")]
    heads = [f"{label:<{width}}"]
    rows = wrapped(text, room - width, style)
    heads += [" " * width] * (len(rows) - 1)
    return [((head, "dim"), *row) for head, row in zip(heads, rows, strict=True)]
