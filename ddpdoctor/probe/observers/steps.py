"""Follow the training steps: their beginning and end, their phases, and their journal line.

A step ends with the first optimizer's ``step()``. Several backwards before it are accumulation. A
second optimizer belongs to the same step. Without optimizers, DDP's forward counts. The time
between a loader's end and the next batch (evaluation, checkpoints) is recorded as ``outside`` and
belongs to no step.

Everything here runs in the training loop, several times a step, and has to be short.
"""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ddpdoctor.probe.observers.overhead import Detail
from ddpdoctor.probe.runtime import events, torch_private
from ddpdoctor.probe.runtime.hot import Phases
from ddpdoctor.probe.runtime.phases import CoreClock, CudaClock, Measured, Timed, Times
from ddpdoctor.probe.runtime.recorder import NotYet, Recorder, Vitals
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.status import NO_EPOCH, Parts, Phase

# -- settings of the job that change how its steps are read; hooks set them

uneven_inputs = False
"""Whether this process has entered an enabled ``join()``. From then on, ranks may have taken
different numbers of steps."""

last_scaler: weakref.ref[Any] | None = None  # the GradScaler whose ``step`` was called last


def current_scaler() -> Any:
    """Return the last GradScaler whose ``step`` was called, if it still exists."""
    return None if last_scaler is None else last_scaler()


def join_entered(join: Any) -> None:
    """Note that a ``join()`` is entered."""
    global uneven_inputs
    uneven_inputs = uneven_inputs or torch_private.is_enabled(join)


# -- a line of the journal: one step, or several short ones

MAX_RUNS = 32  # maximum number of runs of steps with equal numbers of backwards in a line
ZERO: Times = [0] * len(Phase)


class OpenStep:
    """The steps of one journal line. It stays open until DDP's logger has its times, a step later.

    A line has several steps if they are short (`ddpdoctor.probe.observers.overhead`).
    """

    # A dozen defaults in the class make the instance, one per step, cheaper.
    epoch = NO_EPOCH
    armed = 0  # forwards whose backward is all-reduced
    timed = 0  # armed iterations whose times DDP's logger gave
    exposed = 0  # nanoseconds of all-reduce without overlap, by DDP's logger
    full = 0  # number of full steps, whose batches and losses were read
    fetched = 0  # number of samples that loaders returned
    fed = 0  # number of samples passed to forwards, if no loader returned any
    loss: Any = None
    norm: Any = None
    skipped = False
    outside = 0
    last = 0  # the number of the last of its steps
    times = ZERO
    measured: Measured | None = None
    cores: tuple[int, int] | None = None  # nanoseconds that the thread ran and waited for a core

    def __init__(self, number: int, start: int, vitals: Vitals, passes: list[int]) -> None:
        self.number = number
        self.vitals = vitals
        self.start = start
        self.passes = passes  # for each ended step, the number of backwards so far

    def line(self, last: bool = False) -> bytes:
        """Return the line of its `ddpdoctor.run.records.training.StepRecord`.

        The writing thread calls this for every step. Encoding a record would take three times as
        long, during which the training thread may wait for the GIL.

        Raises:
            NotYet: The device is still busy with the step, and this is not the ``last`` call.
        """
        times, host = self._timed(last)
        ran: Sequence[int] | None = self.cores
        count, number, backwards = len(self.passes), "", ""
        if count > 1:
            times, ran = _means(times, count), ran and _means(ran, count)
            number, backwards = f',"steps":{count}', _backwards_of_each(self.passes)
        elif self.passes[0] != 1:
            backwards = f',"backwards":{self.passes[0]}'
        _, other, data, forward, backward, optimizer, wait, _ = times
        # DDP timed only some of the reduced backwards.
        exposed = self.exposed * self.armed // (self.timed * count) if self.timed else 0
        exposed = min(exposed, backward)
        split = self.timed >= self.armed or (count > 1 and self.timed > 0)
        # Waits of the host for a core do not explain times on a device.
        cores = ran if ran is not None and self.measured is None else (0, 0)
        backward, wait = backward - exposed, wait + exposed
        self.vitals.wrote(
            Parts(self.last, data, forward, backward, optimizer, other, wait, split, *cores)
        )
        text = f'{{"kind":"step","step":{self.last},"start":{self.start}'
        if self.epoch != NO_EPOCH:
            text += f',"epoch":{self.epoch}'
        text += (
            f',"data":{data},"forward":{forward},"backward":{backward}'
            f',"optimizer":{optimizer},"other":{other},"wait":{wait}'
            f',"total":{data + forward + backward + optimizer + other + wait}'
            f',"split":{"true" if split else "false"}'
        )
        if ran is not None:
            text += f',"cpu":{ran[0]},"waited":{ran[1]}'
        if host:
            text += f',"host":{host // count}'
        text += number
        samples = self.fetched or self.fed
        if samples:
            text += f',"samples":{samples // max(1, self.full)}'
        for name, given in (("loss", self.loss), ("norm", self.norm)):
            value = given() if callable(given) else given
            if value is not None:
                text += f',"{name}":{json.dumps(value)}'
        text += backwards
        if self.skipped:
            text += ',"skipped":true'
        if self.outside:
            text += f',"outside":{self.outside}'
        return text.encode() + b"}\n"

    def _timed(self, last: bool) -> Timed:
        """Return the times on the device, or on the host if the device did not finish the step.

        Light steps are assumed to have the phases of full ones. But a device does not wait longer
        for data than the host, whose times cover all steps.
        """
        found = None if self.measured is None else self.measured()
        if found is None:
            if self.measured is not None and not last:
                raise NotYet
            return Timed(self.times)
        thinned, *phases = found.times
        seen = sum(phases)
        if not thinned:
            return found
        if not seen:
            return Timed(self.times)
        whole, data = seen + thinned, phases[Phase.DATA - 1]
        waited = min(data * whole // seen, max(data, self.times[Phase.DATA]))
        rest = max(seen - data, 1)
        scaled = [0, *(each * (whole - waited) // rest for each in phases)]
        scaled[Phase.DATA] = waited
        scaled[Phase.BACKWARD] += whole - sum(scaled)
        return Timed(scaled, found.host * whole // seen)


def _backwards_of_each(passes: Sequence[int]) -> str:
    """Return the field with the numbers of backwards. Empty if each of several steps has one."""
    counts = [b - a for a, b in itertools.pairwise((0, *passes))]
    if min(counts) == max(counts):
        return f',"backwards":{counts[0]}' if counts[0] != 1 else ""
    runs = [f"{passed},{len([*same])}" for passed, same in itertools.groupby(counts)]
    return f',"each":[{",".join(runs[:MAX_RUNS])}]'


def _means(sums: Sequence[int], count: int) -> list[int]:
    return [each // count for each in sums]


# -- steps and phases

SKIPPED = 24  # number of newest skipped steps that are remembered


class StepTracker(Phases):
    """Follow the training thread of one rank through its steps.

    ``optimizers`` returns whether there has been an optimizer: then only optimizers end a step.
    """

    def __init__(self, recorder: Recorder, optimizers: Callable[[], bool]) -> None:
        super().__init__(recorder.page)
        self._recorder = recorder
        self._totals = recorder.page.totals
        self._optimizers = optimizers
        self.native = threading.get_native_id()
        self._cores = CoreClock()
        self._closer: weakref.ref[object] | None = None
        self._resting: set[int] = set()
        self._closed: OpenStep | None = None
        self.detail = Detail(self)
        self.skipped: deque[int] = deque(maxlen=SKIPPED)  # by the job, or by a GradScaler
        self._vitals = Vitals(recorder.page)
        recorder.each_round.append(self._vitals.store)
        self.step = OpenStep(0, self.began + self.unix, self._vitals, self.passes)
        self.memory_of: Any = None  # the device whose memory is read
        self.noticing: Callable[[], None] | None = None  # called when watched memory has changed
        self._fresh = True

    # -- phases

    def site_met(self, phase: int, site: Site) -> None:
        """Record a new line at which a phase is entered."""
        super().site_met(phase, site)
        if site.path:
            self._recorder.add(SiteRecord(phase=Phase(phase).label, **site.place))

    def here(self) -> bool:
        """Make the calling thread the training thread. Return whether another one was it before."""
        changed = super().here()
        if changed:
            self.native = threading.get_native_id()
            self._cores.close()
            self._cores = CoreClock()
        return changed

    def use_device(self, clock: CudaClock) -> None:
        """Use the device's events for times from now on."""
        self.device = clock
        self.use_memory(clock.device)
        self._restart()

    def use_memory(self, device: Any) -> None:
        """Read the memory of a device from now on. Its time may be unknown."""
        self.memory_of = device
        self._vitals.use_device(device)

    def _cut_device(self) -> Measured | None:
        """End the times of a line on the device, if any. Return a function that reads them."""
        if self.device is None:
            return None
        self.device.charge(Phase.STARTING if self.light else self.phase)
        return self.device.cut()

    def page_phase(self, phase: int) -> None:
        """Show a phase that is not part of a step (starting, ended)."""
        super().page_phase(phase)
        self._totals(self.steps, self.epoch, 0, self._recorder.dropped)

    # -- steps

    def forward(self, armed: bool) -> None:
        """Begin DDP's forward in grad mode. ``armed``: its backward will be all-reduced."""
        if self.begun:
            if not self._optimizers():
                self.close()
        elif self._fresh:
            # Time before the first step, such as building the model, belongs to no step.
            self.outside()
            self._fresh = False
        self.forward_begins(armed)

    def evaluating(self) -> None:
        """Begin a forward without gradients."""
        if self.begun and not self._optimizers():
            self.close()

    def evaluated(self) -> None:
        """End a forward without gradients. The time since the last step belongs to no step."""
        if not self._optimizers():
            self.begun += 1
            self.close()
        elif not self.begun:
            self.outside()

    def fetch(self, iterator: int, first: bool) -> None:
        """Note the start of a fetch from an iterator, perhaps the first one of a pass."""
        self._fresh = False
        if not self.begun:
            known = iterator in self.trained
            if first or (known and self.aside):
                # The job returns from another loader, which it may have left early.
                self.outside()
            self.aside = not known
        elif not self._optimizers():
            self.close()
        self.iterators.add(iterator)

    def outside(self) -> None:
        """Assign the time since the last step to no step, unless one has begun."""
        if self.begun:
            return
        if self.step.passes:
            self._end_line(self.steps, whole=False)
        began = self.began
        self._restart()
        self.step.outside += self.began - began
        self.step.fetched = self.step.full = 0
        self.iterators.clear()
        self.step.start = self.began + self.unix

    def _restart(self) -> None:
        """Restart measuring."""
        self.began = self.start()
        self._cores.cut()
        self._cut_device()

    def stepped(self, optimizer: object, skipped: bool = False) -> None:
        """End an optimizer's step, or a step ``skipped`` by a GradScaler after an overflow."""
        self.optimizer_steps += 1
        closer = self._closer() if self._closer is not None else None
        if closer is optimizer:
            pass
        elif closer is None:
            self._closer = weakref.ref(optimizer)
        else:
            # Another optimizer steps twice while the first one rests, so it counts from now on.
            if id(optimizer) not in self._resting:
                self._resting.add(id(optimizer))
                self.closer = 0
                return
            self._closer = weakref.ref(optimizer)
        if self._resting:
            self._resting.clear()
        else:
            self.closer = id(optimizer)
        self.close(skipped)

    def close(self, skipped: bool = False) -> None:
        """End the step. Its line is written when the next step ends and DDP knows the waits."""
        step = self.step
        now = self.charge()
        self.last_total = total = now - self.began
        self.began = now
        self.steps = number = self.steps + 1
        self.begun = 0
        self.passes.append(self.step_backwards)
        if not self.light:
            step.full += 1
            if self.device is not None:
                self.device.step_ended()
        if skipped:
            step.skipped = True
            self.skipped.append(number - 1)
        if self.iterators:
            self.trained, self.iterators = self.iterators, set()
        self.aside = False
        if number & self.line and not skipped:
            self.keep()
        else:
            self._end_line(number)
        self._totals(number, self.epoch, total, self._recorder.dropped)
        light, self.light = self.light, (number + 1) & self.sparse
        if (not light) != (not self.light) and self.device is not None:
            # The phases of light steps are unknown.
            self.device.charge(Phase.STARTING if light else self.phase)
        if self.noticing is not None and self.noticed():
            self.noticing()
        if number >= events.due:
            events.ring(number)

    def _end_line(self, number: int, whole: bool = True) -> None:
        """Begin a new journal line. If ``whole``, all time since the last line belongs to steps."""
        step, now = self.step, self.began
        step.times = self.take(kept=not whole)
        step.measured = self._cut_device()
        ran = self._cores.cut()
        if whole:
            step.cores = ran
        step.epoch = self.epoch
        step.last = number - 1
        step.armed, self.step_armed = self.step_armed, 0
        self.step_backwards = 0
        if self._closed is not None:
            self._recorder.add(self._closed.line)
        self._closed = step
        if now >= self._vitals.due:
            self._vitals.ask(now)
        self.passes = []
        self.step = OpenStep(number, now + self.unix, self._vitals, self.passes)
        self.detail.choose(number, self.last_total)
        self.line, self.sparse = self.detail.line, self.detail.sparse

    def finish(self) -> int:
        """Write the last step. Return the number of steps."""
        if self.begun and not self._optimizers():
            self.close()
        if self.step.passes:
            self._end_line(self.steps, whole=False)
        if self._closed is not None:
            self._recorder.add(self._closed.line)
            self._closed = None
        return self.steps
