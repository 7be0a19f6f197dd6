"""Rules for rates that count optimizer steps, each of which has more samples on more ranks.

DDP339 and DDP341, and DDP331 where two sizes show it. ``ddpdoctor parity`` calls `rates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count, percent
from ddpdoctor.core.relations import always
from ddpdoctor.diagnose.parity.training import Schedule, Training, needs_two_runs

SAME_RATE = 0.02  # Relative difference of learning rates that are the same
MIN_SHAPE = 5  # Learning rates that show whether a schedule follows steps or samples
MIN_FACTOR = 1.4  # Ratio of two schedules' lengths, in epochs, that is worth a word
MIN_WARM = 0.3  # Part of a schedule that a warm-up takes, from which it is worth a word
FITS = 0.1  # Relative difference of a schedule's length and the steps of a training that it fits
SAME_DECAY = 0.1  # Relative difference of 1 - decay that is the same
MIN_AVERAGED = 5  # Steps in which averaged weights changed
MIN_STEADY = 0.85  # Part of what an average forgot some steps before, if its decay does not grow
BY_LOADER = (
    "Compute the schedule's lengths (warm-up, milestones, patience, total) from len(loader), or "
    "divide them by the number of ranks."
)


@rule(
    "DDP339",
    "rate-not-scaled",
    Severity.INFO,
    detect=needs_two_runs,
    yields_to={"DDP317": always},
)
@dataclass(frozen=True)
class RateNotScaled:
    """The global batch grew with the ranks, and the learning rate stayed as it was.

    What it finds
        `ddpdoctor parity` ran the job at two sizes. An optimizer step averages more samples at the
        larger one, and the highest learning rate is the same.

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


@rule("DDP341", "average-by-steps", Severity.INFO, detect=needs_two_runs)
@dataclass(frozen=True)
class AverageBySteps:
    """The averaged weights forget by optimizer steps, and each of them has more samples now.

    What it finds
        `ddpdoctor parity` ran the job at two sizes. Tensors that follow the weights as an
        exponential average does (EMA) moved towards them by the same part in each step, while a
        step has more samples at the larger size. How the average is made does not matter:
        `AveragedModel`, timm's `ModelEmaV3`, or a line of the job.

    Why it is bad
        An epoch has fewer steps, so the average reaches back over more epochs. With a decay near 1
        it may still hold the first weights when training ends, and the averaged model is worse
        than the trained one.

    How to fix it
        Raise the decay to the power by which the batch grew: https://arxiv.org/abs/2307.13813

    Example
        Wrong: `ema.mul_(0.999).add_(p, alpha=0.001)` at 1 and at 8 ranks.
        Right: `decay = 0.999 ** dist.get_world_size()`

    When it stays silent
        If the decay changes with the size, if the global batch stays the same, and if no average
        was found among the tensors of the process.
    """


def rates(base: Training, other: Training) -> Iterator[Finding]:
    """Yield rates that count steps where these have more samples."""
    growth = other.batch / base.batch if base.batch else 0.0
    schedule = _schedule(base, other)
    if schedule is not None:
        yield schedule
    if growth >= 1 + SAME_RATE:
        yield from _averages(base, other, growth)
        yield from _rates(base, other, growth)


def _schedule(base: Training, other: Training) -> Finding | None:
    """Return a schedule that fits the epochs of one size and not those of the other."""
    one, two, before, after = base.schedule, other.schedule, base.epoch, other.epoch
    if one is None or two is None or before is None or after is None:
        return None
    # A job that counts steps to its end may well count them in its schedule.
    if not (before.repeated and after.repeated and before.steps and after.steps):
        return None
    what, ends = _lengths(one, two)
    lengths = ends[0] / before.steps, ends[1] / after.steps
    sizes = f"{count(base.ranks, 'rank')}", f"{count(other.ranks, 'rank')}"
    if not all(lengths):
        return None
    factor = lengths[1] / lengths[0]
    # Steps of an epoch are whole numbers.
    rough = MIN_FACTOR + 1 / after.steps
    shares = _warm(one), _warm(two)
    # If it ends with the training of the larger size, it is the smaller one that it does not fit.
    fits = other.finished and abs(ends[1] - other.steps) <= FITS * other.steps
    if factor > rough and not fits:
        message = (
            f"the learning rate's schedule {what} after {lengths[0]:.3g} epochs with {sizes[0]}, "
            f"and after {lengths[1]:.3g} with {sizes[1]}: in the same epochs it gets to "
            f"{percent(1 / factor)} of its length"
        )
        fix = BY_LOADER
    elif factor < 1 / rough and not fits:
        message = (
            f"the learning rate's schedule {what} after {lengths[0]:.3g} epochs with {sizes[0]}, "
            f"and after {lengths[1]:.3g} with {sizes[1]}: at {percent(factor)} of the same epochs"
        )
        fix = (
            "Leave out the division by the number of ranks: len(loader) is a rank's part already, "
            "and the scheduler is stepped once for each optimizer step."
        )
    elif shares[1] >= MIN_WARM and shares[1] > rough * shares[0]:
        message = (
            f"the warm-up takes {percent(shares[1])} of the learning rate's schedule with "
            f"{sizes[1]}, and {percent(shares[0])} with {sizes[0]}"
        )
        fix = "Give the warm-up as a part of the schedule's length, not as a number of steps."
    else:
        return None
    return Finding(
        code="DDP331",
        severity=Severity.WARNING,
        message=message,
        location=two.made,
        evidence=(
            f"{one.scheduler}: the warm-up ends after {one.peak:g} and {two.peak:g} steps, the "
            f"schedule {what} after {ends[0]:g} and {ends[1]:g}",
            f"an epoch has {before.steps} optimizer steps with {sizes[0]}, {after.steps} with "
            f"{sizes[1]}",
            f"{base.batch:g} samples a step before, {other.batch:g} now",
        ),
        fix=fix,
        about="schedule by steps",
    )


def _lengths(one: Schedule, two: Schedule) -> tuple[str, tuple[float, float]]:
    """Return what can be compared of two schedules, and after how many steps. 0 if unknown."""
    if one.end is not None and two.end is not None:
        return "ends", (one.end, two.end)
    what = "may cut the rate" if two.waits else "halves the rate"
    return what, (one.half or 0.0, two.half or 0.0)


def _warm(schedule: Schedule) -> float:
    """Return the part of a schedule's length that its warm-up takes."""
    length = schedule.end or schedule.half
    return schedule.peak / length if length and schedule.half is not None else 0.0


def _averages(base: Training, other: Training, growth: float) -> Iterator[Finding]:
    """Yield averaged weights whose decay is the same in each step."""
    number = min(len(base.averages), len(other.averages))
    one, two = _forgets(base.averages[:number]), _forgets(other.averages[:number])
    if one is None or two is None or abs(two - one) > SAME_DECAY * one:
        return
    lives = base.half_life, other.half_life
    if lives[0] is None or lives[1] is None:
        return
    decay = math.exp(-one)
    yield Finding(
        code="DDP341",
        severity=Severity.INFO,
        message="the averaged weights decay by the same factor in each optimizer step, which has "
        f"{growth:.3g} times the samples with {other.ranks} ranks",
        location=other.averaged,
        evidence=(
            f"decay in a step: {decay:.6g} with {count(base.ranks, 'rank')}, {math.exp(-two):.6g} "
            f"with {other.ranks}",
            f"half of an average is forgotten after {lives[0]:.4g} samples, and after "
            f"{lives[1]:.4g} now",
        ),
        fix=f"Raise the decay to the power by which the batch grew: decay ** {growth:.3g} is "
        f"{decay**growth:.6g}.",
        about="average",
    )


def _forgets(averages: tuple[float, ...]) -> float | None:
    """Return the typical negative logarithm of a decay. None if too few are known, or if it grows.

    A plain average of all steps has a decay that grows with their number, and some warm theirs up.
    """
    quarter = len(averages) // 4
    if sum(each < 1.0 for each in averages) < MIN_AVERAGED or not quarter:
        return None
    before, last = (
        mean(-math.log(each) for each in part)
        for part in (averages[-2 * quarter : -quarter], averages[-quarter:])
    )
    return last if last >= MIN_STEADY * before else None


def _rates(base: Training, other: Training, growth: float) -> Iterator[Finding]:
    """Yield a schedule by hand that counts steps, or a rate that did not grow with the batch."""
    if not base.rates or not other.rates:
        return
    # The last rates at which both have seen as many samples.
    seen = min(base.samples, other.samples)
    rate, given = base.rate_at(seen), other.rate_at(seen)
    if rate is None or given is None:
        return
    ranks = count(base.ranks, "rank")
    repeated = base.epoch is not None and base.epoch.repeated
    if base.schedule is None and repeated and _counts_steps(base, other, rate, given):
        yield Finding(
            code="DDP331",
            severity=Severity.WARNING,
            message="the learning rate's schedule counts optimizer steps, and each of them has "
            f"{growth:.3g} times the samples: it takes {growth:.3g} times the samples to the same "
            "rate",
            location=other.stepped,
            evidence=(
                f"after {seen} samples: {rate:.4g} with {ranks}, {given:.4g} with {other.ranks}",
                f"by steps it is the same with {ranks} and {other.ranks}",
            ),
            fix=BY_LOADER,
            about="schedule by steps",
        )
    highest = base.highest, other.highest
    if _near(*highest) and (base.schedule is not None or _near(rate, given)):
        linear, root = highest[0] * growth, highest[0] * math.sqrt(growth)
        yield Finding(
            code="DDP339",
            severity=Severity.INFO,
            message=f"an optimizer step has {growth:.3g} times the samples with {other.ranks} "
            "ranks, and the learning rate is the same",
            location=other.stepped,
            evidence=(
                f"{base.batch:g} samples a step with {ranks}, {other.batch:g} with {other.ranks}",
                f"the highest rate is {highest[0]:.4g} with both; the linear rule gives "
                f"{linear:.4g}, the square root {root:.4g}",
            ),
            fix="Scale the rate with the batch (with a warm-up), or divide the batch of a rank by "
            "the number of ranks, unless the rate was chosen for this batch.",
            about="rate not scaled",
        )


def _counts_steps(base: Training, other: Training, rate: float, given: float) -> bool:
    """Return whether rates are the same by steps, and not by samples."""
    if not base.by_step[0]:
        return False
    start = other.by_step[0] / base.by_step[0]
    pairs = list(zip(base.by_step, other.by_step, strict=False))
    return (
        len({each for each, _ in pairs}) >= MIN_SHAPE
        and all(_near(before * start, after) for before, after in pairs)
        and not _near(rate * start, given)
    )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= SAME_RATE * abs(other) + 1e-15
