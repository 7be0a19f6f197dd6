"""Which optimizer steps which parameters, and where each was made.

Parameters that no optimizer steps do not learn. Whether something else trains them (an update by
hand, an optimizer that is not torch's) is told by their values: these are compared over some steps.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.observers.readback import Readback
from ddpdoctor.probe.observers.replicas import Watched, watched
from ddpdoctor.probe.runtime import events, rank, shield, sites
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.base import JsonObject

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


class Habit:
    """The optimizers that one line has made for one parameter."""

    __slots__ = ("began", "epoch", "epochs", "last", "row", "shape", "since")

    def __init__(self, last: Made, step: int, epoch: int, shape: object) -> None:
        self.last = last
        self.began = self.since = step
        """The steps at which the last one, and the first one of the row, began."""
        self.row = 0
        self.epoch = epoch
        """The epoch in which the last one began."""
        self.epochs = 0
        """Optimizers in a row before the last one that stepped for one epoch each."""
        self.shape = shape


_made: weakref.WeakKeyDictionary[Any, Made] = weakref.WeakKeyDictionary()
_habits: dict[tuple[Site, int], Habit] = {}
_unowned: dict[int, _Unowned] = {}
_settled: weakref.ref[Any] | None = None
"""The last optimizer that was seen to step more than once."""


class _Unowned:
    """Parameters of a DDP module that were in no optimizer, and how they were then."""

    __slots__ = ("indices", "orphans", "read", "step")

    def __init__(self, indices: list[int], orphans: int, read: Readback, step: int) -> None:
        self.indices = indices
        self.orphans = orphans
        self.read = read
        self.step = step


def made(optimizer: Any) -> None:
    """An optimizer is being made."""
    if len(_made) < MOST and optimizer not in _made:
        _made[optimizer] = Made(type(optimizer).__name__, sites.caller())


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
    return frozenset(
        id(parameter) for group in optimizer.param_groups for parameter in group["params"]
    )


def step_begins(optimizer: Any) -> None:
    """Look, at two moments of its training, for parameters that are in no optimizer."""
    state = rank.current()
    if state is None or not state.budget.enabled:
        return
    for each in watched:
        looks = each.looks
        if looks > 1 or each.reduced < (FROM, TO)[looks] or not _concerns(optimizer, each):
            continue
        each.looks += 1
        began = clock()
        (_second_look if looks else _first_look)(state, each)
        state.budget.spend(clock() - began)


def _concerns(optimizer: Any, each: Watched) -> bool:
    """Whether an optimizer steps a module's parameters, or nobody does."""
    return not each.ids.isdisjoint(owned(optimizer)) or all(
        each.ids.isdisjoint(owned(other)) for other in list(_made)
    )


def _without(each: Watched) -> list[int]:
    """Parameters with a gradient that no optimizer holds."""
    everything: set[int] = set()
    for optimizer in list(_made):
        everything |= owned(optimizer)
    return [
        index
        for index in range(len(each.names))
        if (parameter := each.parameter(index)) is not None
        and id(parameter) not in everything
        and parameter.requires_grad
        and parameter.grad is not None
        and norms.plain(parameter)
    ]


def _orphans(optimizer: Any) -> int:
    """How many parameters an optimizer holds that never get a gradient and are in no DDP module."""
    known: set[int] = set()
    for each in watched:
        ddp = each.ddp()
        if ddp is not None:
            known.update(id(parameter) for parameter in ddp.module.parameters())
    return sum(
        1
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter.grad is None and id(parameter) not in known
    )


def _first_look(state: rank.RankState, each: Watched) -> None:
    indices = _without(each)
    read = norms.norms([each.parameter(index) for index in indices[:MEASURED]])
    if read is not None:
        orphans = sum(_orphans(optimizer) for optimizer in list(_made))
        _unowned[each.number] = _Unowned(indices, orphans, read, state.tracker.steps)


def _second_look(state: rank.RankState, each: Watched) -> None:
    before = _unowned.pop(each.number, None)
    if before is None:
        return
    still = [index for index in before.indices if index in set(_without(each))]
    same = before.indices[:MEASURED]
    if still[:MEASURED] != same:
        return
    read = norms.norms([each.parameter(index) for index in same])
    if read is None:
        return
    orphans = {optimizer: _orphans(optimizer) for optimizer in list(_made)}
    lost = max(orphans, key=lambda optimizer: orphans[optimizer])
    if not before.orphans or not orphans[lost]:
        lost = max(_made, key=lambda optimizer: len(owned(optimizer) & each.ids))
    maker = _made[lost]
    record: JsonObject = {
        "kind": "unowned",
        "time": time.time_ns(),
        "ddp": each.number,
        "steps": [before.step, state.tracker.steps],
        "parameters": [each.names[index] for index in still[:NAMED]],
        "count": len(still),
        "of": len(each.names),
        "orphans": min(before.orphans, orphans[lost]),
        "optimizer": maker.name,
        "path": maker.site.path,
        "line": maker.site.line,
    }

    def with_norms(values: list[float]) -> JsonObject:
        half = len(values) // 2
        return {**record, "unchanged": values[:half] == values[half:]}

    state.recorder.add(norms.lazy([before.read, read], with_norms))


def step_ended(optimizer: Any, number: int) -> None:
    """Count an optimizer's steps, and notice one that is made anew for each."""
    global _settled
    if _settled is not None and _settled() is optimizer:
        return
    each = _made.get(optimizer)
    if each is None:
        return
    each.steps += 1
    if each.steps > 1:
        _settled = weakref.ref(optimizer)
    if each.steps == 1 and len(_habits) < MOST:
        _first_step(optimizer, each, number)


def _first_step(optimizer: Any, each: Made, number: int) -> None:
    state = rank.current()
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if state is None or first is None:
        return
    key = (each.site, id(first))
    habit = _habits.get(key)
    epoch = state.tracker.epoch
    # With other parameters or options it is the next phase of a training.
    shape = (len(owned(optimizer)), repr(optimizer.defaults))
    if habit is None:
        _habits[key] = Habit(each, number, epoch, shape)
        return
    one = habit.last.steps > 1 and epoch == habit.epoch + 1 and shape == habit.shape
    habit.epochs = habit.epochs + 1 if one and _remembers(optimizer, first) else 0
    habit.epoch, habit.shape = epoch, shape
    once = habit.last.steps == 1 and _remembers(optimizer, first)
    habit.row = habit.row + 1 if once else 0
    if habit.epochs + habit.row <= 1:
        habit.since = habit.began
    habit.last, habit.began = each, number
    known = any(id(first) in module.ids for module in watched)
    by_epoch = habit.epochs == REMADE_BY_EPOCH - 1
    if (habit.row == REMADE or by_epoch) and known:
        state.recorder.add(
            {
                "kind": "remade",
                "time": time.time_ns(),
                "step": number,
                "since": habit.since,
                "optimizer": each.name,
                "times": (habit.epochs if by_epoch else habit.row) + 1,
                "every": "epoch" if by_epoch else "step",
                "path": each.site.path,
                "line": each.site.line,
            }
        )


def _remembers(optimizer: Any, parameter: Any) -> bool:
    """Whether an optimizer keeps of a parameter what its next step would need."""
    torch: Any = sys.modules["torch"]
    kept = optimizer.state.get(parameter)
    return isinstance(kept, dict) and any(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape
        for value in kept.values()
    )


def install() -> None:
    """Subscribe to the life of optimizers."""
    events.optimizer_made.append(shield.shielded(made))
    events.step_begins.append(shield.shielded(step_begins))
    events.step_ended.append(shield.shielded(step_ended))
