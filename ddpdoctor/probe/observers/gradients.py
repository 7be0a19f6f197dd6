"""Which gradients DDP reduces and which it does not: kept by what really reached the parameters.

A forward through DDP arms its next backward; only a backward so armed is reduced. Parameters whose
gradients came otherwise are looked at when an optimizer steps them (`Unreduced`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.observers.missing_gradients import MissingGradients
from ddpdoctor.probe.observers.pacing import Pacing
from ddpdoctor.probe.observers.replicas import Replica, Replicas, Unreduced
from ddpdoctor.probe.observers.unreduced import MEASURED, UnreducedGradients
from ddpdoctor.probe.runtime import sites, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.model import BatchNormRecord, NoSyncVainRecord

CLOSELY = 10
"""Synchronized backwards of a DDP module that are looked at one by one."""

NAMED = 8
"""Layers that a record names; it counts the rest."""

NORMALIZING = 3
"""The synchronized backward at which it is seen which BatchNorm layers train."""


class Gradients(Observer):
    """The gradients of a rank's replicas."""

    def __init__(
        self,
        state: RankState,
        replicas: Replicas,
        pacing: Pacing,
        owned: Callable[[Any], frozenset[int]],
    ) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._pacing = pacing
        self._owned = owned
        self._enabled = state.budget.enabled
        self._missing = MissingGradients(state)
        self._unreduced = UnreducedGradients(state)

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Count it, and remember its line in the first iterations."""
        for each in self._replicas.alive:
            if each.ddp() is ddp:
                each.forwards += 1
                if armed:
                    each.armed += 1
                else:
                    each.unarmed += 1
                if each.reduced < CLOSELY:
                    each.site = sites.caller()
                return

    def backward_begins(self) -> None:
        """Remember the gradients as they are, where this backward may reach them unreduced."""
        if not self._enabled:
            return
        alive = self._replicas.alive
        for each in alive:
            ddp = each.ddp()
            if ddp is None:
                continue
            # A backward before this one may have raised.
            each.sure, each.marks = False, None
            each.cause = _cause(each, bool(ddp.require_backward_grad_sync))
            if not each.cause:
                # Whose backward it is needs no proof where there is one module, and it is known.
                if each.reduced >= CLOSELY and len(alive) == 1:
                    each.sure = each.armed > 0
                else:
                    each.marks = each.take_marks(each.probes)
            elif self.state.budget.left() >= 0:
                began = clock()
                each.marks = each.take_marks(each.witnesses)
                self.state.budget.spend(2 * (clock() - began))

    def backward_ended(self) -> None:
        """See which modules the backward has touched, and whether it was reduced."""
        for each in self._replicas.alive:
            if each.sure:
                each.sure, each.due, each.unreduced = False, True, None
                each.reduced += 1
                each.armed = each.unarmed = 0
                continue
            marks, each.marks = each.marks, None
            ddp = each.ddp()
            if marks is not None and ddp is not None:
                self._settle(each, ddp, each.changed(marks))

    def _settle(self, each: Replica, ddp: Any, changed: list[int]) -> None:
        """A backward ended that may have changed some of a module's gradients."""
        if each.armed and each.reduced < CLOSELY:
            # Which parameters it reached DDP knows; the one looked at may be unused.
            changed = changed or _stirred(each, ddp)
        if not changed:
            return
        vain = each.cause == "backward in no_sync" and not each.unarmed
        if vain and not self._pacing.settling and "vain" not in each.recorded:
            each.recorded.add("vain")
            self.state.recorder.add(
                NoSyncVainRecord(
                    step=self.state.tracker.steps, ddp=each.number, **sites.caller().place
                )
            )
        if each.armed:
            each.reduced += 1
            each.due = True
            each.unreduced = None
        elif each.cause and each.unreduced is None:
            each.unreduced = Unreduced(each.cause, sites.caller(), changed[:MEASURED])
        each.armed = each.unarmed = 0

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer is about to use the gradients: what is missing or unreduced stays so."""
        if not self._enabled:
            return
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is None:
                continue
            if each.due:
                each.due = False
                if each.reduced == NORMALIZING:
                    self._look_for_batchnorm(each, ddp)
                self._missing.look(each, ddp)
                self._unreduced.look_for_strangers(each, ddp)
            each.forwards = 0
            if self._pacing.settling:
                # Its forward may have come while nothing was counted.
                each.unreduced = None
            if each.unreduced is not None or each.strangers:
                self._unreduced.look(each, self._owned(optimizer))

    def _look_for_batchnorm(self, each: Replica, ddp: Any) -> None:
        """Record the BatchNorm layers that take their statistics from this rank's batch alone."""
        layers = [
            name
            for name, module in ddp.module.named_modules()
            if module.training and torch_private.normalizes_alone(module)
        ]
        if layers:
            first = tuple(layers[:NAMED])
            self.state.recorder.add(
                BatchNormRecord(ddp=each.number, layers=first, count=len(layers))
            )

    def rank_fails(self, error: BaseException) -> None:
        """If DDP missed gradients, its parameters may have been frozen or replaced meanwhile."""
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is not None:
                self._missing.rank_fails(each, ddp, error)

    def rank_ends(self) -> None:
        """A short job, too, may have had no unused parameter."""
        for each in self._replicas.alive:
            self._missing.rank_ends(each)


def _cause(each: Replica, syncs: bool) -> str:
    """Why the gradients of a backward that begins now would not be reduced as one may think."""
    if each.armed:
        return "" if syncs else "backward in no_sync"
    if each.unarmed:
        return "forward in no_sync" if syncs else ""
    return "second backward" if each.forwards else "around"


def _stirred(each: Replica, ddp: Any) -> list[int]:
    times = torch_private.gradient_ready_times(ddp) or []
    return [index for index, when in enumerate(times) if when != each.ready[index]][:1]
