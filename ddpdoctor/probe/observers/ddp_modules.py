"""Keep track of the rank's DDP modules and pipeline stages, and of weights loaded into them.

``load_state_dict(strict=False)`` ignores names that do not match. A load that ignored most of a
checkpoint is recorded, even before the process is a rank.

A pipeline's schedule (``torch.distributed.pipelining``) runs every forward of a DDP module in
``no_sync`` and reduces only in the last backward of a step, for which DDP's logger has no times.
The extra time of this backward is the wait for the replicas.
"""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ddpdoctor.probe.runtime import rank, sites, torch_groups, torch_private
from ddpdoctor.probe.runtime.events import Observer, subscribe
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, caller
from ddpdoctor.run.records.model import (
    CutRecord,
    GradientlessParameter,
    LoadRecord,
    ModelRecord,
    Parameter,
    ResumeRecord,
    StageRecord,
)
from ddpdoctor.run.records.training import AppliedRecord, NotAppliedRecord

# -- DDP modules

MAX_SPREAD = 48  # number of parameters checked for whether a backward changed their gradients
MAX_GUARDS = 16  # number of frozen parameters checked for whether a module was unfrozen
MAX_MODELS = 16  # maximum number of recorded models
MAX_PARAMETERS = 4096  # maximum number of recorded parameters of a model
Mark = tuple[int, int]  # the identity of a gradient's state


def mark_of(parameter: Any) -> Mark:
    """Return the current state of a parameter's gradient."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


class Unreduced(NamedTuple):
    """Accumulated gradients that were not reduced and that no optimizer has used yet."""

    cause: str
    site: Site
    indices: list[int]


class Replica:
    """The state of one DDP module."""

    def __init__(self, ddp: Any, number: int) -> None:
        self.ddp = weakref.ref(ddp)
        self.number = number
        reduced = torch_private.reduced_parameters(ddp)
        self.names = [name for name, _ in reduced]
        self.parameters = [weakref.ref(parameter) for _, parameter in reduced]
        self.ids = frozenset(id(parameter) for _, parameter in reduced)
        frozen = torch_private.frozen_parameters(ddp)
        self.frozen = frozenset(id(parameter) for parameter in frozen)
        """Parameters that required no gradient when DDP was built."""
        every = max(1, -(-len(frozen) // MAX_GUARDS))
        self.guards = [weakref.ref(parameter) for parameter in frozen[::every]]
        count = len(reduced)
        self.spread = list(range(0, count, max(1, -(-count // MAX_SPREAD))))
        """Indices of some parameters spread over the module."""
        self.middle = [count // 2] if count else []
        self.armed = 0  # armed forwards since the last backward that changed the module's gradients
        self.unarmed = 0  # the same for forwards within ``no_sync()``
        self.forwards = 0  # forwards since the last step of an optimizer
        self.site = NOWHERE  # the line of the last forward, in the first iterations
        self.reduced = 0  # backwards that were reduced
        self.due = False  # whether a reduced backward is still to be checked
        self.ready: Sequence[int] = [0] * count
        self.sure = False  # whether the current backward is certainly this module's, and reduced
        self.marks: list[tuple[int, Mark]] | None = None
        self.cause = ""
        self.unreduced: Unreduced | None = None
        self.unreduced_counts: dict[str, int] = {}
        self.recorded: set[str] = set()
        self.searches = 0  # number of searches for its parameters in optimizers
        self.least: Any = None
        """By parameter, the smallest number of ranks that used it so far, on the module's
        device."""
        self.most: Any = None  # the largest magnitude of each gradient in `looks` backwards
        self.looks = 0
        self.every: tuple[GradientlessParameter, ...] = ()  # all parameters in the form of a record
        self.sizes: list[int] = []
        self.versions: dict[int, int] = {}
        """Versions of the parameters that had no gradient at the first check."""
        self.added: list[tuple[str, weakref.ref[Any], str]] = []
        """Parameters that require a gradient and are not reduced, with the reason."""

    def parameter(self, index: int) -> Any:
        """Return a reduced parameter, or None if it was freed."""
        return self.parameters[index]()

    @property
    def thawed(self) -> bool:
        """Return whether frozen parameters have been unfrozen since DDP was built."""
        return any(p.requires_grad for each in self.guards if (p := each()) is not None)

    def take_marks(self, indices: Iterable[int]) -> list[tuple[int, Mark]]:
        """Return the state of the gradients of some parameters."""
        return [
            (index, mark_of(parameter))
            for index in indices
            if (parameter := self.parameter(index)) is not None
        ]

    def changed(self, marks: list[tuple[int, Mark]]) -> list[int]:
        """Return the parameters whose gradients have changed since `take_marks`."""
        return [
            index
            for index, mark in marks
            if (parameter := self.parameter(index)) is not None and mark_of(parameter) != mark
        ]


class Replicas(Observer):
    """The DDP modules of a rank."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self.alive: list[Replica] = []  # in the order of construction
        self._built = 0

    def ddp_built(self, ddp: Any) -> None:
        """Number the module. A job may wrap its model repeatedly."""
        each = Replica(ddp, self._built)
        self._built += 1
        self.alive[:] = [*(other for other in self.alive if other.ddp() is not None), each]

    def living(self) -> Iterator[tuple[Replica, Any]]:
        """Yield the state of each module that still exists, and the module."""
        for each in self.alive:
            ddp = each.ddp()
            if ddp is not None:
                yield each, ddp

    def parameter_ids(self) -> set[int]:
        """Return the ids of all parameters of the modules, reduced or not."""
        return {id(each) for _, ddp in self.living() for each in ddp.module.parameters()}

    def number_of(self, ddp: Any) -> int | None:
        """Return the number of a DDP module."""
        return next((each.number for each in self.alive if each.ddp() is ddp), None)

    def holds(self, parameter: Any) -> bool:
        """Return whether DDP reduces a parameter."""
        return any(id(parameter) in each.ids for each in self.alive)


class Models(Observer):
    """The model that a rank gives to DDP, recorded before DDP compares and broadcasts it.

    If the models differ, DDP's constructor raises on some ranks and hangs on others, or silently
    mixes up bytes.
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
                for each in tensors[:MAX_PARAMETERS]
            ),
            count=len(tensors),
            **caller().place,
        )
        if self.state.add(record, MAX_MODELS):
            self._count += 1
            # Write at once, because the constructor may hang.
            self.state.recorder.flush(0.2)


# -- loaded weights and optimizers

MAX_CHANGES = 64  # maximum number of records of each kind
MATCHED_SHARE = 0.5  # maximum ratio of matching names that is reported; a new head leaves more
_SHOWN_NAMES = 3

_load_numbers = itertools.count()
_partial_loads: dict[int, int] = {}
"""By ``id``, modules whose last load ignored most names, with the number of the record."""


def state_dict_loaded(module: Any, given: Any, result: Any) -> None:
    """Record a ``load_state_dict`` that ignored most names, and a later one that did not."""
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(given, Mapping) or missing is None or unexpected is None:
        return
    before = _partial_loads.pop(id(module), None)
    record = not_applied(given, list(missing), list(unexpected))
    if record is not None and len(_partial_loads) < MAX_CHANGES:
        _partial_loads[id(module)] = record.number
        rank.add(record, MAX_CHANGES)
    elif before is not None:
        rank.add(AppliedRecord(number=before), MAX_CHANGES)


def not_applied(
    given: Mapping[Any, Any], missing: list[str], unexpected: list[str]
) -> NotAppliedRecord | None:
    """Return a record if most names did not match. Return None if one side has no unmatched names.

    A part of a checkpoint, or a part of a model, leaves no unmatched names on the smaller side.
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
    """Return the prefix that most names have on one side only, and the side."""
    for of, short, long in (("checkpoint", missing, unexpected), ("model", unexpected, missing)):
        first = next((name for name in long if name.endswith("." + short[0])), "")
        prefix = first[: len(first) - len(short[0])]
        known = set(long)
        if prefix and sum(prefix + name in known for name in short) > MATCHED_SHARE * len(short):
            return prefix, of
    return "", ""


class _Change(sites.Place):
    """The common fields of the records of changes."""

    time: int
    step: int
    what: str


class Changes(Observer):
    """Changes of a rank's DDP modules outside of steps."""

    def __init__(self, state: rank.RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas

    def weights_loaded(self, module: Any) -> None:
        """Record the load for each DDP module that contains the loaded module."""
        for each, ddp in self._replicas.living():
            if any(part is module for part in ddp.modules()):
                change = self._change(type(module).__name__)
                self.state.add(LoadRecord(module=each.number, **change), MAX_CHANGES)

    def optimizer_loaded(self, optimizer: Any) -> None:
        """Record that training resumes from a checkpoint."""
        self.state.add(ResumeRecord(**self._change(type(optimizer).__name__)), MAX_CHANGES)

    def rate_cut(self) -> None:
        """Record the step of the change, which may differ between ranks."""
        self.state.add(CutRecord(**self._change("ReduceLROnPlateau")), MAX_CHANGES)

    def _change(self, what: str) -> _Change:
        now, step = time.time_ns(), self.state.tracker.steps
        return {"time": now, "step": step, "what": what, **sites.caller().place}


def forget_loads() -> None:
    """Drop the parent's loads in a forked child."""
    _partial_loads.clear()


# -- pipeline stages

MAX_STAGES = 64  # maximum number of recorded stages


class Stages(Observer):
    """The pipeline stages that this rank runs."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._numbers: set[int] = set()
        self._reduces = False

    def stage_built(self, stage: Any) -> None:
        """Record the stage. Measure its waits from now on if it has replicas."""
        number, of = stage.stage_index, stage.num_stages
        group = tuple(torch_groups.pipeline_ranks(stage))
        record = StageRecord(stage=number, stages=of, group=group, **sites.caller().place)
        self.state.add(record, MAX_STAGES, ("stage", number, of))
        self._numbers.add(number)
        self.state.tracker.page.set_stage(sorted(self._numbers))
        # On a GPU, the host's times do not include waits.
        if not self._reduces and str(stage.device) == "cpu" and torch_groups.is_reduced(stage):
            self._reduces = True
            subscribe(Waits(self.state))


class Waits(Observer):
    """The wait for other replicas of a stage, separate from the backwards of its micro-batches."""

    def step_begins(self, optimizer: Any) -> None:
        """Compare the last backward of the step with its other backwards."""
        tracker = self.state.tracker
        count = tracker.step_backwards
        passes = tracker.backwards[-count:] if count > 1 else []
        if passes and not tracker.step_armed:
            *others, last = (ended - began for began, ended, _ in passes)
            # A file of the job may shadow the module `statistics`.
            ordered, middle = sorted(others), len(others) // 2
            median = (ordered[middle] + ordered[-1 - middle]) / 2
            tracker.step.exposed = max(0, int(last - median))
