"""The signs on the board, each with a twin for terminals that only have ASCII."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Marks:
    """A set of signs; all but the ellipsis are one column wide."""

    ascii_only: bool
    levels: str
    """Bars of rising height; the first is an empty one."""
    over: str
    """A bar that goes beyond the axis."""
    fill: str
    """What a stretch of a stacked bar is drawn with."""
    ellipsis: str
    rule: str
    dot: str
    """Between parts of a line."""
    blamed: str
    dead: str
    stale: str
    debugger: str
    ended: str
    starting: str
    cursor: str
    ok: str
    info: str
    warning: str
    error: str

    def level(self, name: str) -> str:
        """The sign of a verdict's or a finding's level."""
        signs = {"ok": self.ok, "info": self.info, "warning": self.warning, "error": self.error}
        return signs.get(name, self.info)

    def state(self, name: str, blamed: bool) -> str:
        """The sign in front of a rank."""
        signs = {
            "dead": self.dead,
            "stale": self.stale,
            "debugger": self.debugger,
            "ended": self.ended,
            "starting": self.starting,
        }
        return signs.get(name, self.blamed if blamed else " ")


UNICODE = Marks(
    ascii_only=False,
    levels=" ▁▂▃▄▅▆▇█",
    over="▲",
    fill="━",
    ellipsis="…",
    rule="─",
    dot="·",
    blamed="!",
    dead="✗",
    stale="?",
    debugger="‖",
    ended="·",
    starting="*",
    cursor="▸",
    ok="✓",
    info="i",
    warning="!",
    error="✗",
)

ASCII = Marks(
    ascii_only=True,
    levels=" _.-=+*%#",
    over="^",
    fill="=",
    ellipsis="...",
    rule="-",
    dot="-",
    blamed="!",
    dead="x",
    stale="?",
    debugger="D",
    ended=".",
    starting="*",
    cursor=">",
    ok="+",
    info="i",
    warning="!",
    error="x",
)


def marks_for(ascii_only: bool) -> Marks:
    """The signs that a terminal can show."""
    return ASCII if ascii_only else UNICODE
