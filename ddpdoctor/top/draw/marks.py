"""The signs on the board, each with a twin for terminals that only have ASCII."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Marks:
    """A set of signs; all but the ellipsis are one column wide."""

    ascii_only: bool
    letters: bool
    """Whether phases are letters, since there are no colours."""
    levels: str
    """Bars of rising height; the first is an empty one."""
    fill: str
    """What a stretch of a stacked bar is drawn with."""
    waiting: str
    """The same for waiting."""
    ellipsis: str
    rule: str
    dot: str
    """Between parts of a line."""
    cursor: str
    dead: str
    debugger: str
    ended: str
    ok: str
    error: str
    stale: str = "?"
    starting: str = "*"
    blamed: str = "!"
    info: str = "i"
    warning: str = "!"

    def level(self, name: str) -> str:
        """The sign of a verdict's or a finding's level."""
        return str(getattr(self, name)) if name in LEVELS else self.info

    def state(self, name: str, blamed: bool) -> str:
        """The sign in front of a rank."""
        if name in ("dead", "stale", "debugger", "starting") or (name == "ended" and not blamed):
            return str(getattr(self, name))
        return self.blamed if blamed else " "


LEVELS = ("ok", "info", "warning", "error")

UNICODE = Marks(
    ascii_only=False,
    letters=False,
    levels=" ▁▂▃▄▅▆▇█",
    fill="▇",
    waiting="░",
    ellipsis="…",
    rule="─",
    dot="·",
    cursor="▸",
    dead="✗",
    debugger="‖",
    ended="·",
    ok="✓",
    error="✗",
)

_PLAIN = replace(UNICODE, letters=True)

ASCII = Marks(
    ascii_only=True,
    letters=True,
    levels=" _.-=+*%#",
    fill="=",
    waiting=".",
    ellipsis="...",
    rule="-",
    dot="-",
    cursor=">",
    dead="x",
    debugger="D",
    ended=".",
    ok="+",
    error="x",
)


def marks_for(ascii_only: bool, colour: bool = True) -> Marks:
    """The signs that a terminal can show."""
    return ASCII if ascii_only else UNICODE if colour else _PLAIN
