"""Rules for what training on more ranks changes (DDP337 to DDP340).

DDP337 needs one run whose ranks recorded what they train with. The others compare runs of two
sizes, or a kept step with its computation: ``ddpdoctor parity`` calls them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count, percent
from ddpdoctor.diagnose.parity.training import Training, at
from ddpdoctor.run.records.training import TrainedRecord
from ddpdoctor.run.snapshot import Run

MIN_STEPS = 10  # Steps in which the ranks counted different numbers of predictions
MIN_SPREAD = 1.1  # Ratio of these numbers from which a step tells how the loss weighs them
MIN_WEIGHT = 1.1  # Typical ratio of two predictions' weights that is worth a word
MEAN, WHOLE = 0.25, 0.75
"""Slope of pull over number, both logarithmic: near 0 for a mean over the rank's own predictions,
near 1 where all predictions weigh the same."""

SAME_RATE = 0.02  # Relative difference of learning rates that are the same
SAME_EPOCH = 0.02  # Relative difference of an epoch's samples that padding explains
MIN_SHAPE = 5  # Learning rates that show whether a schedule follows steps or samples


def _needs_two_runs(run: Run) -> Iterator[Finding]:
    """Find nothing in one run."""
    yield from ()


@rule("DDP337", "loss-by-local-count", Severity.WARNING)
def loss_by_local_count(run: Run) -> Iterator[Finding]:
    """Each rank averages its loss over its own tokens, whose number differs between ranks.

    What it finds
        In steps in which the ranks' losses count different numbers of predictions (tokens that are
        not padding, pixels that are not ignored), the sum of the gradients of a rank's predictions
        stays the same: each rank divides by its own number. Needs `ddpdoctor parity`, or a run that
        it made.

    Why it is bad
        DDP averages the ranks' gradients. So a token of a rank with few tokens weighs more than one
        of a rank with many, and the gradient is not that of the whole batch: a job of one rank
        trains differently.

    How to fix it
        Divide the sum of the losses by the number of all ranks' predictions, and multiply by the
        number of ranks, since DDP divides by it.

    Example
        Wrong: `loss = F.cross_entropy(logits, labels, ignore_index=-100)`
        Right:
            number = (labels != -100).sum()
            dist.all_reduce(number)
            loss = F.cross_entropy(logits, labels, reduction="sum") * world_size / number

    When it stays silent
        If all ranks count the same number in nearly all steps, if the weights differ by less than a
        tenth, and for models that return the loss alone.
    """
    by_rank = {
        rank.rank: {each.step: each for each in rank.records.of(TrainedRecord)} for rank in run.last
    }
    if len(by_rank) < 2 or len(by_rank) < run.world_size:
        return
    spreads, product, square, largest = [], 0.0, 0.0, (0, 0)
    common = set.intersection(*(set(each) for each in by_rank.values()))
    for step in sorted(common):
        known = [each[step] for each in by_rank.values()]
        counted = [(each.rows, each.pull) for each in known if each.rows and each.pull]
        if len(counted) < len(known):
            continue
        few, many = min(counted), max(counted)
        ratio = many[0] / few[0]
        spreads.append(ratio)
        if ratio >= MIN_SPREAD:
            apart = math.log(ratio)
            product += apart * math.log(many[1] / few[1])
            square += apart * apart
            largest = max(largest, (many[0], few[0]), key=lambda pair: pair[0] / (pair[1] or 1))
    uneven = sum(each >= MIN_SPREAD for each in spreads)
    if uneven < MIN_STEPS or median(spreads) < MIN_WEIGHT or product / square > MEAN:
        return
    yield Finding(
        code="DDP337",
        severity=Severity.WARNING,
        message="each rank averages its loss over its own predictions, whose number differs: one "
        f"of a rank with few weighs {median(spreads):.2g} times one of another rank",
        ranks=tuple(sorted(by_rank)),
        location=run.last[0].site("backward"),
        evidence=(
            f"the ranks counted different numbers of predictions in {uneven} of "
            f"{count(len(spreads), 'step')}, up to {largest[0]} on one rank and {largest[1]} on "
            "another",
            "the sum of a rank's gradients did not grow with its number",
        ),
        fix="Divide the sum of the losses by the number of all ranks' predictions (all_reduce it), "
        "and multiply by the number of ranks.",
        about="loss by local count",
    )


@rule("DDP338", "gradient-not-average", Severity.ERROR, detect=_needs_two_runs)
@dataclass(frozen=True)
class GradientNotAverage:
    """DDP's gradient is not the average of the ranks' gradients.

    What it finds
        `ddpdoctor parity --replay` keeps one step of each rank and computes its forward and
        backward again in one process. The gradient after the job's backward is not the average of
        these: it is scaled, or parameters have another one.

    Why it is bad
        All the ranks make the same wrong step, or each another one. Training on one rank does not.

    How to fix it
        Look at what changes the gradient between DDP and here: `no_sync()` around the last
        backward, a communication hook, a forward that does not go through DDP.

    Example
        Wrong: a communication hook that sums, and does not divide by the number of ranks.
        Right: `default_hooks.allreduce_hook`, or a division in the hook.

    When it stays silent
        If the model cannot be computed again, which is said, and for differences of rounding. A
        computation that is not deterministic on a GPU may look like this.
    """


@rule("DDP339", "rate-not-scaled", Severity.INFO, detect=_needs_two_runs)
@dataclass(frozen=True)
class RateNotScaled:
    """The global batch grew with the ranks, and the learning rate stayed as it was.

    What it finds
        `ddpdoctor parity` ran the job at two sizes. An optimizer step averages more samples at the
        larger one, and the learning rate after the same number of samples is the same.

    Why it is bad
        It may be right: it depends on the optimizer and on how far the batch is from the largest
        useful one. But then training makes fewer steps of the same length, and often converges
        worse for the same number of epochs.

    How to fix it
        Try the linear rule (SGD, https://arxiv.org/abs/1706.02677) with a warm-up, or the square
        root (Adam), or keep the global batch: divide the batch of a rank by the number of ranks.

    Example
        Wrong: `SGD(model.parameters(), lr=0.1)` at 1 and at 8 ranks.
        Right: `SGD(model.parameters(), lr=0.1 * dist.get_world_size())`

    When it stays silent
        If the rate changes with the size, or the global batch stays the same.
    """


@rule("DDP340", "epoch-differs", Severity.WARNING, detect=_needs_two_runs)
@dataclass(frozen=True)
class EpochDiffers:
    """An epoch of all ranks has other samples than an epoch of one rank.

    What it finds
        `ddpdoctor parity` ran the job at two sizes, and the ranks together drew more or fewer
        samples in their first epoch than at the smaller size, by more than padding explains.

    Why it is bad
        With more, an epoch repeats samples, and each rank trains on the whole data set: N ranks do
        the same work N times. With fewer, samples are never seen.

    How to fix it
        Give the loader a `DistributedSampler`, once: not on data that are already a rank's part.

    Example
        Wrong: `DataLoader(data, shuffle=True)` on every rank.
        Right: `DataLoader(data, sampler=DistributedSampler(data))`

    When it stays silent
        For data without a length, for epochs that were not finished, and for what a sampler pads.
    """


def compared(base: Training, other: Training) -> Iterator[Finding]:
    """Yield what changed in the training between a smaller and a larger size."""
    sizes = f"{count(base.ranks, 'rank')} and {other.ranks}"
    yield from _rates(base, other, sizes)
    one, two = base.epoch, other.epoch
    if one is None or two is None or not one.drawn:
        return
    ratio = two.drawn / one.drawn
    if abs(ratio - 1) > SAME_EPOCH + other.ranks / one.drawn:
        more = f"{ratio:.2g} times the" if ratio > 1 else f"only {percent(ratio)} of the"
        yield Finding(
            code="DDP340",
            severity=Severity.WARNING,
            message=f"an epoch of {other.ranks} ranks has {more} samples of an epoch of "
            f"{count(base.ranks, 'rank')}",
            location=two.made,
            evidence=(
                f"first epoch: {one.drawn} samples with {count(base.ranks, 'rank')}, {two.drawn} "
                f"with {other.ranks} ranks",
                f"each rank took {count(two.steps, 'batch', 'batches')}, and {one.steps} before",
            ),
            fix="Give the loader a DistributedSampler, so that each rank gets its part."
            if ratio > 1
            else "Let the data be divided once: a DistributedSampler on the whole data set.",
            about="epoch",
        )


def _rates(base: Training, other: Training, sizes: str) -> Iterator[Finding]:
    growth = other.batch / base.batch if base.batch else 0.0
    one, two = base.rates, other.rates
    if growth < 1 + SAME_RATE or not one or not two:
        return
    # The last rates at which both have seen as many samples.
    seen = min(base.samples, other.samples)
    rate, given = at(one, seen), at(two, seen)
    if rate is None or given is None or not one[0].value:
        return
    start = two[0].value / one[0].value
    shared = min(len(base.by_step), len(other.by_step))
    distinct = len(set(base.by_step[:shared]))
    by_step = all(
        abs(a * start - b) <= SAME_RATE * abs(b) + 1e-15
        for a, b in zip(base.by_step, other.by_step, strict=False)
    )
    by_samples = abs(rate * start - given) <= SAME_RATE * abs(given)
    if distinct >= MIN_SHAPE and by_step and not by_samples:
        yield Finding(
            code="DDP331",
            severity=Severity.WARNING,
            message="the learning rate's schedule counts optimizer steps, and each of them has "
            f"{growth:.3g} times the samples: it takes {growth:.3g} times the samples to the same "
            "rate",
            location=other.stepped,
            evidence=(
                f"after {seen} samples: {rate:.4g} with {count(base.ranks, 'rank')}, {given:.4g} "
                f"with {other.ranks}",
                f"after {shared} steps it is the same with {sizes} ranks",
            ),
            fix="Compute the schedule's lengths (warm-up, milestones, total) from len(loader), or "
            "divide them by the number of ranks.",
            about="schedule by steps",
        )
    elif abs(start - 1) <= SAME_RATE and abs(rate - given) <= SAME_RATE * abs(rate):
        yield Finding(
            code="DDP339",
            severity=Severity.INFO,
            message=f"an optimizer step has {growth:.3g} times the samples with {other.ranks} "
            "ranks, and the learning rate is the same",
            location=other.stepped,
            evidence=(
                f"{base.batch:g} samples a step with {count(base.ranks, 'rank')}, {other.batch:g} "
                f"with {other.ranks}",
                f"after {seen} samples the rate is {given:.4g} with both; the linear rule gives "
                f"{rate * growth:.4g}, the square root {rate * math.sqrt(growth):.4g}",
            ),
            fix="Scale the rate with the batch (with a warm-up), or divide the batch of a rank by "
            "the number of ranks, unless the rate was chosen for this batch.",
            about="rate not scaled",
        )
