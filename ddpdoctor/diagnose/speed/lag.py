"""Which rank, or which stage of a pipeline, holds the others up: in most steps, or in some."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median, median_low

from ddpdoctor.core.formatting import named
from ddpdoctor.diagnose.speed.pace import ENOUGH, SLOWER, WARM_UP, stands_out
from ddpdoctor.diagnose.speed.surplus import (
    FEWEST,
    FEWEST_PASSES,
    STEADIER,
    STEADY,
    THIRD,
    Lag,
    Steps,
    cpu,
    first_of_passes,
    halvings,
    lag_of,
    net,
    own,
    passes,
    pooled,
    rhythm,
    waited,
    whole,
)
from ddpdoctor.run.records.model import StageRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import on_gpu, reducing_together, split_by_comparison

# -- stages


@dataclass(frozen=True)
class Stage:
    """What some ranks run of a pipeline: one of its stages, or several in turn."""

    numbers: tuple[int, ...]
    """From 0, ascending."""
    of: int
    """Stages that the pipeline has."""
    ranks: tuple[Rank, ...]
    """Of each replica of the model one."""

    @cached_property
    def name(self) -> str:
        """``stage 1``, ``stages 0 and 2``."""
        return named(self.numbers, "stage")

    @property
    def record(self) -> StageRecord:
        """Of the first of its ranks."""
        return self.ranks[0].records.of(StageRecord)[-1]


def stages(run: Run) -> tuple[Stage, ...]:
    """The stages of the last attempt, in their order; empty where not every rank runs any."""
    found: dict[tuple[int, ...], list[Rank]] = {}
    of = 0
    for rank in run.last:
        records = rank.records.of(StageRecord)
        if not records:
            return ()
        # A job may have built pipelines before, to try them.
        of = records[-1].stages
        numbers = {record.stage for record in records if record.stages == of}
        found.setdefault(tuple(sorted(numbers)), []).append(rank)
    return tuple(Stage(numbers, of, tuple(ranks)) for numbers, ranks in sorted(found.items()))


def alike(run: Run) -> Sequence[Sequence[Rank]]:
    """The ranks of the last attempt, those together that do the same work."""
    return [stage.ranks for stage in stages(run)] or [run.last]


def stage_of(run: Run, number: int) -> Stage | None:
    """The stage that a rank runs."""
    of_rank = (each for each in stages(run) if any(rank.rank == number for rank in each.ranks))
    return next(of_rank, None)


# -- which rank holds the others up: in most steps, as medians show it, or in some, as sums do


ENOUGH_SAMPLED = 6
"""Steps that a verdict needs on a GPU, where DDP times only every hundredth step."""

FEW = 8
"""Steps that say something of a job that is too short for that, if they say it plainly."""

BEGINNING = 2
"""Steps at its beginning that say nothing: loaders start, buckets are built, caches are filled."""

LASTING = 5_000_000_000
"""Nanoseconds that steps must span to say that others use a rank's core: for less the kernel may
just not have balanced its load."""

MANY = 16
"""Ranks from which on only the slowest are compared with all the others."""


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
        rank.rank: median([net(step) for step in _usable(run, rank).values()] or [0.0])
        for rank in ranks
    }
    return sorted(ranks, key=lambda rank: times[rank.rank])[(len(ranks) - 1) // 2]


def _lags(
    run: Run, ranks: Sequence[Rank], enough: int, few: int, infers: bool = True
) -> Iterator[Lag]:
    if len(ranks) < 2:
        return
    usable: Mapping[int, Steps] = {rank.rank: _usable(run, rank) for rank in ranks}
    joined = infers and tuple(ranks) in reducing_together(ranks)
    if not any(on_gpu(rank) for rank in ranks):
        found = list(_by_medians(ranks, usable, enough, few, gpu=False))
        if not found:
            usable = {rank.rank: _chosen(run, rank.steps) for rank in ranks}
            timed = all(step.split and step.steps == 1 for rank in ranks for step in rank.steps)
            if joined and not timed:
                usable = _with_sums(usable, _inferred(run, ranks))
        yield from found or _by_sums(ranks, usable, enough, gpu=False)
        return
    found = list(_by_medians(ranks, _timed(usable), min(enough, ENOUGH_SAMPLED), few, gpu=True))
    if not found and joined:
        usable = _inferred(run, ranks)
        found = list(_by_medians(ranks, usable, enough, few, gpu=True))
        found = found or list(_by_sums(ranks, usable, enough, gpu=True))
    yield from found


def _by_medians(
    ranks: Sequence[Rank], usable: Mapping[int, Steps], enough: int, few: int, *, gpu: bool
) -> Iterator[Lag]:
    """The ranks that hold others up in most steps."""
    common = _common(usable)
    short = len(common) < enough
    if short:
        common = _common(usable, BEGINNING)
        if gpu or len(common) < few:
            return
    for rank in _slow(ranks, usable, common):
        lag = lag_of(
            rank,
            usable[rank.rank],
            _but(usable, rank),
            common,
            gpu=gpu,
            lasting=LASTING * min(enough / ENOUGH, 1.0),
            few=short,
            steady=STEADY,
        )
        if lag is not None:
            yield lag


def _common(usable: Mapping[int, Steps], first: int = WARM_UP) -> list[int]:
    """The numbers of the steps that all ranks have, from that one on."""
    steps = set.intersection(*(set(each) for each in usable.values()))
    return sorted(number for number in steps if number >= first)


def _with_sums(usable: Mapping[int, Steps], inferred: Mapping[int, Steps]) -> dict[int, Steps]:
    """The steps that DDP timed, and those of a line whose sums alone are known: it timed some."""
    return {
        rank: {
            **inferred[rank],
            **{number: step for number, step in steps.items() if step.steps == 1},
        }
        for rank, steps in usable.items()
    }


def _timed(usable: Mapping[int, Steps]) -> dict[int, Steps]:
    """One step of each line of the first rank: DDP timed one of those that it stands for."""
    first = next(iter(usable.values()))
    # The steps of a line begin as far apart as they are long.
    lines = {step.start - number * step.total: number for number, step in first.items()}
    return {
        rank: {number: steps[number] for number in lines.values() if number in steps}
        for rank, steps in usable.items()
    }


def _but(ranks: Mapping[int, Steps], rank: Rank) -> list[Steps]:
    return [steps for number, steps in ranks.items() if number != rank.rank]


def _by_sums(
    ranks: Sequence[Rank],
    usable: Mapping[int, Steps],
    enough: int,
    *,
    gpu: bool,
) -> Iterator[Lag]:
    """The ranks that hold others up in some steps only, which medians of steps do not show.

    Args:
        ranks: The ranks.
        usable: Their steps.
        enough: As `ENOUGH`.
        gpu: They were timed on GPUs.
    """
    common, part = _common(usable), min(enough / ENOUGH, 1.0)
    if len(common) < enough:
        return
    usable, slow = _outstanding(usable, common)
    if not slow:
        return
    firsts = first_of_passes([*usable.values()], common)

    def compare(pools: Mapping[int, Steps]) -> Iterator[Lag]:
        numbers = sorted(next(iter(pools.values())))
        for rank in ranks:
            if rank.rank not in slow:
                continue
            lag = lag_of(
                rank,
                pools[rank.rank],
                _but(pools, rank),
                numbers,
                gpu=gpu,
                lasting=LASTING,
                few=False,
                steady=STEADIER,
                least=THIRD,
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

    for pools in halvings(usable, common, max(int(part * FEWEST), 2)):
        found = list(compare(pools))
        if found:
            yield from found
            return
    by_pass = passes(usable, common, max(int(part * FEWEST_PASSES), 2))
    if by_pass:
        for lag in compare(pooled(usable, by_pass)):
            if lag.rhythm is not None and lag.rhythm.of_passes:
                yield lag


def _outstanding(
    usable: Mapping[int, Steps], common: Sequence[int]
) -> tuple[Mapping[int, Steps], set[int]]:
    """The ranks that stand out by their sums, and whom to compare them with: of many, some."""
    total = median(sum(steps[number].total for number in common) for steps in usable.values())
    slow: set[int] = set()
    for of in (whole, net):
        spent = {n: sum(of(steps[number]) for number in common) for n, steps in usable.items()}
        usual = median_low(spent.values())
        most = heapq.nlargest(MANY // 2, spent, key=spent.__getitem__)
        slow.update(rank for rank in most if spent[rank] - usual >= SLOWER * total / 2)
    beside = [*usable][:: max(1, len(usable) // MANY)]
    return {rank: usable[rank] for rank in sorted({*slow, *beside})}, slow


def _slow(
    ranks: Sequence[Rank], usable: Mapping[int, Steps], common: Sequence[int]
) -> Sequence[Rank]:
    """The ranks that may hold others up: of many the slowest, as each is compared with all."""
    if len(ranks) <= MANY:
        return ranks
    slow: set[int] = set()
    for of in (own, net):
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
    return tuple(ranks) in reducing_together(ranks) and _is_slower(_inferred(run, ranks), number)


def _is_slower(usable: dict[int, Steps], number: int) -> bool:
    mine = usable.pop(number, {})
    others = list(usable.values())
    common = set(mine).intersection(*others)
    if not common:
        return False
    gaps = [net(mine[step]) - median(net(steps[step]) for steps in others) for step in common]
    # What is not in each step, a mean shows.
    gap = max(median(gaps), fmean(gaps))
    total = median(max(step.total - waited(step), cpu(step)) for step in mine.values())
    return stands_out(2 * gap, total, 2 * gap)


def _usable(run: Run, rank: Rank) -> Steps:
    """Steps whose backward was split into compute and wait, by number."""
    return _chosen(run, rank.split_steps)


def _chosen(run: Run, steps: Iterable[StepRecord]) -> Steps:
    return {
        step.step: step
        for step in steps
        if step.split and not step.skipped and step.total > 0 and run.undisturbed(step)
    }


def _inferred(run: Run, ranks: Sequence[Rank]) -> dict[int, Steps]:
    """Steps of ranks on GPUs, all of them split by what the shortest backward took.

    DDP's timers count where nothing was reduced: there is nothing to be split then.
    """
    steps = {rank.rank: [_whole(step) for step in rank.steps] for rank in ranks}
    return {rank: _chosen(run, each) for rank, each in split_by_comparison(steps).items()}


def _whole(step: StepRecord) -> StepRecord:
    """The step with its wait within its backward."""
    if not step.wait:
        return step
    return replace(step, backward=step.backward + step.wait, wait=0, split=False)
