"""Losses and gradients that are not finite and yet were stepped with: the first few of a rank.

A step that a GradScaler skipped has done no harm and is passed over. A loss on a GPU is looked at
some steps later, when it has come into pinned memory by itself.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from typing import Any

from ddpdoctor.probe import events, norms, origins, rank, shield
from ddpdoctor.probe.budget import clock
from ddpdoctor.probe.hooks.losses import Loss
from ddpdoctor.probe.replicas import watched
from ddpdoctor.probe.steps import OpenStep
from ddpdoctor.record import Record

MOST = 8
"""Records that one rank writes."""

LARGEST = 1 << 16
"""Elements of a parameter that is looked at after the step."""

MOST_ORIGINS = 2
"""Losses whose origin is looked for: the second one in case that the step was skipped."""

LATER = 16
"""Steps after which a GPU's loss is looked at; its slot of memory is used again after 64."""

_Waiting = deque[tuple[OpenStep, Any, list[str]]]
"""The step, the number or what reads it, and whose gradient it is; no name for a loss."""


class Losses:
    """The losses of one rank, and sums of its own gradients, on their way.

    Args:
        state: The rank.
    """

    def __init__(self, state: rank.RankState) -> None:
        self.state = state
        self.waiting: _Waiting = deque(maxlen=64)
        self._told = {True: 0, False: 0}
        self._origins: dict[int, Record | None] = {}
        """By step, where its loss became what it is."""

    def loss_began(self, loss: Any, value: Loss | float) -> None:
        """Take a loss that may not be finite, and look where it became so.

        Backward has not freed the graph yet.
        """
        step = self.state.tracker.step
        self._take(step, value, [])
        budget = self.state.budget
        if callable(value) or not budget.enabled or step.number in self._origins:
            return
        if len(self._origins) < MOST_ORIGINS:
            self._origins[step.number] = None
            began = clock()
            self._origins[step.number] = origins.origin(loss, value)
            budget.spend(clock() - began)

    def gradient(self, value: Any, names: list[str]) -> None:
        """Take the sum of a gradient before the all-reduce, if it is to be looked at."""
        self._take(self.state.tracker.step, value, names)

    def _take(self, step: OpenStep, value: Any, names: list[str]) -> None:
        wanted = callable(value) or not math.isfinite(value)
        if wanted and self._told[bool(names)] < MOST:
            self.waiting.append((step, value, names))

    def step_ended(self, number: int) -> None:
        """Look at what has arrived."""
        while self.waiting:
            step, value, names = self.waiting[0]
            if callable(value) and step.number > number - LATER:
                return
            self.waiting.popleft()
            self._look(step, value, names)

    def rank_ends(self) -> None:
        """Look at the rest: the job has waited for its devices, or does not care any more."""
        while self.waiting:
            self._look(*self.waiting.popleft())

    def _look(self, step: OpenStep, number: Any, names: list[str]) -> None:
        value = number() if callable(number) else number
        of_gradient = bool(names)
        if value is None or math.isfinite(value) or step.skipped or self._told[of_gradient] >= MOST:
            return
        self._told[of_gradient] += 1
        told: Record = {"names": names} if names else {"loss": repr(value)}
        if step.number == self.state.tracker.steps - 1 and not callable(number):
            # The optimizer has just stepped with it.
            told["spread"] = _spread(names)
        where = self._origins.get(step.number)
        if where is not None and not names:
            told["origin"] = where
        kind = "nonfinite_gradient" if names else "nonfinite"
        self.state.recorder.add({"kind": kind, "time": time.time_ns(), "step": step.number, **told})


def _spread(names: list[str]) -> bool:
    """Whether small parameters on the CPU, those of these names if any, are not finite now."""
    looked_at = [
        parameter
        for each in watched
        for index in (map(each.names.index, set(names) & set(each.names)) if names else each.probes)
        if (parameter := each.parameter(index)) is not None
        and norms.plain(parameter)
        and parameter.device.type == "cpu"
        and parameter.numel() <= LARGEST
    ]
    with sys.modules["torch"].no_grad():
        return any(not parameter.isfinite().all() for parameter in looked_at)


_losses: Losses | None = None


def _mine() -> Losses | None:
    """The losses of this process as the rank that it is now."""
    global _losses
    state = rank.current()
    if state is None:
        return None
    if _losses is None or _losses.state is not state:
        _losses = Losses(state)
    return _losses


@shield.shielded
def loss_began(loss: Any, value: Loss | float) -> None:
    """A backward begins with a loss that is not finite, or on a GPU and to be read later."""
    mine = _mine()
    if mine is not None:
        mine.loss_began(loss, value)


def local_gradient(value: Any, names: list[str]) -> None:
    """The sum of a gradient of this rank's own, or what reads it, and the parameters to name."""
    mine = _mine()
    if mine is not None:
        mine.gradient(value, names)


@shield.shielded
def _step_ended(optimizer: Any, number: int) -> None:
    if _losses is not None and _losses.waiting and _losses.state is rank.current():
        _losses.step_ended(number)


@shield.shielded
def _rank_ends() -> None:
    if _losses is not None and _losses.state is rank.current():
        _losses.rank_ends()


def install() -> None:
    """Listen to the moments of training."""
    events.step_ended.append(_step_ended)
    events.rank_ends.append(_rank_ends)
