"""Where steps begin and end, and which phase the training thread is in.

A step ends with the first optimizer's ``step()``. Several backwards before it are accumulation; a
second optimizer belongs to the same cycle; where no optimizer exists, DDP's forward counts.
Whatever happens between a loader's end and the next batch (evaluation, checkpoints) is kept
as ``outside``, so that it weighs on no step.

Everything here runs in the training loop, several times a step: it is written to be short.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType

from ddpdoctor.probe.observers.detail import Detail
from ddpdoctor.probe.observers.open_step import ZERO, Backward, OpenStep
from ddpdoctor.probe.runtime import events
from ddpdoctor.probe.runtime.clocks import CudaClock
from ddpdoctor.probe.runtime.cores import CoreClock
from ddpdoctor.probe.runtime.recorder import Recorder
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.probe.runtime.vitals import Vitals
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.status import NO_EPOCH, Phase

_now = time.perf_counter_ns
_thread = threading.get_ident

_OTHER = int(Phase.OTHER)
_OPTIMIZER = int(Phase.OPTIMIZER)
_WAIT = int(Phase.WAIT)

BACKWARDS = 24
"""Backward passes that are remembered."""


class StepTracker:
    """Follows the training thread of one rank through its phases and steps.

    Hooks call :meth:`enter` and :meth:`leave` in pairs; nested phases are charged exclusively, so
    the parts of a step always add up to its total.

    Args:
        recorder: Where steps are written.
        optimizers: Whether any optimizer was ever made: then only an optimizer ends a step.
    """

    def __init__(self, recorder: Recorder, optimizers: Callable[[], bool]) -> None:
        self._recorder = recorder
        self.page = recorder.page
        self._show = recorder.page.show
        self._totals = recorder.page.totals
        self._optimizers = optimizers
        self._thread = _thread()
        self.native = threading.get_native_id()
        """The training thread, as the kernel numbers it."""
        self._cores = CoreClock()
        self._mark = _now()
        self._began = self._mark
        self._unix = time.time_ns() - self._mark
        self._times = ZERO.copy()
        self._device: CudaClock | None = None
        self._stack: list[int] = []
        self._site: Site | None = None
        self._closer: weakref.ref[object] | None = None
        self._resting: set[int] = set()
        self._closed: OpenStep | None = None
        self.phase = int(Phase.STARTING)
        self.steps = 0
        """Steps closed so far."""
        self.last_total = 0
        """Nanoseconds of the last of them, as the host saw it."""
        self.armed = 0
        """Forwards so far whose backward is all-reduced."""
        self.begun = 0
        """Forwards of the step under way."""
        self.light = 0
        """Not 0 if of the step under way only that is seen which must not be missed."""
        self.detail = Detail()
        self.skipped: deque[int] = deque(maxlen=BACKWARDS)
        """The newest steps that the job, or a GradScaler, did not take."""
        self._kept = ZERO
        """`_times` as they were when the last step ended."""
        self._vitals = Vitals(recorder.page)
        recorder.each_round.append(self._vitals.store)
        self.step = OpenStep(0, self._began + self._unix, self._vitals)
        self.optimizer_steps = 0
        """Steps of any optimizer, skipped ones included."""
        self.epoch = NO_EPOCH
        self.collective = ""
        """Name of the collective under way."""
        self.failed: tuple[int, str, str] | None = None
        """``id`` of the exception that last flew through a hook, with phase and collective.

        Not the exception: it would keep the frames alive, and with them the step's tensors.
        """
        self.optimizer_frame: FrameType | None = None
        """The frame of the optimizer step under way."""
        self.backwards: deque[Backward] = deque(maxlen=BACKWARDS)
        """The newest, the last of them at the end."""
        self._iterators: set[int] = set()
        self._trained: set[int] = set()
        self._aside = False
        self._fresh = True

    # -- phases

    def is_here(self) -> bool:
        """Whether the calling thread is the training one."""
        return _thread() == self._thread

    def enter(self, phase: int, site: Site) -> bool:
        """Begin a phase; False (and nothing done) on any thread but the training one."""
        if _thread() != self._thread:
            return False
        # A rank that does anything we know is no longer starting (which is phase 0).
        current = self.phase or _OTHER
        if current == _OPTIMIZER and phase != _WAIT:
            current = self._leave_failed_optimizer()
        stack = self._stack
        if not stack:
            self.failed = None
        now = _now()
        self._times[current] += now - self._mark
        self._mark = now
        if self._device is not None:
            self._device.charge(current)
        stack.append(current)
        self.phase = phase
        self._show(phase, now + self._unix, self.armed)
        if site is not self._site:
            self._site = site
            self.page.set_site(site.page)
        if not site.recorded & 1 << phase:
            self._record_site(phase, site)
        return True

    def leave(self, error: BaseException | None = None) -> None:
        """End the phase begun last, remembering the exception that ended it, if one did."""
        phase, stack = self.phase, self._stack
        now = _now()
        self._times[phase] += now - self._mark
        self._mark = now
        if self._device is not None:
            self._device.charge(phase)
        if error is not None and (self.failed is None or self.failed[0] != id(error)):
            self.failed = (id(error), Phase(phase).label, self.collective)
        self.phase = back = stack.pop() if stack else _OTHER
        self._show(back, now + self._unix, self.armed)

    def reset(self) -> None:
        """After a fault of ours: no phase is under way that we know of."""
        self._stack.clear()
        self.phase = _OTHER
        self.optimizer_frame = None

    def _leave_failed_optimizer(self) -> int:
        """The phase we are in, which is no optimizer step any more if that one raised.

        torch calls no hook for a step that raised. Within a closure (LBFGS) its frame still runs.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame is self.optimizer_frame:
                return _OPTIMIZER
            frame = frame.f_back
        self.reset()
        return _OTHER

    def _record_site(self, phase: int, site: Site) -> None:
        """The first time that a phase is entered at a line: write it down."""
        site.recorded |= 1 << phase
        if site.path:
            self._recorder.add(SiteRecord(phase=Phase(phase).label, **site.place))

    def here(self) -> None:
        """Make the calling thread the training thread."""
        if _thread() != self._thread:
            self._thread = _thread()
            self.native = threading.get_native_id()
            self._cores.close()
            self._cores = CoreClock()
            self._stack.clear()
            self.phase = _OTHER

    def use_device(self, clock: CudaClock) -> None:
        """Measure by the device's events from now on."""
        self._device = clock
        self._vitals.use_device(clock.device)
        self._restart()

    def page_phase(self, phase: Phase) -> None:
        """Show a phase that is no part of a step (starting, ended)."""
        self.phase = int(phase)
        self._show(self.phase, _now() + self._unix, self.armed)
        self.page.totals(self.steps, self.epoch, 0, self._recorder.dropped)

    # -- steps

    def forward(self, armed: bool) -> None:
        """DDP's forward begins in grad mode; ``armed`` if its backward will be all-reduced."""
        if self.begun:
            if not self._optimizers():
                self.close()
        elif self._fresh:
            # What came before the very first step (building the model, say) belongs to none.
            self.outside()
            self._fresh = False
        self.begun += 1
        if armed:
            self.step.armed += 1
            self.armed += 1

    def evaluating(self) -> None:
        """A forward without gradients begins."""
        if self.begun and not self._optimizers():
            self.close()

    def evaluated(self) -> None:
        """A forward without gradients ended: nothing since the last step belongs to a step."""
        if not self._optimizers():
            self.begun += 1
            self.close()
        elif not self.begun:
            self.outside()

    def fetch(self, iterator: int, first: bool) -> None:
        """A batch is asked of the loader's iterator with that id; ``first`` of a pass over it."""
        self._fresh = False
        if not self.begun:
            known = iterator in self._trained
            if first or (known and self._aside):
                # Back from another loader, which may have been left before its end.
                self.outside()
            self._aside = not known
        elif not self._optimizers():
            self.close()
        self._iterators.add(iterator)

    def outside(self) -> None:
        """What was charged since the last step belongs to no step, unless one has begun."""
        if self.begun:
            return
        if self.step.passes:
            self._times = self._kept
            self._end_line(self.steps, cores=False)
        began = self._began
        self._restart()
        self.step.outside += self._began - began
        self.step.fetched = self.step.looked = 0
        self._iterators.clear()
        self.step.start = self._began + self._unix

    def _restart(self) -> None:
        """Begin to measure again."""
        self._began = self._mark = _now()
        self._times = ZERO.copy()
        self._cores.cut()
        if self._device is not None:
            self._device.charge(self.phase)
            self._device.cut()

    def stepped(self, optimizer: object, skipped: bool = False) -> None:
        """An optimizer's step ended, or was ``skipped`` by a GradScaler that saw an overflow."""
        self.optimizer_steps += 1
        closer = self._closer() if self._closer is not None else None
        if closer is optimizer:
            pass
        elif closer is None:
            self._closer = weakref.ref(optimizer)
        else:
            # The first optimizer rests while another one works on: that one counts from now on.
            if id(optimizer) not in self._resting:
                self._resting.add(id(optimizer))
                return
            self._closer = weakref.ref(optimizer)
        if self._resting:
            self._resting.clear()
        self.close(skipped)

    def close(self, skipped: bool = False) -> None:
        """End the step; its line is written when the next one ends, once DDP has its waits."""
        step, times = self.step, self._times
        now = _now()
        times[self.phase] += now - self._mark
        self._mark = now
        self.last_total = total = now - self._began
        self._began = now
        self.steps = number = self.steps + 1
        self.begun = 0
        step.passes.append(step.backwards)
        if skipped:
            step.skipped = True
            self.skipped.append(number - 1)
        if self._iterators:
            self._trained, self._iterators = self._iterators, set()
        self._aside = False
        if number & self.detail.line and not skipped:
            self._kept = times.copy()
        else:
            self._end_line(number)
        self._totals(number, self.epoch, total, self._recorder.dropped)
        self.light = (number + 1) & self.detail.sparse
        if number >= events.due:
            events.ring(number)

    def _end_line(self, number: int, cores: bool = True) -> None:
        """What comes from the step of that number on is in another line of the journal.

        Args:
            number: Of the step that begins.
            cores: Whether what the thread ran since the last line was all in these steps.
        """
        step, now = self.step, self._began
        step.times, self._times = self._times, ZERO.copy()
        self._kept = ZERO
        if self._device is not None:
            self._device.charge(self.phase)
            step.measured = self._device.cut()
        ran = self._cores.cut()
        if cores:
            step.cores = ran
        step.epoch = self.epoch
        step.last = number - 1
        if self._closed is not None:
            self._recorder.add(self._closed.line)
        self._closed = step
        if now >= self._vitals.due:
            self._vitals.ask(now)
        self.step = OpenStep(number, now + self._unix, self._vitals)
        self.detail.choose(number, self.last_total)

    @property
    def thread(self) -> int:
        """The training thread, as Python numbers it."""
        return self._thread

    @property
    def last_change(self) -> int:
        """Unix nanoseconds of the last change of phase."""
        return self._mark + self._unix

    def finish(self) -> int:
        """Write the last step; the number of steps closed."""
        if self.begun and not self._optimizers():
            self.close()
        if self.step.passes:
            self._times = self._kept
            self._end_line(self.steps, cores=False)
        if self._closed is not None:
            self._recorder.add(self._closed.line)
            self._closed = None
        return self.steps
