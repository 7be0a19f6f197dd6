"""Define sources of frames, keep shown frames, and read new ones in a thread.

A `Source` makes snapshots. `Reader` calls it in its own thread, so that a slow disk never delays
a key. `History` keeps the last frames and the points of the charts.
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


@dataclass(frozen=True)
class Visible:
    """The visible content of the screen, so that a source can skip the rest."""

    ranks: frozenset[int] | None = None  # Ranks that are visible. None: all.


WANT_ALL = Visible()


class Replay:
    """A source whose frames already exist. Reading returns the one at ``position``."""

    length: int  # Number of frames, at least one
    _position = 0

    @property
    def replay(self) -> Replay:
        """The source itself."""
        return self

    @property
    def position(self) -> int:
        """The frame that is read next."""
        return self._position

    def seek(self, position: int) -> None:
        """Go to the nearest existing frame."""
        self._position = min(max(position, 0), self.length - 1)


class Source(Protocol):
    """Makes one frame after another."""

    @property
    def interval(self) -> float:
        """Minimum useful seconds between frames."""

    @property
    def replay(self) -> Replay | None:
        """The frames of a replay. None for a live run."""

    def read(self, want: Visible) -> Snapshot:
        """Read the current frame. This may take a while, so call it in a separate thread.

        Raises:
            DoctorError: There is nothing to show, and there will not be.
        """

    def history(self) -> Iterable[Snapshot]:
        """Return frames from the first to the last, evenly spread, enough for a chart."""

    def close(self) -> None:
        """Release files and the driver."""


_MAX_ROWS, _MAX_FRAMES = 4000, 300
"""Maximum number of kept rows of ranks, which bounds the monitor's memory, and of frames."""

_MAX_POINTS = 240  # Maximum number of points of a run. Beyond it every other one is dropped.

_MIN_GAP, _MAX_GAP = 2.0, 8.0
"""Seconds between two points at first, and in a long run. Each new point redraws the charts."""

_POINTS_PER_AGE = 30

_MAX_RANKS = 32  # Maximum number of ranks in a point: the first ones


@dataclass(frozen=True, eq=False)
class Point:
    """The data of one frame in the charts. No two points are equal."""

    time: float  # Unix seconds
    times: Mapping[int, Times] = field(default_factory=dict)
    median: Times | None = None
    skew: float | None = None
    loss: float | None = None
    memory: Mapping[int, int] = field(default_factory=dict)  # In bytes
    power: float | None = None  # Watts of all GPUs


def point(snapshot: Snapshot) -> Point:
    """Return the point of a frame."""
    rows = snapshot.ranks[:_MAX_RANKS]
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


class History:
    """Keeps the last frames of a run, and points of the whole run."""

    def __init__(self) -> None:
        self.frames: deque[Snapshot] = deque()
        self.points: list[Point] = []
        self._gap = _MIN_GAP  # Seconds between two points
        self._path = ""
        self._step: int | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Add a frame, and drop the oldest ones."""
        if self._path != snapshot.path:
            self._path, self._gap, self._step = snapshot.path, _MIN_GAP, None
            self.frames.clear()
            self.points.clear()
        self.frames.append(snapshot)
        while len(self.frames) > max(10, min(_MAX_FRAMES, _MAX_ROWS // (len(snapshot.ranks) or 1))):
            self.frames.popleft()
        # Until the next step ends, there is nothing new to draw.
        if snapshot.median is None or snapshot.job.step == self._step:
            return
        self._step = snapshot.job.step
        if self.points:
            age = self.points[-1].time - self.points[0].time
            gap = max(self._gap, min(age / _POINTS_PER_AGE, _MAX_GAP))
            if snapshot.time < self.points[-1].time + gap:
                return
        self.points.append(point(snapshot))
        if len(self.points) > _MAX_POINTS:
            del self.points[1::2]
            self._gap *= 2

    def add_earlier(self, points: list[Point]) -> None:
        """Add points from before the first frame."""
        until = self.points[0].time if self.points else float("inf")
        older = [each for each in points if each.time < until]
        if len(older) > 1:
            self._gap = max((older[-1].time - older[0].time) / (len(older) - 1), _MIN_GAP)
            self.points[:] = [*older, *self.points[-1:]]


T = TypeVar("T")

Position = tuple[int, int] | None  # Frame and number of frames of a replay
MIN_PAUSE = 0.05  # Minimum seconds between two readings
PAUSE_AFTER_FAILURE = 2.0  # Seconds until a failed source is tried again


class Reader(threading.Thread):
    """Reads one frame after another. All callbacks run in this thread.

    Args:
        make: Makes the source. Called again after a failure.
        deliver: Called with each frame.
        trouble: Called with a description of a failure.
        before: Called with frames from before the first one of a run.
    """

    def __init__(
        self,
        make: Callable[[], Source],
        deliver: Callable[[Snapshot, Position], object],
        trouble: Callable[[str], object],
        before: Callable[[list[Point]], object],
    ) -> None:
        super().__init__(name="ddpdoctor-top-reader", daemon=True)
        self._make = make
        self._deliver = deliver
        self._trouble = trouble
        self._before = before
        self._run: str | None = None  # The directory of the run whose history was read
        self._wake = threading.Event()
        self._tasks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._ended = False
        self._source: Source | None = None
        self.want = Visible(frozenset())
        self.playing = True  # Whether a replay is playing

    def run(self) -> None:
        """Read until `stop`."""
        while not self._ended:
            started = time.monotonic()
            pause = self._round()
            self._wake.wait(max(pause - (time.monotonic() - started), MIN_PAUSE))
            self._wake.clear()
        self._close()

    def _round(self) -> float:
        """Run requests and read a frame. Return the seconds until the next one."""
        with self._lock:
            tasks, self._tasks = self._tasks, []
        for task in tasks:
            self._guarded(task)
        source = self._guarded(self._opened)
        if source is None:
            return PAUSE_AFTER_FAILURE
        snapshot = self._guarded(lambda: source.read(self.want))
        if snapshot is None:
            return PAUSE_AFTER_FAILURE
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
        """Return the function's result. Report a failure without ending the monitor."""
        try:
            return do()
        except DoctorError as error:
            self._trouble(str(error))
        except Exception as error:
            self._trouble(f"{type(error).__name__}: {error}")
        return None

    def ask(self, task: Callable[[], None]) -> None:
        """Run a task in this thread soon."""
        with self._lock:
            self._tasks.append(task)
        self._wake.set()

    def wake(self) -> None:
        """Read a frame now instead of at the end of the interval."""
        self._wake.set()

    def switch(self, make: Callable[[], Source]) -> None:
        """Switch to another source."""

        def switched() -> None:
            self._close()
            self._make = make

        self.ask(switched)

    def step(self, by: int) -> None:
        """Go to another frame of a replay, and stop playing."""
        self.playing = False

        def moved() -> None:
            replay = None if self._source is None else self._source.replay
            if replay is not None:
                replay.seek(replay.position + by)

        self.ask(moved)

    def stop(self) -> None:
        """Stop soon. Returns immediately."""
        self._ended = True
        self._wake.set()

    def _close(self) -> None:
        if self._source is not None:
            with contextlib.suppress(Exception):
                self._source.close()
            self._source = None
