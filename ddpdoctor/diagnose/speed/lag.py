"""Find the rank, or the stage of a pipeline, that holds the others up.

First, compare medians of steps. If no rank stands out, compare the means of ever longer stretches
of steps, which show a surplus that is not in every step. `lag_of` handles both.

On a crowded machine every rank waits for a core, and a rank that computes longer waits longer. So
times are compared without such waits. Waits that the rank's work does not explain are reported as
`Lag.crowded`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from statistics import fmean, median, median_low

from ddpdoctor.core.formatting import named
from ddpdoctor.diagnose.speed.pace import (
    ENOUGH,
    MIN_SURPLUS,
    MIN_WAITED,
    WARM_UP,
    own_time,
    stands_out,
)
from ddpdoctor.run.records.model import StageRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import PHASES
from ddpdoctor.run.step_series import on_gpu, reducing_together, split_by_comparison, unclocked

Steps = Mapping[int, StepRecord]  # Steps of one rank, by number


@dataclass(frozen=True)
class Stage:
    """The part of a pipeline that some ranks run: one of its stages, or several in turn."""

    numbers: tuple[int, ...]  # From 0, ascending
    of: int  # The number of stages in the pipeline
    ranks: tuple[Rank, ...]  # One rank of each replica of the model

    @cached_property
    def name(self) -> str:
        """``stage 1``, ``stages 0 and 2``."""
        return named(self.numbers, "stage")

    @property
    def record(self) -> StageRecord:
        """The record of the first of its ranks."""
        return self.ranks[0].records.of(StageRecord)[-1]


def stages(run: Run) -> tuple[Stage, ...]:
    """Return the stages of the last attempt in order; none unless every rank runs one."""
    found: dict[tuple[int, ...], list[Rank]] = {}
    of = 0
    for rank in run.last:
        records = rank.records.of(StageRecord)
        if not records:
            return ()
        # The job may have tried other pipelines before.
        of = records[-1].stages
        numbers = {record.stage for record in records if record.stages == of}
        found.setdefault(tuple(sorted(numbers)), []).append(rank)
    return tuple(Stage(numbers, of, tuple(ranks)) for numbers, ranks in sorted(found.items()))


def alike(run: Run) -> Sequence[Sequence[Rank]]:
    """Group the ranks of the last attempt by the work they do."""
    return [stage.ranks for stage in stages(run)] or [run.last]


def stage_of(run: Run, number: int) -> Stage | None:
    """Return the stage that a rank runs."""
    of_rank = (each for each in stages(run) if any(rank.rank == number for rank in each.ranks))
    return next(of_rank, None)


# -- one rank against the others

PLAIN_SHARE, PLAIN_NS = 0.5, 20_000_000
"""Minimum surplus that few steps can show: as a fraction of the step, and in nanoseconds."""
STEADY, STEADY_STRETCHES = 0.75, 0.875
"""Fraction of steps, or of stretches, that must show the surplus. Stretches are fewer."""
PRESENT, PRESENT_IN_STRETCH = 1 / 2, 1 / 3
"""Fraction of the surplus that a step, or a stretch, needs to show it. With a surplus in every 10th
step, stretches of 16 steps have one or two."""
MAX_IDLE_WAIT = 0.01  # Maximum fraction of a step spent waiting for a core if cores are idle
MAX_CALM_WAIT = 0.05  # The same if the machine is not crowded
BRIEF_NS = 500_000_000
"""Steps that span fewer nanoseconds count as few, unless the machine is calm. For that long, a core
may be slow because of its sibling, or because of a virtual machine's host."""
CORE_TAKEN = 3.0
"""Minimum ratio of a rank's wait for a core to the others', if processes use only its core."""
SAME_WORK = 1.25
"""Maximum ratio of a rank's CPU time to the others', if its work does not explain its waits. A rank
that computes longer loses its core more often, and not only in proportion."""


@dataclass(frozen=True)
class Rhythm:
    """The steps that have a surplus."""

    words: str = ""
    """``in every 2nd step``. Empty if it is spread, or if single steps were not recorded."""
    period: int = 0  # Number of steps from one to the next, or 0 if it varies
    of_passes: bool = False  # Whether they are the first steps of passes over the data
    gap: float = 0.0  # The mean surplus in each of them, in nanoseconds


@dataclass(frozen=True)
class Lag:
    """A rank that holds the others up. Times are in nanoseconds a step.

    They are medians of steps, or medians of means over stretches of steps.
    """

    rank: Rank
    gap: float  # Time that the others would save if this rank were like them
    crowded: bool  # Whether the gap is a wait for a core that only this rank needs
    cpu: float  # CPU time of its training thread beyond that of the others; 0 if unknown
    total: float  # The step without waits for a core
    wall: float  # The step as measured
    calm: bool  # Whether ranks hardly wait for cores, so that times are reliable
    sure: bool
    """Whether the gap remains, however the others' waits for a core are divided between their own
    time and the all-reduce."""
    own: tuple[float, float]  # Own time of this rank and of the others, without waits for a core
    wait: tuple[float, float]  # Wait in the all-reduce of this rank and of the others
    cores: tuple[float, float]  # Wait for a core of this rank and of the others
    ran: bool  # Whether the kernel reports how long a thread ran and waited for a core
    phase: str  # The phase with the largest surplus
    slow: float  # The time of that phase here
    usual: float  # The time of that phase on the others
    steps: int
    few: bool
    """Whether the steps are few or span little time. Then the gap is large, and in all of them."""
    rhythm: Rhythm | None = None  # The steps that have the gap, if most do not

    @property
    def cores_idle(self) -> bool:
        """Whether ranks wait so little for a core that their workers cannot lack one."""
        return self.ran and max(self.cores) <= MAX_IDLE_WAIT * self.wall


def lag_of(
    rank: Rank,
    mine: Steps,
    others: Sequence[Steps],
    common: Sequence[int],
    *,
    gpu: bool,
    lasting: float,
    few: bool = False,
    stretches: bool = False,
) -> Lag | None:
    """Return a rank's lag behind the others in common steps. None if it has none.

    With ``stretches``, the steps are means over stretches of steps. ``lasting`` is the minimum span
    in nanoseconds to show that others use the rank's core.
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
        """Return whether most steps have the surplus and the others wait for it."""
        gap = median(surplus)
        part = PRESENT_IN_STRETCH if stretches else PRESENT
        seen = sum(value > gap * part for value in surplus)
        steady = STEADY_STRETCHES if stretches else STEADY
        return stands_out(gap, total, relief) and seen >= steady * len(surplus)

    total = here(lambda step: max(step.total - waited(step), cpu(step)))
    wall = here(lambda step: step.total)
    relief = there(lambda step: step.wait) - here(lambda step: step.wait)
    # A host without a core may have queued enough work on its GPU, and may spin for it.
    mine_of = (lambda step: max(step.own - waited(step), 0)) if gpu else net
    rest: Callable[[StepRecord], float] = (lambda step: step.own) if gpu else net
    working = surplus(mine_of, rest)
    # The others' own time may be this long, if they lacked a core in the all-reduce.
    safely = surplus(mine_of, lambda step: step.own - max(waited(step) - step.wait, 0))
    gap, crowded = 0.0, False
    waits = max(here(waited), there(waited))
    calm = waits <= MAX_CALM_WAIT * wall
    span = mine[common[-1]].start - mine[common[0]].start
    few = few or (not calm and span < BRIEF_NS)
    if outstanding(working, total) and (not few or _is_plain(working, total)):
        gap = median(working)
    # Waits for a core beyond those that come with longer work.
    rate = there(waited) / there(cpu) if there(cpu) else 0.0
    crowd = [
        wait - rate * max(ran, 0.0)
        for wait, ran in zip(surplus(waited, waited), surplus(cpu, cpu), strict=True)
    ]
    taken = here(cpu) <= SAME_WORK * there(cpu) and here(waited) >= CORE_TAKEN * there(waited)
    if taken and span >= lasting and not few and median(crowd) > gap and outstanding(crowd, wall):
        gap, crowded = median(crowd), True
    if not gap:
        return None
    phase, slow, usual = max(
        ((name, here(attrgetter(name)), there(attrgetter(name))) for name in PHASES),
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
        sure=outstanding(safely, total) and median(safely) >= MIN_WAITED * gap,
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


def _is_plain(surplus: Sequence[float], total: float) -> bool:
    """Return whether few steps show a surplus: a large one in all but one of them."""
    gap = median(surplus)
    small = sum(value <= gap / 2 for value in surplus)
    return gap >= max(PLAIN_SHARE * total, PLAIN_NS) and small <= 1


def whole(step: StepRecord) -> int:
    """Return a rank's own time in a step, including the time between passes before it."""
    return step.own + step.outside


def net(step: StepRecord) -> float:
    """Return a step's own time without waits for a core (`own_time`)."""
    return own_time(step.own, cpu(step), waited(step))


def waited(step: StepRecord) -> float:
    """Return the time for which the training thread waited for a core. 0 if unknown."""
    return step.waited or 0


def cpu(step: StepRecord) -> float:
    """Return the CPU time of the training thread. 0 if unknown."""
    return step.cpu or 0


# -- comparing ranks step by step

ENOUGH_SAMPLED = 6  # Minimum number of steps on a GPU, where DDP times only every hundredth step
FEW = 8  # Minimum number of steps in a shorter job, if they show a large surplus
WARM_UP_STEPS = 2  # Number of warm-up steps: loaders start, buckets are built, caches are filled
MIN_LASTING_NS = 5_000_000_000
"""Minimum span of steps in nanoseconds to show that others use a rank's core. In less time the
kernel may not have balanced the load yet."""
MAX_COMPARED = 16  # Number of ranks above which only the slowest are compared with all others
MAX_OTHERS = 64  # Maximum number of ranks to compare a rank with
MIN_STRETCHES = 16  # Minimum number of stretches of equal length
MIN_PASSES = 8
"""Minimum number of passes over the data, if most of the surplus is in their first steps."""
MIN_NAMED_SURPLUS = 0.75  # Minimum fraction of a surplus in the named steps
MAX_NAMED_STEPS = 0.6  # Maximum fraction of steps to name


def lags(run: Run, enough: int = ENOUGH, few: int = FEW) -> Iterator[Lag]:
    """Yield the ranks of the last attempt that hold up others with the same work.

    A verdict needs ``enough`` steps after the warm-up. For a large surplus, ``few`` steps including
    it are enough.
    """
    for ranks in alike(run):
        yield from _lags(run, ranks, enough, few)


def stage_lags(run: Run) -> Iterator[tuple[Stage, Lag]]:
    """Yield the pipeline stages that delay the others, judged by their median ranks."""
    found: dict[int, Stage] = {}
    for stage in stages(run):
        times = {
            rank.rank: median([net(step) for step in _usable(run, rank).values()] or [0.0])
            for rank in stage.ranks
        }
        # The median of two ranks is the faster one.
        found[sorted(times, key=times.__getitem__)[(len(times) - 1) // 2]] = stage
    ranks = [run.rank(number) for number in found]
    for lag in _lags(run, ranks, ENOUGH, FEW, infers=False):
        yield found[lag.rank.rank], lag


def _lags(
    run: Run, ranks: Sequence[Rank], enough: int, few: int, infers: bool = True
) -> Iterator[Lag]:
    if len(ranks) < 2 or any(map(unclocked, ranks)):
        return
    usable: Mapping[int, Steps] = {rank.rank: _usable(run, rank) for rank in ranks}
    joined = infers and tuple(ranks) in reducing_together(ranks)
    if any(map(on_gpu, ranks)):
        timed = _timed(usable)
        found = list(_by_medians(ranks, timed, min(enough, ENOUGH_SAMPLED), few, gpu=True))
        if not found and joined:
            usable = _inferred(run, ranks)
            found = list(_by_medians(ranks, usable, enough, few, gpu=True))
            found = found or list(_by_stretches(ranks, usable, enough, gpu=True))
        yield from found
        return
    found = list(_by_medians(ranks, usable, enough, few, gpu=False))
    if not found:
        usable = {rank.rank: _chosen(run, rank.steps) for rank in ranks}
        if joined and any(not step.split or step.steps > 1 for r in ranks for step in r.steps):
            # DDP timed some steps of a journal line. Only sums of the others are known.
            inferred = _inferred(run, ranks)
            usable = {
                rank: {
                    **inferred[rank],
                    **{number: step for number, step in steps.items() if step.steps == 1},
                }
                for rank, steps in usable.items()
            }
    yield from found or _by_stretches(ranks, usable, enough, gpu=False)


def _timed(usable: Mapping[int, Steps]) -> dict[int, Steps]:
    """Keep one step of each line of the first rank: the one that DDP timed."""
    first = next(iter(usable.values()))
    # The steps of a line begin one duration apart.
    lines = {step.start - number * step.total: number for number, step in first.items()}
    return {
        rank: {number: steps[number] for number in lines.values() if number in steps}
        for rank, steps in usable.items()
    }


def _by_medians(
    ranks: Sequence[Rank], usable: Mapping[int, Steps], enough: int, few: int, *, gpu: bool
) -> Iterator[Lag]:
    """Yield the ranks that hold others up in most steps."""
    common = _common(usable)
    short = len(common) < enough
    if short:
        common = _common(usable, WARM_UP_STEPS)
        if gpu or len(common) < few:
            return
    slow = {rank.rank for rank in ranks}
    if len(ranks) > MAX_COMPARED:
        slow = set()
        for of in (attrgetter("own"), net):
            times = {n: median(of(steps[step]) for step in common) for n, steps in usable.items()}
            slow.update(heapq.nlargest(MAX_COMPARED // 2, times, key=times.__getitem__))
    for rank in ranks:
        if rank.rank not in slow:
            continue
        lasting = MIN_LASTING_NS * min(enough / ENOUGH, 1.0)
        mine, others = usable[rank.rank], _but(usable, rank)
        lag = lag_of(rank, mine, others, common, gpu=gpu, lasting=lasting, few=short)
        if lag is not None:
            yield lag


def _common(usable: Mapping[int, Steps], first: int = WARM_UP) -> list[int]:
    """Return the numbers of the steps that all ranks have, from ``first`` on."""
    steps = set.intersection(*(set(each) for each in usable.values()))
    return sorted(number for number in steps if number >= first)


def _but(ranks: Mapping[int, Steps], rank: Rank) -> list[Steps]:
    """Return the steps of the other ranks, or of evenly chosen ones: their median is similar."""
    others = [steps for number, steps in ranks.items() if number != rank.rank]
    return others[:: 1 + len(others) // MAX_OTHERS]


def still_slower(run: Run, number: int) -> bool:
    """Return whether a reported rank is still slower, by half of the threshold for a report.

    On a crowded machine, some steps do not show a lag that others show.
    """
    ranks = next((each for each in alike(run) if any(n.rank == number for n in each)), ())
    if len(ranks) < 2:
        return False
    if _is_slower({rank.rank: _usable(run, rank) for rank in ranks}, number):
        return True
    return tuple(ranks) in reducing_together(ranks) and _is_slower(_inferred(run, ranks), number)


def _is_slower(usable: dict[int, Steps], number: int) -> bool:
    mine = usable.pop(number, {})
    others = list(usable.values())
    common = set(mine).intersection(*others)
    if not common:
        return False
    gaps = [net(mine[step]) - median(net(steps[step]) for steps in others) for step in common]
    # The mean also shows a surplus that is not in every step.
    gap = max(median(gaps), fmean(gaps))
    total = median(max(step.total - waited(step), cpu(step)) for step in mine.values())
    return stands_out(2 * gap, total, 2 * gap)


def _usable(run: Run, rank: Rank) -> Steps:
    """Return the steps whose backward was split into compute and wait, by number."""
    return _chosen(run, rank.split_steps)


def _chosen(run: Run, steps: Iterable[StepRecord]) -> dict[int, StepRecord]:
    return {
        step.step: step.settled
        for step in steps
        if step.split and not step.skipped and step.total > 0 and run.undisturbed(step)
    }


def _inferred(run: Run, ranks: Sequence[Rank]) -> dict[int, Steps]:
    """Return steps whose waits are inferred from the shortest backward among the ranks.

    DDP's timers also run if nothing is reduced, but do not show waits then.
    """
    merged = {
        rank.rank: [
            replace(step, backward=step.backward + step.wait, wait=0, split=False)
            if step.wait
            else step
            for step in rank.steps
        ]
        for rank in ranks
    }
    return {rank: _chosen(run, each) for rank, each in split_by_comparison(merged).items()}


# -- comparing ranks by stretches of steps


def _by_stretches(
    ranks: Sequence[Rank], usable: Mapping[int, Steps], enough: int, *, gpu: bool
) -> Iterator[Lag]:
    """Yield the ranks that hold others up in some steps only, which medians do not show."""
    common, part = _common(usable), min(enough / ENOUGH, 1.0)
    if len(common) < enough:
        return
    usable, slow = _outstanding(usable, common)
    if not slow:
        return
    # Before these steps a loader restarted, or an evaluation ran.
    firsts = {n for n in common if any(steps[n].outside > 0 for steps in usable.values())}

    def compare(pools: Mapping[int, Steps]) -> Iterator[Lag]:
        numbers = sorted(next(iter(pools.values())))
        for rank in ranks:
            if rank.rank not in slow:
                continue
            mine, others = pools[rank.rank], _but(pools, rank)
            lag = lag_of(
                rank, mine, others, numbers, gpu=gpu, lasting=MIN_LASTING_NS, stretches=True
            )
            if lag is None or lag.crowded:
                continue
            others, mine = _but(usable, rank), usable[rank.rank]
            single = [number for number in common if mine[number].steps == 1]
            surplus = [
                whole(mine[number]) - median(whole(steps[number]) for steps in others)
                for number in single
            ]
            yield replace(lag, steps=len(common), rhythm=rhythm(single, surplus, firsts))

    # Stretches of 2 steps, then of 4, and so on, while there are enough of them.
    pools, numbers = usable, common
    while len(numbers) // 2 >= max(int(part * MIN_STRETCHES), 2):
        parts = [numbers[place : place + 2] for place in range(0, len(numbers) - 1, 2)]
        pools, numbers = _pooled(pools, parts), [part[-1] for part in parts]
        found = list(compare(pools))
        if found:
            yield from found
            return
    starts = [place for place, number in enumerate(common) if number in firsts]
    if max(int(part * MIN_PASSES), 2) < len(starts) <= len(common) / 2:
        passes = [common[begin:end] for begin, end in itertools.pairwise(starts)]
        for lag in compare(_pooled(usable, passes)):
            if lag.rhythm is not None and lag.rhythm.of_passes:
                yield lag


def _outstanding(
    usable: Mapping[int, Steps], common: Sequence[int]
) -> tuple[Mapping[int, Steps], set[int]]:
    """Return some ranks to compare with, and the ranks whose sums stand out."""
    total = median(sum(steps[number].total for number in common) for steps in usable.values())
    slow: set[int] = set()
    for of in (whole, net):
        spent = {n: sum(of(steps[number]) for number in common) for n, steps in usable.items()}
        usual = median_low(spent.values())
        most = heapq.nlargest(MAX_COMPARED // 2, spent, key=spent.__getitem__)
        slow.update(rank for rank in most if spent[rank] - usual >= MIN_SURPLUS * total / 2)
    beside = [*usable][:: max(1, len(usable) // MAX_COMPARED)]
    return {rank: usable[rank] for rank in sorted({*slow, *beside})}, slow


def _pooled(ranks: Mapping[int, Steps], parts: Sequence[Sequence[int]]) -> dict[int, Steps]:
    """Return the mean step of each stretch, by the number of its last step."""
    return {
        rank: {part[-1]: mean_step([steps[number] for number in part]) for part in parts}
        for rank, steps in ranks.items()
    }


def mean_step(steps: Sequence[StepRecord], between: bool = True) -> StepRecord:
    """Return the mean of several steps.

    With ``between``, time between passes counts as code between the phases. Otherwise it is left
    out.
    """
    outside = sum(step.outside for step in steps) * between

    def mean(name: str, more: int = 0) -> int:
        return int(sum(getattr(step, name) or 0 for step in steps) + more) // len(steps)

    return StepRecord(
        step=steps[-1].step,
        start=steps[0].start,
        data=mean("data"),
        forward=mean("forward"),
        backward=mean("backward"),
        optimizer=mean("optimizer"),
        other=mean("other", outside),
        wait=mean("wait"),
        total=mean("total", outside),
        split=True,
        cpu=mean("cpu"),
        waited=mean("waited"),
    )


def rhythm(numbers: Sequence[int], surplus: Sequence[float], firsts: set[int]) -> Rhythm:
    """Find the steps in which a rank's own time exceeds the others' by its surplus.

    ``firsts`` are the first steps of passes.
    """
    rest = MIN_NAMED_SURPLUS * sum(each for each in surplus if each > 0)
    found: list[int] = []
    gaps: list[float] = []
    for value, number in sorted(zip(surplus, numbers, strict=True), reverse=True):
        if rest <= 0 or value <= 0:
            break
        rest -= value
        found.append(number)
        gaps.append(value)
    if len(found) < 2 or len(found) > MAX_NAMED_STEPS * len(numbers):
        return Rhythm()
    if len(firsts & {*found}) >= MIN_NAMED_SURPLUS * len(found) and 2 * len(firsts) < len(numbers):
        return Rhythm("in the first step of each pass", of_passes=True, gap=fmean(gaps))
    apart = Counter(b - a for a, b in itertools.pairwise(sorted(found)))
    period, times = apart.most_common(1)[0]
    if times >= MAX_NAMED_STEPS * (len(found) - 1):
        return Rhythm(f"in every {ordinal(period)} step", period, gap=fmean(gaps))
    return Rhythm(f"in about one step of {round(len(numbers) / len(found))}", gap=fmean(gaps))


def ordinal(number: int) -> str:
    """``2nd``, ``11th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number // 10 % 10 == 1 else ending}"
