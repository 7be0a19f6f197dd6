"""Keep a step of a rank in a file, and compute it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.core.opening import ForeignError
from ddpdoctor.replay import gradients
from ddpdoctor.replay.definitions import Definitions
from ddpdoctor.run import capsule as capsules
from ddpdoctor.run.capsule import Capsule, Forward, Source, read, write


def no_script(source: Source) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        raise AssertionError(f"{name} is not of {source.script}")

    return find


def kept(rank: int, rows: list[list[float]], targets: list[float], step: int = 3) -> Capsule:
    """A step of one of two ranks with a linear model, and with its own gradient."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    torch.manual_seed(7 + rank)
    generators = {"torch": torch.get_rng_state()}
    inputs = torch.tensor(rows)
    output = module(inputs)
    output.retain_grad()
    (output.flatten() - torch.tensor(targets)).square().mean().backward()
    own = {n: e.grad.clone() for n, e in module.named_parameters() if e.grad is not None}
    for each in module.parameters():
        each.grad = None
    forward = Forward((inputs,), {}, generators, {0: output.grad})
    return Capsule(rank, 2, step, module, weights, [forward], own, dict(own))


def averaged(one: Capsule, other: Capsule) -> None:
    """Give both what DDP makes of their gradients."""
    reduced = {name: (each + other.reduced[name]) / 2 for name, each in one.reduced.items()}
    one.reduced = one.used = other.reduced = other.used = reduced


def written(folder: Path, *every: Capsule) -> str:
    for each in every:
        name = folder / f"capsule-{each.rank:04d}.pickle"
        write(str(name), each, Source("/nothing.py", []), torch)
    return str(folder)


@pytest.fixture
def pair() -> tuple[Capsule, Capsule]:
    """A rank with two samples and one with four, with gradients as DDP reduces them."""
    one = kept(0, [[1.0, 2.0], [3.0, -1.0]], [0.5, 1.0])
    other = kept(1, [[0.5, 0.5], [2.0, 2.0], [1.0, -2.0], [0.0, 1.0]], [1.0, 0.0, 2.0, 1.0])
    averaged(one, other)
    return one, other


Pair = tuple[Capsule, Capsule]


def test_a_step_is_read_as_it_was(tmp_path: Path, pair: Pair) -> None:
    one = pair[0]
    written(tmp_path, one)
    back = read(str(tmp_path / "capsule-0000.pickle"), torch, no_script)
    assert (back.rank, back.world_size, back.step) == (0, 2, 3)
    assert torch.equal(back.forwards[0].args[0], one.forwards[0].args[0])
    assert torch.equal(back.forwards[0].generators["torch"], one.forwards[0].generators["torch"])
    for name, each in one.module.named_parameters():
        again = dict(back.module.named_parameters())[name]
        assert torch.equal(again, each) and again.requires_grad
    assert (tmp_path / "capsule-0000.pickle").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
def test_tensors_of_all_types(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (2, 3)):
        tensor = torch.ones(shape).to(dtype)
        again = capsules._tensor(capsules.stored(tensor), torch)
        assert again.dtype == dtype and torch.equal(again, tensor)


def test_a_step_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    monkeypatch.setattr(capsules, "MAX_BYTES", 16)
    with pytest.raises(capsules.TooLargeError):
        written(tmp_path, *pair)
    assert not list(tmp_path.glob("*.pickle"))


def test_a_file_of_another_account_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    written(tmp_path, *pair)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ForeignError, match="belongs to"):
        read(str(tmp_path / "capsule-0000.pickle"), torch, no_script)


def test_the_average_is_recognized(tmp_path: Path, pair: Pair) -> None:
    result = gradients.compare(written(tmp_path, *pair))
    assert (result.why_not, result.different, result.parameters) == ("", [], 4)
    assert (result.ranks, result.rows) == (2, [2, 4])
    assert result.used == pytest.approx(1.0)
    # Two samples of one rank weigh as much as four of the other.
    assert result.whole is not None and result.whole > 0.05


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_factor_is_told_from_another_gradient(tmp_path: Path, factor: float, pair: Pair) -> None:
    one, _ = pair
    for each in pair:
        each.reduced = {name: factor * value for name, value in one.reduced.items()}
    result = gradients.compare(written(tmp_path, *pair))
    assert len(result.different) == result.parameters == 4
    assert result.scale == pytest.approx(factor)
    one.reduced = {**one.reduced, "0.weight": -one.reduced["0.weight"]}
    other = gradients.compare(written(tmp_path, *pair))
    assert other.scale is None and other.different[0].name == "0.weight"


def test_a_rank_without_its_step(tmp_path: Path, pair: Pair) -> None:
    assert gradients.compare(str(tmp_path)).why_not == "no rank kept a step"
    assert gradients.compare(written(tmp_path, pair[0])).why_not == "1 of 2 ranks kept the step"
    (tmp_path / "capsule-0001.pickle").write_bytes(b"\x80\x05nothing")
    assert "UnpicklingError" in gradients.compare(str(tmp_path)).why_not


SCRIPT = """
import torch
from torch import nn
WIDTH = 4
DEVICES = torch.cuda.device_count() + print("runs") and 1
class Net(nn.Module):
    class Inner:
        width = WIDTH
def helper():
    return WIDTH
raise SystemExit("it must not run")
"""


def test_a_script_is_not_run_for_its_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    definitions = Definitions(str(script))
    assert definitions.find("Net.Inner").width == 4
    assert definitions.find("helper")() == 4
    assert definitions.find("Net") is definitions.find("Net")
    with pytest.raises(AttributeError):
        definitions.find("DEVICES")
    assert capsys.readouterr().out == ""
