"""What a debugger shows of a value in one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.probe.runtime import debugpy_private, frame_values, stacks, values
from ddpdoctor.render.stack_text import StackStyle, draw_variables
from ddpdoctor.run.records.supervisor import RankStacks, Variable
from ddpdoctor.stacks.capture import Declared, StackRequest


class Explosive:
    """A class whose own code must not run."""

    def __repr__(self) -> str:
        raise AssertionError("its code was run")

    def __getattr__(self, name: str) -> object:
        raise AssertionError("its code was run")


def repr_of_type(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


class OnGpu:
    """A tensor as it is on a GPU, where every figure would wait."""

    shape, dtype, device = (32, 10), torch.float32, torch.device("cuda:0")
    layout, requires_grad, is_leaf = torch.strided, False, False


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(32, 10), "Tensor[32, 10] float32 cpu mean 1 std 0 nan 0"),
        (torch.tensor([1.0, float("nan")]), "Tensor[2] float32 cpu mean 1 std 0 nan 1"),
        (torch.tensor([1.0, float("inf")]), "Tensor[2] float32 cpu mean 1 std 0 nan 0 inf 1"),
        (torch.full((2,), float("nan")), "Tensor[2] float32 cpu nan 2"),
        (torch.tensor(2.5, requires_grad=True), "Tensor[] float32 cpu 2.5"),
        (torch.arange(5), "Tensor[5] int64 cpu from 0 to 4"),
        (torch.zeros(0), "Tensor[0] float32 cpu"),
        (torch.zeros(1 << 16), "Tensor[65536] float32 cpu"),
        (torch.empty(3, device="meta"), "Tensor[3] float32 meta"),
        (torch.randn(4).to_sparse(), "Tensor[4] float32 cpu"),
        (torch.zeros(3, dtype=torch.complex64), "Tensor[3] complex64 cpu"),
        (nn.Parameter(torch.ones(2)), "Parameter[2] float32 cpu mean 1 std 0 nan 0"),
        (nn.Linear(2, 2), "<torch.nn.modules.linear.Linear>"),
        (list(range(1000)), "[0, 1, 2, 3, 4, 5, ...] (list of 1000)"),
        ({"a": [1, [2, [3]]]}, "{'a': [1, list of 2]}"),
        ((1,), "(1,)"),
        (10**5000, "int of 16610 bits"),
        (torch.Size([2, 3]), "torch.Size([2, 3])"),
        ([Explosive()], "[<tests.probe.test_values.Explosive>]"),
    ],
    ids=repr_of_type,
)
def test_the_line_of_a_value(value: object, text: str) -> None:
    before = torch.get_rng_state()
    assert values.summary(value) == text
    assert torch.equal(before, torch.get_rng_state())


def test_a_line_has_an_end() -> None:
    assert len(values.summary("x" * 10_000)) == values.MAX_TEXT
    assert values.children(Explosive()) == []


def test_a_tensor_of_a_gpu_is_not_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "is_tensor", lambda _: True)
    assert values.summary(OnGpu()) == "OnGpu[32, 10] float32 cuda:0"


def test_the_parts_of_values() -> None:
    parts = dict(values.children(torch.ones(2, 3)))
    assert (parts["shape"], parts["[1]"].tolist()) == (torch.Size([2, 3]), [1, 1, 1])
    names = [name for name, _ in values.children(torch.ones(30))]
    assert names[-1] == "[19]" and "[03]" in names
    assert values.holds_tensor({"a": [torch.ones(1)]})
    assert not values.holds_tensor({"a": [1], "b": Explosive()})
    assert dict(values.children(nn.Linear(2, 3)))["out_features"] == 3
    assert values.children(range) == []
    assert len(values.children(list(range(10**6)))) == values.MAX_CHILDREN


# -- frames of another thread


def asked(frame: int, expression: str) -> dict[str, Any]:
    return frame_values.evaluate({"frame": frame, "expression": expression})


def test_variables_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugpy_private, "object_id", lambda number: number)
    config = {"lr": 0.1, "betas": [0.9, 0.99]}
    batch = torch.ones(2, 3)
    me = id(sys._getframe())
    found = frame_values.variables({"frame": me, "path": ["locals"]})["variables"]
    names = [row[0] for row in found]
    assert ["config", "{'lr': 0.1, 'betas': [0.9, 0.99]}", "dict", True] in map(list, found)
    place = names.index("config")
    (_, betas) = frame_values.variables({"frame": me, "path": ["locals", place]})["variables"]
    assert list(betas) == ["betas", "[0.9, 0.99]", "list", True]
    assert found[names.index("batch")][1] == values.summary(batch)
    assert "error" in frame_values.variables({"frame": me, "path": ["locals", 999]})
    assert "error" in frame_values.variables({"frame": 1, "path": ["locals"]})
    names = [
        row[0] for row in frame_values.variables({"frame": me, "path": ["globals"]})["variables"]
    ]
    assert "Explosive" in names and "__name__" not in names
    huge = {str(number): "\U0001f600" * 1000 for number in range(1000)}
    assert huge
    found = frame_values.variables({"frame": me, "path": ["locals"]})["variables"]
    place = [row[0] for row in found].index("huge")
    parts = frame_values.variables({"frame": me, "path": ["locals", place]})["variables"]
    assert 0 < len(parts) < 100  # asyncio reads 64 KiB a line
    assert config["lr"] == 0.1


def test_expressions_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugpy_private, "object_id", lambda number: number)
    monkeypatch.setattr(frame_values, "EVALUATION", 0.2)
    step, gate = 7, SimpleNamespace(open=False)
    me = id(sys._getframe())
    assert asked(me, "step + 1") == {"result": "8", "type": "int"}
    assert asked(me, "nn.Linear")["type"] == "type"
    assert asked(me, "nope")["error"].startswith("NameError")
    assert "only expressions" in asked(me, "step = 1")["error"]
    assert "returned" in frame_values.evaluate({"frame": 1, "expression": "1"})["error"]
    endless = "[None for _ in iter(lambda: gate.open, True)]"
    assert "no result within" in asked(me, f"[{endless} for gate in [gate]]")["error"]
    assert "has not ended" in asked(me, "1")["error"]
    gate.open = True
    while "has not ended" in asked(me, "1").get("error", ""):
        pass
    assert asked(me, "step")["result"] == "7" and step == 7


# -- stacks with variables


def test_the_variables_of_a_stack() -> None:
    batch = torch.ones(2, 3)
    step = 7
    found = stacks._variables(sys._getframe())
    assert (0, "batch", values.summary(batch)) in found and (0, "step", "7") in found
    assert step == 7
    assert {number for number, _, _ in found} == {0}, "frames of libraries have none"


def test_variables_are_counted_from_the_outermost_frame() -> None:
    declared = Declared("", 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, None, "", "", "/")
    answer = {
        "ident": 1,
        "main": True,
        "name": "",
        "cut": True,
        "frames": [["a.py", 2, "inner"], ["a.py", 9, "outer"]],
        "variables": [[0, "x", "1"], [1, "y", "2"], [2, "z", "3"]],
    }
    thread = StackRequest(declared)._thread(answer)
    assert [frame.function for frame in thread.frames[1:]] == ["outer", "inner"]
    assert thread.variables == (Variable(2, "x", "1"), Variable(1, "y", "2"))
    ranks = [RankStacks(3, 0, 1, "", (thread,))]
    drawn = ["".join(text for text, _ in line) for line in draw_variables(ranks, StackStyle())]
    assert drawn == ["[3]  /a.py:2  inner", "  x = 1", "[3]  /a.py:9  outer", "  y = 2"]
