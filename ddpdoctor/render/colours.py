"""The colours of phases and severities: the same in the monitor, the HTML report and pictures."""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """One meaning, in every place that draws it."""

    light: str
    """On a light background, as ``#rrggbb``."""
    dark: str
    """On a dark one."""
    ansi: str
    """In a terminal of sixteen colours, as rich names it."""


PHASES = {
    "data": Colour("#d97706", "#f59e0b", "yellow"),
    "forward": Colour("#0ea5e9", "#38bdf8", "cyan"),
    "backward": Colour("#4f46e5", "#818cf8", "blue"),
    "optimizer": Colour("#15a34a", "#4ade80", "green"),
    "other": Colour("#a8745a", "#d0a183", "magenta"),
    "wait": Colour("#cbd5e1", "#475569", "bright_black"),
}
"""In the order in which a step's bar stacks them. Waiting recedes: who waits is not to blame."""

SEVERITIES = {
    "error": Colour("#dc2626", "#f87171", "red"),
    "warning": Colour("#b45309", "#fbbf24", "yellow"),
    "info": Colour("#0e7490", "#67e8f9", "cyan"),
    "good": Colour("#15803d", "#4ade80", "green"),
}
"""``good`` is a job that succeeded."""
