"""Losses that are not finite and yet were stepped with: one record each, the first few of a rank.

A step that a GradScaler skipped has done no harm and is passed over. A loss on a GPU is looked at
some steps later, when it has come into pinned memory by itself.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from ddpdoctor.probe import events, rank, shield
from ddpdoctor.probe.steps import OpenStep

MOST = 8
"""Records that one rank writes."""

LATER = 16
"""Steps after which a GPU's loss is looked at; its slot of memory is used again after 64."""

_Waiting = deque[tuple[OpenStep, Any]]


class Losses:
    """The losses of one rank, on their way.

    Args:
        state: The rank.
    """

    def __init__(self, state: rank.RankState) -> None:
        self.state = state
        self._waiting: _Waiting = deque(maxlen=64)
        self._told = 0

    def backward_ended(self) -> None:
        """Take the loss that the backward began with, if it is to be looked at."""
        step = self.state.tracker.step
        loss = step.loss
        if loss is not None and self._told < MOST and (callable(loss) or not math.isfinite(loss)):
            self._waiting.append((step, loss))

    def step_ended(self, number: int) -> None:
        """Look at what has arrived."""
        while self._waiting:
            step, loss = self._waiting[0]
            if callable(loss) and step.number > number - LATER:
                return
            self._waiting.popleft()
            self._look(step, loss)

    def rank_ends(self) -> None:
        """Look at the rest: the job has waited for its devices, or does not care any more."""
        while self._waiting:
            self._look(*self._waiting.popleft())

    def _look(self, step: OpenStep, loss: Any) -> None:
        value = loss() if callable(loss) else loss
        if value is None or math.isfinite(value) or step.skipped or self._told >= MOST:
            return
        self._told += 1
        self.state.recorder.add(
            {"kind": "nonfinite", "time": time.time_ns(), "step": step.number, "loss": repr(value)}
        )


_losses: Losses | None = None


@shield.shielded
def _backward_ended() -> None:
    global _losses
    state = rank.current()
    if state is None:
        return
    if _losses is None or _losses.state is not state:
        _losses = Losses(state)
    _losses.backward_ended()


@shield.shielded
def _step_ended(optimizer: Any, number: int) -> None:
    if _losses is not None and _losses.state is rank.current():
        _losses.step_ended(number)


@shield.shielded
def _rank_ends() -> None:
    if _losses is not None and _losses.state is rank.current():
        _losses.rank_ends()


def install() -> None:
    """Listen to the moments of training."""
    events.backward_ended.append(_backward_ended)
    events.step_ended.append(_step_ended)
    events.rank_ends.append(_rank_ends)
