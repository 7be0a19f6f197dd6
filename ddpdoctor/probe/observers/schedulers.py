"""Schedulers that are re-created before their schedule has come to its end.

Which position of its schedule each one reaches is read at the steps of optimizers: wrapping
``scheduler.step`` would stand in the way of a step that the job compiles.
"""

from __future__ import annotations

import time
import weakref
from types import FunctionType
from typing import Any

from ddpdoctor.probe.observers.optimizers import REMADE, REMADE_BY_EPOCH, parameters_of
from ddpdoctor.probe.observers.replicas import Replicas
from ddpdoctor.probe.runtime import sites
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.model import RemadeRecord

_MODULE = "torch.optim.lr_scheduler"

_ENDS = {
    "ConstantLR": "total_iters",
    "CosineAnnealingLR": "T_max",
    "CosineAnnealingWarmRestarts": "T_0",
    "CyclicLR": "total_size",
    "LinearLR": "total_iters",
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
    "StepLR": "step_size",
}
"""Where a class keeps the number of positions after which it ends, begins again, or first cuts."""

NEARLY = 0.9
"""The part of a schedule after which it counts as complete."""

MOST = 16
"""Places that make schedulers which are remembered."""

_VARIES = ("last_epoch", "_step_count", "_last_lr")


class Made:
    """The newest scheduler of a place, and how many in a row before it were cut short."""

    __slots__ = (
        "end", "epoch", "gone", "position", "restored", "row",
        "scheduler", "shape", "since", "step",
    )  # fmt: skip

    def __init__(self, scheduler: Any, end: float, step: int, epoch: int) -> None:
        self.scheduler = weakref.ref(scheduler)
        self.end = end
        self.step = step
        self.epoch = epoch
        self.shape = _shape(scheduler)
        self.position = 0
        self.gone = False
        """Its last step may have come after the last look."""
        self.restored = False
        """It does not begin at the beginning."""
        self.row = 0
        self.since = step
        """The step at which the first one of the row was made."""

    def look(self) -> None:
        """Read the position."""
        scheduler = self.scheduler()
        if scheduler is None:
            self.gone = True
        else:
            self.position = scheduler.last_epoch

    @property
    def cut_short(self) -> bool:
        """Whether it ends before its schedule does."""
        return not self.restored and self.position + self.gone < NEARLY * self.end


class Schedulers(Observer):
    """The schedulers of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._made: dict[tuple[Site, str, int], Made] = {}

    def step_begins(self, optimizer: Any) -> None:
        """Read where the schedulers are."""
        if not self._made:
            self.rest("step_begins")
        for each in self._made.values():
            each.look()
            if each.position and self.state.tracker.steps == each.step:
                # It was brought there by a loaded state, or by steps to catch up.
                each.restored = True

    def scheduler_made(self, scheduler: Any) -> None:
        """See whether it takes the place of one whose schedule has not come to its end."""
        end = _end(scheduler)
        first = next(iter(parameters_of(scheduler.optimizer)), None)
        if end is None or first is None:
            return
        site, name = sites.caller(), type(scheduler).__name__
        key = (site, name, id(first))
        before = self._made.get(key)
        if before is None and len(self._made) >= MOST:
            return
        tracker = self.state.tracker
        self.wake("step_begins")
        now = self._made[key] = Made(scheduler, end, tracker.steps, tracker.epoch)
        now.restored = scheduler.last_epoch != 0
        if before is None:
            return
        before.look()
        steps = now.step - before.step
        by_epoch = now.epoch == before.epoch + 1 and steps > 1
        # With other options it is the next phase of a training.
        if before.cut_short and now.shape == before.shape and (by_epoch or steps == 1):
            now.row, now.since = before.row + 1, before.since
        enough = REMADE_BY_EPOCH - 1 if by_epoch else REMADE
        if now.row == enough and self._replicas.holds(first):
            self.state.recorder.add(
                RemadeRecord(
                    time=time.time_ns(),
                    step=now.step,
                    since=now.since,
                    scheduler=name,
                    times=now.row + 1,
                    every="epoch" if by_epoch else "step",
                    position=before.position,
                    end=end if name in _ENDS else None,
                    **site.place,
                )
            )


def _end(scheduler: Any) -> float | None:
    """The position at which a schedule ends; None if it is the same at each, or is not known."""
    name = type(scheduler).__name__
    if type(scheduler).__module__ != _MODULE:
        return None
    if name == "ReduceLROnPlateau":
        # The first value is the best one so far.
        return float(scheduler.patience + 2)
    if name == "LambdaLR":
        # A function may well end with an epoch; but not where it is stepped once.
        return 2.0
    if name == "MultiStepLR":
        return float(max(scheduler.milestones, default=0))
    end = getattr(scheduler, _ENDS.get(name, ""), None)
    # StepLR of one step multiplies at each.
    return float(end) if isinstance(end, (int, float)) and end > 1 else None


def _shape(scheduler: Any) -> str:
    """A scheduler's options."""
    kept = {name: value for name, value in vars(scheduler).items() if name not in _VARIES}
    return repr({name: _plain(value) for name, value in kept.items()})


def _plain(value: Any) -> object:
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, FunctionType):
        # What it reads may be the epoch.
        read = [value.__globals__.get(name) for name in value.__code__.co_names]
        read += [getattr(cell, "cell_contents", None) for cell in value.__closure__ or ()]
        return [each for each in read if isinstance(each, (int, float, str))]
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else None
