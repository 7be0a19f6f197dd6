"""Follow gradients between backward and step: missing, unreduced, or changed by the job.

The parameters whose gradients changed show what DDP reduced. A forward through DDP arms its next
backward. Only an armed backward is reduced. Parameters with other gradients are measured when an
optimizer steps them (`Unreduced`): the norms of gradient and parameter are recorded, and a rule
compares the ranks to find whether the missing reduction did harm.

Changes of gradients are not a fault if all ranks make them. A rank records when it starts or stops
changing them, and a rule compares. Calls of torch's clipping are observed in every step. Their end
is noticed later, but recorded with the right step. Other changes of a gradient show in its version
counter, in the steps that all ranks check.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

from ddpdoctor.probe.observers import collective_calls, readback
from ddpdoctor.probe.observers.ddp_modules import Mark, Replica, Replicas, Unreduced, mark_of
from ddpdoctor.probe.observers.optimizers import all_made, made_at, owned, parameters_of
from ddpdoctor.probe.observers.overhead import Pacing
from ddpdoctor.probe.observers.readback import Readback, when_ready
from ddpdoctor.probe.runtime import sites, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer, before_step
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.recorder import Lazy
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, caller
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    ClipRecord,
    ConstantLossRecord,
    EditRecord,
    FindUnusedRecord,
    GradientlessParameter,
    GradientScaleRecord,
    LossScaleRecord,
    MisplacedClipRecord,
    NeverUsedRecord,
    NoGradientRecord,
    NoSyncVainRecord,
    UnreducedRecord,
)

MAX_CHECKED = 10  # number of synchronized backwards of a module checked for missing gradients
MAX_NAMED = 8  # maximum number of parameters or layers that a record names; it counts all
UNFINISHED = "Expected to have finished reduction"  # DDP's message about missing gradients
USE_BACKWARDS = 50  # synchronized backwards after which full use of the parameters is recorded
MIN_USE_BACKWARDS = 5  # the same if the rank ends earlier
DENSE_SEARCHES = 8  # number of first synchronized backwards, each followed by a search for zeros
ZEROS_RECORDED_AT = 64  # synchronized backwards after which a running job records zeros
CHECKED_ELEMENTS = 1 << 12  # number of elements of a gradient on the CPU that are checked first
NORMALIZING_AT = 3  # the synchronized backward after which BatchNorm layers are recorded

STEP_IN_NO_SYNC = "step in no_sync"
"""The cause if an optimizer steps after a forward and a backward within ``no_sync()``."""

NO_BACKWARD = "no backward"
"""The cause if an optimizer steps after a forward without backward, as with ``autograd.grad``."""

OUTSIDE = "outside"  # The cause if parameters belong to no DDP module
MAX_CONSTANT_LOSSES = 16  # maximum number of records
MAX_MEASURED = 4  # maximum number of parameters whose norms are in a record
DENSE_UNREDUCED = 10  # number of first unreduced steps per kind, all measured; then powers of two
MAX_UNREDUCED = 256  # nothing is measured after this many such steps
SEARCH_EVERY = 512
"""Maximum interval, in synchronized backwards, of searches for new parameters. The first searches
are at powers of two."""


class Gradients(Observer):
    """The gradients of a rank's DDP modules: missing ones, and those without an all-reduce."""

    def __init__(self, state: RankState, replicas: Replicas, pacing: Pacing) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._pacing = pacing
        self._enabled = state.budget.enabled

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Count the forward. Note its line in the first iterations."""
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
        """Note the state of gradients that this backward may change without a reduction."""
        if not self._enabled:
            return
        alone = len(self._replicas.alive) == 1
        for each, ddp in self._replicas.living():
            # The previous backward may have raised.
            each.sure, each.marks = False, None
            each.cause = _cause(each, bool(ddp.require_backward_grad_sync))
            if each.cause == STEP_IN_NO_SYNC:
                # Harmless unless a step precedes the next reduced backward.
                each.marks = each.take_marks(each.middle)
            elif not each.cause:
                # With a single module, the backward is certainly its own.
                if each.reduced >= MAX_CHECKED and alone:
                    each.sure = each.armed > 0
                else:
                    each.marks = each.take_marks(each.middle)
            elif self.state.budget.left() >= 0:
                began = clock()
                each.marks = each.take_marks(each.spread)
                self.state.budget.spend(2 * (clock() - began))

    def backward_ended(self) -> None:
        """Find the modules whose gradients the backward changed, and whether it was reduced."""
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
        """Note whether a backward changed some of a module's gradients."""
        if each.armed and each.reduced < MAX_CHECKED and not changed:
            # DDP knows which parameters the backward reached. The compared one may be unused.
            times = torch_private.gradient_ready_times(ddp) or []
            changed = [index for index, when in enumerate(times) if when != each.ready[index]][:1]
        if not changed:
            return
        if each.armed and each.reduced < MAX_CHECKED:
            # The parameter compared until now may be unused.
            each.middle = changed[:1]
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
        elif each.cause and (each.unreduced is None or each.unreduced.cause == STEP_IN_NO_SYNC):
            # Accumulation within no_sync() is not a fault while more backwards follow.
            each.unreduced = Unreduced(each.cause, sites.caller(), changed[:MAX_MEASURED])
        each.armed = each.unarmed = 0

    def step_begins(self, optimizer: Any) -> None:
        """Record missing and unreduced gradients before an optimizer uses them."""
        if not self._enabled:
            return
        for each, ddp in self._replicas.living():
            if each.due:
                each.due = False
                self._check(each, ddp)
            elif each.armed and each.forwards and each.unreduced is None:
                # No backward has reached its parameters. They may still have gradients.
                each.unreduced = Unreduced(NO_BACKWARD, each.site, each.spread[:MAX_MEASURED])
            each.forwards = 0
            if self._pacing.settling:
                # Its forward may have run while nothing was counted.
                each.unreduced = None
            if each.unreduced is not None or each.added:
                self._find_unreduced(each, owned(optimizer))

    def _check(self, each: Replica, ddp: Any) -> None:
        """Check a module after a synchronized backward."""
        budget = self.state.budget
        if each.reduced == NORMALIZING_AT:
            self._record_normalizing(each, ddp)
        # DDP's constructor sets the static graph after our events.
        unused = ddp.find_unused_parameters
        most = USE_BACKWARDS if unused else MAX_CHECKED
        if each.reduced <= most and not getattr(ddp, "static_graph", False):
            with budget.spending():
                if unused:
                    self._count_use(each, ddp)
                else:
                    self._find_missing(each, ddp)
        count = each.reduced
        search = not count & (count - 1) or count % SEARCH_EVERY == 0
        if (unused or getattr(ddp, "static_graph", False)) and (count <= DENSE_SEARCHES or search):
            self._look_for_zeros(each, ddp)
        if (search or (each.guards and not each.added and each.thawed)) and budget.left() >= 0:
            with budget.spending():
                each.added = [
                    (name, weakref.ref(parameter), _why_added(each, name, parameter))
                    for name, parameter in torch_private.reduced_parameters(ddp)
                    if id(parameter) not in each.ids
                ]

    def _record_normalizing(self, each: Replica, ddp: Any) -> None:
        """Record the layers that compute statistics of this rank's batch alone."""
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

    def rank_fails(self, error: BaseException) -> None:
        """Record parameters that were frozen or replaced, if DDP missed their gradients."""
        for each, ddp in self._replicas.living():
            if "missing" not in each.recorded and UNFINISHED in str(error):
                why = _reasons(each, ddp)
                gone = [index for index in range(len(each.names)) if why(index) != "unused"]
                if gone:
                    self._record_missing(each, ddp, gone)

    def rank_ends(self) -> None:
        """Record for short jobs whether all parameters were used, and which were not."""
        for each in self._replicas.alive:
            if each.looks >= MIN_USE_BACKWARDS:
                self._record_never(each)
            if each.least is not None and each.reduced >= MIN_USE_BACKWARDS:
                self._record_use(each)

    # -- missing gradients

    def _find_missing(self, each: Replica, ddp: Any) -> None:
        """Record parameters without a gradient after a synchronized backward."""
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

    def _look_for_zeros(self, each: Replica, ddp: Any) -> None:
        """Keep the largest magnitude of each gradient.

        With ``find_unused_parameters`` or a static graph, DDP passes zeros as gradients of outputs
        that the loss does not use.
        """
        torch: Any = sys.modules["torch"]
        budget = self.state.budget
        if budget.left() < 0 or readback.capturing(torch):
            return
        with budget.spending():
            self._keep_largest(torch, each, ddp)
            if each.reduced == ZEROS_RECORDED_AT:
                self._record_never(each)

    def _keep_largest(self, torch: Any, each: Replica, ddp: Any) -> None:
        parameters = [each.parameter(index) for index in range(len(each.names))]
        gradients = [None if one is None else one.grad for one in parameters]
        # Parameters stepped in between had a gradient in an unchecked step.
        stepped = [
            one is not None
            and gradient is None
            and each.versions.setdefault(index, one._version) != one._version
            for index, (one, gradient) in enumerate(zip(parameters, gradients, strict=True))
        ]
        device = next((one.device for one in gradients if one is not None), None)
        with torch.no_grad():
            # Fill it on the device, because a copy would wait.
            zero, other = torch.zeros((), device=device), torch.ones((), device=device)
            largest = torch.stack(
                [
                    (other if touched else zero)
                    if gradient is None
                    else _largest(gradient).float()
                    if readback.is_plain(gradient) and gradient.layout is torch.strided
                    else other
                    for gradient, touched in zip(gradients, stepped, strict=True)
                ]
            )
            each.most = largest if each.most is None else torch.maximum(each.most, largest)
        if not each.looks:
            # The module may be freed when the rank ends.
            each.every = _gradientless(each, ddp, range(len(each.names)))
            each.sizes = [0 if one is None else one.numel() for one in parameters]
        each.looks += 1

    def _record_never(self, each: Replica) -> None:
        every, sizes = each.every, each.sizes
        record = NeverUsedRecord(
            ddp=each.number, backwards=each.looks, parameters=(), count=0, of=len(every),
            **each.site.place,
        )  # fmt: skip

        def with_values(values: list[float]) -> NeverUsedRecord:
            never = [index for index, value in enumerate(values) if value == 0]
            return replace(
                record,
                count=len(never),
                parameters=tuple(every[index] for index in never[:MAX_NAMED]),
                part=sum(sizes[index] for index in never) / max(1, sum(sizes)),
            )

        self.state.recorder.add(when_ready([Readback.of(each.most)], with_values))

    def _record_missing(self, each: Replica, ddp: Any, missing: Sequence[int]) -> None:
        self.state.recorder.add(
            NoGradientRecord(
                time=time.time_ns(),
                step=self.state.tracker.steps,
                ddp=each.number,
                iteration=each.reduced,
                parameters=_gradientless(each, ddp, missing[:MAX_NAMED]),
                count=len(missing),
                of=len(each.names),
                **each.site.place,
            )
        )

    def _count_use(self, each: Replica, ddp: Any) -> None:
        """Track the smallest use of any parameter. Record it after enough backwards."""
        used = torch_private.used_map(ddp)
        if used is None:
            return
        least = used.min().double()
        each.least = least if each.least is None else each.least.minimum(least)
        if each.reduced == USE_BACKWARDS:
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
            record = UnreducedRecord(
                step=self.state.tracker.steps, ddp=each.number, cause=cause, **site.place
            )
            seen = _with_norms(record, dict(plain[:MAX_MEASURED]))
            if seen is not None:
                self.state.recorder.add(seen)


def _with_norms(record: UnreducedRecord, shown: dict[str, Any]) -> Lazy | None:
    """Return a record that waits for norms of gradients and values. None if unreadable."""
    read = readback.gradients_and_values(list(shown.values()))
    if read is None:
        return None
    names = list(shown)

    def with_norms(values: list[float]) -> UnreducedRecord:
        gradients = dict(zip(names, values[::2], strict=True))
        parameters = dict(zip(names, values[1::2], strict=True))
        return replace(record, gradients=gradients, parameters=parameters)

    return when_ready([read], with_norms)


JOINT_BACKWARDS = 4  # number of first backwards that are checked for gradients of other parameters
FACTOR_ERROR = 1e-3
MAX_GRAPHS = 8  # number of first backwards whose graph is followed from the loss
MAX_NODES = 64  # maximum number of nodes read
SCALED_STEPS = 3  # number of backwards with a loss divided by the world size until it is recorded


class LossScale(Observer):
    """The factors of the first losses, and whether the losses were reduced."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._world_size = sys.modules["torch"].distributed.get_world_size()
        self._looked = 0
        self._divided = 0

    def graph_begins(self, loss: Any) -> None:
        """Follow the graph from the loss to reduced tensors."""
        if not self._replicas.alive:
            return
        reduced = collective_calls.reduced_graphs
        self._looked += 1
        if self._looked > MAX_GRAPHS:
            self.rest("graph_begins")
        elif (root := getattr(loss, "grad_fn", None)) is not None:
            self._follow(root, reduced)
        reduced.clear()

    def _follow(self, root: Any, reduced: list[tuple[Any, str, Site]]) -> None:
        step = self.state.tracker.steps
        queue, seen = [(root, 1.0)], {root}
        leading, only = 1.0, True  # the product of the factors nearest to the loss
        for place, (node, before) in enumerate(queue):
            for graph, call, site in reduced:
                if node is graph:
                    record = LossScaleRecord(step=step, call=call, factor=before, **site.place)
                    self.state.add(record, 1)
                    return
            own = torch_private.scalar_factor(node)
            factor = before if own is None else before * own
            only = only and own is not None and place + 1 == len(queue)
            leading = factor if only else leading
            after = [each for each, _ in node.next_functions if each is not None]
            if len(queue) < MAX_NODES:
                queue += [(each, factor) for each in after if each not in seen]
                seen.update(after)
            elif not reduced:
                break
        self._count(leading, step)

    def _count(self, factor: float, step: int) -> None:
        world = self._world_size
        if world > 1 and abs(factor * world - 1) < FACTOR_ERROR:
            self._divided += 1
            if self._divided == SCALED_STEPS:
                place = sites.caller().place
                self.state.recorder.add(LossScaleRecord(step=step, factor=factor, **place))


@dataclass(eq=False)
class _Beside:
    """The parameters of an optimizer that belong to no DDP module."""

    ddp: int  # as in the records
    parameters: dict[str, weakref.ref[Any]]  # the first of them
    joint: bool = False  # whether a reduced backward gave them gradients
    steps: int = 0
    first: Lazy | None = None  # the record of the first step, written once they are joint


class Outside(Observer):
    """Parameters that are trained together with a DDP module but are not part of it.

    Parameters with gradients from other backwards belong to a model that is the rank's own.
    """

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._known: weakref.WeakKeyDictionary[Any, _Beside] = weakref.WeakKeyDictionary()
        self._marks: list[tuple[_Beside, Any, Mark]] = []
        self._reduced = 0
        self._looked = 0

    def optimizer_made(self) -> None:
        """Look for the optimizer's parameters in the next backwards."""
        self._looked = 0
        self.wake("backward_begins", "backward_ended", "step_begins")

    def backward_begins(self) -> None:
        """Note the state of the parameters' gradients."""
        self._looked += 1
        if self._looked > JOINT_BACKWARDS:
            self.rest("backward_begins", "backward_ended")
        for optimizer in all_made():
            if optimizer not in self._known and self._replicas.alive:
                self._known[optimizer] = self._beside(optimizer)
        self._reduced = sum(each.reduced for each in self._replicas.alive)
        self._marks = [
            (each, parameter, mark_of(parameter))
            for each in self._known.values()
            if not each.joint
            for reference in each.parameters.values()
            if (parameter := reference()) is not None
        ]

    def _beside(self, optimizer: Any) -> _Beside:
        inside = self._replicas.parameter_ids()
        outside = {
            f"parameter {place} of shape {tuple(parameter.shape)}": weakref.ref(parameter)
            for place, parameter in enumerate(parameters_of(optimizer))
            if id(parameter) not in inside and parameter.requires_grad
        }
        return _Beside(-1 - len(self._known), dict(list(outside.items())[:MAX_MEASURED]))

    def backward_ended(self) -> None:
        """Note whether the backward was reduced."""
        marks, self._marks = self._marks, []
        if sum(each.reduced for each in self._replicas.alive) > self._reduced:
            for each, parameter, mark in marks:
                each.joint = each.joint or mark_of(parameter) != mark

    def step_begins(self, optimizer: Any) -> None:
        """Record the norms of some parameters in the first steps, then at powers of two."""
        each = self._known.get(optimizer)
        if each is None:
            return
        each.steps += 1
        if each.steps == 1 and not each.joint and self.state.budget.left() >= 0:
            with self.state.budget.spending():
                each.first = self._seen(optimizer, each)
        if not any(one.joint and one.steps < MAX_UNREDUCED for one in self._known.values()):
            if self._looked > JOINT_BACKWARDS:
                self.rest("step_begins")
            return
        count, budget = each.steps, self.state.budget
        dense = count <= DENSE_UNREDUCED or not count & (count - 1)
        if not each.joint or count > MAX_UNREDUCED or not dense or budget.left() < 0:
            return
        with budget.spending():
            for record in (each.first, self._seen(optimizer, each)):
                if record is not None:
                    self.state.recorder.add(record)
            each.first = None

    def _seen(self, optimizer: Any, each: _Beside) -> Lazy | None:
        """Return the record of a step. None if no parameter has a gradient."""
        shown = {
            name: parameter
            for name, reference in each.parameters.items()
            if (parameter := reference()) is not None and readback.has_plain_gradient(parameter)
        }
        if not shown:
            return None
        step, place = self.state.tracker.steps, made_at(optimizer).place
        return _with_norms(UnreducedRecord(step=step, ddp=each.ddp, cause=OUTSIDE, **place), shown)


def _largest(gradient: Any) -> Any:
    """Return the largest magnitude in a gradient, or in a nonzero part of it."""
    if gradient.numel() > CHECKED_ELEMENTS and gradient.device.type == "cpu":
        some = readback.flattened(gradient)[:: gradient.numel() // CHECKED_ELEMENTS].abs().max()
        if some:
            return some
    return gradient.abs().max() if gradient.numel() else gradient.new_ones(())


def _gradientless(
    each: Replica, ddp: Any, indices: Sequence[int]
) -> tuple[GradientlessParameter, ...]:
    """Return the recorded facts about some parameters."""
    owners = {
        name: type(module).__name__
        for name, module in ddp.module.named_modules(remove_duplicate=False)
    }
    why = _reasons(each, ddp)
    named = [(index, each.names[index]) for index in indices]
    return tuple(
        GradientlessParameter(name, owners.get(name.rpartition(".")[0], ""), why(index))
        for index, name in named
    )


def _has_none(each: Replica, index: int) -> bool:
    parameter = each.parameter(index)
    return parameter is None or parameter.grad is None


def _reasons(each: Replica, ddp: Any) -> Callable[[int], str]:
    """Return a function that gives the reason why a parameter has no gradient, if known by now."""
    present = {id(parameter) for parameter in ddp.module.parameters()}

    def why(index: int) -> str:
        parameter = each.parameter(index)
        if parameter is None or id(parameter) not in present:
            return "replaced"
        return "unused" if parameter.requires_grad else "frozen"

    return why


def _why_added(each: Replica, name: str, parameter: Any) -> str:
    """Return why DDP does not reduce a parameter that requires a gradient."""
    if id(parameter) in each.frozen:
        return "unfrozen"
    return "replaced" if name in each.names else "added"


def _cause(each: Replica, syncs: bool) -> str:
    """Return why the gradients of the next backward will not be reduced, or ""."""
    if each.armed:
        return "" if syncs else "backward in no_sync"
    if each.unarmed:
        return "forward in no_sync" if syncs else STEP_IN_NO_SYNC
    return "second backward" if each.forwards else "around"


# -- gradients that the job changes between backward and the optimizer's step

EDITS_EVERY = 64  # number of first steps, all checked; then the interval of checks
MAX_EDITS = 128  # maximum number of records of each kind
NAMED_EDITED = 4  # maximum number of parameters that a record names
FACTOR_STEPS = 8  # number of first steps with a gradient measured before and after the changes
MAX_FACTORS = 4  # maximum number of measured changes
MIN_MISPLACED = 3  # number of consecutive early calls of clipping until it is recorded
_NO_CALL = ("", NOWHERE)


class Edits(Observer):
    """Changes of the gradients of a rank."""

    def __init__(self, state: RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas
        self._call: tuple[str, Site] = _NO_CALL  # the last clipping, unless it has stopped
        self._clipped = -1  # the step of that call
        self._from: tuple[str, CodeType | None, int] = ("", None, 0)
        """The name of the last clipping function, and the instruction that called it."""
        self._last_count: dict[int, int] = {}
        """By DDP module, the number of gradients changed in the last checked step."""
        self._marks: list[tuple[Replica, list[tuple[int, Mark]]]] = []
        self._scaled = False  # whether a GradScaler has scaled a loss and not unscaled yet
        self._fresh = False  # whether a backward has ended since the last step of an optimizer
        self._early: tuple[str, Site] | None = None  # a call before any backward of the step
        self._misplaced: dict[str, int] = {}  # consecutive occurrences by fault
        self._passes = 0  # backwards since the last step
        self._measured: tuple[Replica, int, Readback] | None = None
        """The parameter whose gradient was measured after the last backward."""
        self._pairs: list[Readback] = []

    def loss_scaled(self) -> None:
        """Expect the gradients to be unscaled."""
        self._scaled = True

    def unscales(self) -> None:
        """Note that the gradients are unscaled."""
        self._scaled = False

    def clips(self, name: str, frame: FrameType) -> None:
        """Note the outermost clipping call of a step. torch's functions call each other."""
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
        if step < EDITS_EVERY:
            if not self._fresh:
                self._early = name, sites.caller()
                return
            edited = any(each.changed(marks) for each, marks in self._marks)
            if self._scaled and not edited:
                self._count("scaled", name, sites.caller())
            else:
                self._misplaced["scaled"] = -EDITS_EVERY
            self._misplaced["early"] = -EDITS_EVERY

    def _count(self, what: str, name: str, site: Site) -> None:
        times = self._misplaced[what] = self._misplaced.get(what, 0) + 1
        if times == MIN_MISPLACED:
            step = self.state.tracker.steps
            record = MisplacedClipRecord(step=step, call=name, what=what, **site.place)
            self.state.recorder.add(record)

    def _note_stop(self, last: int) -> None:
        """Record the first step without clipping, unless clipping continues."""
        if self._call is not _NO_CALL and self._clipped < last:
            self._call = _NO_CALL
            self.state.add(ClipRecord(step=self._clipped + 1, **NOWHERE.place), MAX_EDITS)

    def backward_ended(self) -> None:
        """Note the gradients after the backward."""
        step = self.state.tracker.steps
        if self._early is not None:
            self._count("early", *self._early)
        self._fresh, self._early = True, None
        self._passes += 1
        if step < FACTOR_STEPS:
            self._measure()
        if step < EDITS_EVERY or not step % EDITS_EVERY:
            self._marks = [(each, each.take_marks(each.spread)) for each in self._replicas.alive]
            self.wake("step_begins")
            return
        self._marks = []
        self.rest("backward_ended")
        before_step(step - step % EDITS_EVERY + EDITS_EVERY, lambda: self.wake("backward_ended"))

    def _measure(self) -> None:
        """Measure a gradient after DDP's reduction."""
        self._measured = None
        budget = self.state.budget
        if self._passes > 1 or len(self._pairs) >= 2 * MAX_FACTORS or budget.left() < 0:
            return
        with budget.spending():
            for each in self._replicas.alive[:1]:
                for index in each.middle:
                    parameter = each.parameter(index)
                    if parameter is not None and readback.has_plain_gradient(parameter):
                        read = readback.norms_of([parameter.grad])
                        self._measured = (each, index, read) if read is not None else None

    def _compare(self) -> None:
        """Measure the gradient again. Only this shows a change through `.data`."""
        measured, self._measured = self._measured, None
        if measured is None or self._passes != 1:
            return
        each, index, before = measured
        parameter = each.parameter(index)
        if parameter is None:
            return
        read = readback.norms_of([parameter.grad]) if parameter.grad is not None else None
        if read is None:
            return
        self._pairs += [before, read]
        if len(self._pairs) == 2 * MAX_FACTORS:
            record = GradientScaleRecord(step=self.state.tracker.steps, name=each.names[index])

            def with_factors(norms: list[float]) -> GradientScaleRecord:
                pairs = zip(norms[::2], norms[1::2], strict=True)
                return replace(
                    record, factors=tuple(new / old if old else 0.0 for old, new in pairs)
                )

            if all(one.ready for one in self._pairs):
                norms = [one for pair in self._pairs for one in pair.numbers()]
                factors = with_factors(norms).factors
                if factors[0] == 1.0 or max(factors) - min(factors) > FACTOR_ERROR:
                    return
            self.state.recorder.add(when_ready(self._pairs, with_factors))

    def step_begins(self, optimizer: Any) -> None:
        """Record how many gradients have changed since the backward."""
        step = self.state.tracker.steps
        self._note_stop(step)
        # With several optimizers, a call may follow the step of another optimizer.
        self._fresh, self._early = False, None
        if not self._marks:
            self._passes = 0
            if step >= EDITS_EVERY:
                self.rest("step_begins")
            return
        marked, self._marks = self._marks, []
        self._compare()
        self._passes = 0
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
    """Backwards that DDP should reduce and that reach no parameter."""

    def constant_backward(self) -> None:
        """Record the step."""
        tracker = self.state.tracker
        record = ConstantLossRecord(step=tracker.steps, backward=tracker.reduced, **caller().place)
        self.state.add(record, MAX_CONSTANT_LOSSES)
