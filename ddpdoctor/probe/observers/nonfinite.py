"""Find losses and gradients that are NaN or infinite and yet were stepped with, the first few.

A step that a GradScaler skipped has done no harm and is passed over. A loss on a GPU is looked at
some steps later, when it has come into pinned memory by itself; what it came out of is asked for
before, as often as the budget allows (`origins`).

Gradients of the rank's own are seen before the all-reduce spreads them. One small parameter of each
DDP module is watched, the first one: its gradient comes out of nearly all of the backward pass, so
what is not finite anywhere in it arrives there. Its sum is looked at just before autograd
accumulates it, and only then are the other parameters searched. On a GPU the sum comes later: there
the others are asked for as often as the budget allows.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ddpdoctor.probe.observers import origins, readback
from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.readback import Loss, capturing
from ddpdoctor.probe.runtime import events, hot, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import NonfiniteGradientRecord, NonfiniteRecord, Origin

# -- finite


MOST_RECORDS = 8
"""Records that one rank writes."""

LARGEST_STEPPED = 1 << 16
"""Elements of a parameter that is looked at after the step."""

MOST_ORIGINS = 2
"""Losses whose origin is looked for: the second one in case that the step was skipped."""

READ_LATER = 16
"""Steps after which a GPU's loss is looked at; its slot of memory is used again after 64."""

MOST_TRACES = 4
"""Traces of losses that are on their way or hold a value that is not finite."""

TRACES_SHARE = 4
"""Of what diagnosis may cost, a quarter at most goes into traces of losses that are mostly fine."""

FIRST_TRACE = 5_000_000
"""Nanoseconds that the first one may cost."""

GPU_BANDWIDTH = 1_000
"""Bytes in a nanosecond that a GPU reads, at least while it is needed for something."""

Names = Callable[[], "list[str]"]
_Waiting = deque[tuple[int, Any, "Names | None"]]
"""The step, the number or what reads it, and whose gradient it is; None for a loss."""


class Losses(Observer):
    """The losses of one rank, and sums of its gradients, on their way."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self.waiting: _Waiting = deque(maxlen=64)
        self._recorded = {True: 0, False: 0}
        """Records so far, of gradients and of losses."""
        self._origins: dict[int, Origin | None] = {}
        """By step, where its loss became what it is."""
        self._traces: dict[int, origins.Trace] = {}
        self._traced = 0
        """Nanoseconds spent on traces."""
        # It goes through all kinds of graphs: if that fails, losses are still recorded.
        self._look_safely = shield.shielded(self._look_into)

    def loss_began(self, loss: Any, value: Loss | float) -> None:
        """Take a loss that may not be finite."""
        self._take(self.state.tracker.steps, value, None)
        if self.state.budget.enabled:
            self._look_safely(loss, value)

    def _look_into(self, loss: Any, value: Loss | float) -> None:
        """Look where such a loss became what it is, before backward frees its graph."""
        step = self.state.tracker.steps
        if callable(value):
            self._trace(step, loss)
        elif step not in self._origins and len(self._origins) < MOST_ORIGINS:
            self._origins[step] = None
            with self.state.budget.spending():
                self._origins[step] = origins.origin(loss, value, self._replicas.alive)

    def _trace(self, step: int, loss: Any) -> None:
        """Ask the device for what a loss came out of, if it can be paid for."""
        budget = self.state.budget
        paid = (
            budget.left() >= FIRST_TRACE
            if not self._traced
            else TRACES_SHARE * self._traced <= budget.earned()
        )
        if not paid or step in self._traces or len(self._traces) >= MOST_TRACES:
            return
        began = clock()
        found = origins.trace(loss, self._replicas.alive)
        cost = clock() - began
        if found is not None:
            self._traces[step], size = found
            cost += size // GPU_BANDWIDTH
        if self._traced:
            budget.spend(cost)
        else:
            budget.spend_first(cost, FIRST_TRACE)
        self._traced += cost

    def gradient(self, value: Any, names: Names) -> None:
        """Take the sum of a gradient before the all-reduce, if it is to be looked at.

        Args:
            value: The sum, or what reads it.
            names: Gives the parameters to name.
        """
        self._take(self.state.tracker.steps, value, names)

    def _take(self, step: int, value: Any, names: Names | None) -> None:
        wanted = callable(value) or not math.isfinite(value)
        if wanted and self._recorded[names is not None] < MOST_RECORDS:
            self.waiting.append((step, value, names))
            self.wake("step_ended")

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Look at what has arrived."""
        if not self.waiting:
            self.rest("step_ended")
            return
        while self.waiting:
            step, value, names = self.waiting[0]
            if callable(value) and step > number - READ_LATER:
                break
            self.waiting.popleft()
            self._look(step, value, names)
        if self._traces and not capturing(sys.modules["torch"]):
            for step_number, trace in list(self._traces.items()):
                if trace.ready and trace.finite:
                    del self._traces[step_number]

    def rank_ends(self) -> None:
        """Look at the rest: the job has waited for its devices, or does not care any more."""
        while self.waiting:
            self._look(*self.waiting.popleft())

    def _look(self, step: int, number: Any, names: Names | None) -> None:
        value = number() if callable(number) else number
        trace = None if names else self._traces.pop(step, None)
        of_gradient = names is not None
        if (
            value is None
            or math.isfinite(value)
            or step in self.state.tracker.skipped
            or self._recorded[of_gradient] >= MOST_RECORDS
        ):
            return
        self._recorded[of_gradient] += 1
        named = tuple(names()) if names is not None else ()
        # Whether the optimizer has just stepped with it.
        spread = step == self.state.tracker.steps - 1 and self._spread(named)
        now = time.time_ns()
        record: Record
        if of_gradient:
            record = NonfiniteGradientRecord(time=now, step=step, names=named, spread=spread)
        else:
            where = self._origins.get(step)
            if trace is not None and trace.ready:
                where = trace.origin(value)
            record = NonfiniteRecord(
                time=now, step=step, loss=repr(value), spread=spread, origin=where
            )
        self.state.recorder.add(record)

    def _spread(self, names: Sequence[str]) -> bool:
        """Whether small parameters, those of these names if any, are not finite now.

        A GPU is asked if it has nothing left to do, as at the end of a job: it is not waited for.
        """
        torch: Any = sys.modules["torch"]
        looked_at = [
            parameter
            for each in self._replicas.alive
            for index in (
                map(each.names.index, set(names) & set(each.names)) if names else each.witnesses
            )
            if (parameter := each.parameter(index)) is not None
            and readback.is_plain(parameter)
            and parameter.numel() <= LARGEST_STEPPED
            and (parameter.device.type == "cpu" or _idle(torch, parameter.device))
        ]
        with torch.no_grad():
            return any(not parameter.isfinite().all() for parameter in looked_at)


def _idle(torch: Any, device: Any) -> bool:
    return bool(not capturing(torch) and torch.cuda.current_stream(device).query())


# -- gradients of a rank's own that are not finite, seen before the all-reduce spreads them


LARGEST_WATCHED = 1 << 16
"""Elements of a parameter that is watched, at most."""

MOST_SEARCHES = 8
"""Gradients that are looked into; a job that goes on with NaN has them in every step."""

GRADIENTS_SHARE = 4
"""Of what diagnosis may cost, a quarter at most goes here: the others have to have their turn."""

NAMED_GRADIENTS = 4
"""Parameters that are named: the last ones, through which the backward came first."""

_SEARCH = "local_gradients.search"


class _Watched:
    """A parameter, and what is to be called before its gradient is accumulated.

    Args:
        parameter: The parameter; the node of autograd that does it would keep it alive.
        call: What is called.
    """

    def __init__(self, parameter: Any, call: Callable[[Any], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._call = call
        self._handle: Any = None
        self._watching = False

    def watch(self) -> None:
        """Call it from now on."""
        parameter = self._parameter()
        if self._watching or parameter is None or torch_private.compiles_autograd():
            return
        self._watching = self._handle is not None and torch_private.hook_again(
            self._handle, self._call
        )
        if not self._watching:
            node = torch_private.accumulator(parameter)
            if node is not None:
                self._handle = node.register_prehook(self._call)
                self._watching = True

    def let_go(self) -> None:
        """Call it no more."""
        if self._watching:
            self._handle.remove()
            self._watching = False


class LocalGradients(Observer):
    """Those of one rank."""

    def __init__(self, state: RankState, losses: Losses) -> None:
        super().__init__(state)
        self._losses = losses
        self._found = 0
        self._spent = 0
        self._watched: list[_Watched] = []

    def ddp_built(self, ddp: Any) -> None:
        """Watch a parameter of the module."""
        for name, parameter in torch_private.reduced_parameters(ddp):
            if readback.is_plain(parameter) and 0 < parameter.numel() <= LARGEST_WATCHED:
                self._watched.append(_Watched(parameter, self._watcher(weakref.ref(ddp), name)))
                self.wake("backward_begins", "step_ended")
                return

    def _watcher(self, module: weakref.ref[Any], name: str) -> Callable[[Any], None]:
        look = shield.shielded(self._look)
        tracker = self.state.tracker

        def before_accumulation(gradients: Any) -> None:
            if rank.active is tracker and not tracker.light:
                look(module, name, gradients[0])

        return hot.deferring(before_accumulation)

    def backward_begins(self) -> None:
        """Watch in steps that are seen in full: in the others autograd is to call nothing."""
        for each in self._watched:
            each.watch()
        self.rest("backward_begins")

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Watch no longer, until the next step that is seen in full."""
        sparse = self.state.tracker.sparse
        if not self.state.tracker.light:
            return
        for each in self._watched:
            each.let_go()
        self.rest("step_ended")
        events.before_step((number + 2 + sparse & ~sparse) - 1, self._watch_again)

    def _watch_again(self) -> None:
        self.wake("backward_begins", "step_ended")

    def _look(self, module: weakref.ref[Any], name: str, gradient: Any) -> None:
        budget = self.state.budget
        if self._found >= MOST_SEARCHES or GRADIENTS_SHARE * self._spent > budget.earned():
            return
        if not readback.is_plain(gradient):
            return
        torch: Any = sys.modules["torch"]
        began = clock()
        with torch.no_grad():
            value = readback.loss_reader(gradient.sum(dtype=torch.float32))
            if callable(value):
                # To search costs more than to look: it is done half as often.
                search = 2 * GRADIENTS_SHARE * self._spent <= budget.earned()
                self._losses.gradient(value, _ask(module, name, search))
            elif value is not None and not math.isfinite(value):
                self._found += 1
                names = _search(module, name)
                self._losses.gradient(value, lambda: names)
        cost = clock() - began
        self._spent += cost
        budget.spend(cost)


def _search(module: weakref.ref[Any], name: str) -> list[str]:
    """The parameters on the CPU whose gradient so far is not finite."""
    named = _arrived(module)
    sizes = origins.sizes_at_once([gradient for _, gradient in named])
    return _named([(each, sizes(place)) for place, (each, _) in enumerate(named)], name)


def _ask(module: weakref.ref[Any], name: str, search: bool) -> Names:
    """Ask the devices which gradients so far are not finite; what names them when they answered."""
    found, names = None, []
    if search and _SEARCH not in shield.off:
        try:
            named = _arrived(module)
            names = [each for each, _ in named]
            found = readback.largest_magnitudes([gradient for _, gradient in named])
        except Exception as error:
            # The sum is recorded without it.
            shield.fault(_SEARCH, error)

    def answer() -> list[str]:
        if found is None or not found.ready:
            return [name]
        return _named(list(zip(names, found.numbers(), strict=True)), name)

    return answer


def _named(sizes: list[tuple[str, float]], name: str) -> list[str]:
    """The parameters whose gradients are not finite, those that backward came to first."""
    return [each for each, size in sizes if not math.isfinite(size)][
        : -NAMED_GRADIENTS - 1 : -1
    ] or [name]


def _arrived(module: weakref.ref[Any]) -> list[tuple[str, Any]]:
    """The gradients of this rank's own that have arrived so far, with their parameters' names."""
    ddp = module()
    # In a view of a bucket there may already be what the all-reduce left.
    if ddp is None or ddp.gradient_as_bucket_view:
        return []
    return [
        (each, parameter.grad)
        for each, parameter in torch_private.reduced_parameters(ddp)
        if parameter.grad is not None and origins.measurable(parameter.grad)
    ]
