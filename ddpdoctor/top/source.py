"""Where frames come from, for those that draw them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ddpdoctor.top.snapshot import Snapshot


@dataclass(frozen=True)
class Want:
    """What the viewer looks at: lets the source skip work that is not seen."""

    ranks: frozenset[int] | None = None
    """Ranks that are visible; None: all."""


ALL = Want()


class Replay(Protocol):
    """Frames that all exist already.

    Reading gives the frame at ``position`` and does not move: who plays, seeks.
    """

    @property
    def length(self) -> int:
        """How many frames there are; at least one."""

    @property
    def position(self) -> int:
        """The frame that is read."""

    def seek(self, position: int) -> None:
        """Go to a frame; beyond the ends, to the nearest."""


class Source(Protocol):
    """Makes one frame after another."""

    @property
    def interval(self) -> float:
        """Seconds between frames that are worth asking for."""

    @property
    def replay(self) -> Replay | None:
        """The frames to go to; None while the run lives."""

    def read(self, want: Want) -> Snapshot:
        """The present frame; may take a while, so call it in a separate thread.

        Raises:
            DoctorError: There is nothing to show, and there will not be.
        """

    def history(self) -> Iterable[Snapshot]:
        """Frames from the first to the last, evenly spread, as many as make a chart."""

    def close(self) -> None:
        """Let go of files and of the driver."""
