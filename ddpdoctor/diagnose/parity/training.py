"""What a run trains with: batch, rates, epochs and losses over the samples seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.data.draws import passes_of
from ddpdoctor.run.records.model import BatchNormRecord, DdpRecord
from ddpdoctor.run.records.training import TrainedRecord
from ddpdoctor.run.snapshot import Rank, Run


class Point(NamedTuple):
    """A value after a number of samples of all ranks."""

    samples: int
    value: float


class Epoch(NamedTuple):
    """The first pass over the training data that all ranks finished."""

    length: int | None  # Samples of the data set
    drawn: int  # Samples that the ranks drew together
    steps: int  # Batches of a rank
    made: Location | None  # The line that built the loader


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
        epoch: The first pass over the training data. None if no rank finished one.
        synchronized: Whether the model has no BatchNorm layers with statistics of each rank alone.
        stepped: The line of ``optimizer.step()``.
    """

    ranks: int
    steps: int
    batch: float
    rates: tuple[Point, ...]
    by_step: tuple[float, ...]
    decay: float | None
    losses: tuple[Point, ...]
    epoch: Epoch | None
    synchronized: bool
    stepped: Location | None

    @property
    def samples(self) -> int:
        """Samples of all ranks in the recorded steps."""
        return self.rates[-1].samples if self.rates else 0

    def rate_at(self, samples: int) -> float | None:
        """Return the learning rate after some samples."""
        return at(self.rates, samples)


def at(points: Sequence[Point], samples: int) -> float | None:
    """Return the last value at or before a number of samples. None before the first."""
    place = bisect_right(points, samples, key=lambda point: point.samples)
    return points[place - 1].value if place else None


def training_of(run: Run) -> Training | None:
    """Return what a run trains with. None if its ranks did not record it."""
    ranks = [rank for rank in run.last if rank.records.of(TrainedRecord)]
    if not ranks or len(ranks) < run.world_size:
        return None
    records = {rank.rank: rank.records.of(TrainedRecord) for rank in ranks}
    steps = min(map(len, records.values()))
    rates, losses, by_step, seen = [], [], [], 0
    batches = []
    for each in zip(*(found[:steps] for found in records.values()), strict=True):
        batch = sum(one.samples for one in each)
        if each[0].rates:
            rates.append(Point(seen, each[0].rates[0]))
            by_step.append(each[0].rates[0])
        seen += batch
        batches.append(batch)
        known = [one.loss for one in each if one.loss is not None]
        if len(known) == len(each):
            losses.append(Point(seen, mean(known)))
    first = records[ranks[0].rank][0]
    return Training(
        ranks=run.world_size,
        steps=steps,
        batch=median(batches),
        rates=tuple(rates),
        by_step=tuple(by_step),
        decay=first.decays[0] if first.decays else None,
        losses=tuple(losses),
        epoch=_epoch(ranks),
        synchronized=not any(rank.records.of(BatchNormRecord) for rank in ranks),
        stepped=ranks[0].site("optimizer"),
    )


def _epoch(ranks: Sequence[Rank]) -> Epoch | None:
    """Return the first pass that all ranks trained on to its end."""
    passes = []
    for rank in ranks:
        found = next((e for e in passes_of(rank) if e.trains and e.record.state == "ended"), None)
        if found is None or not found.record.draws:
            return None
        passes.append(found.record)
    return Epoch(
        length=passes[0].length,
        drawn=sum(each.draws for each in passes),
        steps=passes[0].fetched,
        made=passes[0].made,
    )


def wrapped_at(run: Run) -> Location | None:
    """Return the line that built the first DDP module."""
    for rank in run.last:
        built = rank.records.first(DdpRecord)
        if built is not None:
            return built.location
    return None
