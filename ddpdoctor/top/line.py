"""Styled lines of text: spans of a text and the name of its style.

Styles are names of meanings (``error``, ``dim``), not colours: what they look like on a terminal is
said in one place (`ddpdoctor.top.styles`), and goldens compare the plain text.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

from ddpdoctor.core.control_characters import shown

Span = tuple[str, str]
"""A text, and its style's name; empty: plain."""

Line = tuple[Span, ...]


def width(line: Line) -> int:
    """The columns a line takes on a terminal."""
    return sum(columns(text) for text, _ in line)


def columns(text: str) -> int:
    """The columns a text takes on a terminal."""
    return len(text) if text.isascii() else cell_len(text)


def plain(line: Line) -> str:
    """A line's text."""
    return "".join(text for text, _ in line)


def fitted(line: Line, room: int, style: str = "") -> Line:
    """A line of exactly ``room`` columns: cut, or filled up with spaces."""
    spans: list[Span] = []
    left = room
    for text, name in line:
        if left <= 0:
            break
        taken = columns(text)
        if taken > left:
            text, taken = fit(text, left), left
        if text:
            spans.append((text, name))
        left -= taken
    if left > 0:
        spans.append((" " * left, style))
    return tuple(spans)


def fit(text: str, room: int) -> str:
    """A text of exactly ``room`` columns."""
    if text.isascii():
        return text[:room].ljust(room)
    return set_cell_size(text, room)


def shortened(text: str, room: int, ellipsis: str) -> str:
    """A text of at most ``room`` columns, with a sign where it was cut."""
    if columns(text) <= room:
        return text
    if room <= columns(ellipsis):
        return fit(text, max(room, 0))
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


def joined(parts: Iterable[str], separator: str) -> str:
    """The parts that say something, with a separator between them."""
    return separator.join(part for part in parts if part)
