"""NCCL's time-outs of several ranks, compared: which rank the others waited for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpdoctor.core.opening import whole
from ddpdoctor.failures.sightings import Sighting

_GROUP = re.compile(r"\bPG (?:ID )?(\d+)")
_SIZES = re.compile(r"NumelIn=(\d+), NumelOut=(\d+)")
_ENOUGH = 3
"""Ranks that have to wait before one without a line is said to be missing."""


@dataclass(frozen=True)
class Place:
    """The collective in which a rank waited until its time-out."""

    number: int
    operation: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.operation} #{self.number}{self.sizes}"


@dataclass(frozen=True)
class Awaited:
    """The ranks that the others waited for, and how that is known."""

    ranks: tuple[int, ...]
    said: str
    differ: bool = False
    """All ranks are at the same number, and some in another collective."""


def awaited(sightings: Sequence[Sighting]) -> Awaited | None:
    """Whom the ranks that timed out waited for; None if their lines do not show it."""
    groups: dict[str, dict[int, Place]] = defaultdict(dict)
    enqueued: dict[str, dict[int, int]] = defaultdict(dict)
    for each in sightings:
        if each.failure is None or each.rank is None:
            continue
        group = found[1] if (found := _GROUP.search(each.text)) else ""
        if each.failure.known.name == "nccl-timeout" and "seq" in each.groups:
            sizes = _SIZES.search(each.text)
            words = f" of {sizes[1]} elements" if sizes else ""
            place = Place(whole(each.groups["seq"]), each.groups.get("op", ""), words)
            # Later ones of the same rank follow from the first.
            groups[group].setdefault(each.rank, place)
        elif each.failure.known.name == "nccl-progress":
            enqueued[group].setdefault(each.rank, int(each.groups["enqueued"]))
    if not groups:
        return None
    group = max(groups, key=lambda name: len(groups[name]))
    return _compared(groups[group], enqueued[group])


def together(sightings: Sequence[Sighting]) -> tuple[int, ...]:
    """The ranks that all timed out in one collective, if no rank below the highest is missing."""
    places: dict[int, tuple[str, Mapping[str, str]]] = {}
    for each in sightings:
        if each.failure is None or each.rank is None or "seq" not in each.groups:
            continue
        if each.failure.known.name == "nccl-timeout":
            group = found[1] if (found := _GROUP.search(each.text)) else ""
            facts = {name: each.groups.get(name, "") for name in ("seq", "op")}
            places.setdefault(each.rank, (group, facts))
    alike = len(places) > 1 and all(each == next(iter(places.values())) for each in places.values())
    ranks = tuple(sorted(places))
    return ranks if alike and ranks == tuple(range(len(ranks))) else ()


def _compared(places: dict[int, Place], enqueued: dict[int, int]) -> Awaited | None:
    highest = max(place.number for place in places.values())
    lowest = min(place.number for place in places.values())
    others = _most([place for place in places.values() if place.number == highest])
    if lowest < highest:
        behind = tuple(sorted(rank for rank, place in places.items() if place.number == lowest))
        count = f"{highest - lowest} behind the others, which waited in {others}"
        return Awaited(behind, f"{_was(behind)} in {places[behind[0]]}, {count}")
    late = {rank: number for rank, number in enqueued.items() if 0 <= number < highest}
    if late and len(late) < len({*places, *enqueued}):
        least = min(late.values())
        behind = tuple(sorted(rank for rank, number in late.items() if number == least))
        came = f"{_they(behind)} had come only to collective #{least}"
        return Awaited(behind, f"{came}; the others waited in {others}")
    odd = tuple(sorted(rank for rank, place in places.items() if place != others))
    if odd:
        where = f"{_was(odd)} in {places[odd[0]]}, where the others were in {others}"
        return Awaited(odd, where, True)
    missing = tuple(sorted({*range(max(places))} - {*places}))
    if len(places) >= _ENOUGH and 0 < len(missing) <= len(places) // 3:
        shows = f"the log shows no time-out of {'it' if len(missing) == 1 else 'them'}"
        return Awaited(missing, f"{shows}; the others waited in {others}")
    return None


def _they(ranks: tuple[int, ...]) -> str:
    return "it" if len(ranks) == 1 else "they"


def _was(ranks: tuple[int, ...]) -> str:
    return "it was" if len(ranks) == 1 else "they were"


def _most(places: list[Place]) -> Place:
    return Counter(places).most_common(1)[0][0]
