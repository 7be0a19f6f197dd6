"""Rules for losses, gradients and random numbers that more ranks change (DDP337, DDP338, DDP342).

DDP337 and DDP342 need one run whose ranks recorded their training, or trained without DDP.
The others compare runs of two sizes, or a kept step with its computation: ``ddpdoctor parity``
calls them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count
from ddpdoctor.diagnose.parity.training import Norms, Training, needs_two_runs, training_of
from ddpdoctor.diagnose.source_operations import mentions
from ddpdoctor.run.records.model import ClipRecord, DdpRecord, SoloRecord
from ddpdoctor.run.records.training import TrainedModelRecord, TrainedRecord
from ddpdoctor.run.snapshot import Run

MIN_BY_HAND = 4  # Minimum number of recorded steps of a job without DDP
MIN_STEPS = 10  # Steps in which the ranks counted different numbers of predictions
MIN_SPREAD = 1.1  # Ratio of these numbers from which a step tells how the loss weighs them
MIN_WEIGHT = 1.1  # Typical ratio of two predictions' weights that is worth a word
MEAN, WHOLE = 0.25, 0.75
"""Slope of pull over number, both logarithmic: near 0 for a mean over the rank's own predictions,
near 1 where all predictions weigh the same."""

FEWER = 1.5  # Ratio of the samples of batch statistics that is worth a word
SAME_NORM = 0.01  # Relative difference of norms that are the same


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


@rule("DDP338", "gradient-not-average", Severity.ERROR, detect=needs_two_runs)
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


@rule("DDP342", "clipped-before-average", Severity.WARNING)
def clipped_before_average(run: Run) -> Iterator[Finding]:
    """Each rank clips its own gradients, and they are averaged afterwards.

    What it finds
        `clip_grad_norm_` that returns another norm on each rank, while the optimizers of all ranks
        get the same gradients. Or a hook that bounds the gradient of a parameter, which runs before
        DDP averages it. With DDP it needs `ddpdoctor parity`, or a run that it made.

    Why it is bad
        The gradient of one rank is noisier and longer than the average, so it is clipped more
        often. Ranks with long gradients lose their weight. The same threshold means something else
        with each number of ranks.

    How to fix it
        Clip after the gradients were averaged: after the last backward, outside of `no_sync()`, or
        after the all-reduce that the job makes itself.

    Example
        Wrong: `p.register_hook(lambda grad: grad.clamp_(-1, 1))`
        Right: `clip_grad_value_(model.parameters(), 1)` between `backward()` and `step()`

    When it stays silent
        If the norms are the same on all ranks, if the optimizers get different gradients, if the
        limit is infinite, and in the first steps.
    """
    training = training_of(run)
    norms = training.norms if training is not None else _averaged_by_hand(run)
    if run.world_size < 2 or (training is None and not norms):
        return
    ranks = tuple(rank.rank for rank in run.last)
    model = run.last[0].records.first(TrainedModelRecord)
    if model is not None and model.hooks:
        yield Finding(
            code="DDP342",
            severity=Severity.WARNING,
            message="a hook bounds the gradients of each rank before DDP averages them",
            ranks=ranks,
            location=model.location,
            evidence=(f"{count(model.hooks, 'parameter')} had such a hook at the first step",),
            fix="Clip after the backward: clip_grad_value_(model.parameters(), limit) before "
            "optimizer.step().",
            about="clipping",
        )
        return
    apart = [each for each in norms if not _same(each.clipped) and _same(each.used)]
    if len(apart) < max(MIN_STEPS if training is not None else MIN_BY_HAND, len(norms) // 2):
        return
    widest = max(apart, key=lambda each: max(each.clipped) / (min(each.clipped) or 1.0))
    clip = run.last[0].records.first(ClipRecord)
    at = clip.location if clip is not None else None
    if at is not None and mentions(at, "inf"):
        # The job only measures the norm.
        return
    yield Finding(
        code="DDP342",
        severity=Severity.WARNING,
        message="each rank clips its own gradients, which are averaged afterwards",
        ranks=ranks,
        location=at or run.last[0].site("optimizer"),
        evidence=(
            f"the clipped norm differed between the ranks in {len(apart)} of "
            f"{count(len(norms), 'recorded step')}, up to {min(widest.clipped):.4g} and "
            f"{max(widest.clipped):.4g}",
            "the optimizers of all ranks got the same gradients there",
        ),
        fix="Clip after the gradients were averaged, between the last all-reduce and "
        "optimizer.step().",
        about="clipping",
    )


def _averaged_by_hand(run: Run) -> tuple[Norms, ...]:
    """Return the norms of a job without DDP whose ranks clip at one line.

    ``used`` holds the norm of one tensor that the optimizer got.
    """
    by_rank = []
    for rank in run.last:
        if len(rank.records.of(ClipRecord)) != 1 or rank.records.of(DdpRecord):
            return ()
        clipped = {each.step: each.norm for each in rank.steps if each.norm is not None}
        by_rank.append(
            {
                each.step: (clipped[each.step], each.gradients[0])
                for each in rank.records.of(SoloRecord)
                if each.step in clipped and any(each.gradients)
            }
        )
    if len(by_rank) < run.world_size:
        return ()
    common = set.intersection(*map(set, by_rank)) if by_rank else set()
    return tuple(
        Norms(*zip(*(each[step] for each in by_rank), strict=True)) for step in sorted(common)
    )


def _same(norms: Sequence[float]) -> bool:
    return max(norms) - min(norms) <= SAME_NORM * max(norms)


def models(base: Training, other: Training) -> Iterator[Finding]:
    """Yield what the model of a larger size normalizes and draws in another way."""
    if base.normalized and other.normalized and base.normalized >= FEWER * other.normalized:
        yield Finding(
            code="DDP309",
            severity=Severity.INFO,
            message=f"BatchNorm takes its statistics from {other.normalized:g} samples with "
            f"{other.ranks} ranks, and from {base.normalized:g} with {count(base.ranks, 'rank')}",
            ranks=tuple(range(other.ranks)),
            location=other.wrapped,
            evidence=(
                f"a step has {other.batch:g} samples of {other.ranks} ranks, each of which "
                "normalizes its own",
            ),
            fix="On GPUs, SyncBatchNorm.convert_sync_batchnorm(model) before DDP; else GroupNorm "
            "or larger batches.",
            about="batch statistics",
        )
    if other.masks and base.masks is not None:
        yield Finding(
            code="DDP601",
            severity=Severity.INFO,
            message="the models of all ranks draw the same random numbers, such as the masks of "
            "dropout",
            ranks=tuple(range(other.ranks)),
            location=other.seeded or other.stepped,
            evidence=(
                f"the generator had the same state on {other.ranks} ranks before each forward, and "
                "another after it",
            ),
            fix="Seed the ranks differently after the model is built: "
            "torch.manual_seed(seed + dist.get_rank()).",
            about="random numbers",
        )
