"""A step that is computed on several devices, one of which flips bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpdoctor.replay import devices
from ddpdoctor.run.capsule import Capsule
from tests.parity.test_losses import LOSSES, kept


class Faulty(nn.Linear):
    """A layer in which one computation of several flips bits of a number."""

    calls = 0
    wrong: tuple[int, ...] = ()
    bit = 1

    def forward(self, inputs: Tensor) -> Tensor:
        output = super().forward(inputs)
        Faulty.calls += 1
        if Faulty.calls in Faulty.wrong:
            with torch.no_grad():
                output[0, 1:2].view(torch.int32).bitwise_xor_(Faulty.bit)
        return output


@pytest.fixture
def step() -> Iterator[Capsule]:
    capsule = kept(0, LOSSES["module"], lambda: Faulty(3, 5))
    Faulty.calls, Faulty.wrong, Faulty.bit = 0, (), 1
    yield capsule
    Faulty.calls, Faulty.wrong = 0, ()


def reported(step: Capsule, *names: str) -> tuple[list[str], bool]:
    every = [devices.compute(step, "cpu", torch)._replace(device=each) for each in names]
    return devices.report(step, every, torch)


def test_a_sound_device_gives_the_same_bits(step: Capsule) -> None:
    lines, wrong = reported(step, "cpu", "cpu")
    assert not wrong
    assert lines == ["cpu, twice: the same bits"] * 2 + ["cpu and cpu: the same bits"]


@pytest.mark.parametrize("bit", [1, 1 << 29])
def test_a_flipped_bit_on_a_cpu(step: Capsule, bit: int) -> None:
    Faulty.wrong, Faulty.bit = (2,), bit
    lines, wrong = reported(step, "cpu")
    assert wrong and lines[-1].startswith("cpu computes wrongly")
    assert "1 value with other bits, first in output 0 of forward 0" in lines[0]
    assert ("more than rounding" in lines[0]) == (bit > 1)


def test_the_one_of_three_that_differs(step: Capsule) -> None:
    Faulty.wrong, Faulty.bit = (3, 4), 1 << 29
    lines, wrong = reported(step, "cuda:0", "cuda:1", "cuda:2")
    assert wrong and lines[-1] == "cuda:1 computes wrongly: the others agree"
    Faulty.calls = 0
    lines, wrong = reported(step, "cuda:0", "cuda:1")
    assert wrong and lines[-1].startswith("one of them computes wrongly")


def test_rounding_of_a_gpu_is_no_fault(step: Capsule) -> None:
    Faulty.wrong = (2, 3, 4)
    lines, wrong = reported(step, "cuda:0", "cpu")
    assert not wrong and "within rounding" in lines[0] and "within rounding" in lines[-1]


def test_random_numbers_are_not_compared_between_kinds(step: Capsule) -> None:
    step.module = nn.Sequential(step.module, nn.Dropout(0.5))
    step.weights = {}
    lines, wrong = reported(step, "cuda:0", "cpu")
    assert not wrong and lines[-1].endswith("not compared, as the model draws random numbers")


def test_what_is_not_a_number_is_equal_to_itself(step: Capsule) -> None:
    values: Any = {"output": torch.tensor([float("nan"), 1.0])}
    other: Any = {"output": torch.tensor([float("nan"), float("nan")])}
    assert devices.differs(values, values, torch) is None
    found = devices.differs(values, other, torch)
    assert found is not None and (found.values, found.largest) == (1, float("inf"))


def test_a_device_that_is_not_there() -> None:
    assert devices.unusable("cpu", torch) == ""
    assert devices.unusable("cuda:99", torch) and devices.unusable("nothing", torch)
