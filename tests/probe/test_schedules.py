"""Where a learning rate's schedule leads, computed on a copy of its scheduler."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ddpdoctor.probe.observers.schedules import course_of, outermost, position_of

called: list[int] = []


def optimizer(rate: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=rate, momentum=0.9)


def linear(step: int, *, warm: int, total: int) -> float:
    return step / warm if step < warm else max(0.0, (total - step) / (total - warm))


class Falls:
    """A function with a state that it only reads."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.total)


class Own(lr_scheduler.LRScheduler):
    """A scheduler of the job's own."""

    def __init__(self, of: torch.optim.Optimizer, total: int) -> None:
        self.total = total
        super().__init__(of)

    def get_lr(self) -> list[Any]:
        return [each * max(0.0, 1 - self.last_epoch / self.total) for each in self.base_lrs]


def counts(step: int) -> float:
    called.append(step)
    return 1.0


def sequence(of: torch.optim.Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(of, 0.1, total_iters=10),
        lr_scheduler.CosineAnnealingLR(of, T_max=90),
    ]
    return lr_scheduler.SequentialLR(of, parts, milestones=[10])


def chain(of: torch.optim.Optimizer) -> Any:
    parts: list[Any] = [lr_scheduler.ConstantLR(of, 0.1, 20), lr_scheduler.ExponentialLR(of, 0.9)]
    return lr_scheduler.ChainedScheduler(parts)


MADE: dict[str, tuple[Callable[[Any], Any], tuple[int, int | None, int | None]]] = {
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 100), (0, 51, 100)),
    "steps": (lambda o: lr_scheduler.StepLR(o, 30), (0, 30, None)),
    "milestones": (lambda o: lr_scheduler.MultiStepLR(o, [30, 60]), (0, 30, 60)),
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100), (29, 65, 99)),
    "exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.99), (0, 69, None)),
    "polynomial": (lambda o: lr_scheduler.PolynomialLR(o, 70), (0, 36, 70)),
    "constant": (lambda o: lr_scheduler.ConstantLR(o, 0.3, 20), (20, None, 20)),
    "restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 25), (0, 13, 24)),
    "partial": (
        lambda o: lr_scheduler.LambdaLR(o, functools.partial(linear, warm=10, total=200)),
        (10, 105, 200),
    ),
    "lambda": (
        lambda o: lr_scheduler.LambdaLR(
            o, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, 120) / 120))
        ),
        (0, 61, 120),
    ),
    "below zero": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 80), (0, 40, 80)),
    "object": (lambda o: lr_scheduler.LambdaLR(o, Falls(50)), (0, 25, 50)),
    "own": (lambda o: Own(o, 40), (0, 20, 40)),
    "sequence": (sequence, (10, 55, 100)),
    "chain": (chain, (20, 27, None)),
    # The rate may be cut by the step after its patience.
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=12), (0, 13, None)),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("error")
def test_a_course_is_computed_and_nothing_is_stepped(name: str) -> None:
    make, places = MADE[name]
    of = optimizer()
    scheduler = make(of)
    before = of.param_groups[0]["lr"], position_of(scheduler)
    course = course_of(scheduler)
    assert course is not None and (course.peak, course.half, course.end) == places
    assert (of.param_groups[0]["lr"], position_of(scheduler)) == before
    assert course_of(scheduler) == course


def test_a_rate_that_is_a_tensor_stays() -> None:
    of = optimizer(torch.tensor(0.1))
    course = course_of(lr_scheduler.CosineAnnealingLR(of, 100))
    assert course is not None and course.end == 100
    assert float(of.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_functions_that_change_something_are_not_called() -> None:
    state = {"steps": 0}

    def remembers(step: int) -> float:
        state["steps"] = step
        return 1.0

    def draws(step: int) -> float:
        return float(torch.rand(()))

    for function in (counts, remembers, draws, lambda step: counts(step)):
        scheduler = lr_scheduler.LambdaLR(optimizer(), function)
        called.clear()
        generator = torch.get_rng_state()
        assert course_of(scheduler) is None
        assert called == [] and torch.equal(torch.get_rng_state(), generator)
    assert state == {"steps": 0}


def test_a_sequence_hides_its_parts() -> None:
    of = optimizer()
    sequenced = sequence(of)
    parts = sequenced._schedulers
    assert outermost(parts) == [sequenced]
    alone = lr_scheduler.StepLR(optimizer(), 5)
    assert outermost([alone]) == [alone]
