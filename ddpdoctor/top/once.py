"""``--once``: one frame as text."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TextIO

from ddpdoctor.top import frame, terminal
from ddpdoctor.top.line import Line, merged, plain
from ddpdoctor.top.source import Replay, Source, Want
from ddpdoctor.top.styles import look
from ddpdoctor.top.view import View


def show(source: Source, view: View, out: TextIO) -> None:
    """Write a frame of the terminal's size; colour only to a terminal that wants it.

    Raises:
        DoctorError: There is nothing to show.
    """
    width, height = terminal.size()
    # Which ranks are in sight is known once there is a frame; only theirs are read in full.
    first = source.read(Want(frozenset()))
    visible = frame.draw(first, view, width, height).visible
    if isinstance(source, Replay):
        view = replace(view, position=(source.position, source.length))
    drawn = frame.draw(source.read(Want(visible)), view, width, height)
    colour = terminal.wants_colour(out, os.environ)
    for line in drawn.lines:
        out.write(f"{_coloured(line) if colour else plain(line).rstrip()}\n")


def _coloured(line: Line) -> str:
    return "".join(look(style).render(text) for text, style in merged(line))
