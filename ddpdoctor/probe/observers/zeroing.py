"""Optimizers whose gradients are never set to zero: the next backward adds to those of the last.

One parameter of each optimizer is watched, and only until its gradient was set to zero or to None
once: in most jobs that is the first step. A change that the counter of versions does not see, as
one through `.data`, is seen by the norm.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers import norms, optimizers
from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.observers.replicas import Mark, mark_of
from ddpdoctor.probe.runtime import sites
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site
from ddpdoctor.run.records.model import UnzeroedRecord

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

    def keep(self, parameter: Any) -> None:
        """At the begin of a backward the gradient is still there."""
        self.kept = True
        if len(self.pairs) % 2:
            _measure(self.pairs, parameter)
        if not self.carried:
            self.site = sites.caller()


class Zeroing(Observer):
    """The optimizers of a rank that keep their gradients."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._watches: list[_Watch] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        """The optimizers that are watched, or were."""

    def step_begins(self, optimizer: Any) -> None:
        """Count a step; meet an optimizer."""
        if optimizer not in self._known:
            self._meet(optimizer)
            return
        each = self._of(optimizer)
        if each is None:
            if not self._watches and len(self._known) >= min(MOST, optimizers.count()):
                # Most jobs come here in their second step.
                self.rest("step_begins", "step_ended", "backward_begins", "backward_ended")
            return
        each.carried += each.grew and each.kept
        each.grew = each.kept = False
        if each.carried == ENOUGH:
            self._watches.remove(each)
            self._record(each)

    def optimizer_made(self) -> None:
        """It is to be met."""
        self.wake("step_begins", "step_ended", "backward_begins", "backward_ended")

    def _of(self, optimizer: Any) -> _Watch | None:
        return next((each for each in self._watches if each.optimizer() is optimizer), None)

    def _meet(self, optimizer: Any) -> None:
        if len(self._known) >= MOST:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.numel() <= LARGEST and norms.plain(gradient):
                    self._known.add(optimizer)
                    self._watches.append(_Watch(optimizer, parameter))
                    return

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Remember the gradient that a step leaves behind."""
        each = self._of(optimizer) if self._watches else None
        parameter = each.parameter() if each is not None else None
        if each is None or parameter is None:
            return
        each.mark = mark_of(parameter)
        if len(each.pairs) < 2 * COMPARED:
            # The one after a step without a backward is not needed.
            del each.pairs[len(each.pairs) // 2 * 2 :]
            _measure(each.pairs, parameter)

    def backward_begins(self) -> None:
        """See whether the gradient is still there."""
        for each in tuple(self._watches):
            parameter = each.parameter()
            if parameter is None or parameter.grad is None or each.optimizer() is None:
                self._watches.remove(each)
            elif each.mark is None or mark_of(parameter) == each.mark:
                if each.mark is not None and not each.grew:
                    each.keep(parameter)
            elif len(each.edits) < EDITS:
                # Whatever is added from now on is not added to what the step has left.
                each.kept, each.grew = False, True
                _measure(each.edits, parameter)
            else:
                self._watches.remove(each)

    def backward_ended(self) -> None:
        """See whether a backward has added to it."""
        for each in self._watches:
            parameter = each.parameter()
            if each.mark is not None and parameter is not None:
                mark = mark_of(parameter)
                each.grew |= mark != each.mark
                each.mark = mark

    def rank_ends(self) -> None:
        """Write what was carried all along."""
        for each in self._watches:
            if each.carried >= LEAST:
                self._record(each)

    def _record(self, each: _Watch) -> None:
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


def _measure(readbacks: list[Readback], parameter: Any) -> None:
    read = norms.norms([parameter.grad]) if parameter.grad is not None else None
    if read is not None:
        readbacks.append(read)
