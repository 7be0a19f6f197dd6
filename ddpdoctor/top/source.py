"""Where frames come from, for those that draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ddpdoctor.top.snapshot import Snapshot


@dataclass(frozen=True)
class Want:
    """What the viewer looks at: lets the source skip work that is not seen."""

    ranks: frozenset[int] | None = None
    """Ranks whose owns, totals and output are visible; None: all."""
    history: int = 60
    """How many of the last steps."""


ALL = Want()


class Source(Protocol):
    """Makes one frame after another."""

    @property
    def interval(self) -> float:
        """Seconds between frames that are worth asking for."""

    def read(self, want: Want) -> Snapshot:
        """The present frame; may take a while, so call it in a separate thread.

        Raises:
            DoctorError: There is nothing to show, and there will not be.
        """

    def close(self) -> None:
        """Let go of files and of the driver."""


@runtime_checkable
class Replay(Source, Protocol):
    """A source whose frames all exist already.

    ``read`` gives the frame at ``position`` and does not move: who plays, seeks.
    """

    @property
    def length(self) -> int:
        """How many frames there are; at least one."""

    @property
    def position(self) -> int:
        """The frame that is read."""

    def seek(self, position: int) -> None:
        """Go to a frame; beyond the ends, to the nearest."""
