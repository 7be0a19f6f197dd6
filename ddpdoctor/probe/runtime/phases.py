"""Follow the phase that the training thread is in, and the time of each on host, cores and GPU.

This is the probe's most frequent code: it runs several times a step. `Phases` and `Calls` exist
twice: here, and as types of the same names in ``_hot.c``, which are used if it was compiled
(`runtime.hot`). Both have the same attributes and pass the same tests.

Times on a GPU come from events that are read later. On a machine with too few cores a rank may be
slow without any fault in the job. Linux counts how long a thread was ready and waited for a core
(``schedstat``). We read that once a step, in 2 us, from a file that stays open.
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
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.status import NO_EPOCH, Phase, StatusPage

# -- cores


def waited_for_core(descriptor: int) -> int:
    """Parse ``schedstat``. Return the nanoseconds that a thread was ready and waited for a core.

    Raises:
        OSError: It is gone.
        ValueError: It is another file.
        IndexError: It is another file.
    """
    return int(os.pread(descriptor, 64, 0).split()[1])


class CoreClock:
    """The CPU time and core waits of the creating thread between two calls of `cut`."""

    def __init__(self) -> None:
        self._descriptor = -1
        # Without Linux, or in some sandboxes, there is no such file.
        with contextlib.suppress(OSError):
            self._descriptor = move_up(
                os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            )
        self._ran = self._waited = 0
        self.cut()

    def cut(self) -> tuple[int, int] | None:
        """Return the nanoseconds run and waited since the last cut, or None if unknown."""
        if self._descriptor < 0:
            return None
        try:
            waited = waited_for_core(self._descriptor)
        except (OSError, ValueError, IndexError):
            # The job has closed our file, and its descriptor may now belong to a file of the job.
            self._descriptor = -1
            return None
        ran = time.thread_time_ns()
        counted = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        # The last step may be closed by another thread, whose counts differ.
        return counted if min(counted) >= 0 else None

    def close(self) -> None:
        """Close the file, if it is still ours."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError, ValueError, IndexError):
                # This raises if the descriptor belongs to another file.
                waited_for_core(descriptor)
                os.close(descriptor)


# -- the phases on a GPU, by events that are read later

Times = list[int]
"""Nanoseconds by `Phase`. The first item counts the time in light steps, not a phase."""


class Timed(NamedTuple):
    """The phases of closed steps on a GPU."""

    times: Times
    host: int = 0
    """Nanoseconds of the host's own work in the full steps in which it ran ahead of the GPU."""


Measured = Callable[[], "Timed | None"]
"""Returns the phases of a closed step, or None while the device is still busy with it."""

Mark = tuple[int, Any, int]
"""The phase that a marker ends, its event, and when the host enqueued it (Unix nanoseconds)."""

MAX_MARKS = 256  # maximum number of marked phase boundaries in a step; the rest counts as one phase
SETTLED = 3  # steps until the host takes its usual time to fill the GPU's queue
MAX_PENDING = 64  # maximum number of steps that wait for the device; more drop the oldest
SETTLE_TIME = 50_000_000  # nanoseconds that a device gets to finish its work when the rank ends

_now = time.perf_counter_ns


@dataclass(eq=False)
class _Pending:
    """A closed step whose events the device has not passed yet."""

    first: Any
    marks: list[Mark]
    host: int
    times: Times | None = None

    def measured(self) -> Timed | None:
        return None if self.times is None else Timed(self.times, self.host)


class HostWork:
    """Measure the host's own work in steps in which it runs ahead of the GPU.

    A GPU that waits in an all-reduce delays nothing while its host has its own work to do. This is
    certain if the GPU has not passed the end of a backward when the host begins the next forward:
    nothing between them waited for the GPU. Time counts only while this holds. The host's time in
    forward, backward and optimizer may include waits for the GPU's full queue. So at most the
    shortest of the three counts.
    """

    def __init__(self) -> None:
        self._backward: Any = None  # the event at the end of the last backward, unless passed
        self._ahead = False  # whether the GPU had not passed it when this step's forward began
        self._forward = False  # this step has had a forward
        self._since = 0
        self._between = self._queueing = self._sum = 0
        self._least = 0
        self._steps = 0

    def boundary(self, phase: int, mark: Mark) -> None:
        """Note the marker at the end of a phase."""
        _, event, now = mark
        took, self._since = now - self._since, now
        if phase == Phase.STARTING:
            self._backward = None  # a run of light steps ends here
            return
        if self._backward is not None and self._backward.query():
            self._backward = None
        ahead = self._backward is not None
        if phase in (Phase.OTHER, Phase.DATA):
            if not self._forward:
                self._ahead = ahead
            if ahead or not self._forward:
                self._between += took
        elif ahead:
            self._queueing += took
        self._forward = self._forward or phase == Phase.FORWARD
        if phase == Phase.BACKWARD:
            self._backward = event

    def step_ended(self) -> None:
        """End a full step."""
        self._steps += 1
        if self._steps > SETTLED and self._forward and self._ahead:
            self._least = min(self._least or self._queueing, self._queueing)
            self._sum += self._between + self._least
        self._between = self._queueing = 0
        self._forward = self._ahead = False

    def cut(self) -> int:
        """Return the nanoseconds since the last cut."""
        found, self._sum = self._sum, 0
        return found

    def passed(self, events: list[Any]) -> None:
        """Forget the event of a backward that the GPU has passed. The event is reused."""
        if any(event is self._backward for event in events):
            self._backward = None


class CudaClock:
    """The phases of a rank on a GPU: an event per phase boundary, read once it has passed.

    ``torch.cuda.Event.record`` enqueues a marker and returns. ``query`` does not wait. Neither
    synchronizes. All of it happens in the training thread, and nothing while a CUDA graph is being
    captured: a marker would become part of the graph, and a query would break the capture. Light
    steps have no markers except the one at their end (`Phases.light`). The device is that of DDP's
    module, which need not be the current one.
    """

    def __init__(self, cuda: Any, device: Any) -> None:
        self._cuda = cuda
        self.device = device
        self._current = torch_private.current_stream(cuda, device)
        self._free: list[Any] = []
        self._pending: deque[_Pending] = deque()
        self._last = self._record()
        self._marks: list[Mark] = []
        self._passed: list[Mark] = []  # the last marker of the steps that were read
        self.captures = False  # whether a graph was being captured at the last boundary
        self._host = HostWork()

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
        event.record(self._current())
        return event

    def charge(self, phase: int) -> None:
        """Enqueue a marker on the device's stream. The work before it belongs to ``phase``."""
        self.captures = self._cuda.is_current_stream_capturing()
        if len(self._marks) < MAX_MARKS and not self.captures:
            self._marks.append((phase, self._record(), time.time_ns()))
            self._host.boundary(phase, self._marks[-1])

    def step_ended(self) -> None:
        """End a full step."""
        self._host.step_ended()

    def cut(self) -> Measured:
        """End a line.

        Return a function that reads its times once the device has passed its last marker.
        """
        whole = len(self._marks) < MAX_MARKS
        pending = _Pending(self._last, self._marks, self._host.cut() if whole else 0)
        if self._marks:
            self._last = self._marks[-1][1]
            self._marks = []
            self._pending.append(pending)
        else:
            pending.times = [0] * len(Phase)
        if not self._cuda.is_current_stream_capturing():
            while self._pending and self._read(self._pending[0]):
                self._pending.popleft()
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft().times = [0] * len(Phase)
        return pending.measured

    def standing(self) -> list[tuple[str, int, bool]]:
        """Return the last marker that the device has passed, and the three after it.

        The writing thread calls this in a rank that makes no progress.

        Returns:
            For each marker: the phase that it ends, when it was enqueued (Unix nanoseconds), and
            whether the device has passed it.
        """
        steps = [self._passed, *(step.marks for step in list(self._pending)), self._marks]
        marks = list(itertools.chain.from_iterable(steps))
        ahead = bisect.bisect_left(marks, True, key=lambda mark: not mark[1].query())
        shown = enumerate(marks[: ahead + 3])
        return [(Phase(phase).label, when, at < ahead) for at, (phase, _, when) in shown][
            max(0, ahead - 1) :
        ]

    def settle(self) -> None:
        """Give the device a moment to finish before the rank ends.

        Otherwise its last results are unknown: losses, NaN, hashes. Do not wait longer for a device
        with more work.
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
        self._host.passed([pending.first, *(event for _, event, _ in pending.marks)])
        previous = pending.first
        for phase, event, _ in pending.marks:
            times[phase] += int(previous.elapsed_time(event) * 1e6)
            previous = event
        self._passed = pending.marks[-1:]
        # The last event begins the next step and must not be reused before that step ends.
        self._free.append(pending.first)
        self._free.extend(event for _, event, _ in pending.marks[:-1])
        pending.times = times
        return True


# -- counts of collectives


class Calls:
    """The counts of one rank (`ddpdoctor.probe.observers.collective_calls.Ledger`) and its ring."""

    def __init__(self, memory: Any) -> None:
        self.count = 0  # calls so far
        self.wide = 0  # calls that may have moved gradients or parameters, or that are unknown
        self.carried = 0  # elements of collectives since the step `carried_in`, not point to point
        self.carried_in = 0
        self.enough = 0  # number of elements after which `carried_enough` is called; 0 means never
        self.elsewhere = False  # whether other threads call collectives as well


# -- phases

_thread = threading.get_ident

_OTHER = int(Phase.OTHER)
_OPTIMIZER = int(Phase.OPTIMIZER)
_WAIT = int(Phase.WAIT)
_PHASES = len(Phase)

BACKWARDS = 64  # number of remembered backward passes

Backward = tuple[int, int, Site]
"""A backward pass of the training thread: start and end in Unix nanoseconds, and the line that
called it. The end is 0 while it runs."""


class Phases:
    """The training thread of one rank, and its current phase.

    Hooks call :meth:`enter` and :meth:`leave` in pairs. A nested phase is not charged to
    the outer one, so that the parts of a step add up to its total.
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
        self.began = self._mark  # start of the current step, on the clock of the steps
        self.passes: list[int] = []  # number of backwards by the end of each step of this line
        self.closer = 0  # `id` of the only optimizer that ends steps; 0 if there may be several
        self.optimizer_steps = 0  # steps of any optimizer, including skipped ones
        self.iterators: set[int] = set()  # loaders asked for a batch in this step
        self.trained: set[int] = set()  # the same for the last step with such a loader
        self.aside = False  # whether the last batch came from none of those loaders
        self.looped = 0  # `id` of the iterator whose loop may continue; 0 if it is not recorded
        self.loop_batches = 0  # its batches since `Loops` was last called
        self.loop_forwards = self.loop_backwards = 0  # numbers before the last batch
        self.phase = int(Phase.STARTING)
        self.steps = 0  # number of closed steps
        self.last_total = 0  # nanoseconds of the last one, on the host
        self.epoch = NO_EPOCH
        self.armed = 0  # forwards so far whose backward is all-reduced
        self.forwards = 0  # forwards of DDP modules in grad mode so far
        self.backward_count = 0  # number of backwards begun so far
        self.reduced = 0  # backwards begun so far that are all-reduced
        self.begun = 0  # forwards of this step
        self.step_armed = 0  # armed forwards since the last line of the journal
        self.step_backwards = 0  # backwards since then
        self.light = 0  # not 0 in a light step (see `ddpdoctor.probe.observers.overhead`)
        self.line = 0  # a journal line ends before a step whose number has none of these bits
        self.sparse = 0  # a step is full if the number of the next one has none of these bits
        self.clocked = False  # whether hooks add their time to `spent` in this step
        self.spent = 0  # nanoseconds
        self.calls: Any = None  # the ledger of collectives, for compiled code
        self.collectives = self.reductions = self.gathers = 0  # all calls, and those of two kinds
        self.collective = ""  # the one that the rank waits in
        self.failed: tuple[int, int, str] | None = None
        """``id`` of the last exception that passed through a hook, with phase and collective.

        Storing the exception would keep its frames and the step's tensors alive.
        """
        self.optimizer_code: CodeType | None = None
        """The code object of torch's wrapper around ``Optimizer.step``. None before the first
        step."""

    # -- phases

    def is_here(self) -> bool:
        """Return whether the calling thread is the training thread."""
        return _thread() == self._thread

    def here(self) -> bool:
        """Make the calling thread the training thread. Return whether another one was it before."""
        if _thread() == self._thread:
            return False
        self._thread = _thread()
        self._stack.clear()
        self.phase = _OTHER
        return True

    def enter(self, phase: int, site: Site) -> bool:
        """Begin a phase. Return False on any thread other than the training thread."""
        if _thread() != self._thread:
            return False
        # The rank leaves phase 0, which is starting.
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
        """End the innermost phase. Remember the exception that ended it, if any."""
        phase, stack = self.phase, self._stack
        now = self.charge()
        if self.device is not None and not self.light:
            self.device.charge(phase)
        if error is not None and (self.failed is None or self.failed[0] != id(error)):
            self.failed = (id(error), phase, self.collective)
        self.phase = back = stack.pop() if stack else _OTHER
        self._show(back, now + self._unix, self.armed)

    def charge(self) -> int:
        """Charge the host's time until now to the phase. Return the time on the steps' clock."""
        now = _now()
        self._times[self.phase] += now - self._mark
        self._mark = now
        return now

    def reset(self) -> None:
        """Drop all open phases after an error of the probe."""
        self._stack.clear()
        self.phase = _OTHER

    def page_phase(self, phase: int) -> None:
        """Show a phase that is not part of a step (starting, ended)."""
        self.phase = int(phase)
        self._show(self.phase, _now() + self._unix, self.armed)

    def _optimizer_runs(self) -> bool:
        """Return whether the optimizer's step is still running.

        If it raises, torch calls no hook. A closure (LBFGS) runs within it.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is self.optimizer_code:
                return True
            frame = frame.f_back
        return False

    def site_met(self, phase: int, site: Site) -> None:
        """Note the first time that a phase is entered at a line."""
        site.recorded |= 1 << phase

    # -- passes

    def forward_begins(self, armed: bool) -> None:
        """Begin a forward in grad mode. ``armed``: its backward will be all-reduced."""
        self.begun += 1
        self.forwards += 1
        if armed:
            self.step_armed += 1
            self.armed += 1
            self._reduces = True

    def backward_begins(self, site: Site) -> None:
        """Note a backward that begins at a line."""
        self._backwards.append((self._mark + self._unix, 0, site))
        self.step_backwards += 1
        self.backward_count += 1
        if self._reduces:
            self._reduces = False
            self.reduced += 1
            self.page.reduced(self.reduced)

    def backward_ended(self) -> None:
        """Note the end of the last backward."""
        if self._backwards:
            began, _, site = self._backwards[-1]
            self._backwards[-1] = began, self._mark + self._unix, site

    def goes_on(self, iterator: int) -> bool:
        """Return whether a batch of the iterator with this id only continues the current loop."""
        if iterator != self.looped or self.backward_count == self.loop_backwards:
            return False
        self.loop_batches += 1
        self.loop_forwards, self.loop_backwards = self.forwards, self.backward_count
        return True

    @property
    def backwards(self) -> list[Backward]:
        """Return the newest backwards, oldest first."""
        return list(self._backwards)

    # -- times

    @property
    def now(self) -> int:
        """Return the time of the last change of phase, on the clock of the steps."""
        return self._mark

    @property
    def last_change(self) -> int:
        """Return the same in Unix nanoseconds."""
        return self._mark + self._unix

    @property
    def thread(self) -> int:
        """Return the identifier of the training thread, as `threading.get_ident` gives it."""
        return self._thread

    @property
    def unix(self) -> int:
        """Return the offset from the clock of the steps to Unix nanoseconds."""
        return self._unix

    def keep(self) -> None:
        """Save the times so far, which belong to ended steps."""
        self._kept = self._times.copy()

    def take(self, kept: bool = False) -> Times:
        """Return and clear the nanoseconds of each phase, with ``kept`` those saved by `keep`."""
        times = self._kept if kept else self._times
        self._times, self._kept = [0] * _PHASES, [0] * _PHASES
        return times

    def start(self) -> int:
        """Start measuring. Return the current time on the clock of the steps."""
        self._mark = _now()
        self._times = [0] * _PHASES
        return self._mark

    def watch(self, memory: Any, at: int) -> None:
        """Watch eight bytes of memory for a change."""
        view = memoryview(memory)[at : at + 8].cast("q")
        self._watched = view, view[0]

    def noticed(self) -> bool:
        """Return whether the watched bytes have changed since the last call."""
        if self._watched is None:
            return False
        view, before = self._watched
        if view[0] == before:
            return False
        self._watched = view, view[0]
        return True
