"""Sums over stretches of steps: unlike medians, they show a surplus that is not in every step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ddpdoctor.run.records.training import StepRecord

FEWEST = 16
"""Stretches of equal length that a verdict takes."""

FEWEST_PASSES = 8
"""Passes over the data that a verdict takes, if most of the surplus is in their first steps."""

MOSTLY = 0.75
"""Part of a surplus that is in the steps which are said to have it."""

SPREAD = 0.6
"""Part of the steps from which on they are too many to be named."""

Steps = Mapping[int, StepRecord]


@dataclass(frozen=True)
class Rhythm:
    """In which steps a surplus is."""

    words: str = ""
    """``in every 2nd step``; empty where it is spread, or where single steps were not recorded."""
    period: int = 0
    """Steps from one to the next; 0 if that is not regular."""
    of_passes: bool = False
    """They are the first steps of passes over the data."""
    gap: float = 0.0
    """Nanoseconds of the surplus in each of them, a mean."""


def first_of_passes(ranks: Sequence[Steps], numbers: Sequence[int]) -> set[int]:
    """The steps before which a loader began again, or which an evaluation came before."""
    return {number for number in numbers if any(steps[number].outside > 0 for steps in ranks)}


def whole(step: StepRecord) -> int:
    """What a rank spent on a step itself, with what it did between passes before it."""
    return step.own + step.outside


def mean(steps: Sequence[StepRecord], between: bool = True) -> StepRecord:
    """Several steps as one; what came between passes is code between the phases, or left out."""
    count, outside = len(steps), sum(step.outside for step in steps) * between
    return StepRecord(
        step=steps[-1].step,
        start=steps[0].start,
        data=sum(step.data for step in steps) // count,
        forward=sum(step.forward for step in steps) // count,
        backward=sum(step.backward for step in steps) // count,
        optimizer=sum(step.optimizer for step in steps) // count,
        other=(sum(step.other for step in steps) + outside) // count,
        wait=sum(step.wait for step in steps) // count,
        total=(sum(step.total for step in steps) + outside) // count,
        split=True,
        cpu=sum(step.cpu or 0 for step in steps) // count,
        waited=sum(step.waited or 0 for step in steps) // count,
    )


def pooled(ranks: Mapping[int, Steps], parts: Sequence[Sequence[int]]) -> dict[int, Steps]:
    """The means of the steps of each stretch, by the number of its last step."""
    return {
        rank: {part[-1]: mean([steps[number] for number in part]) for part in parts}
        for rank, steps in ranks.items()
    }


def passes(ranks: Mapping[int, Steps], numbers: Sequence[int], fewest: int) -> list[Sequence[int]]:
    """Return the steps of each data pass, or none if passes are too few or too short."""
    firsts = first_of_passes([*ranks.values()], numbers)
    starts = [place for place, number in enumerate(numbers) if number in firsts]
    if len(starts) <= fewest or 2 * len(starts) > len(numbers):
        return []
    return [numbers[begin:end] for begin, end in itertools.pairwise(starts)]


def halvings(
    ranks: Mapping[int, Steps], numbers: Sequence[int], fewest: int
) -> Iterator[dict[int, Steps]]:
    """Stretches of 2 steps, then of 4, and so on, while there are enough of them."""
    while len(numbers) // 2 >= fewest:
        parts = [numbers[place : place + 2] for place in range(0, len(numbers) - 1, 2)]
        ranks = pooled(ranks, parts)
        numbers = [part[-1] for part in parts]
        yield {**ranks}


def rhythm(numbers: Sequence[int], surplus: Sequence[float], firsts: set[int]) -> Rhythm:
    """In which steps a surplus is.

    Args:
        numbers: The steps.
        surplus: What a rank spent on each beyond the others.
        firsts: The first steps of passes.
    """
    rest = MOSTLY * sum(each for each in surplus if each > 0)
    found: list[int] = []
    gaps: list[float] = []
    for value, number in sorted(zip(surplus, numbers, strict=True), reverse=True):
        if rest <= 0 or value <= 0:
            break
        rest -= value
        found.append(number)
        gaps.append(value)
    if len(found) < 2 or len(found) > SPREAD * len(numbers):
        return Rhythm()
    if len(firsts & {*found}) >= MOSTLY * len(found) and 2 * len(firsts) < len(numbers):
        return Rhythm("in the first step of each pass", of_passes=True, gap=fmean(gaps))
    apart = Counter(b - a for a, b in itertools.pairwise(sorted(found)))
    period, times = apart.most_common(1)[0]
    if times >= SPREAD * (len(found) - 1):
        return Rhythm(f"in every {ordinal(period)} step", period, gap=fmean(gaps))
    return Rhythm(f"in about one step of {round(len(numbers) / len(found))}", gap=fmean(gaps))


def ordinal(number: int) -> str:
    """``2nd``, ``11th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number // 10 % 10 == 1 else ending}"
