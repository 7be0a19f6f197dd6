"""What a run trains with: batch, rates, epochs and losses over the samples seen."""

from __future__ import annotations

import ast
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.data.draws import passes_of
from ddpdoctor.diagnose.source_files import source_of
from ddpdoctor.diagnose.source_operations import averaged_at, callers
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import (
    CourseRecord,
    PassRecord,
    TrainedModelRecord,
    TrainedRecord,
)
from ddpdoctor.run.snapshot import Rank, Run

LAST = 20  # Steps of which a typical decay or norm is taken
MAX_CALLERS = 4  # Functions between a loader's loop and the loop over epochs
PER_STEP = 0.5  # Positions of a scheduler in an optimizer step from which it is stepped by step


class Point(NamedTuple):
    """A value after a number of samples of all ranks."""

    samples: int
    value: float


@dataclass(frozen=True)
class Epoch:
    """A pass over the training data, the first that all ranks finished, or else their first.

    Attributes:
        length: Samples of the data set. None if not known.
        steps: Optimizer steps.
        batches: Batches of a rank.
        drawn: Samples that the ranks drew together. None if they did not finish it.
        missing: Samples of the data set that no rank drew.
        doubled: Draws of samples that were drawn before, on any rank.
        shuffled: Whether a rank's batches are not in order. None if not known.
        made: The line that built the loader.
        repeated: Whether the training is a number of these, by the loops of the source.
    """

    length: int | None
    steps: int
    batches: int
    drawn: int | None = None
    missing: int = 0
    doubled: int = 0
    shuffled: bool | None = None
    made: Location | None = None
    repeated: bool = False


class Schedule(NamedTuple):
    """Where a scheduler leads, in optimizer steps. None if a place was not found."""

    scheduler: str  # Its class
    made: Location | None
    rate: float  # The highest
    peak: float  # Where the rate is first the highest: the end of a warm-up
    half: float | None
    end: float | None


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
        batch: Samples of all ranks in an optimizer step.
        rates: Learning rate of the first parameter group over samples.
        by_step: The same, by optimizer step.
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
        weights: Norm of the parameters at first.
        variances: Norm of the running variances of BatchNorm layers over samples.
        masks: Whether the ranks' models draw the same random numbers in each step. None if they
            draw none, or if that is not known.
    """

    ranks: int
    steps: int
    batch: float
    rates: tuple[Point, ...]
    by_step: tuple[float, ...]
    decay: float | None
    losses: tuple[Point, ...]
    epoch: Epoch | None
    normalized: float | None
    stepped: Location | None
    wrapped: Location | None = None
    schedule: Schedule | None = None
    averages: tuple[float, ...] = ()
    averaged: Location | None = None
    norms: tuple[Norms, ...] = ()
    weights: float | None = None
    variances: tuple[Point, ...] = ()
    masks: bool | None = None

    @property
    def samples(self) -> int:
        """Samples of all ranks in the recorded steps."""
        return self.rates[-1].samples if self.rates else 0

    def rate_at(self, samples: int) -> float | None:
        """Return the learning rate after some samples."""
        return at(self.rates, samples)

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
    """Return what a run trains with. None if its ranks did not record it."""
    ranks = [rank for rank in run.last if rank.records.of(TrainedRecord)]
    if not ranks or len(ranks) < run.world_size:
        return None
    every = list(zip(*(rank.records.of(TrainedRecord) for rank in ranks), strict=False))
    rates, losses, variances, norms, seen = [], [], [], [], 0
    for each in every:
        first = each[0]
        if first.rates:
            rates.append(Point(seen, first.rates[0]))
        seen += sum(one.samples for one in each)
        known = [one.loss for one in each if one.loss is not None]
        if len(known) == len(each):
            losses.append(Point(seen, mean(known)))
        if first.spread is not None:
            variances.append(Point(seen, first.spread))
        clipped = tuple(one.norm for one in each if one.norm is not None)
        used = tuple(one.used for one in each if one.used is not None)
        if len(clipped) == len(used) == len(each):
            norms.append(Norms(clipped, used))
    records = [each[0] for each in every]
    batch = median(sum(one.samples for one in each) for each in every)
    averages = tuple(each.average for each in records if each.average is not None)
    averaged = any(each < 1.0 for each in averages)
    model = ranks[0].records.first(TrainedModelRecord)
    return Training(
        ranks=run.world_size,
        steps=len(every),
        batch=batch,
        rates=tuple(rates),
        by_step=tuple(each.value for each in rates),
        decay=records[0].decays[0] if records[0].decays else None,
        losses=tuple(losses),
        epoch=(epoch := _epoch(run, ranks)),
        normalized=_normalized(model, batch, [each.forwards for each in every[-1]]),
        stepped=ranks[0].site("optimizer"),
        wrapped=wrapped_at(run),
        schedule=_schedule(ranks[0], records, epoch),
        averages=averages if averaged else (),
        averaged=averaged_at(run) if averaged else None,
        norms=tuple(norms),
        weights=model.weights if model is not None else None,
        variances=tuple(variances),
        masks=_masks(every),
    )


def _normalized(
    model: TrainedModelRecord | None, batch: float, forwards: Sequence[int]
) -> float | None:
    """Return the samples over which BatchNorm takes its statistics."""
    if model is None or not model.batchnorm or not all(forwards):
        return None
    # Layers of both kinds have the smaller batch, too.
    alone = model.synchronized < model.batchnorm
    return batch / (sum(forwards) if alone else max(forwards))


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


def _epoch(run: Run, ranks: Sequence[Rank]) -> Epoch | None:
    """Return the first pass that all ranks trained on to its end, or else what is known of one."""
    every = [[each for each in passes_of(rank) if each.trains] for rank in ranks]
    ended = [[each for each in mine if each.record.state == "ended"] for mine in every]
    finished = all(ended)
    if not finished and not all(every):
        return None
    passes = [mine[0] for mine in (ended if finished else every)]
    first = passes[0]
    record = first.record
    trained = ranks[0].records.of(TrainedRecord)
    per_step = max(1, round(median(each.forwards for each in trained)))
    epoch = Epoch(
        length=record.subset_length or record.length,
        steps=math.ceil((record.batches or 0) / per_step),
        batches=record.batches or 0,
        made=record.made,
        repeated=record.to_end and _repeated(run, first.read),
    )
    if not finished:
        return epoch if epoch.batches else None
    within = [
        [one for one in rank.records.of(TrainedRecord) if _is_within(one, each.record)]
        for rank, each in zip(ranks, passes, strict=True)
    ]
    hits = [each.hits for each in passes]
    known, union = sum(map(len, hits)), frozenset[int]().union(*hits)
    repeats = sum(each.record.repeats for each in passes)
    followed = record.followed or 1
    # The whole data set is followed, unless it is very large.
    share = (epoch.length or 0) / followed if union else 0.0
    draws = sum(each.record.draws for each in passes)
    falls = record.falls / max(1, record.draws - record.fetched)
    return Epoch(
        length=epoch.length,
        steps=len(within[0]) or epoch.steps,
        batches=record.fetched,
        drawn=draws or sum(one.samples for mine in within for one in mine),
        missing=round((followed - len(union)) * share),
        doubled=round((known - len(union) + repeats) * share),
        shuffled=falls > 0.1 if record.draws >= 2 * record.fetched else None,
        made=record.made,
        repeated=epoch.repeated,
    )


def _is_within(step: TrainedRecord, record: PassRecord) -> bool:
    return record.armed < step.armed <= (record.armed_after or 0)


def _repeated(run: Run, read: Location) -> bool:
    """Return whether a ``for`` is around the loop over a loader."""
    at: Location | None = read
    for _ in range(MAX_CALLERS):
        source = source_of(at.path) if at is not None else None
        if at is None or source is None:
            return False
        loops = source.around(at.line)
        if loops:
            return isinstance(loops[0], ast.For)
        calls = callers(run, at)
        at = calls[0] if len(calls) == 1 else None
    return False


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
