"""Schedulers that are re-created before their schedule has come to its end.

Which position of its schedule each one reaches is read at the steps of optimizers: wrapping
``scheduler.step`` would stand in the way of a step that the job compiles.
"""

from __future__ import annotations

import functools
import time
import weakref
from types import FunctionType, ModuleType
from typing import Any

from ddpdoctor.probe.observers.optimizers import REMADE, REMADE_BY_EPOCH
from ddpdoctor.probe.observers.replicas import watched
from ddpdoctor.probe.runtime import events, rank, shield, sites
from ddpdoctor.probe.runtime.sites import Site

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


_made: dict[tuple[Site, str, int], Made] = {}


def forget() -> None:
    """In a forked child: nothing was made yet."""
    _made.clear()


def install(module: ModuleType) -> None:
    """Wrap the constructors; that of ``ReduceLROnPlateau`` does not call its base's."""
    for name in ("LRScheduler", "ReduceLROnPlateau"):
        scheduler_class = getattr(module, name, None)
        if scheduler_class is not None:
            _wrap(scheduler_class)
    events.step_begins.append(shield.shielded(_step_begins))


def _wrap(scheduler_class: Any) -> None:
    original = scheduler_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if rank.active is not None:
            _begins(self)

    scheduler_class.__init__ = __init__


@shield.shielded
def _begins(scheduler: Any) -> None:
    state = rank.current()
    end = _end(scheduler)
    groups = scheduler.optimizer.param_groups
    first = next((parameter for group in groups for parameter in group["params"]), None)
    if state is None or end is None or first is None:
        return
    site, name = sites.caller(), type(scheduler).__name__
    key = (site, name, id(first))
    before = _made.get(key)
    if before is None and len(_made) >= MOST:
        return
    now = _made[key] = Made(scheduler, end, state.tracker.steps, state.tracker.epoch)
    now.restored = scheduler.last_epoch != 0
    if before is None:
        return
    before.look()
    steps = now.step - before.step
    by_epoch = now.epoch == before.epoch + 1 and steps > 1
    # With other options it is the next phase of a training.
    if before.cut_short and now.shape == before.shape and (by_epoch or steps == 1):
        now.row, now.since = before.row + 1, before.since
    known = any(id(first) in module.ids for module in watched)
    if known and now.row == (REMADE_BY_EPOCH - 1 if by_epoch else REMADE):
        state.recorder.add(
            {
                "kind": "remade",
                "time": time.time_ns(),
                "step": now.step,
                "since": now.since,
                "scheduler": name,
                "times": now.row + 1,
                "every": "epoch" if by_epoch else "step",
                "position": before.position,
                "end": end if name in _ENDS else None,
                "path": site.path,
                "line": site.line,
            }
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


def _step_begins(optimizer: Any) -> None:
    state = rank.current()
    if state is None:
        return
    for each in _made.values():
        each.look()
        if each.position and state.tracker.steps == each.step:
            # It was brought there by a loaded state, or by steps to catch up.
            each.restored = True
