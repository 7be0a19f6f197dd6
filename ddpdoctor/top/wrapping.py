"""Text in paragraphs of a given width."""

from __future__ import annotations

import textwrap

from ddpdoctor.top.line import Line


def wrapped(text: str, room: int, style: str = "", indent: str = "") -> list[Line]:
    """A text in lines of at most ``room`` columns; every line behind ``indent``."""
    lines: list[Line] = []
    width = max(room - len(indent), 1)
    for paragraph in text.splitlines() or [""]:
        for each in textwrap.wrap(paragraph, width) or [""]:
            lines.append(((f"{indent}{each}", style),))
    return lines


def labelled(label: str, text: str, room: int, width: int, style: str = "") -> list[Line]:
    """A text behind a label of ``width`` columns, wrapped beside it."""
    if room < width + 12:
        return [((label, "dim"),), *wrapped(text, room, style, " ")]
    rows = wrapped(text, room - width, style)
    head = f"{label:<{width}}"
    return [
        ((head if number == 0 else " " * width, "dim"), *row) for number, row in enumerate(rows)
    ]
