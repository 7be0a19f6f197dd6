"""How long each phase took on a GPU, by events that are read later."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.run.status import Phase

Times = list[int]
"""Nanoseconds by `Phase`; the first, of no step, is what passed in steps not seen in full."""

Measured = Callable[[], "Times | None"]
"""The phases of a closed step; None while the device is still busy with it."""

Mark = tuple[int, Any, int]
"""The phase that a marker ends, its event, and when the host put it there (Unix nanoseconds)."""

MOST_MARKS = 256
"""Phase boundaries of one step that are marked; what comes after them is one stretch."""

MOST_STEPS = 64
"""Steps that wait for the device at most; those before them are given up."""

SETTLING = 50_000_000
"""Nanoseconds that a device has at the end of a rank to come to what it was asked for."""

_now = time.perf_counter_ns


class _Pending:
    """A closed step whose events the device has not passed yet."""

    __slots__ = ("first", "marks", "times")

    def __init__(self, first: Any, marks: list[Mark]) -> None:
        self.first = first
        self.marks = marks
        self.times: Times | None = None

    def measured(self) -> Times | None:
        return self.times


class CudaClock:
    """The phases of a rank on a GPU: an event per phase boundary, read once it has passed.

    ``torch.cuda.Event.record`` enqueues a marker and returns; ``query`` asks without waiting.
    Neither synchronizes. All of it happens in the training thread, and nothing while a CUDA graph
    is being captured: a marker would become part of the graph, and a query would break the capture.
    Steps that are not seen in full have no markers but the one at their end (`Phases.light`).

    Args:
        cuda: ``torch.cuda``.
        device: The device that DDP's module is on, which need not be the current one.
    """

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda = cuda
        self.device = device
        self._current = torch_private.current_stream(cuda, device)
        self._free: list[Any] = []
        self._pending: deque[_Pending] = deque()
        self._last = self._record()
        self._marks: list[Mark] = []
        self._passed: list[Mark] = []
        """The last one of the steps that were read."""
        self.captures = False
        """Whether a graph was being captured at the last boundary."""

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record(self._current())
        return event

    def charge(self, phase: int) -> None:
        """Put a marker into the device's stream: what came before it belongs to ``phase``."""
        self.captures = self._cuda.is_current_stream_capturing()
        if len(self._marks) < MOST_MARKS and not self.captures:
            self._marks.append((phase, self._record(), time.time_ns()))

    def cut(self) -> Measured:
        """End a step: its times, once the device has passed its last marker."""
        pending = _Pending(self._last, self._marks)
        if self._marks:
            self._last = self._marks[-1][1]
            self._marks = []
            self._pending.append(pending)
        else:
            pending.times = [0] * len(Phase)
        if not self._cuda.is_current_stream_capturing():
            while self._pending and self._read(self._pending[0]):
                self._pending.popleft()
        if len(self._pending) > MOST_STEPS:
            self._pending.popleft().times = [0] * len(Phase)
        return pending.measured

    def standing(self) -> list[tuple[str, int, bool]]:
        """How far the device has come: the last marker that it passed, and the three behind it.

        Asked by the writing thread, of a rank that makes no progress.

        Returns:
            Of each the phase that it ends, when it was put there (Unix nanoseconds), and whether
            the device has passed it.
        """
        steps = [self._passed, *(step.marks for step in list(self._pending)), self._marks]
        marks = list(itertools.chain.from_iterable(steps))
        ahead = bisect.bisect_left(marks, True, key=lambda mark: not mark[1].query())
        shown = enumerate(marks[: ahead + 3])
        return [(Phase(phase).label, when, at < ahead) for at, (phase, _, when) in shown][
            max(0, ahead - 1) :
        ]

    def settle(self) -> None:
        """Before a rank ends: give the device a moment to come to what it was asked for.

        Without it what was computed last is not known: losses, NaN, hashes. Nothing waits for a
        device that has more to do than that.
        """
        if self._cuda.is_current_stream_capturing():
            return
        asked, deadline = self._record(), _now() + SETTLING
        while not asked.query() and _now() < deadline:
            time.sleep(0.001)

    def _read(self, pending: _Pending) -> bool:
        if not pending.marks[-1][1].query():
            return False
        times = [0] * len(Phase)
        previous = pending.first
        for phase, event, _ in pending.marks:
            times[phase] += int(previous.elapsed_time(event) * 1e6)
            previous = event
        self._passed = pending.marks[-1:]
        # The last event begins the next step and must not be used again before its end.
        self._free.append(pending.first)
        self._free.extend(event for _, event, _ in pending.marks[:-1])
        pending.times = times
        return True
