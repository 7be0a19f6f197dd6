"""What a run trains with: batch, rates, epochs and losses over the samples seen."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.data.seeds import seeds_of
from ddpdoctor.diagnose.parity.epochs import Epoch, epoch_of
from ddpdoctor.diagnose.source_operations import averaged_at
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import CourseRecord, TrainedModelRecord, TrainedRecord
from ddpdoctor.run.snapshot import Rank, Run

LAST = 20  # Steps of which a typical decay or norm is taken
PER_STEP = 0.5  # Positions of a scheduler in an optimizer step from which it is stepped by step


class Point(NamedTuple):
    """A value after a number of samples of all ranks."""

    samples: int
    value: float


class Schedule(NamedTuple):
    """Where a scheduler leads, in optimizer steps. None if a place was not found."""

    scheduler: str  # Its class
    made: Location | None
    rate: float  # The highest
    peak: float  # Where the rate is first the highest: the end of a warm-up
    half: float | None
    end: float | None

    @property
    def waits(self) -> bool:
        """Whether it waits for a metric, for as many steps as it has patience."""
        return self.scheduler == "ReduceLROnPlateau"


class Norms(NamedTuple):
    """Gradients before an optimizer step, on each rank."""

    clipped: tuple[float, ...]  # Their norms as they were clipped
    used: tuple[float, ...]  # The same as the optimizer got them


@dataclass(frozen=True)
class Training:
    """What one run trains with.

    Attributes:
        ranks: The world size.
        steps: Number of optimizer steps that all ranks recorded.
        finished: Whether these are all, as the job ended well.
        batch: Samples of all ranks in an optimizer step.
        rates: Learning rate of the first parameter group over samples.
        decay: Its weight decay.
        losses: Mean loss of the ranks over samples.
        epoch: A pass over the training data. None if it is not known.
        normalized: Samples over which BatchNorm takes its statistics. None without such layers.
        stepped: The line of ``optimizer.step()``.
        wrapped: The line that built the first DDP module.
        schedule: The schedule of the learning rate. None if it is not known.
        averages: Decay of averaged weights by optimizer step, where they were found.
        averaged: A line that updates them.
        norms: Norms of gradients by optimizer step, where the job clips them.
        skipped: Optimizer steps that a GradScaler or the job skipped.
        weights: Norm of the parameters at first.
        variances: Norm of the running variances of BatchNorm layers over samples.
        masks: Whether the ranks' models draw the same random numbers in each step. None if they
            draw none, or if that is not known.
        seeded: A line that seeds them alike.
    """

    ranks: int
    steps: int
    batch: float
    rates: tuple[Point, ...]
    decay: float | None
    losses: tuple[Point, ...]
    epoch: Epoch | None
    normalized: float | None
    stepped: Location | None
    wrapped: Location | None = None
    schedule: Schedule | None = None
    averages: tuple[float, ...] = ()
    averaged: Location | None = None
    finished: bool = False
    norms: tuple[Norms, ...] = ()
    skipped: int = 0
    weights: float | None = None
    variances: tuple[Point, ...] = ()
    masks: bool | None = None
    seeded: Location | None = None

    @property
    def samples(self) -> int:
        """Samples of all ranks in the recorded steps."""
        return self.rates[-1].samples if self.rates else 0

    def rate_at(self, samples: int) -> float | None:
        """Return the learning rate after some samples."""
        return at(self.rates, samples)

    @property
    def by_step(self) -> tuple[float, ...]:
        """The learning rates by optimizer step."""
        return tuple(each.value for each in self.rates)

    @property
    def highest(self) -> float:
        """The highest learning rate of the schedule, or of the recorded steps."""
        return self.schedule.rate if self.schedule is not None else max(self.by_step, default=0.0)

    @property
    def decay_per_sample(self) -> float | None:
        """The part of a weight that weight decay takes for each sample, at the highest rate."""
        return self.highest * self.decay / self.batch if self.decay and self.batch else None

    @property
    def half_life(self) -> float | None:
        """Samples after which an average of the weights has forgotten half of what it held."""
        known = [-math.log(each) for each in self.averages[-LAST:]]
        return math.log(2) / mean(known) * self.batch if any(known) else None

    @property
    def norm(self) -> float | None:
        """The typical norm of gradients before they are clipped."""
        return median([mean(each.clipped) for each in self.norms]) if self.norms else None

    @property
    def clipped(self) -> float | None:
        """The part of the steps in which clipping made gradients smaller."""
        if not self.norms:
            return None
        return mean(each.used[0] < 0.99 * each.clipped[0] for each in self.norms)


def needs_two_runs(run: Run) -> Iterator[Finding]:
    """Find nothing in one run."""
    yield from ()


def at(points: Sequence[Point], samples: int) -> float | None:
    """Return the last value at or before a number of samples. None before the first."""
    place = bisect_right(points, samples, key=lambda point: point.samples)
    return points[place - 1].value if place else None


def training_of(run: Run) -> Training | None:
    """Return what a run trains with. None if its ranks did not record steps of a DDP module."""
    ranks = [rank for rank in run.last if rank.records.of(TrainedRecord)]
    if not ranks or len(ranks) < run.world_size:
        return None
    every = list(zip(*(rank.records.of(TrainedRecord) for rank in ranks), strict=False))
    records = [each[0] for each in every]
    if not any(each.forwards for each in records):
        return None
    batches = [sum(one.samples for one in each) for each in every]
    before = [*itertools.accumulate(batches, initial=0)]
    losses = [_mean([one.loss for one in each]) for each in every]
    averages = _averages(records)
    model = ranks[0].records.first(TrainedModelRecord)
    epoch = epoch_of(run, ranks)
    masks = _masks(every)
    return Training(
        ranks=run.world_size,
        steps=len(every),
        batch=median(batches),
        rates=_points(before, [next(iter(each.rates), None) for each in records]),
        decay=next(iter(records[0].decays), None),
        losses=_points(before[1:], losses),
        epoch=epoch,
        normalized=_normalized(model, every),
        stepped=ranks[0].site("optimizer"),
        wrapped=wrapped_at(run),
        schedule=_schedule(ranks[0], records, epoch),
        averages=averages,
        finished=run.exit_status == 0,
        averaged=averaged_at(run) if averages else None,
        norms=tuple(_norms(every)),
        skipped=sum(each.skipped for each in ranks[0].steps),
        weights=model.weights if model is not None else None,
        variances=_points(before, [each.spread for each in records]),
        masks=masks,
        seeded=_seeded(run) if masks else None,
    )


def _points(samples: Sequence[int], values: Sequence[float | None]) -> tuple[Point, ...]:
    pairs = zip(samples, values, strict=False)
    return tuple(Point(seen, value) for seen, value in pairs if value is not None)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the ranks' values. None if one of them is not known."""
    known = [each for each in values if each is not None]
    return mean(known) if len(known) == len(values) else None


def _averages(records: Sequence[TrainedRecord]) -> tuple[float, ...]:
    """Return the decays of averaged weights. Empty if nothing averages them."""
    found = tuple(each.average for each in records if each.average is not None)
    return found if any(each < 1.0 for each in found) else ()


def _norms(every: Sequence[tuple[TrainedRecord, ...]]) -> Iterator[Norms]:
    for each in every:
        clipped = tuple(one.norm for one in each if one.norm is not None)
        used = tuple(one.used for one in each if one.used is not None)
        if len(clipped) == len(used) == len(each) and all(map(math.isfinite, (*clipped, *used))):
            yield Norms(clipped, used)


def _seeded(run: Run) -> Location | None:
    """Return the last line that seeds torch's generator alike on all ranks."""
    seeds = [each for each in seeds_of(run) if each.library in ("torch", "") and not each.own]
    return seeds[-1].location if seeds else None


def _normalized(
    model: TrainedModelRecord | None, every: Sequence[tuple[TrainedRecord, ...]]
) -> float | None:
    """Return the samples over which BatchNorm takes its statistics."""
    last = every[-1]
    if model is None or not model.batchnorm or not all(each.forwards for each in last):
        return None
    # Layers of both kinds have the smaller batch, too.
    alone = model.synchronized < model.batchnorm
    among = last[:1] if alone else last
    return sum(each.samples for each in among) / last[0].forwards


def _masks(every: Sequence[tuple[TrainedRecord, ...]]) -> bool | None:
    """Return whether ranks draw the same numbers in the forward. None if none is drawn."""
    drawn = [
        [one.masks for one in each]
        for each in every
        if all(one.masks is not None and one.masks[0] != one.masks[1] for one in each)
    ]
    if len(drawn) < max(2, len(every) // 2):
        return None
    return all(len(set(each)) == 1 for each in drawn)


def _schedule(rank: Rank, records: Sequence[TrainedRecord], epoch: Epoch | None) -> Schedule | None:
    """Return a rank's schedule in optimizer steps. None unless the scheduler was stepped."""
    course = next(reversed(rank.records.of(CourseRecord)), None)
    positions = [each.position for each in records if each.position is not None]
    if course is None or len(positions) < 2 or positions[-1] <= positions[0]:
        return None
    pace = (positions[-1] - positions[0]) / (len(positions) - 1)
    if pace < PER_STEP:
        # It is stepped once for each epoch, or for some steps.
        if epoch is None or not epoch.steps:
            return None
        pace = round(pace * epoch.steps) / epoch.steps
    if not pace:
        return None
    return Schedule(
        course.scheduler,
        course.location,
        course.rate,
        (course.peak - course.start) / pace,
        None if course.half is None else (course.half - course.start) / pace,
        None if course.end is None else (course.end - course.start) / pace,
    )


def wrapped_at(run: Run) -> Location | None:
    """Return the line that built the first DDP module."""
    for rank in run.last:
        built = rank.records.first(DdpRecord)
        if built is not None:
            return built.location
    return None
