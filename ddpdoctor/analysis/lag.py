"""Which rank holds the others up, by how much, and how much of that is a wait for a CPU core.

On a crowded machine every rank waits for its core, and one that computes longer waits longer. So
times are compared without such waits; those that a rank has more of than its work explains are
another matter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ddpdoctor.analysis.pace import BORNE_OUT, WARM_UP, own_time, stands_out
from ddpdoctor.analysis.stages import Stage, alike, stages
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import PHASES

ENOUGH = 20
"""Steps that a verdict needs, after the warm-up."""

ENOUGH_SAMPLED = 6
"""The same on a GPU, where DDP times only every hundredth step."""

FEW = 8
"""Steps that say something of a job that is too short for that, if they say it plainly."""

BEGINNING = 2
"""Steps at its beginning that say nothing: loaders start, buckets are built, caches are filled."""

PLAINLY = 0.5
"""A surplus that few steps can show, as a part of the step."""

PLAIN = 20_000_000
"""The same in nanoseconds."""

STEADY = 0.75
"""In what part of the steps the surplus must be there."""

LASTING = 5_000_000_000
"""Nanoseconds that steps must span to say that others use a rank's core: for less the kernel may
just not have balanced its load."""

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

MANY = 16
"""Ranks from which on only the slowest are compared with all the others."""

_Steps = dict[int, StepRecord]


@dataclass(frozen=True)
class Lag:
    """A rank that holds the others up; times in nanoseconds a step, medians."""

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
    phase: str
    """The phase with the largest surplus, and its time here and elsewhere."""
    slow: float
    usual: float
    steps: int
    few: bool
    """Whether these are few, or over soon: then the gap is plain to see, and in all of them."""


def lags(run: Run, enough: int = ENOUGH, few: int = FEW) -> Iterator[Lag]:
    """The ranks of the last attempt that hold others up which do the same work.

    Args:
        run: The run.
        enough: Steps after the warm-up that it takes.
        few: Steps, those of the warm-up included, that a surplus takes which is plain to see.
    """
    for ranks in alike(run):
        yield from _lags(run, ranks, enough, few)


def stage_lags(run: Run) -> Iterator[tuple[Stage, Lag]]:
    """The stages of a pipeline that hold the others up: of each its median rank is compared."""
    found = {_middle(run, stage.ranks).rank: stage for stage in stages(run)}
    ranks = [run.rank(number) for number in found]
    for lag in _lags(run, ranks, ENOUGH, FEW, infers=False):
        yield found[lag.rank.rank], lag


def _middle(run: Run, ranks: Sequence[Rank]) -> Rank:
    """The median one of ranks that do the same work; of two the faster one."""
    times = {
        rank.rank: median([_net(step) for step in _usable(run, rank).values()] or [0.0])
        for rank in ranks
    }
    return sorted(ranks, key=lambda rank: times[rank.rank])[(len(ranks) - 1) // 2]


def _lags(
    run: Run, ranks: Sequence[Rank], enough: int, few: int, infers: bool = True
) -> Iterator[Lag]:
    if len(ranks) < 2:
        return
    usable = {rank.rank: _usable(run, rank) for rank in ranks}
    if not any(on_gpu(rank) for rank in ranks):
        yield from _compared(ranks, usable, enough, few, False)
        return
    found = list(_compared(ranks, usable, min(enough, ENOUGH_SAMPLED), few, True))
    if not found and infers and _reduce_together(ranks):
        found = list(_compared(ranks, _inferred(run, ranks), enough, few, True))
    yield from found


def _compared(
    ranks: Sequence[Rank],
    usable: Mapping[int, _Steps],
    enough: int,
    few: int,
    sampled: bool,
) -> Iterator[Lag]:
    steps = sorted(set.intersection(*(set(each) for each in usable.values())))
    common = [number for number in steps if number >= WARM_UP]
    short = len(common) < enough
    if short:
        common = [number for number in steps if number >= BEGINNING]
        if sampled or len(common) < few:
            return
    for rank in _slow(ranks, usable, common):
        others = [steps for number, steps in usable.items() if number != rank.rank]
        lasting = LASTING * min(enough / ENOUGH, 1.0)
        lag = _lag(rank, usable[rank.rank], others, common, sampled, lasting, short)
        if lag is not None:
            yield lag


def _slow(
    ranks: Sequence[Rank], usable: Mapping[int, _Steps], common: Sequence[int]
) -> Sequence[Rank]:
    """The ranks that may hold others up: of many the slowest, as each is compared with all."""
    if len(ranks) <= MANY:
        return ranks
    slow: set[int] = set()
    for of in (_own, _net):
        times = {n: median(of(steps[step]) for step in common) for n, steps in usable.items()}
        slow.update(heapq.nlargest(MANY // 2, times, key=times.__getitem__))
    return [rank for rank in ranks if rank.rank in slow]


def still_slower(run: Run, number: int) -> bool:
    """Whether a rank that held the others up still does so by half of what it takes to say so.

    On a crowded machine some steps do not show what the ones before and after them do.
    """
    ranks = next((each for each in alike(run) if any(n.rank == number for n in each)), ())
    if len(ranks) < 2:
        return False
    if _is_slower({rank.rank: _usable(run, rank) for rank in ranks}, number):
        return True
    inferred = any(on_gpu(rank) for rank in ranks) and _reduce_together(ranks)
    return inferred and _is_slower(_inferred(run, ranks), number)


def _is_slower(usable: dict[int, _Steps], number: int) -> bool:
    mine = usable.pop(number, {})
    others = list(usable.values())
    common = set(mine).intersection(*others)
    if not common:
        return False
    gap = median(
        _net(mine[step]) - median(_net(steps[step]) for steps in others) for step in common
    )
    total = median(max(step.total - _waited(step), _cpu(step)) for step in mine.values())
    return stands_out(2 * gap, total, 2 * gap)


def _lag(
    rank: Rank,
    mine: _Steps,
    others: Sequence[_Steps],
    common: Sequence[int],
    sampled: bool,
    lasting: float,
    few: bool,
) -> Lag | None:
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

    total = here(lambda step: max(step.total - _waited(step), _cpu(step)))
    wall = here(lambda step: step.total)
    relief = there(lambda step: step.wait) - here(lambda step: step.wait)
    # A host that waits for a core may have given its GPU enough to do, and may spin for it.
    net = _without_waits if sampled else _net
    rest = _own if sampled else _net
    working = surplus(net, rest)
    safely = surplus(net, _at_most)
    crowd = _crowd(surplus(_waited, _waited), surplus(_cpu, _cpu), there(_waited), there(_cpu))
    span = mine[common[-1]].start - mine[common[0]].start
    alike = here(_cpu) <= ALIKE * there(_cpu)
    taken = alike and here(_waited) >= ALONE * there(_waited) and span >= lasting
    waits = max(here(_waited), there(_waited))
    calm = waits <= CALM * wall
    few = few or (not calm and span < BRIEF)
    gap = 0.0
    crowded = False
    if _stands_out(working, total, relief) and (not few or _plain(working, total)):
        gap = median(working)
    if taken and not few and median(crowd) > gap and _stands_out(crowd, wall, relief):
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
        cpu=0.0 if sampled else median(surplus(_cpu, _cpu)),
        total=total,
        wall=wall,
        calm=calm,
        sure=_stands_out(safely, total, relief) and median(safely) >= BORNE_OUT * gap,
        own=(here(net), there(rest)),
        wait=(here(lambda step: step.wait), there(lambda step: step.wait)),
        cores=(here(_waited), there(_waited)),
        phase=phase,
        slow=slow,
        usual=usual,
        steps=len(common),
        few=few,
    )


def _stands_out(surplus: Sequence[float], total: float, relief: float) -> bool:
    """Whether a surplus is worth a word, there in most steps, and waited for by the others."""
    gap = median(surplus)
    return stands_out(gap, total, relief) and sum(
        value > gap / 2 for value in surplus
    ) >= STEADY * len(surplus)


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


def _net(step: StepRecord) -> float:
    """A step's own time without waits for a core, but at least what the thread ran.

    Some of the waits were in the all-reduce, so it may be a little more.
    """
    return own_time(step.own, _cpu(step), _waited(step))


def _without_waits(step: StepRecord) -> float:
    return max(step.own - _waited(step), 0)


def _own(step: StepRecord) -> float:
    return step.own


def _at_most(step: StepRecord) -> float:
    """Its own time, if it waited for a core in the all-reduce rather than before."""
    return step.own - max(_waited(step) - step.wait, 0)


def _waited(step: StepRecord) -> float:
    return step.waited or 0


def _cpu(step: StepRecord) -> float:
    return step.cpu or 0


def _part(name: str) -> Callable[[StepRecord], float]:
    return lambda step: float(getattr(step, name))


def _usable(run: Run, rank: Rank) -> _Steps:
    """Steps whose backward was split into compute and wait, by number."""
    return {
        step.step: step
        for step in rank.split_steps
        if step.split and not step.skipped and step.total > 0 and run.undisturbed(step)
    }


def _inferred(run: Run, ranks: Sequence[Rank]) -> dict[int, _Steps]:
    """Steps of ranks on GPUs, split by what a rank's backward takes longer than the shortest one.

    DDP times every hundredth backward. In all of them the rank that the others wait for does not
    wait: what their backward takes longer is their wait, unless its backward is what is slow; then
    none is found, and DDP's timers have to show it. Where nothing is reduced, nothing is to be
    split, and a step counts as split.
    """
    steps = {
        rank.rank: {
            step.step: step
            for step in rank.steps
            if not (step.split or step.skipped) and step.total > 0 and run.undisturbed(step)
        }
        for rank in ranks
    }
    common = set.intersection(*(set(each) for each in steps.values()))
    least = {
        number: min(each[number].backward + each[number].wait for each in steps.values())
        for number in common
    }
    return {
        rank: {number: _waiting(each[number], least[number]) for number in common}
        for rank, each in steps.items()
    }


def _reduce_together(ranks: Sequence[Rank]) -> bool:
    """Whether a backward of each of these ranks ends with that of all the others."""
    groups = {each.group_ranks for rank in ranks for each in rank.records.of(DdpRecord)}
    built = all(rank.records.first(DdpRecord) is not None for rank in ranks)
    return built and len(groups) == 1 and {rank.rank for rank in ranks} <= set(*groups)


def _waiting(step: StepRecord, compute: int) -> StepRecord:
    """The step, if its backward took no longer than that and then waited."""
    return replace(step, backward=compute, wait=step.backward + step.wait - compute)


def on_gpu(rank: Rank) -> bool:
    """Whether the rank's steps were timed on a GPU."""
    return any(record.device.startswith("cuda") for record in rank.records.of(DdpRecord))
