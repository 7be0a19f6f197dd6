"""What the monitor has seen: the last frames, to go back to, and the whole run, for its charts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpdoctor.top.snapshot import Snapshot, Times

_ROWS = 4000
"""Rows of ranks that are kept over all frames: what bounds the monitor's memory."""
_FRAMES = 300

_POINTS = 240
"""Points that are kept of a run; beyond them every other one goes."""

_LEAST_GAP = 2.0
"""Seconds between two points at least."""

_EARLY = 30
"""Points that a run has after its first minute."""

_USUAL_GAP = 8.0
"""Seconds between two points of a run that is older: each new one has the charts drawn again."""

_RANKS = 32
"""Ranks of which a point knows the times and the memory: those that come first."""


@dataclass(frozen=True, eq=False)
class Point:
    """What charts show of one moment; no two points are the same."""

    time: float
    """Unix seconds."""
    times: Mapping[int, Times] = field(default_factory=dict)
    median: Times | None = None
    skew: float | None = None
    loss: float | None = None
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes."""
    power: float | None = None
    """Watts of all GPUs."""


def point(snapshot: Snapshot) -> Point:
    """What is kept of a frame."""
    rows = snapshot.ranks[:_RANKS]
    watts = [gpu.power for gpu in snapshot.gpus if gpu.power is not None]
    return Point(
        snapshot.time,
        {row.rank: row.times for row in rows if row.times is not None},
        snapshot.median,
        snapshot.skew,
        snapshot.job.loss,
        {row.rank: row.memory for row in rows if row.memory is not None},
        sum(watts) if watts else None,
    )


class Past:
    """Keeps the last frames of a run, and points of all of it."""

    def __init__(self) -> None:
        self.frames: deque[Snapshot] = deque()
        self.points: list[Point] = []
        self._gap = _LEAST_GAP
        """Seconds between two points."""
        self._path = ""
        self._step: int | None = None

    def add(self, snapshot: Snapshot) -> None:
        """One more frame; the oldest ones go."""
        if self._path != snapshot.path:
            self._path, self._gap, self._step = snapshot.path, _LEAST_GAP, None
            self.frames.clear()
            self.points.clear()
        self.frames.append(snapshot)
        most = max(10, min(_FRAMES, _ROWS // max(len(snapshot.ranks), 1)))
        while len(self.frames) > most:
            self.frames.popleft()
        # While no step ends there is nothing new to draw.
        if snapshot.median is not None and snapshot.job.step != self._step:
            self._step = snapshot.job.step
            self._keep(point(snapshot))

    def before(self, points: list[Point]) -> None:
        """What was before the first frame."""
        until = self.points[0].time if self.points else float("inf")
        older = [each for each in points if each.time < until]
        if len(older) > 1:
            gap = (older[-1].time - older[0].time) / (len(older) - 1)
            self._gap = max(gap, _LEAST_GAP)
            self.points[:] = [*older, *self.points[-1:]]

    def _keep(self, new: Point) -> None:
        if self.points:
            age = self.points[-1].time - self.points[0].time
            if new.time < self.points[-1].time + max(self._gap, min(age / _EARLY, _USUAL_GAP)):
                return
        self.points.append(new)
        if len(self.points) > _POINTS:
            del self.points[1::2]
            self._gap *= 2
