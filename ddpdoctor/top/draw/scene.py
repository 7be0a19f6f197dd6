"""What is drawn, and for which terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ddpdoctor.render.lines import Line, columns, shortened
from ddpdoctor.top.draw.marks import Marks
from ddpdoctor.top.history import Point
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.view import View, chosen

if TYPE_CHECKING:
    from ddpdoctor.top.ask import Taken


@dataclass(frozen=True)
class Material:
    """What a screen shows beside the snapshot: it was asked for, or was seen over time."""

    points: tuple[Point, ...] = ()
    """The run over time, oldest first."""
    asked: tuple[str, ...] = ()
    """The lines that a key asked for: processes below a rank, how to attach, live runs."""
    taken: Taken | None = None
    """The stacks; None until they were taken."""
    outlier: Taken | None = None
    """Those of the rank that is blamed, as a wide screen shows them."""


@dataclass(frozen=True)
class Scene:
    """A snapshot, how it is looked at, and the columns there are."""

    snapshot: Snapshot
    view: View
    room: int
    marks: Marks
    material: Material = field(default_factory=Material)

    @cached_property
    def row(self) -> RankRow | None:
        """The rank that the keys are about."""
        return chosen(self.snapshot, self.view)

    def cut(self, text: str, room: int | None = None) -> str:
        """A text of at most so many columns, all of them unless said."""
        return shortened(text, self.room if room is None else room, self.marks.ellipsis)

    def rule(self, text: str) -> Line:
        """A title with a line through the rest of the screen."""
        text = f"{self.marks.rule * 2} {text} "
        return ((text + self.marks.rule * max(self.room - columns(text), 0), "bold"),)
