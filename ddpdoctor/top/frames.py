"""Define where frames come from, keep the ones already shown, and read new ones in a thread.

A `Source` makes snapshots, `Reader` calls it in its own thread so that a slow disk never delays a
key, and `Past` keeps the last frames and the points of the charts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top.snapshot import Snapshot, Times

# -- where frames come from, for those that draw them


@dataclass(frozen=True)
class Want:
    """What the viewer looks at: lets the source skip work that is not seen."""

    ranks: frozenset[int] | None = None
    """Ranks that are visible; None: all."""


WANT_ALL = Want()


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


# -- history


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


# -- the thread that reads, so that no slow disk ever holds up a key


T = TypeVar("T")

Task = Callable[[], None]
Position = tuple[int, int] | None
"""Frame and number of frames of a replay."""

LEAST_PAUSE = 0.05
"""Seconds between two readings at the very least."""
AFTER_TROUBLE = 2.0
"""Seconds until a source that failed is asked again."""


class Reader(threading.Thread):
    """Reads frame after frame and hands each to ``deliver``, or what went wrong to ``trouble``.

    Args:
        make: Makes the source; called in this thread, and again when it failed.
        deliver: Called in this thread with each frame.
        trouble: Called in this thread with what went wrong, in words.
        before: Called in this thread with what was before the first frame of a run.
    """

    def __init__(
        self,
        make: Callable[[], Source],
        deliver: Callable[[Snapshot, Position], None],
        trouble: Callable[[str], None],
        before: Callable[[list[Point]], None],
    ) -> None:
        super().__init__(name="ddpdoctor-top-reader", daemon=True)
        self._make = make
        self._deliver = deliver
        self._trouble = trouble
        self._before = before
        self._run: str | None = None
        """The directory of the run whose past is known."""
        self._wake = threading.Event()
        self._tasks: list[Task] = []
        self._lock = threading.Lock()
        self._ended = False
        self._source: Source | None = None
        self.want = Want(frozenset())
        self.playing = True
        """Whether a replay goes on to its next frame."""

    def run(self) -> None:
        """Read until `stop`."""
        while not self._ended:
            started = time.monotonic()
            pause = self._round()
            self._wake.wait(max(pause - (time.monotonic() - started), LEAST_PAUSE))
            self._wake.clear()
        self._close()

    def _round(self) -> float:
        """Do what was asked, read a frame; seconds until the next one."""
        with self._lock:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            self._guarded(task)
        source = self._guarded(self._opened)
        if source is None:
            return AFTER_TROUBLE
        snapshot = self._guarded(lambda: source.read(self.want))
        if snapshot is None:
            return AFTER_TROUBLE
        replay = source.replay
        self._deliver(snapshot, None if replay is None else (replay.position, replay.length))
        if snapshot.path != self._run:
            self._run = snapshot.path
            found = self._guarded(lambda: [point(frame) for frame in source.history()])
            self._before(found or [])
        if replay is not None and self.playing:
            replay.seek(replay.position + 1)
        return source.interval

    def _opened(self) -> Source:
        if self._source is None:
            self._source = self._make()
        return self._source

    def _guarded(self, do: Callable[[], T]) -> T | None:
        """What it returns; a failure is reported and never ends the monitor."""
        try:
            return do()
        except DoctorError as error:
            self._trouble(str(error))
        except Exception as error:
            self._trouble(f"{type(error).__name__}: {error}")
        return None

    def ask(self, task: Task) -> None:
        """Have something done in this thread, soon."""
        with self._lock:
            self._tasks.append(task)
        self._wake.set()

    def wake(self) -> None:
        """Read a frame now rather than at the end of the interval."""
        self._wake.set()

    def switch(self, make: Callable[[], Source]) -> None:
        """Read from another source from now on."""

        def switched() -> None:
            self._close()
            self._make = make

        self.ask(switched)

    def step(self, by: int) -> None:
        """Go to another frame of a replay, which then stands still."""
        self.playing = False

        def moved() -> None:
            replay = None if self._source is None else self._source.replay
            if replay is not None:
                replay.seek(replay.position + by)

        self.ask(moved)

    def stop(self) -> None:
        """End soon; returns at once."""
        self._ended = True
        self._wake.set()

    def _close(self) -> None:
        if self._source is not None:
            with contextlib.suppress(Exception):
                self._source.close()
            self._source = None
