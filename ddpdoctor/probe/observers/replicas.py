"""The DDP modules of this rank: their parameters, and what is known of their gradients."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import NOWHERE, Site, caller
from ddpdoctor.run.records.model import ModelRecord, Parameter

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
