"""Gradients that were accumulated without an all-reduce, and that an optimizer steps with.

The norms of gradient and parameter are written down, and by comparing the ranks a rule sees whether
it did any harm.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.observers.readback import when_ready
from ddpdoctor.probe.observers.replicas import Replica
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.records.model import UnreducedRecord

MEASURED = 4
"""Parameters whose norms are written down at a time."""

EACH = 10
"""Times that each kind of unreduced gradient is looked at; then at the powers of two."""

SIGHTINGS = 256
"""The last of these."""

WALK = 512
"""Synchronized backwards between two walks through a module in search of new parameters, once the
powers of two are further apart."""


class UnreducedGradients:
    """Those of one rank.

    Args:
        state: The rank.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state

    def look(self, each: Replica, owned: frozenset[int]) -> None:
        """Record those gradients without a reduction that an optimizer is about to use.

        Args:
            each: Their module.
            owned: The ids of the optimizer's parameters.
        """
        unreduced = each.unreduced
        if unreduced is not None and not each.ids.isdisjoint(owned):
            each.unreduced = None
            reached = [
                (each.names[index], parameter)
                for index in unreduced.indices
                if (parameter := each.parameter(index)) is not None and id(parameter) in owned
            ]
            self._record(each, unreduced.cause, unreduced.site, reached)
        for why in {why for _, _, why in each.strangers}:
            reached = [
                (name, parameter)
                for name, reference, reason in each.strangers
                if reason == why
                and (parameter := reference()) is not None
                and id(parameter) in owned
            ]
            if reached:
                self._record(each, why, each.site, reached)

    def look_for_strangers(self, each: Replica, ddp: Any) -> None:
        """Find parameters that need a gradient now and did not belong to the module DDP saw."""
        if not _worth_a_walk(each) or self._state.budget.left() < 0:
            return
        with self._state.budget.spending():
            each.strangers = [
                (name, weakref.ref(parameter), _why(each, name, parameter))
                for name, parameter in torch_private.reduced_parameters(ddp)
                if id(parameter) not in each.ids
            ]

    def _record(
        self, each: Replica, cause: str, site: Site, reached: list[tuple[str, Any]]
    ) -> None:
        """Record the norms of unreduced gradients and of their parameters, before the step."""
        count = each.sightings[cause] = each.sightings.get(cause, 0) + 1
        budget = self._state.budget
        if count > SIGHTINGS or (count > EACH and count & (count - 1)) or budget.left() < 0:
            return
        with budget.spending():
            plain = [pair for pair in reached if norms.has_plain_gradient(pair[1])]
            shown = dict(plain[:MEASURED])
            read = norms.gradients_and_values(list(shown.values()))
            if read is None:
                return
            record = UnreducedRecord(
                step=self._state.tracker.steps, ddp=each.number, cause=cause, **site.place
            )
            names = list(shown)

            def with_norms(values: list[float]) -> UnreducedRecord:
                gradients = dict(zip(names, values[::2], strict=True))
                parameters = dict(zip(names, values[1::2], strict=True))
                return replace(record, gradients=gradients, parameters=parameters)

            self._state.recorder.add(when_ready([read], with_norms))


def _why(each: Replica, name: str, parameter: Any) -> str:
    if id(parameter) in each.frozen:
        return "unfrozen"
    return "replaced" if name in each.names else "added"


def _worth_a_walk(each: Replica) -> bool:
    count = each.reduced
    if not count & (count - 1) or count % WALK == 0:
        return True
    return bool(each.guards) and not each.strangers and each.thawed
