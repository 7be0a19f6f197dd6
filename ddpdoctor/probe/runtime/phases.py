"""Follow the phase that the training thread is in, and the time of each on host, cores and GPU.

This is what runs most often in a rank, several times a step. `Phases` and `Calls` exist twice:
here, and as the types of the same names in ``_hot.c``, which are taken where it could be compiled
(`runtime.hot`). Both keep the same attributes and are tested by the same tests.

Times on a GPU are by events that are read later. On a machine that runs more than it has cores for,
a rank may be slow without any fault in the job: the kernel counts by thread how long it was ready
and had to wait (``schedstat``, Linux). It is read once a step, in 2 us, from a file that is kept
open.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.status import NO_EPOCH, Phase, StatusPage

# -- cores


def waited_for_core(descriptor: int) -> int:
    """Nanoseconds that a thread, or a process's first one, was ready to run and had to wait.

    Args:
        descriptor: Its ``schedstat``.

    Raises:
        OSError: It is gone.
        ValueError: This is no such file.
        IndexError: Likewise.
    """
    return int(os.pread(descriptor, 64, 0).split()[1])


class CoreClock:
    """The CPU time and the core waits of the thread that makes it, from one cut to the next."""

    def __init__(self) -> None:
        self._descriptor = -1
        # No Linux, or a kernel that does not count, or a sandbox: nothing is known then.
        with contextlib.suppress(OSError):
            self._descriptor = move_up(
                os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            )
        self._ran = self._waited = 0
        self.cut()

    def cut(self) -> tuple[int, int] | None:
        """Nanoseconds run and waited since the last cut; None if they cannot be known."""
        if self._descriptor < 0:
            return None
        try:
            waited = waited_for_core(self._descriptor)
        except (OSError, ValueError, IndexError):
            # The job has closed what is not its own. The number may be one of its files now.
            self._descriptor = -1
            return None
        ran = time.thread_time_ns()
        counted = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        # Of another thread, which closes a last step, they say nothing.
        return counted if min(counted) >= 0 else None

    def close(self) -> None:
        """Let go of the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Only if it is still ours.
                waited_for_core(descriptor)
                os.close(descriptor)


# -- how long each phase took on a GPU, by events that are read later


Times = list[int]
"""Nanoseconds by `Phase`; the first, of no step, is what passed in steps not seen in full."""

Measured = Callable[[], "Times | None"]
"""The phases of a closed step; None while the device is still busy with it."""

Mark = tuple[int, Any, int]
"""The phase that a marker ends, its event, and when the host put it there (Unix nanoseconds)."""

MOST_MARKS = 256
"""Phase boundaries of one step that are marked; what comes after them is one stretch."""

MOST_PENDING = 64
"""Steps that wait for the device at most; those before them are given up."""

SETTLE_TIME = 50_000_000
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
        if len(self._pending) > MOST_PENDING:
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
        asked, deadline = self._record(), _now() + SETTLE_TIME
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


# -- what a rank has called so far: counts that the compiled core keeps, where there is one


class Calls:
    """The counts of one rank (`ddpdoctor.probe.observers.collective_calls.Ledger`).

    Args:
        memory: The rank's ring, which compiled code writes into by itself.
    """

    def __init__(self, memory: Any) -> None:
        self.count = 0
        """Calls so far."""
        self.wide = 0
        """Calls that may have moved gradients or parameters, unknown ones among them."""
        self.carried = 0
        """Elements that collectives were called with since the step `carried_in` began, none of
        them point to point."""
        self.carried_in = 0
        self.enough = 0
        """So many of them are waited for; 0: none are."""
        self.elsewhere = False
        """Whether other threads than the training one call collectives, too."""


# -- phases


_thread = threading.get_ident

_OTHER = int(Phase.OTHER)
_OPTIMIZER = int(Phase.OPTIMIZER)
_WAIT = int(Phase.WAIT)
_PHASES = len(Phase)

BACKWARDS = 64
"""Backward passes that are remembered."""

Backward = tuple[int, int, Site]
"""A backward pass of the training thread: its begin and its end in Unix nanoseconds, 0 while it is
under way, and the line that called it."""


class Phases:
    """The training thread of one rank, and what it is doing.

    Hooks call :meth:`enter` and :meth:`leave` in pairs; nested phases are charged exclusively, so
    the parts of a step always add up to its total.

    Args:
        page: The rank's status page.
    """

    def __init__(self, page: StatusPage) -> None:
        self.page = page
        self._show = page.show
        self._thread = _thread()
        self._mark = _now()
        self._unix = time.time_ns() - self._mark
        self._times: Times = [0] * _PHASES
        self._kept: Times = [0] * _PHASES
        self._stack: list[int] = []
        self._site: Site | None = None
        self._backwards: deque[Backward] = deque(maxlen=BACKWARDS)
        self._reduces = False
        self._watched: Any = None
        self.device: CudaClock | None = None
        """Measures by the events of a GPU, if the rank computes on one."""
        self.began = self._mark
        """When the step under way began, on the clock of the steps."""
        self.passes: list[int] = []
        """For each step since the last line, how many backwards there were until then."""
        self.closer = 0
        """The ``id`` of the optimizer that alone ends steps; 0 if several may, or none is known."""
        self.optimizer_steps = 0
        """Steps of any optimizer, skipped ones included."""
        self.iterators: set[int] = set()
        """Loaders that were asked for a batch in the step under way."""
        self.trained: set[int] = set()
        """The same of the last step that asked one."""
        self.aside = False
        """Whether the last batch came from another loader than those."""
        self.phase = int(Phase.STARTING)
        self.steps = 0
        """Steps closed so far."""
        self.last_total = 0
        """Nanoseconds of the last of them, as the host saw it."""
        self.epoch = NO_EPOCH
        self.armed = 0
        """Forwards so far whose backward is all-reduced."""
        self.forwards = 0
        """Forwards of DDP modules in grad mode so far."""
        self.backward_count = 0
        """Backward passes begun so far."""
        self.reduced = 0
        """Those of them that are all-reduced."""
        self.begun = 0
        """Forwards of the step under way."""
        self.step_armed = 0
        """Those since the last line of the journal whose backward is all-reduced."""
        self.step_backwards = 0
        """Backwards since then."""
        self.light = 0
        """Not 0 if of the step under way only that is seen which must not be missed."""
        self.line = 0
        """A line of the journal ends before a step whose number has none of these bits."""
        self.sparse = 0
        """A step is seen in full if the number of the next one has none of these bits."""
        self.clocked = False
        """Whether hooks add what they take to `spent` in the step under way."""
        self.spent = 0
        """Nanoseconds of the step that is clocked, so far."""
        self.calls: Any = None
        """Where collectives are written down, for compiled code."""
        self.collectives = self.reductions = self.gathers = 0
        """Collectives called so far, and those of them that reduce and that gather."""
        self.collective = ""
        """Name of the collective under way."""
        self.failed: tuple[int, int, str] | None = None
        """``id`` of the exception that last flew through a hook, with phase and collective.

        Not the exception: it would keep the frames alive, and with them the step's tensors.
        """
        self.optimizer_code: CodeType | None = None
        """What torch runs around the step of an optimizer, once one was seen."""

    # -- phases

    def is_here(self) -> bool:
        """Whether the calling thread is the training one."""
        return _thread() == self._thread

    def here(self) -> bool:
        """Make the calling thread the training thread; whether it was another one."""
        if _thread() == self._thread:
            return False
        self._thread = _thread()
        self._stack.clear()
        self.phase = _OTHER
        return True

    def enter(self, phase: int, site: Site) -> bool:
        """Begin a phase; False (and nothing done) on any thread but the training one."""
        if _thread() != self._thread:
            return False
        # A rank that does anything we know is no longer starting (which is phase 0).
        current = self.phase or _OTHER
        if current == _OPTIMIZER and phase != _WAIT and not self._optimizer_runs():
            self.reset()
            current = _OTHER
        stack = self._stack
        if not stack:
            self.failed = None
        now = _now()
        self._times[current] += now - self._mark
        self._mark = now
        if self.device is not None and not self.light:
            self.device.charge(current)
        stack.append(current)
        self.phase = phase
        self._show(phase, now + self._unix, self.armed)
        if site is not self._site:
            self._site = site
            self.page.set_site(site.page)
        if not site.recorded & 1 << phase:
            self.site_met(phase, site)
        return True

    def leave(self, error: BaseException | None = None) -> None:
        """End the phase begun last, remembering the exception that ended it, if one did."""
        phase, stack = self.phase, self._stack
        now = self.charge()
        if self.device is not None and not self.light:
            self.device.charge(phase)
        if error is not None and (self.failed is None or self.failed[0] != id(error)):
            self.failed = (id(error), phase, self.collective)
        self.phase = back = stack.pop() if stack else _OTHER
        self._show(back, now + self._unix, self.armed)

    def charge(self) -> int:
        """Charge the host's time until now to the phase; now, on the clock of the steps."""
        now = _now()
        self._times[self.phase] += now - self._mark
        self._mark = now
        return now

    def reset(self) -> None:
        """After a fault of ours: no phase is under way that we know of."""
        self._stack.clear()
        self.phase = _OTHER

    def page_phase(self, phase: int) -> None:
        """Show a phase that is no part of a step (starting, ended)."""
        self.phase = int(phase)
        self._show(self.phase, _now() + self._unix, self.armed)

    def _optimizer_runs(self) -> bool:
        """Whether the optimizer's step has not raised, for which torch calls no hook.

        Within a closure (LBFGS) its frame still runs.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is self.optimizer_code:
                return True
            frame = frame.f_back
        return False

    def site_met(self, phase: int, site: Site) -> None:
        """The first time that a phase is entered at a line."""
        site.recorded |= 1 << phase

    # -- passes

    def forward_begins(self, armed: bool) -> None:
        """A forward in grad mode; ``armed`` if its backward will be all-reduced."""
        self.begun += 1
        self.forwards += 1
        if armed:
            self.step_armed += 1
            self.armed += 1
            self._reduces = True

    def backward_begins(self, site: Site) -> None:
        """A backward, whose phase has begun at that line."""
        self._backwards.append((self._mark + self._unix, 0, site))
        self.step_backwards += 1
        self.backward_count += 1
        if self._reduces:
            self._reduces = False
            self.reduced += 1
            self.page.reduced(self.reduced)

    def backward_ended(self) -> None:
        """That backward's phase has ended."""
        if self._backwards:
            began, _, site = self._backwards[-1]
            self._backwards[-1] = began, self._mark + self._unix, site

    @property
    def backwards(self) -> list[Backward]:
        """The newest backwards, the last of them at the end."""
        return list(self._backwards)

    # -- times

    @property
    def now(self) -> int:
        """The last change of phase, on the clock of the steps."""
        return self._mark

    @property
    def last_change(self) -> int:
        """The same in Unix nanoseconds."""
        return self._mark + self._unix

    @property
    def thread(self) -> int:
        """The training thread, as Python numbers it."""
        return self._thread

    @property
    def unix(self) -> int:
        """What turns the clock of the steps into Unix nanoseconds."""
        return self._unix

    def keep(self) -> None:
        """The steps so far are whole."""
        self._kept = self._times.copy()

    def take(self, kept: bool = False) -> Times:
        """The nanoseconds of each phase since the last call; ``kept``: as they were then."""
        times = self._kept if kept else self._times
        self._times, self._kept = [0] * _PHASES, [0] * _PHASES
        return times

    def start(self) -> int:
        """Begin to measure now; now, on the clock of the steps."""
        self._mark = _now()
        self._times = [0] * _PHASES
        return self._mark

    def watch(self, memory: Any, at: int) -> None:
        """Look at every step whether the eight bytes at that place are still the same."""
        view = memoryview(memory)[at : at + 8].cast("q")
        self._watched = view, view[0]

    def noticed(self) -> bool:
        """Whether they have changed since the last call."""
        if self._watched is None:
            return False
        view, before = self._watched
        if view[0] == before:
            return False
        self._watched = view, view[0]
        return True
