"""The DDP modules of this rank: their parameters, and what is known of their gradients."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ddpdoctor.probe.runtime import rank, torch_private
from ddpdoctor.probe.runtime.sites import NOWHERE, Site

WITNESSES = 48
"""Parameters of a DDP module that tell whether a backward touched it; spread over all of it."""

GUARDS = 16
"""Frozen parameters that are watched for being unfrozen; spread over all of them."""

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


class Watched:
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
        self.told: set[str] = set()
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


watched: list[Watched] = []
"""The DDP modules of this rank that are alive, in the order in which they were built."""

_numbers = itertools.count()


def built(ddp: Any) -> None:
    """A DDP module was built."""
    if rank.current() is None:
        return
    each = Watched(ddp, next(_numbers))
    # A job may wrap its model anew, again and again.
    watched[:] = [*(other for other in watched if other.ddp() is not None), each]
