"""Find the first losses and gradients that are NaN or infinite and that an optimizer used.

A step that a GradScaler skipped does no harm and is ignored. A loss on a GPU is read some steps
later, when it has arrived in pinned memory. The magnitudes of its inputs are requested before that,
as often as the budget allows (`origins`).

A rank's own gradients are checked before the all-reduce spreads them. The first small parameter of
each DDP module is watched: its gradient depends on nearly all of the backward pass, so any
non-finite value there reaches it. Its sum is checked just before autograd accumulates it. Only if
it is not finite are the other parameters searched. On a GPU the sum arrives later, so the others
are requested at once, as often as the budget allows.
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

# -- losses

MAX_RECORDS = 8  # maximum number of records
LARGEST_STEPPED = 1 << 16  # maximum size of a parameter that is checked after the step
MAX_ORIGINS = 2  # maximum number of searches for an origin: the first loss's step may be skipped
READ_LATER = 16  # steps after which a GPU's loss is read; its memory is reused after 64
MAX_TRACES = 4  # maximum number of traces that are not ready, or whose sizes are not finite
TRACES_SHARE = 4  # divisor: this part of the budget goes into traces, most of which find nothing
FIRST_TRACE = 5_000_000  # nanoseconds that the first trace may cost
GPU_BANDWIDTH = 1_000  # bytes that a busy GPU reads in a nanosecond

Names = Callable[[], "list[str]"]
_Waiting = deque[tuple[int, Any, "Names | None"]]
"""A step, a number or its reader, and the names of a gradient's parameters."""


class Losses(Observer):
    """The pending losses of one rank, and sums of its gradients."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self.waiting: _Waiting = deque(maxlen=64)
        self._recorded = {True: 0, False: 0}  # number of records of gradients, and of losses
        self._origins: dict[int, Origin | None] = {}  # by step
        self._traces: dict[int, origins.Trace] = {}
        self._traced = 0  # nanoseconds spent on traces
        # Graphs may have any shape. If tracing fails, losses are still recorded.
        self._look_safely = shield.shielded(self._look_into)

    def loss_began(self, loss: Any, value: Loss | float) -> None:
        """Keep a loss that may not be finite."""
        self._take(self.state.tracker.steps, value, None)
        if self.state.budget.enabled:
            self._look_safely(loss, value)

    def _look_into(self, loss: Any, value: Loss | float) -> None:
        """Search for the origin of a non-finite loss before backward frees its graph."""
        step, budget = self.state.tracker.steps, self.state.budget
        if not callable(value):
            if step not in self._origins and len(self._origins) < MAX_ORIGINS:
                self._origins[step] = None
                with budget.spending():
                    self._origins[step] = origins.origin(loss, value, self._replicas.alive)
            return
        if self._traced:
            paid = TRACES_SHARE * self._traced <= budget.earned()
        else:
            paid = budget.left() >= FIRST_TRACE
        if not paid or step in self._traces or len(self._traces) >= MAX_TRACES:
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
        """Keep the sum of a gradient, or its reader, if it may not be finite."""
        self._take(self.state.tracker.steps, value, names)

    def _take(self, step: int, value: Any, names: Names | None) -> None:
        wanted = callable(value) or not math.isfinite(value)
        if wanted and self._recorded[names is not None] < MAX_RECORDS:
            self.waiting.append((step, value, names))
            self.wake("step_ended")

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Read the values that have arrived."""
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
        """Read the rest. The job has waited for its devices, or no longer needs them."""
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
            or self._recorded[of_gradient] >= MAX_RECORDS
        ):
            return
        self._recorded[of_gradient] += 1
        named = tuple(names()) if names is not None else ()
        # Check whether the optimizer has just stepped with it.
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
        """Return whether small parameters, or the named ones, are not finite now.

        Read from a GPU only if it is idle, such as at the end of a job, because we never wait for
        it.
        """
        torch: Any = sys.modules["torch"]
        small = [
            parameter
            for each in self._replicas.alive
            for index in (
                map(each.names.index, set(names) & set(each.names)) if names else each.spread
            )
            if (parameter := each.parameter(index)) is not None
            and readback.is_plain(parameter)
            and parameter.numel() <= LARGEST_STEPPED
            and (
                parameter.device.type == "cpu"
                or (not capturing(torch) and torch.cuda.current_stream(parameter.device).query())
            )
        ]
        with torch.no_grad():
            return any(not parameter.isfinite().all() for parameter in small)


# -- a rank's own gradients, before the all-reduce spreads non-finite values

LARGEST_WATCHED = 1 << 16  # maximum size of a watched parameter
MAX_SEARCHES = 8  # maximum number of searches: a job with NaN would have one in every step
GRADIENTS_SHARE = 4  # divisor: this part of the budget is spent here
NAMED_GRADIENTS = 4  # maximum number of named parameters, in the order of the backward

_SEARCH = "local_gradients.search"


class _Watched:
    """Call a function before a parameter's gradient is accumulated. Keep only a weak reference."""

    def __init__(self, parameter: Any, call: Callable[[Any], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._call = call
        self._handle: Any = None
        self._watching = False

    def watch(self) -> None:
        """Call the function from now on."""
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
        """Stop calling the function."""
        if self._watching:
            self._handle.remove()
            self._watching = False


class LocalGradients(Observer):
    """The gradients of one rank before their all-reduce."""

    def __init__(self, state: RankState, losses: Losses) -> None:
        super().__init__(state)
        self._losses = losses
        self._found = 0
        self._spent = 0
        self._watched: list[_Watched] = []

    def ddp_built(self, ddp: Any) -> None:
        """Watch a parameter of a new module."""
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
        """Watch in full steps only. In light steps autograd has nothing to call."""
        for each in self._watched:
            each.watch()
        self.rest("backward_begins")

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Stop watching until the next full step."""
        sparse = self.state.tracker.sparse
        if not self.state.tracker.light:
            return
        for each in self._watched:
            each.let_go()
        self.rest("step_ended")
        full = (number + 2 + sparse & ~sparse) - 1
        events.before_step(full, lambda: self.wake("backward_begins", "step_ended"))

    def _look(self, module: weakref.ref[Any], name: str, gradient: Any) -> None:
        budget = self.state.budget
        if self._found >= MAX_SEARCHES or GRADIENTS_SHARE * self._spent > budget.earned():
            return
        if not readback.is_plain(gradient):
            return
        torch: Any = sys.modules["torch"]
        began = clock()
        with torch.no_grad():
            value = readback.loss_reader(gradient.sum(dtype=torch.float32))
            if callable(value):
                # A search costs more than a sum, so search half as often.
                search = 2 * GRADIENTS_SHARE * self._spent <= budget.earned()
                self._losses.gradient(value, _ask(module, name, search))
            elif value is not None and not math.isfinite(value):
                self._found += 1
                found = _arrived(module)
                sizes = origins.sizes_at_once([each for _, each in found])
                names = _named([(each, sizes(at)) for at, (each, _) in enumerate(found)], name)
                self._losses.gradient(value, lambda: names)
        cost = clock() - began
        self._spent += cost
        budget.spend(cost)


def _ask(module: weakref.ref[Any], name: str, search: bool) -> Names:
    """Ask the devices which gradients are not finite. Return a function that names them later."""
    found, names = None, []
    if search and _SEARCH not in shield.off:
        try:
            named = _arrived(module)
            names = [each for each, _ in named]
            found = readback.largest_magnitudes([gradient for _, gradient in named])
        except Exception as error:
            # Record the sum without the search.
            shield.fault(_SEARCH, error)

    def answer() -> list[str]:
        if found is None or not found.ready:
            return [name]
        return _named(list(zip(names, found.numbers(), strict=True)), name)

    return answer


def _named(sizes: list[tuple[str, float]], name: str) -> list[str]:
    """Return the parameters with non-finite gradients, in the order of the backward."""
    return [each for each, size in sizes if not math.isfinite(size)][
        : -NAMED_GRADIENTS - 1 : -1
    ] or [name]


def _arrived(module: weakref.ref[Any]) -> list[tuple[str, Any]]:
    """Return the gradients accumulated so far by this rank, with the names of their parameters."""
    ddp = module()
    # A view of a bucket may already hold the result of the all-reduce.
    if ddp is None or ddp.gradient_as_bucket_view:
        return []
    return [
        (each, parameter.grad)
        for each, parameter in torch_private.reduced_parameters(ddp)
        if parameter.grad is not None and origins.measurable(parameter.grad)
    ]
