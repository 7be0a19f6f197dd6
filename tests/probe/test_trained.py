"""What a rank records of a step that is compared with another number of ranks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddpdoctor.diagnose.parity.rules_rates import _forgets
from ddpdoctor.probe.observers.trained import MAX_OTHERS, KeptWeights, Trained
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import a_rank

STEPS = 20


class Wrapped(nn.Module):
    """A module around another, as DDP is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, given: Any) -> Any:
        return self.module(given)


def steps_of(
    module: nn.Module,
    update: Callable[[int], None] = lambda step: None,
    schedule: Callable[[Any], Any] | None = None,
) -> list[JsonObject]:
    """Train a module for some steps. Return the records."""
    records: list[JsonObject] = []
    state = a_rank(records, step=SimpleNamespace(norm=3.0))
    observer = Trained(state)
    ddp = Wrapped(module)
    observer.ddp_built(ddp)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = schedule(optimizer) if schedule is not None else None
    if scheduler is not None:
        observer.scheduler_made(scheduler)
    for step in range(STEPS):
        observer.forward_begins(ddp, True)
        loss = ddp(torch.full((4, 8), float(step % 3))).square().mean()
        observer.graph_begins(loss)
        optimizer.zero_grad()
        loss.backward()
        observer.clips("clip_grad_norm_", sys._getframe())
        observer.step_begins(optimizer)
        optimizer.step()
        observer.step_ended(optimizer, step)
        if scheduler is not None:
            scheduler.step()
        update(step)
    return records


def averages(records: list[JsonObject]) -> list[float]:
    return [each["average"] for each in records if isinstance(each.get("average"), float)]


class Copied:
    """An average as timm makes it: a copy of the model, updated by its state (V2) or parameters."""

    def __init__(self, module: nn.Module, decay: Callable[[int], float]) -> None:
        self.module = copy.deepcopy(module).eval()
        self.decay = decay

    @torch.no_grad()
    def update_state(self, module: nn.Module, step: int) -> None:
        decay = self.decay(step)
        pairs = zip(self.module.state_dict().values(), module.state_dict().values(), strict=True)
        for mine, other in pairs:
            mine.copy_(decay * mine + (1 - decay) * other)

    @torch.no_grad()
    def update_parameters(self, module: nn.Module, step: int) -> None:
        mine: Any = list(self.module.parameters())
        others: Any = list(module.parameters())
        torch._foreach_lerp_(mine, others, weight=1 - self.decay(step))


MADE = ["torch", "by hand", "tensors of a dictionary", "ModelEmaV2", "ModelEmaV3"]


@pytest.mark.parametrize("made", MADE)
def test_an_average_is_found_by_its_values(made: str) -> None:
    module = nn.Linear(8, 8)
    copied = Copied(module, lambda step: 0.9)
    with torch.no_grad():
        kept = {name: each.clone() for name, each in module.named_parameters()}
    decays: Any = get_ema_multi_avg_fn
    averaged = AveragedModel(module, multi_avg_fn=decays(0.9))

    def update(step: int) -> None:
        with torch.no_grad():
            if made == "torch":
                averaged.update_parameters(module)
            if made == "ModelEmaV2":
                copied.update_state(module, step)
            elif made == "ModelEmaV3":
                copied.update_parameters(module, step)
            for name, each in module.named_parameters():
                if made == "by hand":
                    kept[name].mul_(0.9).add_(each, alpha=0.1)
                elif made == "tensors of a dictionary":
                    kept[name].lerp_(each, 0.1)

    if made != "torch":
        del averaged
    found = averages(steps_of(module, update))
    assert len(found) > STEPS / 2 and found[-8:] == pytest.approx([0.9] * 8, rel=1e-3)


@pytest.mark.parametrize("made", ["warm-up", "plain"])
def test_an_average_whose_decay_grows_is_not_judged(made: str) -> None:
    module = nn.Linear(8, 8)
    # `decay_warmup` of timm, and torch's average of all steps.
    copied = Copied(module, lambda step: min(0.9999, 1 - (1 + step) ** -0.7))
    averaged = AveragedModel(module)
    if made == "plain":
        del copied

    def update(step: int) -> None:
        if made == "plain":
            averaged.update_parameters(module)
        else:
            copied.update_parameters(module, step)

    found = averages(steps_of(module, update))
    assert sum(each < 1.0 for each in found) > STEPS / 2
    assert _forgets(tuple(found)) is None


def test_weights_that_are_kept() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = copy.deepcopy(module.state_dict())
    observer = KeptWeights(a_rank([]))
    ddp, alone = Wrapped(module), nn.Linear(8, 8)
    first = alone.weight.detach().clone()
    optimizer = torch.optim.SGD([*ddp.parameters(), *alone.parameters()], lr=0.1)
    for step in range(3):
        observer.forward_begins(ddp, True)
        loss = alone(ddp(torch.randn(4, 8))).square().mean()
        # A model that is evaluated between does not disturb the backward.
        observer.model_evaluates(module)
        optimizer.zero_grad()
        loss.backward()
        observer.step_begins(optimizer)
        optimizer.step()
        assert not torch.equal(alone.weight, first)
        observer.step_ended(optimizer, step)
        assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
        assert torch.equal(alone.weight, first)


def test_two_optimizers_make_one_step() -> None:
    records: list[JsonObject] = []
    observer = Trained(a_rank(records, step=SimpleNamespace(norm=3.0)))
    ddp = Wrapped(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    observer.ddp_built(ddp)
    parts: Any = ddp.module
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1 + at) for at, each in enumerate(parts)]
    schedulers = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each, 40 + 10 * at)
        for at, each in enumerate(optimizers)
    ]
    for each in schedulers:
        observer.scheduler_made(each)

    def train(steps: int) -> None:
        for step in range(steps):
            observer.forward_begins(ddp, True)
            loss = ddp(torch.ones(4, 8)).square().mean()
            observer.graph_begins(loss)
            loss.backward()
            for each in optimizers:
                observer.step_begins(each)
                each.step()
                observer.step_ended(each, step)
            for scheduler in schedulers:
                scheduler.step()

    train(6)
    steps = [each for each in records if each["kind"] == "trained"]
    assert len(steps) == 6
    assert [len(each["rates"]) for each in steps] == [1] * 6 and steps[0]["rates"] == [0.1]
    assert [each["position"] for each in steps] == [*range(6)]
    (course,) = (each for each in records if each["kind"] == "course")
    assert (course["end"], course["rate"]) == (40, pytest.approx(0.1))
    # The other one is alone from now on.
    del optimizers[0]
    train(MAX_OTHERS + 3)
    later = [each for each in records if each["kind"] == "trained"][6:]
    assert later and len(later) < 5 and later[-1]["rates"][0] > 0.3


def test_an_average_of_each_third_step() -> None:
    module = nn.Linear(8, 8)
    kept = module.weight.detach().clone()

    def update(step: int) -> None:
        if step % 3 == 0:
            kept.mul_(0.9).add_(module.weight.detach(), alpha=0.1)

    found = averages(steps_of(module, update))
    assert {round(each, 3) for each in found[-9:]} == {0.9, 1.0}
    assert 3 * sum(each < 1.0 for each in found[-9:]) == 9


def test_tensors_that_are_no_average() -> None:
    module = nn.Linear(8, 8)
    other, frozen = torch.randn(8, 8), torch.randn(8, 8)
    # Adam keeps averages of gradients of the same shape.
    found = averages(steps_of(module, lambda step: setattr(other, "data", torch.randn(8, 8))))
    assert all(each == 1.0 for each in found) and frozen is not None


def test_a_step_and_its_model() -> None:
    first = nn.Linear(8, 8)
    weight: Any = first.weight
    weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    bias: Any = first.bias
    bias.register_hook(lambda gradient: gradient * 2)
    module = nn.Sequential(first, nn.BatchNorm1d(8), nn.Dropout(0.5))
    records = steps_of(
        module, schedule=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 40)
    )
    (model,) = (each for each in records if each["kind"] == "trained_model")
    assert (model["batchnorm"], model.get("synchronized"), model["hooks"]) == (1, 0, 1)
    assert str(model["path"]).endswith("test_trained.py")
    (course,) = (each for each in records if each["kind"] == "course")
    assert (course["scheduler"], course["end"]) == ("CosineAnnealingLR", 40)
    assert course["rate"] == pytest.approx(0.01)
    steps = [each for each in records if each["kind"] == "trained"]
    assert [each["position"] for each in steps] == [*range(STEPS)]
    assert (steps[0]["norm"], steps[0]["decays"]) == (3.0, [0.1])
    assert steps[0]["used"] and steps[0]["spread"] and steps[0]["loss"]


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        (lambda loss: loss / 4, 2.0),
        (lambda loss: loss * 0.25, 2.0),
        (lambda loss: loss, 2.0),
        (lambda loss: loss / 3, 2.0 / 3),
    ],
)
def test_a_loss_of_accumulated_batches(scaled: Callable[[Any], Any], expected: float) -> None:
    records: list[JsonObject] = []
    observer = Trained(a_rank(records))
    weight = nn.Parameter(torch.tensor([2.0]))
    for _ in range(4):
        observer.graph_begins(scaled(weight.sum()))
    observer.step_ended(torch.optim.SGD([weight], lr=0.1), 0)
    assert records[0]["loss"] == pytest.approx(expected)
