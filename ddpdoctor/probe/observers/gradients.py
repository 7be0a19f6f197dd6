"""Follow gradients between backward and step: missing, not reduced, changed by the job.

What reached the parameters shows which gradients DDP reduces. A forward through DDP
arms its next backward; only a backward so armed is reduced. Parameters whose gradients came
otherwise are looked at when an optimizer steps them (`Unreduced`): the norms of gradient and
parameter are written down, and by comparing the ranks a rule sees whether it did any harm.

Changes of gradients that all ranks make alike are no fault: a rank only writes when it begins or
ceases to make them, and a rule compares. Calls of torch's clipping are seen in every step; that
they have ceased is noticed later, but written with the step. Whatever else changes a gradient is
seen by its counter of versions, in the steps that all ranks look at.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

from ddpdoctor.probe.observers import readback
from ddpdoctor.probe.observers.ddp_modules import Mark, Replica, Replicas, Unreduced
from ddpdoctor.probe.observers.overhead import Pacing
from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.runtime import sites, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer, before_step
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    ClipRecord,
    EditRecord,
    FindUnusedRecord,
    GradientlessParameter,
    NoGradientRecord,
    NoSyncVainRecord,
    UnreducedRecord,
)

# -- missing gradients


CLOSELY = 10
"""Synchronized backwards of a DDP module that are looked at."""

NAMED_PARAMETERS = 8
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
        named = [(index, each.names[index]) for index in missing[:NAMED_PARAMETERS]]
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


# -- gradients that were accumulated without an all-reduce, and that an optimizer steps with


MEASURED = 4
"""Parameters whose norms are written down at a time."""

DENSE_SIGHTINGS = 10
"""Times that each kind of unreduced gradient is looked at; then at the powers of two."""

MOST_SIGHTINGS = 256
"""The last of these."""

WALK_EVERY = 512
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
                (name, weakref.ref(parameter), _why_unreduced(each, name, parameter))
                for name, parameter in torch_private.reduced_parameters(ddp)
                if id(parameter) not in each.ids
            ]

    def _record(
        self, each: Replica, cause: str, site: Site, reached: list[tuple[str, Any]]
    ) -> None:
        """Record the norms of unreduced gradients and of their parameters, before the step."""
        count = each.sightings[cause] = each.sightings.get(cause, 0) + 1
        budget = self._state.budget
        if (
            count > MOST_SIGHTINGS
            or (count > DENSE_SIGHTINGS and count & (count - 1))
            or budget.left() < 0
        ):
            return
        with budget.spending():
            plain = [pair for pair in reached if readback.has_plain_gradient(pair[1])]
            shown = dict(plain[:MEASURED])
            read = readback.gradients_and_values(list(shown.values()))
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


def _why_unreduced(each: Replica, name: str, parameter: Any) -> str:
    if id(parameter) in each.frozen:
        return "unfrozen"
    return "replaced" if name in each.names else "added"


def _worth_a_walk(each: Replica) -> bool:
    count = each.reduced
    if not count & (count - 1) or count % WALK_EVERY == 0:
        return True
    return bool(each.guards) and not each.strangers and each.thawed


# -- gradients


NAMED_LAYERS = 8
"""Layers that a record names; it counts the rest."""

NORMALIZING_AT = 3
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
                if each.reduced == NORMALIZING_AT:
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
            first = tuple(layers[:NAMED_LAYERS])
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


# -- gradients that the job changes between backward and the optimizer's step


EDITS_EVERY = 64
"""Steps at the beginning whose gradients are looked at; later each so many."""

MOST_EDITS = 128
"""Records of each kind that one rank writes."""

NAMED_EDITED = 4
"""Parameters that a record names."""

_NO_CALL = ("", NOWHERE)


class Edits(Observer):
    """Changes of the gradients of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._call: tuple[str, Site] = _NO_CALL
        """What clipped last, if it has not ceased to."""
        self._clipped = -1
        """The step in which it did."""
        self._from: tuple[str, CodeType | None, int] = ("", None, 0)
        """Its name, and the instruction that called it."""
        self._last_count: dict[int, int] = {}
        """How many gradients were changed in the last step that was looked at, by DDP module."""
        self._marks: list[tuple[Replica, list[tuple[int, Mark]]]] = []

    def clips(self, name: str, frame: FrameType) -> None:
        """Remember the outermost call of a step: torch's functions call each other."""
        step = self.state.tracker.steps
        if self._clipped == step:
            return
        called = (name, frame.f_code, frame.f_lasti)
        if called != self._from or self._clipped != step - 1:
            self._ceased(step - 1)
            self._from = called
            call = name, sites.caller()
            if call != self._call:
                self._call = call
                self.state.add(ClipRecord(step=step, call=name, **call[1].place), MOST_EDITS)
        self._clipped = step

    def _ceased(self, last: int) -> None:
        """If nothing clipped from some step on up to a last one, write the first of them."""
        if self._call is not _NO_CALL and self._clipped < last:
            self._call = _NO_CALL
            self.state.add(ClipRecord(step=self._clipped + 1, **NOWHERE.place), MOST_EDITS)

    def backward_ended(self) -> None:
        """Remember the gradients as the backward left them."""
        step = self.state.tracker.steps
        if step < EDITS_EVERY or not step % EDITS_EVERY:
            self._marks = [(each, each.take_marks(each.witnesses)) for each in self._replicas.alive]
            self.wake("step_begins")
            return
        self._marks = []
        self.rest("backward_ended")
        before_step(step - step % EDITS_EVERY + EDITS_EVERY, lambda: self.wake("backward_ended"))

    def step_begins(self, optimizer: Any) -> None:
        """See which are other ones now."""
        step = self.state.tracker.steps
        self._ceased(step)
        if not self._marks:
            self.rest("step_begins")
            return
        marked, self._marks = self._marks, []
        for each, marks in marked:
            changed = each.changed(marks)
            if len(changed) != self._last_count.get(each.number, 0):
                self._last_count[each.number] = len(changed)
                names = tuple(each.names[index] for index in changed[:NAMED_EDITED])
                record = EditRecord(step=step, ddp=each.number, count=len(changed), names=names)
                self.state.add(record, MOST_EDITS)

    def rank_ends(self) -> None:
        """What has ceased since the last look was not written yet."""
        self._ceased(self.state.tracker.steps - 1)
