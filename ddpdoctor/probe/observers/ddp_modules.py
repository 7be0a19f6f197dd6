"""Keep track of the rank's DDP modules and pipeline stages, and of what is loaded into them.

``load_state_dict(strict=False)`` passes over names that do not fit. Where most of a checkpoint was
passed over, that is recorded, before the process is a rank, too.

A pipeline's schedule (``torch.distributed.pipelining``) runs every forward of a DDP module in
``no_sync`` and reduces with the last backward of a step alone, of which DDP's logger has no times.
What that one takes longer than the other backwards is the wait for the replicas.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddpdoctor.probe.runtime import rank, sites, torch_groups, torch_private
from ddpdoctor.probe.runtime.events import Observer, subscribe
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, caller
from ddpdoctor.run.records.model import (
    CutRecord,
    LoadRecord,
    ModelRecord,
    Parameter,
    ResumeRecord,
    StageRecord,
)
from ddpdoctor.run.records.training import AppliedRecord, NotAppliedRecord

# -- the DDP modules of this rank: their parameters, and what is known of their gradients


WITNESSES = 48
"""Parameters of a DDP module that tell whether a backward touched it; spread over all of it."""

GUARDS = 16
"""Frozen parameters that are watched for being unfrozen; spread over all of them."""

MOST_MODELS = 16
"""Models that a rank records."""

MOST_PARAMETERS = 4096
"""Parameters of a model that are recorded."""

Mark = tuple[int, int]
"""Tells one state of a parameter's gradient from another."""


def mark_of(parameter: Any) -> Mark:
    """The state of a parameter's gradient as it is now."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


class Unreduced:
    """Gradients that were accumulated without being reduced and wait for an optimizer."""

    __slots__ = ("cause", "indices", "site")

    def __init__(self, cause: str, site: Site, indices: list[int]) -> None:
        self.cause = cause
        self.site = site
        self.indices = indices


class Replica:
    """What is known of one DDP module."""

    def __init__(self, ddp: Any, number: int) -> None:
        self.ddp = weakref.ref(ddp)
        self.number = number
        reduced = torch_private.reduced_parameters(ddp)
        self.names = [name for name, _ in reduced]
        self.parameters = [weakref.ref(parameter) for _, parameter in reduced]
        self.ids = frozenset(id(parameter) for _, parameter in reduced)
        frozen = torch_private.frozen_parameters(ddp)
        self.frozen = frozenset(id(parameter) for parameter in frozen)
        """The parameters that required no gradient when DDP was built."""
        every = max(1, -(-len(frozen) // GUARDS))
        self.guards = [weakref.ref(parameter) for parameter in frozen[::every]]
        count = len(reduced)
        stride = max(1, -(-count // WITNESSES))
        self.witnesses = list(range(0, count, stride))
        self.probes = [count // 2] if count else []
        self.armed = 0
        """Armed forwards since the last backward that touched the module."""
        self.unarmed = 0
        """The same for forwards within ``no_sync()``."""
        self.forwards = 0
        """Forwards since the last step of an optimizer."""
        self.site = NOWHERE
        """The line of the last forward, in the first iterations."""
        self.reduced = 0
        """Backwards that were reduced."""
        self.due = False
        """Whether one was since the last look at what it left out."""
        self.ready: Sequence[int] = [0] * count
        self.sure = False
        """Whether the backward under way is known to be this module's, and reduced."""
        self.marks: list[tuple[int, Mark]] | None = None
        self.cause = ""
        self.unreduced: Unreduced | None = None
        self.sightings: dict[str, int] = {}
        self.recorded: set[str] = set()
        self.looks = 0
        """How often its parameters were looked for in optimizers."""
        self.least: Any = None
        """The least number of ranks that used a parameter, so far; on the module's device."""
        self.strangers: list[tuple[str, weakref.ref[Any], str]] = []
        """Parameters that need a gradient and are not reduced, with the reason."""

    def parameter(self, index: int) -> Any:
        """A reduced parameter, or None if it is gone."""
        return self.parameters[index]()

    @property
    def thawed(self) -> bool:
        """Whether parameters need a gradient that needed none when DDP was built."""
        return any(p.requires_grad for each in self.guards if (p := each()) is not None)

    def take_marks(self, indices: Iterable[int]) -> list[tuple[int, Mark]]:
        """The state of the gradients of some parameters."""
        return [
            (index, mark_of(parameter))
            for index in indices
            if (parameter := self.parameter(index)) is not None
        ]

    def changed(self, marks: list[tuple[int, Mark]]) -> list[int]:
        """Of those parameters, the ones whose gradient is another one now."""
        return [
            index
            for index, mark in marks
            if (parameter := self.parameter(index)) is not None and mark_of(parameter) != mark
        ]


class Replicas(Observer):
    """The DDP modules of a rank."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self.alive: list[Replica] = []
        """In the order in which they were built."""
        self._built = 0

    def ddp_built(self, ddp: Any) -> None:
        """Number it; a job may wrap its model in a new one again and again."""
        each = Replica(ddp, self._built)
        self._built += 1
        self.alive[:] = [*(other for other in self.alive if other.ddp() is not None), each]

    def number_of(self, ddp: Any) -> int | None:
        """The number of a DDP module."""
        return next((each.number for each in self.alive if each.ddp() is ddp), None)

    def holds(self, parameter: Any) -> bool:
        """Whether DDP reduces a parameter."""
        return any(id(parameter) in each.ids for each in self.alive)


class Models(Observer):
    """The model that a rank gives to DDP, recorded before DDP compares and broadcasts it.

    Where the models differ, DDP's constructor raises on some ranks and hangs on others, or mixes
    bytes up and says nothing: afterwards it is too late.
    """

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._count = 0

    def model_given(self, ddp: Any, process_group: Any, tensors: Sequence[Any]) -> None:
        """Record the parameters."""
        model = getattr(ddp, "module", None)
        if model is None:
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        distributed: Any = sys.modules["torch"].distributed
        record = ModelRecord(
            time=time.time_ns(),
            number=self._count,
            type=type(model).__name__,
            group=tuple(distributed.get_process_group_ranks(process_group)),
            parameters=tuple(
                Parameter(
                    names.get(id(each), ""), tuple(each.shape), torch_private.dtype_name(each)
                )
                for each in tensors[:MOST_PARAMETERS]
            ),
            count=len(tensors),
            **caller().place,
        )
        if self.state.add(record, MOST_MODELS):
            self._count += 1
            # The constructor may not return.
            self.state.recorder.flush(0.2)


# -- weights


MOST_CHANGES = 64
"""Records of each kind that one rank writes."""

MATCHED_SHARE = 0.5
"""More of the names than this match where a head alone is new."""

_SHOWN_NAMES = 3

_load_numbers = itertools.count()
_partial_loads: dict[int, int] = {}
"""By ``id``, modules whose last load applied little, with the number of its record."""


def state_dict_loaded(module: Any, given: Any, result: Any) -> None:
    """A module's ``load_state_dict`` returned: see what it has applied."""
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(given, Mapping) or missing is None or unexpected is None:
        return
    before = _partial_loads.pop(id(module), None)
    record = not_applied(given, list(missing), list(unexpected))
    if record is not None and len(_partial_loads) < MOST_CHANGES:
        _partial_loads[id(module)] = record.number
        rank.add(record, MOST_CHANGES)
    elif before is not None:
        rank.add(AppliedRecord(number=before), MOST_CHANGES)


def not_applied(
    given: Mapping[Any, Any], missing: list[str], unexpected: list[str]
) -> NotAppliedRecord | None:
    """What was passed over, if it was most; None where names are left over on one side only.

    A part of a checkpoint for a part of a model leaves none over on the side of the smaller one.
    """
    if not missing or not unexpected:
        return None
    matched = len(given) - len(unexpected)
    fits = min(len(given), matched + len(missing))
    if matched > MATCHED_SHARE * fits:
        return None
    prefix, of = _prefix(missing, unexpected)
    return NotAppliedRecord(
        number=next(_load_numbers),
        matched=matched,
        given=len(given),
        wanted=matched + len(missing),
        missing=tuple(missing[:_SHOWN_NAMES]),
        unexpected=tuple(unexpected[:_SHOWN_NAMES]),
        prefix=prefix,
        of=of,
        **sites.caller().place,
    )


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str]:
    """The prefix that most names have on one side only, and the side: checkpoint or model."""
    for of, short, long in (
        ("checkpoint", missing, unexpected),
        ("model", unexpected, missing),
    ):
        first = next((name for name in long if name.endswith("." + short[0])), "")
        prefix = first[: len(first) - len(short[0])]
        known = set(long)
        if prefix and sum(prefix + name in known for name in short) > MATCHED_SHARE * len(short):
            return prefix, of
    return "", ""


class _Change(sites.Place):
    """What the records of all changes have."""

    time: int
    step: int
    what: str


class Changes(Observer):
    """What changes the replicas of a rank from outside a step."""

    def __init__(self, state: rank.RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas

    def weights_loaded(self, module: Any) -> None:
        """Record the DDP modules that the module is, or is a part of."""
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is not None and any(part is module for part in ddp.modules()):
                change = self._change(type(module).__name__)
                self.state.add(LoadRecord(module=each.number, **change), MOST_CHANGES)

    def optimizer_loaded(self, optimizer: Any) -> None:
        """Training is resumed."""
        self.state.add(ResumeRecord(**self._change(type(optimizer).__name__)), MOST_CHANGES)

    def rate_cut(self) -> None:
        """Ranks may do so at different steps."""
        self.state.add(CutRecord(**self._change("ReduceLROnPlateau")), MOST_CHANGES)

    def _change(self, what: str) -> _Change:
        now, step = time.time_ns(), self.state.tracker.steps
        return {"time": now, "step": step, "what": what, **sites.caller().place}


def forget_loads() -> None:
    """In a forked child: the parent's loads are the parent's."""
    _partial_loads.clear()


# -- stages


MOST_STAGES = 64
"""Stages that are written down."""


class Stages(Observer):
    """Writes down which stages this rank runs."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._numbers: set[int] = set()
        self._reduces = False

    def stage_built(self, stage: Any) -> None:
        """Write it down, and measure its waits from now on if it has any."""
        number, of = stage.stage_index, stage.num_stages
        group = tuple(torch_groups.pipeline_ranks(stage))
        record = StageRecord(stage=number, stages=of, group=group, **sites.caller().place)
        self.state.add(record, MOST_STAGES, ("stage", number, of))
        self._numbers.add(number)
        self.state.tracker.page.set_stage(sorted(self._numbers))
        # Of a GPU the host's times say nothing.
        if not self._reduces and str(stage.device) == "cpu" and torch_groups.is_reduced(stage):
            self._reduces = True
            subscribe(Waits(self.state))


class Waits(Observer):
    """Tells the wait for the replicas from the backward of the micro-batches."""

    def step_begins(self, optimizer: Any) -> None:
        """All backwards of the step are done."""
        tracker = self.state.tracker
        count = tracker.step_backwards
        passes = tracker.backwards[-count:] if count > 1 else []
        if passes and not tracker.step_armed:
            *others, last = (ended - began for began, ended, _ in passes)
            tracker.step.exposed = max(0, int(last - _median(others)))


def _median(values: list[int]) -> float:
    """Return the median. Not the library's, whose module a job may have a file in place of."""
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2
