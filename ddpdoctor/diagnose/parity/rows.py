"""What the runs of a job train with, side by side, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ddpdoctor.core.formatting import count, percent
from ddpdoctor.diagnose.parity.epochs import Epoch
from ddpdoctor.diagnose.parity.training import Schedule, Training, at

NONE = "-"
"""A cell of which nothing is known."""

Row = tuple[str, ...]
"""A name, and a cell for each run."""


def head(trainings: Sequence[Training]) -> list[Row]:
    """Return the rows that say how runs differ that train alike."""
    return [
        ("", *(count(each.ranks, "rank") for each in trainings)),
        ("samples per optimizer step", *(f"{each.batch:g}" for each in trainings)),
        ("highest learning rate", *(known(each.highest) for each in trainings)),
    ]


def body(trainings: Sequence[Training]) -> list[Row]:
    """Return all other rows, without those in which nothing is known."""
    seen = min(each.samples for each in trainings)
    growth = [each.batch / (trainings[0].batch or 1.0) for each in trainings]
    rate = trainings[0].highest
    return _shown(
        ("  by the linear rule", *(known(rate * each) for each in growth)),
        ("  by the square root", *(known(rate * math.sqrt(each)) for each in growth)),
        (f"learning rate at {seen}", *(known(each.rate_at(seen)) for each in trainings)),
        *_schedules(trainings),
        ("weight decay per sample", *(known(each.decay_per_sample or None) for each in trainings)),
        ("average forgets half in", *(_samples(each.half_life) for each in trainings)),
        ("gradient norm", *(known(each.norm) for each in trainings)),
        ("steps that clip it", *(_part(each.clipped) for each in trainings)),
        ("skipped steps", *(_any([each.skipped for each in trainings]))),
        *_data(trainings),
        (f"loss after {seen} samples", *(known(_loss(each, seen)) for each in trainings)),
        ("BatchNorm over", *(_samples(each.normalized) for each in trainings)),
        ("  running variances", *(known(at(each.variances, seen)) for each in trainings)),
        ("initial weights", *_compared([each.weights for each in trainings])),
        ("random numbers of the model", *(_masks(each) for each in trainings)),
    )


def _shown(*rows: Row) -> list[Row]:
    return [row for row in rows if any(cell != NONE for cell in row[1:])]


def _schedules(trainings: Sequence[Training]) -> Iterator[Row]:
    """Yield where warm-up and schedule end, in steps, samples and epochs."""

    def rows(name: str, place: Callable[[Schedule], float | None]) -> Iterator[Row]:
        steps = [each.schedule and place(each.schedule) for each in trainings]
        pairs = list(zip(steps, trainings, strict=True))
        yield (name, *(NONE if each is None else f"{each:.4g} steps" for each in steps))
        yield ("", *(_samples(each and each * one.batch) for each, one in pairs))
        if all(one.epoch is not None and one.epoch.steps for one in trainings):
            epochs = [each and one.epoch and each / one.epoch.steps for each, one in pairs]
            yield ("", *(NONE if each is None else f"{each:.3g} epochs" for each in epochs))

    if any(each.schedule is not None and each.schedule.peak for each in trainings):
        yield from rows("warm-up ends after", lambda each: each.peak)
    if all(each.schedule is None or each.schedule.end is not None for each in trainings):
        yield from rows("schedule ends after", lambda each: each.end)
    else:
        waits = any(each.schedule is not None and each.schedule.waits for each in trainings)
        name = "rate may be cut after" if waits else "rate halves after"
        yield from rows(name, lambda each: each.half)


def _data(trainings: Sequence[Training]) -> Iterator[Row]:
    yield ("optimizer steps per epoch", *_of_epochs(trainings, lambda each: each.steps))
    yield ("samples per epoch", *_of_epochs(trainings, lambda each: each.drawn))
    finished = [each.epoch if each.epoch and each.epoch.drawn else None for each in trainings]
    if len({each.length for each in finished if each is not None}) > 1:
        # Each rank has another data set, whose indices say nothing of those of others.
        return
    yield ("  left out", *_any([each.missing if each else None for each in finished]))
    yield ("  drawn twice", *_any([each.doubled if each else None for each in finished]))
    orders = [_order(each.epoch) for each in trainings]
    if {"shuffled", "as it is"} <= set(orders):
        yield ("  order", *orders)


def _order(epoch: Epoch | None) -> str:
    if epoch is None or epoch.shuffled is None:
        return NONE
    return "shuffled" if epoch.shuffled else "as it is"


def _of_epochs(trainings: Sequence[Training], number: Callable[[Epoch], float | None]) -> list[str]:
    return [NONE if each.epoch is None else known(number(each.epoch)) for each in trainings]


def _any(values: Sequence[int | None]) -> list[str]:
    """Return numbers as text, if one of them is not zero."""
    return list(map(known, values)) if any(values) else [NONE] * len(values)


def known(value: float | None) -> str:
    """Return a number as text."""
    return NONE if value is None else f"{value:.4g}" if value else "0"


def _samples(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g} samples"


def _part(value: float | None) -> str:
    return NONE if value is None else percent(value)


def _compared(values: Sequence[float | None]) -> list[str]:
    """Return which values are those of the first run, if any differs."""
    same = [
        each == first if each is None or first is None else math.isclose(each, first)
        for first in values[:1]
        for each in values
    ]
    return [NONE] * len(same) if all(same) else ["the same" if e else "others" for e in same]


def _masks(training: Training) -> str:
    if training.masks is None or training.ranks < 2:
        return NONE
    return "the same" if training.masks else "of each rank"


def _loss(training: Training, samples: int) -> float | None:
    """Return the mean of the losses around a number of samples."""
    near = [each.value for each in training.losses if 0.9 * samples <= each.samples <= samples]
    return sum(near) / len(near) if near else at(training.losses, samples)
