"""Loaders, samplers and subsets, the lines that built them, and what they say of themselves."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.runtime.sites import NOWHERE, Site
from ddpdoctor.run.records.data import SamplerFacts

KNOWN = 64
"""Loaders and samplers that are remembered with the line that built them."""

_FACTS = ("rank", "num_replicas", "seed", "epoch", "shuffle", "drop_last", "replacement")


class Built:
    """A loader or sampler, the line that built it, and its number."""

    __slots__ = ("number", "site", "thing", "used")

    def __init__(self, thing: Any, site: Site, number: int) -> None:
        self.thing = weakref.ref(thing)
        self.site = site
        self.number = number
        self.used = False


class Book:
    """What a class built, newest last."""

    def __init__(self) -> None:
        self._entries: list[Built] = []
        self._count = 0

    def add(self, thing: Any, site: Site) -> Built:
        """Remember a thing that was just built."""
        if len(self._entries) >= KNOWN:
            self._entries = [each for each in self._entries if each.thing() is not None][-KNOWN:]
        self._count += 1
        built = Built(thing, site, self._count)
        self._entries.append(built)
        return built

    def find(self, thing: Any) -> Built | None:
        """The entry of a thing that is still there."""
        return next((each for each in reversed(self._entries) if each.thing() is thing), None)

    def living(self) -> list[tuple[Any, Built]]:
        """The things that are still there, newest first."""
        pairs = ((each.thing(), each) for each in reversed(self._entries))
        return [(thing, each) for thing, each in pairs if thing is not None]


loaders = Book()
samplers = Book()
subsets = Book()


def loader_of(dataset: Any, index_sampler: Any) -> Built | None:
    """The loader whose iterator has that data set and sampler."""
    for loader, built in loaders.living():
        mine = (loader.batch_sampler, loader.sampler)
        if loader.dataset is dataset and any(each is index_sampler for each in mine):
            return built
    return None


def facts_of(mine: list[Any]) -> SamplerFacts:
    """What a pass's samplers say of themselves, without running any code of theirs.

    Args:
        mine: The sampler and, if there is one, the batch sampler around it.
    """
    known: dict[str, Any] = {}
    for sampler in mine:
        attributes = getattr(sampler, "__dict__", {})
        for name in _FACTS:
            if type(attributes.get(name)) in (int, bool):
                known.setdefault(name, attributes[name])
    inner = mine[0] if mine else None
    built = samplers.find(inner)
    if built is None and inner is not None:
        # There may be no weak reference to it.
        with contextlib.suppress(TypeError):
            built = samplers.add(inner, NOWHERE)
    if built is not None:
        built.used = True
    return SamplerFacts(
        name=type(inner).__name__ if mine else "",
        torch=all(type(each).__module__.startswith("torch.utils.data") for each in mine),
        set_epoch=any(hasattr(type(each), "set_epoch") for each in mine),
        id=built.number if built is not None else None,
        made=built.site.location if built is not None and built.site.path else None,
        **known,
    )


def idle_of(dataset: Any) -> tuple[Location, ...]:
    """Lines that built samplers of a data set that no loader was given, the newest two."""
    idle = [
        each.site.location
        for thing, each in samplers.living()
        if not each.used and getattr(thing, "dataset", None) is dataset and each.site.path
    ]
    return tuple(idle[:2])


def batches_of(mine: list[Any]) -> int | None:
    """How many batches a pass will have; None if only code of the job's could tell."""
    if not mine:
        return None
    lengths = (getattr(type(each), "__len__", None) for each in mine)
    if not all(str(getattr(each, "__module__", "")).startswith("torch.") for each in lengths):
        return None
    try:
        return len(mine[-1])
    except Exception:
        return None
