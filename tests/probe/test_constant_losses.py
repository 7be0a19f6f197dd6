"""Losses that depend on no parameter, in full and in light steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe.observers.gradients import MAX_CONSTANT_LOSSES, ConstantLosses
from ddpdoctor.probe.runtime import hot, rank, torch_private, wrapping
from ddpdoctor.run.records.base import JsonObject
from tests.probe.test_hot_light import Light
from tests.support.probed import a_rank

LINEAR = nn.Linear(4, 4)
NET = nn.Sequential(LINEAR, nn.ReLU(), nn.Linear(4, 1))
X = torch.ones(3, 4)


def zero() -> torch.Tensor:
    return torch.zeros((), requires_grad=True)


LOSSES = {
    "leaf": (zero, True, True),
    "sum": (lambda: zero().sum(), True, True),
    "weighted": (lambda: 0.5 * (0 + zero() + zero()), True, True),
    "input": (lambda: (X.clone().requires_grad_() * 2).sum(), True, True),
    "scaled": (lambda: torch.tensor(2.0) * NET(X).mean(), True, False),
    "beside": (lambda: zero() + LINEAR.bias.sum(), True, False),
    "parameter": (lambda: nn.Parameter(torch.ones(())), True, False),
    "linear": (lambda: nn.functional.mse_loss(LINEAR(X), torch.zeros(3, 4)), False, False),
    "model": (lambda: NET(X).square().mean(), False, False),
    "times zero": (lambda: NET(X).sum() * 0, False, False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_graphs_that_reach_no_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, bare, constant = LOSSES[name]
    tensors = (make(),)
    assert torch_private.is_bare(tensors) is bare
    assert torch_private.reaches_no_parameter(tensors) is constant
    if hot.core is None:
        return
    # In a light step the compiled core leaves such a backward to Python.
    light = Light()
    monkeypatch.setattr(rank, "active", light)
    seen: list[Any] = []
    engine = SimpleNamespace(run=lambda tensors, accumulate_grad: None)
    wrapping.around(
        engine, "run", "backward", lambda *args, **_: seen.append(args), lambda *_: None,
        light="engine",
    )  # fmt: skip
    engine.run(tensors, accumulate_grad=True)
    assert not seen  # It is not to be reduced.
    light.forward_begins(True)
    engine.run(tensors, accumulate_grad=True)
    assert bool(seen) is bare


def test_a_job_with_many_of_them() -> None:
    records: list[JsonObject] = []
    observer = ConstantLosses(a_rank(records, reduced=7))
    for _ in range(2 * MAX_CONSTANT_LOSSES):
        observer.constant_backward()
    assert len([each for each in records if each["kind"] == "constant_loss"]) == MAX_CONSTANT_LOSSES
    assert (records[0]["step"], records[0]["backward"]) == (0, 7)
