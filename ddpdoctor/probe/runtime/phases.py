"""Which phase the training thread is in: stores into the status page, and the time each phase took.

This is what runs most often in a rank, several times a step. It exists twice: here, and as the type
of the same name in ``_hot.c``, which is taken where it could be compiled (`runtime.hot`). Both keep
the same attributes and are tested by the same tests.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.status import NO_EPOCH, Phase, StatusPage

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.clocks import CudaClock, Times

_now = time.perf_counter_ns
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
