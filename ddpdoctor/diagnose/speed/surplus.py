"""How much longer a rank takes than others, by medians of steps and by sums over stretches of them.

On a crowded machine every rank waits for its core, and one that computes longer waits longer. So
times are compared without such waits; those that a rank has more of than its work explains are
another matter. Sums show what medians do not: a surplus that is not in every step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from ddpdoctor.diagnose.speed.pace import BORNE_OUT, own_time, stands_out
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank
from ddpdoctor.run.status import PHASES

# -- stretches


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


def mean_step(steps: Sequence[StepRecord], between: bool = True) -> StepRecord:
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
        rank: {part[-1]: mean_step([steps[number] for number in part]) for part in parts}
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


# -- surplus


PLAINLY = 0.5
"""A surplus that few steps can show, as a part of the step."""

PLAIN = 20_000_000
"""The same in nanoseconds."""

STEADY = 0.75
"""In what part of the steps the surplus must be there."""

STEADIER = 0.875
"""The same of stretches of steps, which are fewer and less alike."""

HALF, THIRD = 1 / 2, 1 / 3
"""What part of the surplus counts as being there; of 10 steps from one to the next, 16 have one or
two."""

IDLE = 0.01
"""Part of the steps that ranks may wait for a core where cores are known to be idle."""

BRIEF = 500_000_000
"""Nanoseconds of steps that show no more than few steps do, unless the machine is calm: for so long
a core may be slow because of what its sibling, or the host of a virtual machine, does."""

ALONE = 3.0
"""How many times as long as the others a rank waits for a core if others use that one alone."""

ALIKE = 1.25
"""How many times the CPU time of the others' a rank may take if it is not its own work for which it
waits: who computes longer loses its core more often, and not only in proportion."""

CALM = 0.05
"""Part of the steps that ranks may wait for a core before the machine counts as crowded."""


@dataclass(frozen=True)
class Lag:
    """A rank that holds the others up; times in nanoseconds a step.

    They are medians, of steps or, where it does so in some steps only, of means over stretches.
    """

    rank: Rank
    gap: float
    """What the others could save if this rank were as they are."""
    crowded: bool
    """Whether the gap is a wait for a core that this rank alone has."""
    cpu: float
    """CPU time of its training thread beyond that of the others; 0 if not known."""
    total: float
    """The step, waits for a core left out."""
    wall: float
    """The step as it was."""
    calm: bool
    """Whether hardly any rank waits for a core, so that every time is what it looks like."""
    sure: bool
    """Whether the gap is there however the others' waits for a core are shared out between their
    own time and the all-reduce."""
    own: tuple[float, float]
    """Its own time and that of the others, waits for a core left out."""
    wait: tuple[float, float]
    """Its wait in the all-reduce and that of the others."""
    cores: tuple[float, float]
    """Its wait for a core and that of the others."""
    ran: bool
    """Whether the kernel tells for how long a thread ran and waited for a core."""
    phase: str
    """The phase with the largest surplus, and its time here and elsewhere."""
    slow: float
    usual: float
    steps: int
    few: bool
    """Whether these are few, or over soon: then the gap is plain to see, and in all of them."""
    rhythm: Rhythm | None = None
    """In which steps the gap is, if it is not in most of them."""

    @property
    def cores_idle(self) -> bool:
        """Whether ranks wait so little for a core that their workers cannot lack any."""
        return self.ran and max(self.cores) <= IDLE * self.wall


def lag_of(
    rank: Rank,
    mine: Steps,
    others: Sequence[Steps],
    common: Sequence[int],
    *,
    gpu: bool,
    lasting: float,
    few: bool,
    steady: float,
    least: float = HALF,
) -> Lag | None:
    """How a rank holds the others up; None if it does not.

    Args:
        rank: The rank.
        mine: Its steps, or means of several.
        others: Those of the others.
        common: The numbers of those that are compared.
        gpu: They were timed on a GPU.
        lasting: Nanoseconds that they must span to say that others use its core.
        few: They are few.
        steady: In what part of them the surplus must be there.
        least: What part of it, at least.
    """

    def here(of: Callable[[StepRecord], float]) -> float:
        return median(of(mine[number]) for number in common)

    def there(of: Callable[[StepRecord], float]) -> float:
        return median(median(of(steps[number]) for steps in others) for number in common)

    def surplus(
        of: Callable[[StepRecord], float], elsewhere: Callable[[StepRecord], float]
    ) -> list[float]:
        return [
            of(mine[number]) - median(elsewhere(steps[number]) for steps in others)
            for number in common
        ]

    def outstanding(surplus: Sequence[float], total: float) -> bool:
        """Worth a word, there in most steps, and waited for by the others."""
        gap = median(surplus)
        seen = sum(value > gap * least for value in surplus)
        return stands_out(gap, total, relief) and seen >= steady * len(surplus)

    total = here(lambda step: max(step.total - waited(step), cpu(step)))
    wall = here(lambda step: step.total)
    relief = there(lambda step: step.wait) - here(lambda step: step.wait)
    # A host that waits for a core may have given its GPU enough to do, and may spin for it.
    mine_of = _without_waits if gpu else net
    rest = own if gpu else net
    working = surplus(mine_of, rest)
    safely = surplus(mine_of, _at_most)
    crowd = _crowd(surplus(waited, waited), surplus(cpu, cpu), there(waited), there(cpu))
    span = mine[common[-1]].start - mine[common[0]].start
    alike = here(cpu) <= ALIKE * there(cpu)
    taken = alike and here(waited) >= ALONE * there(waited) and span >= lasting
    waits = max(here(waited), there(waited))
    calm = waits <= CALM * wall
    few = few or (not calm and span < BRIEF)
    gap = 0.0
    crowded = False
    if outstanding(working, total) and (not few or _plain(working, total)):
        gap = median(working)
    if taken and not few and median(crowd) > gap and outstanding(crowd, wall):
        gap, crowded = median(crowd), True
    if not gap:
        return None
    phase, slow, usual = max(
        ((name, here(_part(name)), there(_part(name))) for name in PHASES),
        key=lambda found: found[1] - found[2],
    )
    return Lag(
        rank=rank,
        gap=gap,
        crowded=crowded,
        cpu=0.0 if gpu else median(surplus(cpu, cpu)),
        total=total,
        wall=wall,
        calm=calm,
        sure=outstanding(safely, total) and median(safely) >= BORNE_OUT * gap,
        own=(here(mine_of), there(rest)),
        wait=(here(lambda step: step.wait), there(lambda step: step.wait)),
        cores=(here(waited), there(waited)),
        ran=here(cpu) > 0,
        phase=phase,
        slow=slow,
        usual=usual,
        steps=len(common),
        few=few,
    )


def _plain(surplus: Sequence[float], total: float) -> bool:
    """Whether it is so large, and there in each step but one, that a few of them show it."""
    gap = median(surplus)
    small = sum(value <= gap / 2 for value in surplus)
    return gap >= max(PLAINLY * total, PLAIN) and small <= 1


def _crowd(
    waited: Sequence[float], ran: Sequence[float], others: float, they_ran: float
) -> list[float]:
    """The surplus of core waits without what this rank waits longer because it runs longer."""
    rate = others / they_ran if they_ran else 0.0
    return [wait - rate * max(run, 0.0) for wait, run in zip(waited, ran, strict=True)]


def net(step: StepRecord) -> float:
    """A step's own time without waits for a core, but at least what the thread ran.

    Some of the waits were in the all-reduce, so it may be a little more.
    """
    return own_time(step.own, cpu(step), waited(step))


def _without_waits(step: StepRecord) -> float:
    return max(step.own - waited(step), 0)


def own(step: StepRecord) -> float:
    """A step's own time."""
    return step.own


def _at_most(step: StepRecord) -> float:
    """Its own time, if it waited for a core in the all-reduce rather than before."""
    return step.own - max(waited(step) - step.wait, 0)


def waited(step: StepRecord) -> float:
    """For how long the training thread had no core; 0 if not known."""
    return step.waited or 0


def cpu(step: StepRecord) -> float:
    """For how long it ran; 0 if not known."""
    return step.cpu or 0


def _part(name: str) -> Callable[[StepRecord], float]:
    return lambda step: float(getattr(step, name))
