"""Losses and gradients that are not finite and yet were stepped with: the first few of a rank.

A step that a GradScaler skipped has done no harm and is passed over. A loss on a GPU is looked at
some steps later, when it has come into pinned memory by itself; what it came out of is asked for
before, as often as the budget allows.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ddpdoctor.probe.observers import norms, origins
from ddpdoctor.probe.observers.readback import Loss, capturing
from ddpdoctor.probe.observers.replicas import Replicas
from ddpdoctor.probe.runtime import shield
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import NonfiniteGradientRecord, NonfiniteRecord, Origin

MOST = 8
"""Records that one rank writes."""

LARGEST = 1 << 16
"""Elements of a parameter that is looked at after the step."""

MOST_ORIGINS = 2
"""Losses whose origin is looked for: the second one in case that the step was skipped."""

LATER = 16
"""Steps after which a GPU's loss is looked at; its slot of memory is used again after 64."""

MOST_TRACES = 4
"""Traces of losses that are on their way or hold a value that is not finite."""

SHARE = 4
"""Of what diagnosis may cost, a quarter at most goes into traces of losses that are mostly fine."""

FIRST_TRACE = 5_000_000
"""Nanoseconds that the first one may cost."""

BANDWIDTH = 1_000
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
            else SHARE * self._traced <= budget.earned()
        )
        if not paid or step in self._traces or len(self._traces) >= MOST_TRACES:
            return
        began = clock()
        found = origins.trace(loss, self._replicas.alive)
        cost = clock() - began
        if found is not None:
            self._traces[step], size = found
            cost += size // BANDWIDTH
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
        if wanted and self._recorded[names is not None] < MOST:
            self.waiting.append((step, value, names))
            self.wake("step_ended")

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Look at what has arrived."""
        if not self.waiting:
            self.rest("step_ended")
            return
        while self.waiting:
            step, value, names = self.waiting[0]
            if callable(value) and step > number - LATER:
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
            or self._recorded[of_gradient] >= MOST
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
            and norms.plain(parameter)
            and parameter.numel() <= LARGEST
            and (parameter.device.type == "cpu" or _idle(torch, parameter.device))
        ]
        with torch.no_grad():
            return any(not parameter.isfinite().all() for parameter in looked_at)


def _idle(torch: Any, device: Any) -> bool:
    return bool(not capturing(torch) and torch.cuda.current_stream(device).query())
