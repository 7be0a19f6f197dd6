"""How a person looks at the snapshots: sort, filter, selection. Every key makes a new view."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Panel = Literal["", "help", "findings", "stacks", "environment", "attach", "runs", "signal"]

SORTS = (
    "own",
    "rank",
    "step",
    "data",
    "forward",
    "backward",
    "optimizer",
    "wait",
    "memory",
    "utilization",
    "power",
)
"""What the board can be sorted by, in the order of the key."""


@dataclass(frozen=True)
class View:
    """The state of a viewer."""

    ascii_only: bool = False
    readonly: bool = False
    keys: bool = True
    """Whether there is a keyboard, so that a line says which keys there are."""
    sort: str = "own"
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    """The filter is being typed."""
    cursor: int | None = None
    """The selected rank."""
    top: int = 0
    """The first row of the board that is drawn."""
    expanded: bool = False
    grouped: bool = False
    paused: bool = False
    recording: str = ""
    panel: Panel = ""
    item: int = 0
    """The selected line of a panel, or how far it is scrolled."""
    opened: bool = False
    """The selected finding is open."""
    everyone: bool = True
    """The panel is about all ranks rather than the selected one."""
    position: tuple[int, int] | None = None
    """Frame and number of frames, of a replay or of what can be scrubbed."""
    message: str = ""
    """What the last key has to say."""
    trouble: str = ""
    """Why there are no new frames, or no more of a panel."""

    def next_sort(self) -> View:
        """Sorted by the next column."""
        place = (SORTS.index(self.sort) + 1) % len(SORTS)
        return replace(self, sort=SORTS[place], reverse=False, top=0)

    def turned(self) -> View:
        """Sorted the other way round."""
        return replace(self, reverse=not self.reverse, top=0)

    def shown(self, panel: Panel) -> View:
        """With a panel, or without it if it is there already."""
        opened: Panel = "" if panel == self.panel else panel
        return replace(self, panel=opened, item=0, opened=False)

    def typed(self, text: str) -> View:
        """With another filter."""
        return replace(self, filter=text, top=0)
