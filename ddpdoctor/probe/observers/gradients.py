"""Follow gradients between backward and step: missing, not reduced, changed by the job.

The parameters whose gradients changed show what DDP reduced. A forward through DDP arms its next
backward. Only an armed backward is reduced. Parameters whose gradients came otherwise are measured
when an optimizer steps them (`Unreduced`): the norms of gradient and parameter are recorded, and by
comparing the ranks a rule finds whether it did any harm.

Changes of gradients that all ranks make alike are no fault: a rank only records when it begins or
stops to make them, and a rule compares. Calls of torch's clipping are noticed in every step. That
they have stopped is noticed later, but recorded with the right step. Other changes of a gradient
show in its version counter, in the steps that all ranks check.
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
from ddpdoctor.probe.observers.optimizers import owned
from ddpdoctor.probe.observers.overhead import Pacing
from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.runtime import sites, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer, before_step
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, caller
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    ClipRecord,
    ConstantLossRecord,
    EditRecord,
    FindUnusedRecord,
    GradientlessParameter,
    NoGradientRecord,
    NoSyncVainRecord,
    UnreducedRecord,
)

MAX_CHECKED = 10  # synchronized backwards of a DDP module that are checked for missing gradients
MAX_NAMED = 8  # parameters or layers that a record names, while it counts all of them
UNFINISHED = "Expected to have finished reduction"  # what DDP says when gradients are missing
USED_FOR = 50  # synchronized backwards after which it is recorded that all parameters were used
USED_IN_ALL = 5  # the same at the end of a rank that had fewer
NORMALIZING_AT = 3  # the synchronized backward after which BatchNorm layers are recorded

MAX_CONSTANT_LOSSES = 16  # backwards with a loss that depends on no parameter
MEASURED = 4  # parameters whose norms are recorded at a time
DENSE_UNREDUCED = 10  # times that each kind of unreduced gradient is measured; then powers of two
MAX_UNREDUCED = 256  # the last of these
SEARCH_EVERY = 512
"""Synchronized backwards between two searches of a module for new parameters, once powers of two
are further apart."""


class Gradients(Observer):
    """The gradients of a rank's DDP modules: missing ones, and those without an all-reduce."""

    def __init__(self, state: RankState, replicas: Replicas, pacing: Pacing) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._pacing = pacing
        self._enabled = state.budget.enabled

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Count it. Note its line in the first iterations."""
        for each in self._replicas.alive:
            if each.ddp() is ddp:
                each.forwards += 1
                if armed:
                    each.armed += 1
                else:
                    each.unarmed += 1
                if each.reduced < MAX_CHECKED:
                    each.site = sites.caller()
                return

    def backward_begins(self) -> None:
        """Note the state of gradients that this backward may change without reducing them."""
        if not self._enabled:
            return
        alive = self._replicas.alive
        for each in alive:
            ddp = each.ddp()
            if ddp is None:
                continue
            # The backward before this one may have raised.
            each.sure, each.marks = False, None
            each.cause = _cause(each, bool(ddp.require_backward_grad_sync))
            if not each.cause:
                # The backward of a single known module needs no proof that it is its own.
                if each.reduced >= MAX_CHECKED and len(alive) == 1:
                    each.sure = each.armed > 0
                else:
                    each.marks = each.take_marks(each.middle)
            elif self.state.budget.left() >= 0:
                began = clock()
                each.marks = each.take_marks(each.spread)
                self.state.budget.spend(2 * (clock() - began))

    def backward_ended(self) -> None:
        """Find the modules whose gradients the backward changed, and whether it reduced them."""
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
        """Note whether a backward that may have changed some of a module's gradients did."""
        if each.armed and each.reduced < MAX_CHECKED and not changed:
            # DDP knows which parameters it reached. The one that we compared may be unused.
            times = torch_private.gradient_ready_times(ddp) or []
            changed = [index for index, when in enumerate(times) if when != each.ready[index]][:1]
        if not changed:
            return
        vain = each.cause == "backward in no_sync" and not each.unarmed
        if vain and not self._pacing.settling and "vain" not in each.recorded:
            each.recorded.add("vain")
            step = self.state.tracker.steps
            self.state.recorder.add(
                NoSyncVainRecord(step=step, ddp=each.number, **sites.caller().place)
            )
        if each.armed:
            each.reduced += 1
            each.due = True
            each.unreduced = None
        elif each.cause and each.unreduced is None:
            each.unreduced = Unreduced(each.cause, sites.caller(), changed[:MEASURED])
        each.armed = each.unarmed = 0

    def step_begins(self, optimizer: Any) -> None:
        """Record missing and unreduced gradients, which an optimizer is about to use."""
        if not self._enabled:
            return
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is None:
                continue
            if each.due:
                each.due = False
                self._check(each, ddp)
            each.forwards = 0
            if self._pacing.settling:
                # Its forward may have come while nothing was counted.
                each.unreduced = None
            if each.unreduced is not None or each.added:
                self._find_unreduced(each, owned(optimizer))

    def _check(self, each: Replica, ddp: Any) -> None:
        """Check a module after a synchronized backward."""
        budget = self.state.budget
        if each.reduced == NORMALIZING_AT:
            layers = [
                name
                for name, module in ddp.module.named_modules()
                if module.training and torch_private.normalizes_alone(module)
            ]
            if layers:
                first = tuple(layers[:MAX_NAMED])
                self.state.recorder.add(
                    BatchNormRecord(ddp=each.number, layers=first, count=len(layers))
                )
        # DDP's constructor sets a static graph after its events.
        unused = ddp.find_unused_parameters
        most = USED_FOR if unused else MAX_CHECKED
        if each.reduced <= most and not getattr(ddp, "static_graph", False):
            with budget.spending():
                if unused:
                    self._count_use(each, ddp)
                else:
                    self._find_missing(each, ddp)
        count = each.reduced
        search = not count & (count - 1) or count % SEARCH_EVERY == 0
        if (search or (each.guards and not each.added and each.thawed)) and budget.left() >= 0:
            with budget.spending():
                each.added = [
                    (name, weakref.ref(parameter), _why_added(each, name, parameter))
                    for name, parameter in torch_private.reduced_parameters(ddp)
                    if id(parameter) not in each.ids
                ]

    def rank_fails(self, error: BaseException) -> None:
        """Record parameters that were frozen or replaced, if DDP missed their gradients."""
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is not None and "missing" not in each.recorded and UNFINISHED in str(error):
                why = _reasons(each, ddp)
                gone = [index for index in range(len(each.names)) if why(index) != "unused"]
                if gone:
                    self._record_missing(each, ddp, gone)

    def rank_ends(self) -> None:
        """Record that all parameters were used in a short job, too."""
        for each in self._replicas.alive:
            if each.least is not None and each.reduced >= USED_IN_ALL:
                self._record_use(each)

    # -- missing gradients

    def _find_missing(self, each: Replica, ddp: Any) -> None:
        """Record parameters that got no gradient in the synchronized backward that just ended."""
        times = torch_private.gradient_ready_times(ddp)
        if times is None:
            now = time.perf_counter_ns()
            times = [0 if _has_none(each, index) else now for index in range(len(each.names))]
        missing = [
            index
            for index, (now, before) in enumerate(zip(times, each.ready, strict=False))
            if now == before and (not now or _has_none(each, index))
        ]
        each.ready = times
        if missing and len(missing) < len(times) and "missing" not in each.recorded:
            each.recorded.add("missing")
            self._record_missing(each, ddp, missing)

    def _record_missing(self, each: Replica, ddp: Any, missing: Sequence[int]) -> None:
        owners = {
            name: type(module).__name__
            for name, module in ddp.module.named_modules(remove_duplicate=False)
        }
        why = _reasons(each, ddp)
        named = [(index, each.names[index]) for index in missing[:MAX_NAMED]]
        shown = tuple(
            GradientlessParameter(name, owners.get(name.rpartition(".")[0], ""), why(index))
            for index, name in named
        )
        self.state.recorder.add(
            NoGradientRecord(
                time=time.time_ns(),
                step=self.state.tracker.steps,
                ddp=each.number,
                iteration=each.reduced,
                parameters=shown,
                count=len(missing),
                of=len(each.names),
                **each.site.place,
            )
        )

    def _count_use(self, each: Replica, ddp: Any) -> None:
        """Keep the least use of any parameter. After enough backwards, record it."""
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
        self.state.recorder.add(
            when_ready([Readback([each.least])], lambda values: replace(record, least=values[0]))
        )
        each.least = None

    # -- gradients without an all-reduce

    def _find_unreduced(self, each: Replica, stepped: frozenset[int]) -> None:
        """Record unreduced gradients of the parameters that are about to be stepped."""
        unreduced = each.unreduced
        if unreduced is not None and not each.ids.isdisjoint(stepped):
            each.unreduced = None
            reached = [
                (each.names[index], parameter)
                for index in unreduced.indices
                if (parameter := each.parameter(index)) is not None and id(parameter) in stepped
            ]
            self._record_unreduced(each, unreduced.cause, unreduced.site, reached)
        for why in {why for _, _, why in each.added}:
            reached = [
                (name, parameter)
                for name, reference, reason in each.added
                if reason == why
                and (parameter := reference()) is not None
                and id(parameter) in stepped
            ]
            if reached:
                self._record_unreduced(each, why, each.site, reached)

    def _record_unreduced(
        self, each: Replica, cause: str, site: Site, reached: list[tuple[str, Any]]
    ) -> None:
        """Record the norms of unreduced gradients and of their parameters, before the step."""
        count = each.unreduced_counts[cause] = each.unreduced_counts.get(cause, 0) + 1
        budget = self.state.budget
        dense = count <= DENSE_UNREDUCED or not count & (count - 1)
        if count > MAX_UNREDUCED or not dense or budget.left() < 0:
            return
        with budget.spending():
            plain = [pair for pair in reached if readback.has_plain_gradient(pair[1])]
            shown = dict(plain[:MEASURED])
            read = readback.gradients_and_values(list(shown.values()))
            if read is None:
                return
            record = UnreducedRecord(
                step=self.state.tracker.steps, ddp=each.number, cause=cause, **site.place
            )
            names = list(shown)

            def with_norms(values: list[float]) -> UnreducedRecord:
                gradients = dict(zip(names, values[::2], strict=True))
                parameters = dict(zip(names, values[1::2], strict=True))
                return replace(record, gradients=gradients, parameters=parameters)

            self.state.recorder.add(when_ready([read], with_norms))


def _has_none(each: Replica, index: int) -> bool:
    parameter = each.parameter(index)
    return parameter is None or parameter.grad is None


def _reasons(each: Replica, ddp: Any) -> Callable[[int], str]:
    """Return what tells why a parameter has no gradient, as far as it shows now."""
    present = {id(parameter) for parameter in ddp.module.parameters()}

    def why(index: int) -> str:
        parameter = each.parameter(index)
        if parameter is None or id(parameter) not in present:
            return "replaced"
        return "unused" if parameter.requires_grad else "frozen"

    return why


def _why_added(each: Replica, name: str, parameter: Any) -> str:
    """Tell why a parameter that needs a gradient is not one that DDP reduces."""
    if id(parameter) in each.frozen:
        return "unfrozen"
    return "replaced" if name in each.names else "added"


def _cause(each: Replica, syncs: bool) -> str:
    """Tell why the gradients of a backward that begins now will not be reduced, or return ""."""
    if each.armed:
        return "" if syncs else "backward in no_sync"
    if each.unarmed:
        return "forward in no_sync" if syncs else ""
    return "second backward" if each.forwards else "around"


# -- gradients that the job changes between backward and the optimizer's step

EDITS_EVERY = 64  # steps at the beginning that are all checked; later one in so many
MAX_EDITS = 128  # records of each kind that a rank writes
NAMED_EDITED = 4  # parameters that a record names
_NO_CALL = ("", NOWHERE)


class Edits(Observer):
    """Changes of the gradients of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._call: tuple[str, Site] = _NO_CALL  # what clipped last, if it has not stopped
        self._clipped = -1  # the step in which it did
        self._from: tuple[str, CodeType | None, int] = ("", None, 0)
        """The name of what clipped last, and the instruction that called it."""
        self._last_count: dict[int, int] = {}
        """By DDP module, how many gradients were changed in the last step that was checked."""
        self._marks: list[tuple[Replica, list[tuple[int, Mark]]]] = []

    def clips(self, name: str, frame: FrameType) -> None:
        """Note the outermost call of a step. Functions of torch call each other."""
        step = self.state.tracker.steps
        if self._clipped == step:
            return
        called = (name, frame.f_code, frame.f_lasti)
        if called != self._from or self._clipped != step - 1:
            self._note_stop(step - 1)
            self._from = called
            call = name, sites.caller()
            if call != self._call:
                self._call = call
                self.state.add(ClipRecord(step=step, call=name, **call[1].place), MAX_EDITS)
        self._clipped = step

    def _note_stop(self, last: int) -> None:
        """Record the first step without clipping, if there was none up to a last one."""
        if self._call is not _NO_CALL and self._clipped < last:
            self._call = _NO_CALL
            self.state.add(ClipRecord(step=self._clipped + 1, **NOWHERE.place), MAX_EDITS)

    def backward_ended(self) -> None:
        """Note the gradients as the backward left them."""
        step = self.state.tracker.steps
        if step < EDITS_EVERY or not step % EDITS_EVERY:
            self._marks = [(each, each.take_marks(each.spread)) for each in self._replicas.alive]
            self.wake("step_begins")
            return
        self._marks = []
        self.rest("backward_ended")
        before_step(step - step % EDITS_EVERY + EDITS_EVERY, lambda: self.wake("backward_ended"))

    def step_begins(self, optimizer: Any) -> None:
        """Record how many have changed since."""
        step = self.state.tracker.steps
        self._note_stop(step)
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
                self.state.add(record, MAX_EDITS)

    def rank_ends(self) -> None:
        """Record that clipping has stopped."""
        self._note_stop(self.state.tracker.steps - 1)


# -- losses that depend on no parameter


class ConstantLosses(Observer):
    """Backwards of one rank that DDP was to reduce and that reach no parameter."""

    def constant_backward(self) -> None:
        """Record the step."""
        tracker = self.state.tracker
        record = ConstantLossRecord(step=tracker.steps, backward=tracker.reduced, **caller().place)
        self.state.add(record, MAX_CONSTANT_LOSSES)
