"""Which optimizer steps which parameters, and where each was made.

Parameters that no optimizer steps do not learn. Whether something else trains them (an update by
hand, an optimizer that is not torch's) shows in their values: these are compared over some steps.
"""

from __future__ import annotations

import sys
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.observers.replicas import Replica, Replicas
from ddpdoctor.probe.runtime import events, sites
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.model import RemadeRecord, UnownedRecord
from ddpdoctor.run.records.replicas import Hyper

FROM, TO = 2, 12
"""Synchronized backwards of a DDP module between which a parameter without optimizer is watched."""

REMADE = 5
"""Optimizers in a row, each made at the same line and stepped once, that make a habit."""

REMADE_BY_EPOCH = 3
"""The same of optimizers that stepped for one epoch each."""

MEASURED = 4
"""Parameters whose values are compared."""

NAMED = 8
"""Parameters that a record names; it counts the rest."""

MOST = 256
"""Optimizers that are remembered; a job that makes ever new ones is known well before."""

HYPER = ("lr", "momentum", "betas", "weight_decay")
"""What is recorded of the options of a parameter group, in this order."""

MOST_GROUPS = 4
"""Parameter groups of an optimizer whose options are recorded."""

any_made = False
"""Whether this process ever made an optimizer, or may have without being seen."""


class Made:
    """An optimizer as it was made."""

    __slots__ = ("groups", "ids", "name", "site", "steps")

    def __init__(self, name: str, site: Site) -> None:
        self.name = name
        self.site = site
        self.steps = 0
        self.groups = (0, 0)
        """Number of parameter groups, and of the parameters in them, when ``ids`` was taken."""
        self.ids: frozenset[int] = frozenset()


_made: weakref.WeakKeyDictionary[Any, Made] = weakref.WeakKeyDictionary()


def made(optimizer: Any) -> None:
    """An optimizer is being made, its parameters not yet in it; the process may be no rank yet."""
    global any_made
    any_made = True
    if len(_made) < MOST and optimizer not in _made:
        _made[optimizer] = Made(type(optimizer).__name__, sites.caller())
    for subscriber in events.optimizer_made:
        subscriber()


def count() -> int:
    """How many optimizers there are, as far as they are remembered."""
    return len(_made)


def were_made() -> bool:
    """Whether this process ever made an optimizer."""
    return any_made


def owned(optimizer: Any) -> frozenset[int]:
    """The ids of the parameters that an optimizer steps."""
    each = _made.get(optimizer)
    if each is None:
        return _ids(optimizer)
    groups = optimizer.param_groups
    shape = (len(groups), sum(len(group["params"]) for group in groups))
    if shape != each.groups:
        each.ids, each.groups = _ids(optimizer), shape
    return each.ids


def _ids(optimizer: Any) -> frozenset[int]:
    return frozenset(map(id, parameters_of(optimizer)))


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def options_of(optimizer: Any) -> tuple[tuple[Hyper, ...], ...]:
    """`HYPER` of each parameter group, as far as it is on the CPU."""
    return tuple(
        tuple(_plain(group.get(name)) for name in HYPER)
        for group in optimizer.param_groups[:MOST_GROUPS]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each) for each in value)
    # A tensor on a GPU would have to be waited for.
    device = getattr(value, "device", None)
    if device is not None and device.type == "cpu" and value.numel() == 1:
        return float(value)
    return None


@dataclass
class _Habit:
    """The optimizers that one line has made for one parameter."""

    last: Made
    began: int
    """The step at which the last one began."""
    since: int
    """That at which the first one of the row did."""
    epoch: int
    """The epoch in which the last one began."""
    shape: object
    row: int = 0
    epochs: int = 0
    """Optimizers in a row before the last one that stepped for one epoch each."""


@dataclass
class _Unowned:
    """Parameters of a DDP module that were in no optimizer, and how they were then."""

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
        self._settled: weakref.ref[Any] | None = None
        """The last optimizer that was seen to step more than once."""

    def ddp_built(self, ddp: Any) -> None:
        """Its parameters are to be looked for."""
        self.wake("step_begins")

    def optimizer_made(self) -> None:
        """Its steps are to be counted."""
        self.wake("step_ended")

    # -- parameters without an optimizer

    def step_begins(self, optimizer: Any) -> None:
        """Look, at two moments of its training, for parameters that are in no optimizer."""
        if not self.state.budget.enabled or all(each.looks > 1 for each in self._replicas.alive):
            self.rest("step_begins")
            return
        for each in self._replicas.alive:
            looks = each.looks
            if looks > 1 or each.reduced < (FROM, TO)[looks] or not _concerns(optimizer, each):
                continue
            each.looks += 1
            with self.state.budget.spending():
                if looks:
                    self._second_look(each)
                else:
                    self._first_look(each)

    def _first_look(self, each: Replica) -> None:
        indices = _without(each)
        read = norms.norms([each.parameter(index) for index in indices[:MEASURED]])
        if read is not None:
            orphans = sum(self._orphans(optimizer) for optimizer in list(_made))
            self._unowned[each.number] = _Unowned(indices, orphans, read, self.state.tracker.steps)

    def _second_look(self, each: Replica) -> None:
        before = self._unowned.pop(each.number, None)
        if before is None:
            return
        without = set(_without(each))
        still = [index for index in before.indices if index in without]
        same = before.indices[:MEASURED]
        if still[:MEASURED] != same:
            return
        read = norms.norms([each.parameter(index) for index in same])
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
            parameters=tuple(each.names[index] for index in still[:NAMED]),
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
        """How many parameters of an optimizer never get a gradient and are in no DDP module."""
        known: set[int] = set()
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is not None:
                known.update(id(parameter) for parameter in ddp.module.parameters())
        return sum(
            parameter.requires_grad and parameter.grad is None and id(parameter) not in known
            for parameter in parameters_of(optimizer)
        )

    # -- optimizers that are re-created

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Count an optimizer's steps, and notice one that is re-created for each."""
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
        elif len(self._habits) < MOST:
            self._first_step(optimizer, each, number)

    def _first_step(self, optimizer: Any, each: Made, number: int) -> None:
        first = next(iter(parameters_of(optimizer)), None)
        if first is None:
            return
        epoch = self.state.tracker.epoch
        # With other parameters or options it is the next phase of a training.
        shape = (len(owned(optimizer)), repr(optimizer.defaults))
        habit = self._habits.get((each.site, id(first)))
        if habit is None:
            self._habits[each.site, id(first)] = _Habit(each, number, number, epoch, shape)
            return
        remembers = _remembers(optimizer, first)
        one = habit.last.steps > 1 and epoch == habit.epoch + 1 and shape == habit.shape
        habit.epochs = habit.epochs + 1 if one and remembers else 0
        habit.epoch, habit.shape = epoch, shape
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


def _concerns(optimizer: Any, each: Replica) -> bool:
    """Whether an optimizer steps a module's parameters, or none does."""
    return not each.ids.isdisjoint(owned(optimizer)) or all(
        each.ids.isdisjoint(owned(other)) for other in list(_made)
    )


def _without(each: Replica) -> list[int]:
    """Parameters with a gradient that no optimizer holds."""
    everything = frozenset[int]().union(*(owned(optimizer) for optimizer in list(_made)))
    return [
        index
        for index in range(len(each.names))
        if (parameter := each.parameter(index)) is not None
        and id(parameter) not in everything
        and parameter.requires_grad
        and parameter.grad is not None
        and norms.plain(parameter)
    ]


def _remembers(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer keeps of a parameter what its next step would need."""
    torch: Any = sys.modules["torch"]
    kept = optimizer.state.get(parameter)
    return isinstance(kept, dict) and any(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value in kept.values()
    )
