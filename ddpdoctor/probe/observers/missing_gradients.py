"""Parameters that get no gradient in a synchronized backward, and whether any ever was unused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.observers.replicas import Replica
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.model import FindUnusedRecord, GradientlessParameter, NoGradientRecord

CLOSELY = 10
"""Synchronized backwards of a DDP module that are looked at."""

NAMED = 8
"""Parameters that a record names; it counts the rest."""

UNFINISHED = "Expected to have finished reduction"
"""What DDP says when it missed gradients."""

USED_FOR = 50
"""Synchronized backwards after which it is recorded that no parameter was ever unused."""

USED_IN_ALL = 5
"""The same at the end of a rank that had fewer."""


class MissingGradients:
    """Those of one rank.

    Args:
        state: The rank.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state

    def look(self, each: Replica, ddp: Any) -> None:
        """A synchronized backward ended, and an optimizer is about to step."""
        # Only now is it known: a static graph is set at the end of DDP's constructor.
        unused = ddp.find_unused_parameters
        if each.reduced > (USED_FOR if unused else CLOSELY) or getattr(ddp, "static_graph", False):
            return
        with self._state.budget.spending():
            if unused:
                self._look_for_unused(each, ddp)
            else:
                self._look_for_missing(each, ddp)

    def _look_for_missing(self, each: Replica, ddp: Any) -> None:
        """Which parameters got no gradient in the synchronized backward that just ended."""
        times = torch_private.gradient_ready_times(ddp)
        if times is None:
            now = time.perf_counter_ns()
            times = [0 if _is_bare(each, index) else now for index in range(len(each.names))]
        missing = [
            index
            for index, (now, before) in enumerate(zip(times, each.ready, strict=False))
            if now == before and (not now or _is_bare(each, index))
        ]
        each.ready = times
        if missing and len(missing) < len(times) and "missing" not in each.recorded:
            each.recorded.add("missing")
            self._record(each, ddp, missing)

    def _look_for_unused(self, each: Replica, ddp: Any) -> None:
        """Keep the least use of any parameter; after enough backwards, record it."""
        used = torch_private.used_map(ddp)
        if used is None:
            return
        least = used.min().double()
        each.least = least if each.least is None else each.least.minimum(least)
        if each.reduced == USED_FOR:
            self._record_use(each)

    def _record_use(self, each: Replica) -> None:
        record = FindUnusedRecord(
            ddp=each.number, iterations=each.reduced, parameters=len(each.names)
        )
        self._state.recorder.add(
            when_ready([Readback([each.least])], lambda values: replace(record, least=values[0]))
        )
        each.least = None

    def rank_fails(self, each: Replica, ddp: Any, error: BaseException) -> None:
        """If DDP missed gradients: which of its parameters were frozen or replaced meanwhile."""
        if "missing" not in each.recorded and UNFINISHED in str(error):
            why = _reasons(each, ddp)
            gone = [index for index in range(len(each.names)) if why(index) != "unused"]
            if gone:
                self._record(each, ddp, gone)

    def rank_ends(self, each: Replica) -> None:
        """Record of a short job, too, that no parameter was ever unused."""
        if each.least is not None and each.reduced >= USED_IN_ALL:
            self._record_use(each)

    def _record(self, each: Replica, ddp: Any, missing: Sequence[int]) -> None:
        owners = {
            name: type(module).__name__
            for name, module in ddp.module.named_modules(remove_duplicate=False)
        }
        why = _reasons(each, ddp)
        named = [(index, each.names[index]) for index in missing[:NAMED]]
        shown = tuple(
            GradientlessParameter(name, owners.get(name.rpartition(".")[0], ""), why(index))
            for index, name in named
        )
        self._state.recorder.add(
            NoGradientRecord(
                time=time.time_ns(),
                step=self._state.tracker.steps,
                ddp=each.number,
                iteration=each.reduced,
                parameters=shown,
                count=len(missing),
                of=len(each.names),
                **each.site.place,
            )
        )


def _is_bare(each: Replica, index: int) -> bool:
    parameter = each.parameter(index)
    return parameter is None or parameter.grad is None


def _reasons(each: Replica, ddp: Any) -> Callable[[int], str]:
    """Why parameters got no gradient, as far as it shows now."""
    present = {id(parameter) for parameter in ddp.module.parameters()}

    def why(index: int) -> str:
        parameter = each.parameter(index)
        if parameter is None or id(parameter) not in present:
            return "replaced"
        return "unused" if parameter.requires_grad else "frozen"

    return why
