"""Follow optimizers and schedulers: their parameters, re-creation, and gradients never zeroed.

Parameters without an optimizer do not learn, unless something else trains them (an update by hand,
an optimizer that is not torch's). Their values, compared over some steps, show that.

A scheduler's position in its schedule is read at optimizer steps: a wrapper around
``scheduler.step`` would prevent the job from compiling that step.

If gradients are never zeroed, each backward adds to the previous gradients. One parameter of each
optimizer is watched until its gradient was zeroed or set to None once, which is the first step in
most jobs. Its norm shows changes that the version counter misses, such as those through `.data`.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from ddpdoctor.probe.observers import readback
from ddpdoctor.probe.observers.ddp_modules import Mark, Replica, Replicas, mark_of
from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.runtime import events, sites
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site
from ddpdoctor.run.records.model import (
    Hyper,
    RemadeRecord,
    ScheduleRecord,
    UnownedRecord,
    UnzeroedRecord,
)

# -- optimizers: which parameters each steps, and where it was made

COMPARED_FROM, COMPARED_TO = 2, 12
"""Synchronized backwards after which a parameter in no optimizer is measured, then compared."""

REMADE = 5  # number of consecutive optimizers, made at one line and stepped once, to report
REMADE_BY_EPOCH = 3  # the same for optimizers stepped for one epoch each
MAX_DECAY = 5  # maximum factor of the learning rate between two epochs of one phase
COMPARED_PARAMETERS = 4  # maximum number of compared parameters
NAMED_PARAMETERS = 8  # maximum number of parameters that a record names; it counts all
MAX_OPTIMIZERS = 256  # maximum number of remembered optimizers, far more than a report needs
HYPERPARAMETERS = ("lr", "momentum", "betas", "weight_decay")
"""Recorded options of a parameter group, in this order."""

MAX_GROUPS = 4  # maximum number of recorded parameter groups of an optimizer
any_made = False  # whether this process has made an optimizer; True if unknown


@dataclass(eq=False)
class MadeOptimizer:
    """An optimizer at its creation."""

    name: str
    site: Site
    steps: int = 0
    groups: tuple[int, int] = (0, 0)  # number of groups and of parameters when `ids` was taken
    ids: frozenset[int] = frozenset()


_made: weakref.WeakKeyDictionary[Any, MadeOptimizer] = weakref.WeakKeyDictionary()


def made(optimizer: Any) -> None:
    """Note a new optimizer. The process may not be a rank yet."""
    global any_made
    any_made = True
    if len(_made) < MAX_OPTIMIZERS and optimizer not in _made:
        _made[optimizer] = MadeOptimizer(type(optimizer).__name__, sites.caller())
    events.emit(Observer.optimizer_made)


def count() -> int:
    """Return the number of remembered optimizers."""
    return len(_made)


def owned(optimizer: Any) -> frozenset[int]:
    """Return the ids of the parameters that an optimizer steps."""
    each = _made.get(optimizer)
    if each is None:
        return _ids(optimizer)
    groups = optimizer.param_groups
    shape = (len(groups), sum(len(group["params"]) for group in groups))
    if shape != each.groups:
        each.ids, each.groups = _ids(optimizer), shape
    return each.ids


def all_made() -> list[Any]:
    """Return the remembered optimizers that still exist."""
    return list(_made)


def made_at(optimizer: Any) -> Site:
    """Return the line that made an optimizer."""
    each = _made.get(optimizer)
    return each.site if each is not None else NOWHERE


def _ids(optimizer: Any) -> frozenset[int]:
    return frozenset(map(id, parameters_of(optimizer)))


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def options_of(optimizer: Any) -> tuple[tuple[Hyper, ...], ...]:
    """Return the `HYPERPARAMETERS` of each parameter group that are on the CPU."""
    return tuple(
        tuple(_plain_option(group.get(name)) for name in HYPERPARAMETERS)
        for group in optimizer.param_groups[:MAX_GROUPS]
    )


def _plain_option(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain_option(each) for each in value)
    # Reading a tensor from a GPU would wait.
    device = getattr(value, "device", None)
    if device is not None and device.type == "cpu" and value.numel() == 1:
        return float(value)
    return None


@dataclass
class _Habit:
    """The optimizers that one line made for one parameter."""

    last: MadeOptimizer
    began: int  # the first step of the last one
    since: int  # the first step of the first one in the row
    epoch: int  # the epoch in which the last one began
    shape: object
    rate: Any
    row: int = 0
    epochs: int = 0  # consecutive optimizers before the last one, each stepped for one epoch


@dataclass
class _Unowned:
    """Parameters of a DDP module without an optimizer, and their norms at that time."""

    indices: list[int]
    orphans: int
    read: Readback
    step: int


class Optimizers(Observer):
    """The optimizers of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._habits: dict[tuple[Site, int], _Habit] = {}
        self._unowned: dict[int, _Unowned] = {}
        self._settled: weakref.ref[Any] | None = None  # the last optimizer that was stepped twice

    def ddp_built(self, ddp: Any) -> None:
        """Search for the module's parameters in optimizers from now on."""
        self.wake("step_begins")

    def optimizer_made(self) -> None:
        """Count the optimizer's steps from now on."""
        self.wake("step_ended")

    # -- parameters without an optimizer

    def step_begins(self, optimizer: Any) -> None:
        """Search twice during training for parameters of a module that are in no optimizer."""
        alive = self._replicas.alive
        if not self.state.budget.enabled or all(each.searches > 1 for each in alive):
            self.rest("step_begins")
            return
        for each in alive:
            searches = each.searches
            if searches > 1 or each.reduced < (COMPARED_FROM, COMPARED_TO)[searches]:
                continue
            # Wait until the module has an optimizer, if there is one.
            mine = [other for other in list(_made) if not each.ids.isdisjoint(owned(other))]
            if mine and each.ids.isdisjoint(owned(optimizer)):
                continue
            each.searches += 1
            with self.state.budget.spending():
                if searches:
                    self._compare(each)
                else:
                    self._measure(each)

    def _measure(self, each: Replica) -> None:
        indices = _without(each)
        read = readback.norms_of([each.parameter(index) for index in indices[:COMPARED_PARAMETERS]])
        if read is not None:
            orphans = sum(self._orphans(optimizer) for optimizer in list(_made))
            self._unowned[each.number] = _Unowned(indices, orphans, read, self.state.tracker.steps)

    def _compare(self, each: Replica) -> None:
        before = self._unowned.pop(each.number, None)
        if before is None:
            return
        without = set(_without(each))
        still = [index for index in before.indices if index in without]
        same = before.indices[:COMPARED_PARAMETERS]
        if still[:COMPARED_PARAMETERS] != same:
            return
        read = readback.norms_of([each.parameter(index) for index in same])
        if read is None:
            return
        orphans = {optimizer: self._orphans(optimizer) for optimizer in list(_made)}
        lost = max(orphans, key=lambda optimizer: orphans[optimizer])
        if not before.orphans or not orphans[lost]:
            lost = max(_made, key=lambda optimizer: len(owned(optimizer) & each.ids))
        maker = _made[lost]
        record = UnownedRecord(
            time=time.time_ns(),
            ddp=each.number,
            steps=(before.step, self.state.tracker.steps),
            parameters=tuple(each.names[index] for index in still[:NAMED_PARAMETERS]),
            count=len(still),
            of=len(each.names),
            orphans=min(before.orphans, orphans[lost]),
            optimizer=maker.name,
            **maker.site.place,
        )

        def with_norms(values: list[float]) -> UnownedRecord:
            half = len(values) // 2
            return replace(record, unchanged=values[:half] == values[half:])

        self.state.recorder.add(when_ready([before.read, read], with_norms))

    def _orphans(self, optimizer: Any) -> int:
        """Count an optimizer's parameters that never get a gradient and are in no DDP module."""
        known = self._replicas.parameter_ids()
        return sum(
            parameter.requires_grad and parameter.grad is None and id(parameter) not in known
            for parameter in parameters_of(optimizer)
        )

    # -- optimizers that are re-created

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Count an optimizer's steps. Record a line that repeatedly re-creates one."""
        if self._settled is not None and self._settled() is optimizer:
            if len(_made) == 1:
                self.rest("step_ended")
            return
        each = _made.get(optimizer)
        if each is None:
            return
        each.steps += 1
        if each.steps > 1:
            self._settled = weakref.ref(optimizer)
        elif len(self._habits) < MAX_OPTIMIZERS:
            self._first_step(optimizer, each, number)

    def _first_step(self, optimizer: Any, each: MadeOptimizer, number: int) -> None:
        first = next(iter(parameters_of(optimizer)), None)
        if first is None:
            return
        epoch = self.state.tracker.epoch
        # Other parameters or options mean the next phase of the training. A learning rate that
        # changes a little is a schedule by hand.
        options = {name: value for name, value in optimizer.defaults.items() if name != "lr"}
        shape = (len(owned(optimizer)), repr(options))
        rate = _plain_option(optimizer.defaults.get("lr"))
        habit = self._habits.get((each.site, id(first)))
        if habit is None:
            self._habits[each.site, id(first)] = _Habit(each, number, number, epoch, shape, rate)
            return
        remembers = _remembers(optimizer, first)
        same = shape == habit.shape and _is_near(rate, habit.rate)
        one = habit.last.steps > 1 and epoch == habit.epoch + 1 and same
        habit.epochs = habit.epochs + 1 if one and remembers else 0
        habit.epoch, habit.shape, habit.rate = epoch, shape, rate
        habit.row = habit.row + 1 if habit.last.steps == 1 and remembers else 0
        if habit.epochs + habit.row <= 1:
            habit.since = habit.began
        habit.last, habit.began = each, number
        by_epoch = habit.epochs == REMADE_BY_EPOCH - 1
        if (habit.row == REMADE or by_epoch) and self._replicas.holds(first):
            self.state.recorder.add(
                RemadeRecord(
                    time=time.time_ns(),
                    step=number,
                    since=habit.since,
                    optimizer=each.name,
                    times=(habit.epochs if by_epoch else habit.row) + 1,
                    every="epoch" if by_epoch else "step",
                    **each.site.place,
                )
            )


def _remembers(optimizer: Any, parameter: Any) -> bool:
    """Return whether an optimizer has state of a parameter that its next step needs."""
    kept = optimizer.state.get(parameter)
    return isinstance(kept, dict) and any(
        isinstance(value, sys.modules["torch"].Tensor) and value.shape == parameter.shape
        for value in kept.values()
    )


def _is_near(rate: Any, before: Any) -> bool:
    """Return whether two learning rates may belong to one schedule rather than to two phases."""
    if not isinstance(rate, (int, float)) or not isinstance(before, (int, float)):
        return bool(rate == before)
    low, high = sorted((abs(rate), abs(before)))
    return high <= MAX_DECAY * low


def _without(each: Replica) -> list[int]:
    """Return the parameters with a gradient that are in no optimizer."""
    everything = frozenset[int]().union(*(owned(optimizer) for optimizer in list(_made)))
    return [
        index
        for index in range(len(each.names))
        if (parameter := each.parameter(index)) is not None
        and id(parameter) not in everything
        and parameter.requires_grad
        and parameter.grad is not None
        and readback.is_plain(parameter)
    ]


# -- schedulers that are re-created before their schedule ends

_SCHEDULERS = "torch.optim.lr_scheduler"

_SCHEDULE_ENDS = {
    "ConstantLR": "total_iters",
    "CosineAnnealingLR": "T_max",
    "CosineAnnealingWarmRestarts": "T_0",
    "CyclicLR": "total_size",
    "LinearLR": "total_iters",
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
    "StepLR": "step_size",
}
"""Attributes that hold the position at which a schedule ends, restarts or first cuts."""

NEARLY_COMPLETE = 0.9  # the fraction of a schedule after which it counts as complete
MAX_NUMBERS = 32  # maximum number of recorded numbers of a scheduler, the largest ones
MIN_FOLLOWED = 20  # minimum number of training steps of a recorded schedule
MAX_SCHEDULERS = 16  # maximum number of lines that make schedulers
_VARIES = ("last_epoch", "_step_count", "_last_lr")


class MadeScheduler:
    """The newest scheduler of a line, and how many consecutive ones before it were cut short."""

    def __init__(self, scheduler: Any, end: float, step: int, epoch: int) -> None:
        self.scheduler = weakref.ref(scheduler)
        self.end = end
        self.step = step
        self.epoch = epoch
        kept = {name: value for name, value in vars(scheduler).items() if name not in _VARIES}
        self.shape = repr({name: _plain_value(value) for name, value in kept.items()})
        self.position = 0
        self.gone = False  # whether it may have been stepped after its position was read
        self.restored = False  # whether it started at a position other than 0
        self.row = 0
        self.since = step  # the step at which the first one in the row was made

    def read(self) -> None:
        """Read the position."""
        scheduler = self.scheduler()
        if scheduler is None:
            self.gone = True
        else:
            self.position = scheduler.last_epoch

    @property
    def cut_short(self) -> bool:
        """Return whether the scheduler ends before its schedule."""
        return not self.restored and self.position + self.gone < NEARLY_COMPLETE * self.end


class _FollowedSchedule:
    """A scheduler and its progress."""

    def __init__(self, scheduler: Any, step: int) -> None:
        self.scheduler = weakref.ref(scheduler)
        self.name = type(scheduler).__name__
        self.site = sites.caller()
        self.numbers: tuple[int, ...] = ()
        self.began = step
        self.position = self.steps = 0

    def read(self, step: int) -> None:
        """Read the position before a training step."""
        scheduler = self.scheduler()
        if scheduler is None:
            return
        if not self.steps:
            # A subclass may set its options after the base class's constructor.
            self.numbers = tuple(sorted(set(numbers_of(scheduler))))[-MAX_NUMBERS:]
        self.position, self.steps = scheduler.last_epoch, step - self.began


def numbers_of(scheduler: Any) -> Iterator[int]:
    """Yield the whole numbers among the options of a scheduler and of its functions."""
    for name, value in vars(scheduler).items():
        if name in (*_VARIES, "optimizer"):
            continue
        for each in value if isinstance(value, (list, tuple)) else [value]:
            yield from _whole(each)
            yield from _numbers_of_function(each)


def _numbers_of_function(thing: Any) -> Iterator[int]:
    if isinstance(thing, functools.partial):
        values: list[Any] = [*thing.args, *thing.keywords.values()]
        yield from _numbers_of_function(thing.func)
    elif isinstance(thing, FunctionType):
        values = [thing.__globals__.get(name) for name in thing.__code__.co_names]
        values += [getattr(cell, "cell_contents", None) for cell in thing.__closure__ or ()]
        values += thing.__defaults__ or ()
    elif callable(thing) and hasattr(thing, "__dict__") and not isinstance(thing, type):
        values = list(vars(thing).values())
    else:
        return
    for value in values:
        # Options of the job: `args.total_steps`.
        options = vars(value) if type(value).__name__ in ("Namespace", "SimpleNamespace") else value
        kept = options.values() if isinstance(options, dict) else [value]
        for each in kept:
            yield from _whole(each)


def _whole(value: Any) -> Iterator[int]:
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        yield int(value)


class Schedulers(Observer):
    """The schedulers of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._followed: list[_FollowedSchedule] = []
        self._made: dict[tuple[Site, str, int], MadeScheduler] = {}

    def step_begins(self, optimizer: Any) -> None:
        """Read the positions of the schedulers."""
        if not self._made and not self._followed:
            self.rest("step_begins")
        for followed in self._followed:
            followed.read(self.state.tracker.steps)
        for each in self._made.values():
            each.read()
            if each.position and self.state.tracker.steps == each.step:
                # The position was set by a loaded state or by steps that catch up.
                each.restored = True

    def scheduler_made(self, scheduler: Any) -> None:
        """Follow a new scheduler. Check whether it replaces one with an incomplete schedule."""
        if len(self._followed) < MAX_SCHEDULERS and hasattr(scheduler, "last_epoch"):
            self._followed.append(_FollowedSchedule(scheduler, self.state.tracker.steps))
            self.wake("step_begins")
        end = _schedule_end(scheduler)
        first = next(iter(parameters_of(scheduler.optimizer)), None)
        if end is None or first is None:
            return
        site, name = sites.caller(), type(scheduler).__name__
        key = (site, name, id(first))
        before = self._made.get(key)
        if before is None and len(self._made) >= MAX_SCHEDULERS:
            return
        tracker = self.state.tracker
        self.wake("step_begins")
        now = self._made[key] = MadeScheduler(scheduler, end, tracker.steps, tracker.epoch)
        now.restored = scheduler.last_epoch != 0
        if before is None:
            return
        before.read()
        steps = now.step - before.step
        by_epoch = now.epoch == before.epoch + 1 and steps > 1
        # Other options mean the next phase of the training.
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
                    end=end if name in _SCHEDULE_ENDS else None,
                    **site.place,
                )
            )

    def rank_ends(self) -> None:
        """Record the progress of the schedules."""
        for each in self._followed:
            if each.steps >= MIN_FOLLOWED and each.numbers:
                record = ScheduleRecord(
                    scheduler=each.name, position=each.position, steps=each.steps,
                    numbers=each.numbers, **each.site.place,
                )  # fmt: skip
                self.state.recorder.add(record)


def _schedule_end(scheduler: Any) -> float | None:
    """Return the position at which a schedule ends, or None if it is constant or unknown."""
    name = type(scheduler).__name__
    if type(scheduler).__module__ != _SCHEDULERS:
        return None
    if name == "ReduceLROnPlateau":
        # The first value is the best so far.
        return float(scheduler.patience + 2)
    if name == "LambdaLR":
        # A function often depends on the epoch. Its schedule ends only if it is stepped more than
        # once.
        return 2.0
    if name == "MultiStepLR":
        return float(max(scheduler.milestones, default=0))
    end = getattr(scheduler, _SCHEDULE_ENDS.get(name, ""), None)
    # With a step size of 1, StepLR multiplies at each step.
    return float(end) if isinstance(end, (int, float)) and end > 1 else None


def _plain_value(value: Any) -> object:
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, FunctionType):
        # The function may read the epoch.
        read = [value.__globals__.get(name) for name in value.__code__.co_names]
        read += [getattr(cell, "cell_contents", None) for cell in value.__closure__ or ()]
        return [each for each in read if isinstance(each, (int, float, str))]
    return [_plain_value(each) for each in value] if isinstance(value, (list, tuple)) else None


# -- gradients that are never zeroed

LARGEST_WATCHED = 1 << 16  # maximum size of a watched parameter
MAX_WATCHED = 8  # maximum number of watched optimizers
COMPARED_STEPS = 3  # number of steps with norms read after them and before the next backward
MAX_EDITS = 4
"""Tolerated changes of a gradient between two measured steps, such as by a GradScaler that skips.

An optimizer with more changes is no longer watched.
"""

MIN_UNZEROED = 5  # minimum number of steps with old gradients for a record when the rank ends
ENOUGH_UNZEROED = 100  # the same before the rank ends: gradients may be zeroed rarely on purpose


class _WatchedOptimizer:
    """An optimizer, and the parameter whose gradient is watched."""

    def __init__(self, optimizer: Any, parameter: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.parameter = weakref.ref(parameter)
        self.mark: Mark | None = None  # the last state of the gradient; None before the first step
        self.grew = False  # whether a backward has added to the gradient since the last step
        self.kept = False  # whether that backward began with the gradient of the last step
        self.carried = 0  # number of steps whose gradient contained that of the step before
        self.pairs: list[Readback] = []
        self.edits: list[Readback] = []
        self.site: Site = NOWHERE


class Zeroing(Observer):
    """The optimizers of a rank that never zero their gradients."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._watches: list[_WatchedOptimizer] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers watched so far

    def step_begins(self, optimizer: Any) -> None:
        """Count a step, or start watching an optimizer."""
        if optimizer not in self._known:
            self._meet(optimizer)
            return
        each = self._of(optimizer)
        if each is None:
            if not self._watches and len(self._known) >= min(MAX_WATCHED, count()):
                # Most jobs get here in their second step.
                self.rest("step_begins", "step_ended", "backward_begins", "backward_ended")
            return
        each.carried += each.grew and each.kept
        each.grew = each.kept = False
        if each.carried == ENOUGH_UNZEROED:
            self._watches.remove(each)
            self._record(each)

    def optimizer_made(self) -> None:
        """Watch for the optimizer's first step."""
        self.wake("step_begins", "step_ended", "backward_begins", "backward_ended")

    def _of(self, optimizer: Any) -> _WatchedOptimizer | None:
        return next((each for each in self._watches if each.optimizer() is optimizer), None)

    def _meet(self, optimizer: Any) -> None:
        if len(self._known) >= MAX_WATCHED:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if (
                    gradient is not None
                    and gradient.numel() <= LARGEST_WATCHED
                    and readback.is_plain(gradient)
                ):
                    self._known.add(optimizer)
                    self._watches.append(_WatchedOptimizer(optimizer, parameter))
                    return

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Note the gradient after a step."""
        each = self._of(optimizer) if self._watches else None
        parameter = each.parameter() if each is not None else None
        if each is None or parameter is None:
            return
        each.mark = mark_of(parameter)
        if len(each.pairs) < 2 * COMPARED_STEPS:
            # Drop a norm that no backward followed.
            del each.pairs[len(each.pairs) // 2 * 2 :]
            _measure_gradient(each.pairs, parameter)

    def backward_begins(self) -> None:
        """Check whether the gradient still exists."""
        for each in tuple(self._watches):
            parameter = each.parameter()
            if parameter is None or parameter.grad is None or each.optimizer() is None:
                self._watches.remove(each)
            elif each.mark is None or mark_of(parameter) == each.mark:
                if each.mark is not None and not each.grew:
                    each.kept = True
                    if len(each.pairs) % 2:
                        _measure_gradient(each.pairs, parameter)
                    if not each.carried:
                        each.site = sites.caller()
            elif len(each.edits) < MAX_EDITS:
                # Later backwards do not add to the gradient of the last step.
                each.kept, each.grew = False, True
                _measure_gradient(each.edits, parameter)
            else:
                self._watches.remove(each)

    def backward_ended(self) -> None:
        """Check whether a backward added to the gradient."""
        for each in self._watches:
            parameter = each.parameter()
            if each.mark is not None and parameter is not None:
                mark = mark_of(parameter)
                each.grew |= mark != each.mark
                each.mark = mark

    def rank_ends(self) -> None:
        """Record gradients that were never zeroed."""
        for each in self._watches:
            if each.carried >= MIN_UNZEROED:
                self._record(each)

    def _record(self, each: _WatchedOptimizer) -> None:
        record = UnzeroedRecord(
            optimizer=each.name,
            step=self.state.tracker.steps,
            carried=each.carried,
            **each.site.place,
        )
        pairs = each.pairs[: len(each.pairs) // 2 * 2]

        def with_norms(values: list[float]) -> UnzeroedRecord:
            after, edited = values[: len(pairs)], tuple(values[len(pairs) :])
            return replace(
                record, after=tuple(after[::2]), before=tuple(after[1::2]), edited=edited
            )

        self.state.recorder.add(when_ready([*pairs, *each.edits], with_norms))


def _measure_gradient(readbacks: list[Readback], parameter: Any) -> None:
    read = readback.norms_of([parameter.grad]) if parameter.grad is not None else None
    if read is not None:
        readbacks.append(read)
