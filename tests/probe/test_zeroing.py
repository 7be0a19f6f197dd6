"""Gradients that are never set to zero: what the probe sees of a loop, and what the rule says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ddpdoctor.probe.observers.optimizers import Zeroing
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import a_rank
from tests.support.written import Written


class Loop:
    """A model, an optimizer, and the moments of their training."""

    def __init__(self, watching: Zeroing) -> None:
        self.watching = watching
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.01)
        self.number = 0

    def backward(self) -> None:
        self.watching.backward_begins()
        torch.autograd.backward(self.weight.square().sum())
        self.watching.backward_ended()

    def step(self) -> None:
        self.watching.step_begins(self.optimizer)
        self.optimizer.step()
        self.watching.step_ended(self.optimizer, self.number)
        self.number += 1

    def train(self) -> None:
        self.backward()
        self.step()


@pytest.fixture
def told() -> list[JsonObject]:
    """What the rank has written."""
    return []


@pytest.fixture
def loop(told: list[JsonObject]) -> Loop:
    """A loop that is watched."""
    return Loop(Zeroing(a_rank(told)))


def never(loop: Loop, step: int) -> None:
    loop.train()


def clipped(loop: Loop, step: int) -> None:
    loop.backward()
    torch.nn.utils.clip_grad_norm_([loop.weight], 0.5)
    loop.step()


def a_step_skipped(loop: Loop, step: int) -> None:
    """As a GradScaler does, which unscales gradients and finds that they are infinite."""
    loop.backward()
    loop.weight.grad.mul_(0.5)  # type: ignore[union-attr]
    if step != 2:
        loop.step()


def to_none(loop: Loop, step: int) -> None:
    loop.optimizer.zero_grad()
    loop.train()


def in_place(loop: Loop, step: int) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    loop.train()


def by_hand(loop: Loop, step: int) -> None:
    loop.train()
    loop.weight.grad = None


def past_the_version(loop: Loop, step: int) -> None:
    loop.train()
    loop.weight.grad.data.zero_()  # type: ignore[union-attr]


def accumulated(loop: Loop, step: int) -> None:
    loop.optimizer.zero_grad()
    loop.backward()
    loop.train()


def every_tenth(loop: Loop, step: int) -> None:
    if step % 10 == 9:
        loop.optimizer.zero_grad(set_to_none=False)
    loop.train()


def after_another_backward(loop: Loop, step: int) -> None:
    """As a GAN: the other network's backward goes through this one before its own."""
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.train()


def decayed(loop: Loop, step: int) -> None:
    loop.train()
    loop.weight.grad.mul_(0.9)  # type: ignore[union-attr]


SICK = [never, clipped, a_step_skipped]
HEALTHY = [
    to_none, in_place, by_hand, past_the_version, accumulated, every_tenth,
    after_another_backward, decayed,
]  # fmt: skip


def said(written: Written, told: list[JsonObject]) -> list[str]:
    for number in (0, 1):
        written.rank(number, told)
    return [each.code for each in written.findings(status=0)]


@pytest.mark.parametrize("body", [*SICK, *HEALTHY], ids=lambda body: body.__name__)
@pytest.mark.parametrize("steps", [16, 120])
def test_gradients_that_are_never_set_to_zero_are_named(
    written: Written,
    loop: Loop,
    told: list[JsonObject],
    body: Callable[[Loop, int], None],
    steps: int,
) -> None:
    for step in range(steps):
        body(loop, step)
    loop.watching.rank_ends()
    assert said(written, told) == (["DDP312"] if body in SICK else [])


def test_few_steps_tell_nothing(loop: Loop, told: list[JsonObject]) -> None:
    for _ in range(5):
        loop.train()
    loop.watching.rank_ends()
    assert told == []


def test_who_zeroes_once_is_not_watched_any_more(loop: Loop, told: list[JsonObject]) -> None:
    loop.train()
    to_none(loop, 1)
    assert loop.watching._watches == []


def test_gradients_that_are_zero_are_not_carried(
    written: Written, loop: Loop, told: list[JsonObject]
) -> None:
    loop.weight.data.zero_()
    for _ in range(16):
        loop.train()
    loop.watching.rank_ends()
    assert said(written, told) == []
