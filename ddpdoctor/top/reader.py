"""The thread that reads, so that no slow disk ever holds up a key."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top.history import Point, point
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.source import Source, Want

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
