"""Schedulers of torch's that are re-created before their schedule has come to its end."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

from ddpdoctor.probe.hooks import training
from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.optimizers import Schedulers
from ddpdoctor.probe.runtime import events, shield
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import a_rank

Make = Callable[[torch.optim.Optimizer, int], Any]


@pytest.fixture
def told() -> list[JsonObject]:
    """What the rank has written."""
    return []


@pytest.fixture
def watching(told: list[JsonObject], monkeypatch: pytest.MonkeyPatch) -> Iterator[Schedulers]:
    """The schedulers of a rank whose loop is driven here."""
    state = a_rank(told)
    watching = Schedulers(state, Replicas(state))
    monkeypatch.setattr(events, "scheduler_made", [watching.scheduler_made])
    originals = {each: each.__init__ for each in (lr.LRScheduler, lr.ReduceLROnPlateau)}
    training.install_wrapped(lr)
    # Torch and the tests are many objects, which each collection would go through.
    gc.freeze()
    yield watching
    gc.unfreeze()
    for each, original in originals.items():
        each.__init__ = original  # type: ignore[method-assign]
    assert not shield.off


def train(watching: Schedulers, make: Make, *, by_batch: bool = False, steps: int = 8) -> None:
    """Four epochs with a scheduler that is made in each."""
    parameter = torch.nn.Parameter(torch.ones(3))
    module: Any = types.SimpleNamespace(ids=frozenset((id(parameter),)))
    watching._replicas.alive[:] = [module]
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    tracker: Any = watching.state.tracker
    for epoch in range(4):
        scheduler = make(optimizer, epoch)
        tracker.epoch = epoch
        for _ in range(steps):
            watching.step_begins(optimizer)
            parameter.grad = torch.ones(3)
            optimizer.step()
            tracker.steps += 1
            if by_batch:
                scheduler.step()
        if not by_batch:
            words = (1.0,) if isinstance(scheduler, lr.ReduceLROnPlateau) else ()
            scheduler.step(*words)
        # As at the end of a function that has made it.
        del scheduler
        gc.collect()


@pytest.mark.parametrize(
    ("make", "by_batch"),
    [
        (lambda o, e: lr.CosineAnnealingLR(o, 4), False),
        (lambda o, e: lr.StepLR(o, 2), False),
        (lambda o, e: lr.MultiStepLR(o, [2, 3]), False),
        (lambda o, e: lr.LambdaLR(o, lambda step: 0.9**step), False),
        (lambda o, e: lr.ReduceLROnPlateau(o, patience=1), False),
        (lambda o, e: lr.OneCycleLR(o, 0.1, total_steps=32), True),
        (lambda o, e: lr.LinearLR(o, total_iters=20), True),
    ],
)
def test_a_schedule_that_begins_again_each_epoch(
    watching: Schedulers, told: list[JsonObject], make: Make, by_batch: bool
) -> None:
    train(watching, make, by_batch=by_batch)
    (record,) = told
    assert (record["kind"], record["every"], record["times"]) == ("remade", "epoch", 3)
    assert (record["step"], record["since"], record["path"]) == (16, 0, __file__)


@pytest.mark.parametrize(
    ("make", "by_batch"),
    [
        # To its end in each epoch.
        (lambda o, e: lr.CosineAnnealingLR(o, 8), True),
        (lambda o, e: lr.OneCycleLR(o, 0.1, total_steps=8), True),
        (lambda o, e: lr.LambdaLR(o, lambda step: 1 - step / 9), True),
        # The same factor wherever it is.
        (lambda o, e: lr.ExponentialLR(o, 0.9), False),
        (lambda o, e: lr.StepLR(o, 1), False),
        # It goes on from a position, or it is another schedule.
        (lambda o, e: lr.StepLR(o, 2, last_epoch=e - 1), False),
        (lambda o, e: caught_up(lr.StepLR(o, 2), e), False),
        (lambda o, e: lr.CosineAnnealingLR(o, 4 + e), False),
        (lambda o, e: lr.LambdaLR(o, lambda step: 0.9**e), False),
    ],
)
def test_schedules_that_are_meant(
    watching: Schedulers, told: list[JsonObject], make: Make, by_batch: bool
) -> None:
    train(watching, make, by_batch=by_batch)
    assert told == []


def caught_up(scheduler: Any, epoch: int) -> Any:
    for _ in range(epoch):
        scheduler.step()
    return scheduler


def test_a_scheduler_for_each_step(watching: Schedulers, told: list[JsonObject]) -> None:
    def remake(optimizer: torch.optim.Optimizer, epoch: int) -> Any:
        for _ in range(8):
            scheduler = lr.StepLR(optimizer, 5)
            watching.step_begins(optimizer)
            optimizer.step()
            tracker: Any = watching.state.tracker
            tracker.steps += 1
            scheduler.step()
        return scheduler

    train(watching, remake)
    assert [each["every"] for each in told] == ["step"] * len(told) and told


@pytest.mark.usefixtures("watching")
def test_a_schedulers_own_error_is_raised_as_before(told: list[JsonObject]) -> None:
    with pytest.raises(TypeError, match="is not an Optimizer"):
        lr.StepLR(None, 1)  # type: ignore[arg-type]
    assert told == []


class Shape:
    """A schedule that is an object."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, step: int) -> float:
        return 1 - step / self.total


class Own(lr.LRScheduler):
    """A scheduler of the job that sets its options last."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int) -> None:
        super().__init__(optimizer)
        self.total = total

    def get_lr(self) -> list[float | torch.Tensor]:
        return [0.1]


def lasts(step: int, *, total: int) -> float:
    return 1 - step / total


@pytest.mark.parametrize(
    "make",
    [
        lambda o, total: lr.CosineAnnealingLR(o, total),
        lambda o, total: lr.OneCycleLR(o, 0.1, total_steps=total),
        lambda o, total: lr.LambdaLR(o, lambda step: 1 - step / total),
        lambda o, total: lr.LambdaLR(o, functools.partial(lasts, total=total)),
        lambda o, total: lr.LambdaLR(o, Shape(total)),
        lambda o, total: Own(o, total),
    ],
)
def test_how_far_a_schedule_came_is_recorded_with_its_numbers(
    watching: Schedulers, told: list[JsonObject], make: Make
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    scheduler = make(optimizer, 4321)
    tracker: Any = watching.state.tracker
    for _ in range(30):
        watching.step_begins(optimizer)
        optimizer.step()
        tracker.steps += 1
        scheduler.step()
    # As at the end of a function that has made it.
    del scheduler
    gc.collect()
    watching.rank_ends()
    (record,) = [each for each in told if each["kind"] == "schedule"]
    assert (record["position"], record["steps"]) == (29, 29)
    assert 4321 in record["numbers"]
