"""Optimizers whose gradients are never set to zero: the next backward adds to those of the last.

One parameter of each optimizer is watched, and only until its gradient was set to zero or to None
once: in most jobs that is the first step. A change that the counter of versions does not see, as
one through `.data`, is seen by the norm.
"""

from __future__ import annotations

import weakref
from typing import Any

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.observers.readback import Readback
from ddpdoctor.probe.observers.replicas import Mark, mark_of
from ddpdoctor.probe.runtime import events, rank, shield, sites
from ddpdoctor.probe.runtime.sites import NOWHERE, Site
from ddpdoctor.run.records.base import JsonObject

LARGEST = 1 << 16
"""Elements of a parameter that is watched."""

MOST = 8
"""Optimizers that are watched."""

COMPARED = 3
"""Steps after which the norm is taken twice: after the step, and before the next backward."""

EDITS = 4
"""Changes of a gradient between two steps, as by a GradScaler that skips one, that are looked at.

An optimizer whose gradients are changed more often is not watched any more.
"""

LEAST = 5
"""Steps with gradients of the step before that are written at the end of a rank."""

ENOUGH = 100
"""The same while it goes on: gradients may be set to zero each so many steps on purpose."""


class _Watch:
    """One optimizer, and the parameter that speaks for its gradients."""

    def __init__(self, optimizer: Any, parameter: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.parameter = weakref.ref(parameter)
        self.mark: Mark | None = None
        """The gradient as it was left; None until the first step has ended."""
        self.grew = False
        """Whether a backward has added to it since the last step."""
        self.kept = False
        """Whether what it held after the last step was there then."""
        self.carried = 0
        """Steps whose gradient held that of the step before."""
        self.pairs: list[Readback] = []
        self.edits: list[Readback] = []
        self.site: Site = NOWHERE


_watches: list[_Watch] = []
_known: weakref.WeakSet[Any] = weakref.WeakSet()
"""The optimizers that are watched, or were."""


def forget() -> None:
    """In a forked child: it may train by itself."""
    _watches.clear()
    _known.clear()


def step_begins(optimizer: Any) -> None:
    """Count a step; meet an optimizer."""
    if optimizer not in _known:
        _meet(optimizer)
        return
    each = _of(optimizer)
    if each is None:
        return
    each.carried += each.grew and each.kept
    each.grew = each.kept = False
    if each.carried == ENOUGH:
        _watches.remove(each)
        _tell(each)


def _of(optimizer: Any) -> _Watch | None:
    return next((each for each in _watches if each.optimizer() is optimizer), None)


def _meet(optimizer: Any) -> None:
    state = rank.current()
    if state is None or not state.budget.enabled or len(_known) >= MOST:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.numel() <= LARGEST and norms.plain(gradient):
                _known.add(optimizer)
                _watches.append(_Watch(optimizer, parameter))
                return


def step_ended(optimizer: Any, number: int) -> None:
    """Remember the gradient that a step leaves behind."""
    each = _of(optimizer) if _watches else None
    parameter = each.parameter() if each is not None else None
    if each is None or parameter is None:
        return
    each.mark = mark_of(parameter)
    if len(each.pairs) < 2 * COMPARED:
        # The one after a step without a backward is not needed.
        del each.pairs[len(each.pairs) // 2 * 2 :]
        _measure(each.pairs, parameter)


def backward_begins() -> None:
    """See whether the gradient is still there."""
    for each in tuple(_watches):
        parameter = each.parameter()
        if parameter is None or parameter.grad is None or each.optimizer() is None:
            _watches.remove(each)
        elif each.mark is None or mark_of(parameter) == each.mark:
            if each.mark is not None and not each.grew:
                _kept(each, parameter)
        elif len(each.edits) < EDITS:
            # Whatever is added from now on is not added to what the step has left.
            each.kept, each.grew = False, True
            _measure(each.edits, parameter)
        else:
            _watches.remove(each)


def _kept(each: _Watch, parameter: Any) -> None:
    each.kept = True
    if len(each.pairs) % 2:
        _measure(each.pairs, parameter)
    if not each.carried:
        each.site = sites.caller()


def backward_ended() -> None:
    """See whether a backward has added to it."""
    for each in _watches:
        parameter = each.parameter()
        if each.mark is not None and parameter is not None:
            mark = mark_of(parameter)
            each.grew |= mark != each.mark
            each.mark = mark


def rank_ends() -> None:
    """Write what was carried all along."""
    for each in _watches:
        if each.carried >= LEAST:
            _tell(each)


def _measure(readbacks: list[Readback], parameter: Any) -> None:
    read = norms.norms([parameter.grad]) if parameter.grad is not None else None
    if read is not None:
        readbacks.append(read)


def _tell(each: _Watch) -> None:
    state = rank.current()
    if state is None:
        return
    record: JsonObject = {
        "kind": "unzeroed",
        "optimizer": each.name,
        "step": state.tracker.steps,
        "carried": each.carried,
        "path": each.site.path,
        "line": each.site.line,
    }
    pairs = each.pairs[: len(each.pairs) // 2 * 2]

    def with_norms(values: list[float]) -> JsonObject:
        after, edited = values[: len(pairs)], values[len(pairs) :]
        return {**record, "after": after[::2], "before": after[1::2], "edited": edited}

    state.recorder.add(norms.lazy([*pairs, *each.edits], with_norms))


def install() -> None:
    """Subscribe to the moments in which gradients come and go."""
    events.step_begins.append(shield.shielded(step_begins))
    events.step_ended.append(shield.shielded(step_ended))
    events.backward_begins.append(shield.shielded(backward_begins))
    events.backward_ended.append(shield.shielded(backward_ended))
    events.rank_ends.append(shield.shielded(rank_ends))
