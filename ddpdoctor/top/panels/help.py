"""``?``: the keys, and how the board is to be read."""

from __future__ import annotations

from ddpdoctor.top.keys import KEYS
from ddpdoctor.top.line import Line
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.wrapping import labelled, wrapped

_READING = (
    ("OWN", "what a rank spent itself in a step: data, forward, backward, optimizer and the rest"),
    ("wait", "what it spent in waiting for other ranks; the slow rank is the one that waits least"),
    ("~", "not measured apart: the wait for others is in this number"),
    ("-", "not known"),
    ("util", "share of the last second in which any kernel ran; waiting in NCCL counts: see watt"),
    ("med, skew", "the median of all ranks; the largest OWN as a multiple of the median one"),
)


def draw(room: int, marks: Marks, readonly: bool) -> list[Line]:
    """The keys and the words."""
    lines: list[Line] = []
    for key in KEYS:
        text = key.text
        if key.action == "signal" and readonly:
            text = "off: --readonly"
        others = [name for name in key.keys if name in ("down", "up", "ctrl+c", "h")]
        arrows = f" ({', '.join(others)})" if others else ""
        lines += labelled(f" {key.shown}", text + arrows, room, 8)
    lines += labelled(" ctrl+z", "suspend the monitor; fg brings it back", room, 8)
    lines += labelled(" c", "the live runs, to choose one", room, 8)
    lines += labelled(" ctrl+l", "redraw the whole screen", room, 8)
    lines.append((("", ""),))
    for word, text in _READING:
        lines += labelled(f" {word}", text, room, 12)
    signs = (
        f" {marks.blamed} the slowest rank   {marks.dead} dead   {marks.stale} stale   "
        f"{marks.debugger} in the debugger   {marks.starting} starting   {marks.ended} ended"
    )
    return [*lines, *wrapped(signs, room)]
