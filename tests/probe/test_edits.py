"""Gradients that some ranks alone change: what the probe sees, and what is said of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import clip_grad

from ddpdoctor.probe.hooks import training
from ddpdoctor.probe.observers.ddp_modules import Replica, Replicas
from ddpdoctor.probe.observers.gradients import Edits
from ddpdoctor.probe.runtime import events, rank, torch_private
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import a_rank
from tests.support.replicas import SITE, prints, ranks, tensors
from tests.support.written import Written


def clip(step: int, call: str = "clip_grad_norm_") -> JsonObject:
    return {"kind": "clip", "step": step, "call": call, "path": "/job/train.py", "line": 7}


def edit(step: int, count: int) -> JsonObject:
    return {"kind": "edit", "step": step, "ddp": 0, "count": count, "names": ["first.weight"]}


def said(written: Written) -> list[tuple[str, tuple[int, ...], int]]:
    return [
        (each.code, each.ranks, each.location.line if each.location else 0)
        for each in written.findings(status=0)
        if each.code.startswith("DDP7")
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(([clip(0)], []), [("DDP709", (0,), 7)], id="one rank clips"),
        pytest.param(([clip(0)], [clip(0)]), [("DDP701", (0, 1), 9)], id="both clip"),
        pytest.param(([clip(2)], []), [("DDP709", (0,), 7)], id="from that step on"),
        pytest.param(([clip(3)], []), [("DDP701", (0, 1), 9)], id="one clips later"),
        pytest.param(
            ([clip(0), clip(1, "")], []), [("DDP701", (0, 1), 9)], id="one had clipped before"
        ),
        pytest.param(([], [edit(2, 1)]), [("DDP709", (1,), 9)], id="one rank changes"),
        pytest.param(([edit(0, 2)], [edit(0, 1)]), [("DDP709", (0,), 9)], id="more on one"),
        pytest.param(([edit(0, 2)], [edit(0, 2)]), [("DDP701", (0, 1), 9)], id="both change"),
    ],
)
def test_gradients_that_one_rank_changes_are_the_cause(
    written: Written, told: tuple[list[JsonObject], list[JsonObject]], expected: list[object]
) -> None:
    ranks(written, [*prints("aaaaaa"), *told[0]], [*prints("aabbbb"), *told[1]])
    assert said(written) == expected


@pytest.mark.parametrize(
    ("clipping", "blamed", "words"),
    [
        ((1,), (1,), "rank 1 calls clip_grad_norm_ here and ranks 0 and 2 do not"),
        ((0, 1), (2,), "ranks 0 and 1 call clip_grad_norm_ here and rank 2 does not"),
    ],
)
def test_who_clips_and_who_does_not(
    written: Written, clipping: tuple[int, ...], blamed: tuple[int, ...], words: str
) -> None:
    letters = ["aabb" if rank in clipping else "aaaa" for rank in range(3)]
    each = [[*prints(letters[rank]), *([clip(2)] if rank in clipping else [])] for rank in range(3)]
    ranks(written, *each)
    (finding,) = [each for each in written.findings(status=0) if each.code == "DDP709"]
    assert finding.ranks == blamed
    assert finding.message == f"{words}: the parameters differ since step 2"
    assert finding.evidence[0] == (
        "the first step of that kind since the parameters were equal is step 2"
    )


def test_who_changes_more_gradients_than_the_others(written: Written) -> None:
    each = ([*prints("aaaa"), edit(2, 1)], [*prints("aabb"), edit(2, 2)], [*prints("aaaa")])
    ranks(written, *each)
    (finding,) = [each for each in written.findings(status=0) if each.code == "DDP709"]
    assert finding.ranks == (1,)
    assert finding.message.startswith(
        "rank 1 changes its gradients between backward and optimizer.step() otherwise than ranks 0 "
        "and 2"
    )
    assert finding.evidence[0].startswith(
        "of the gradients looked at in step 2: 1 changed on rank 0, 2 changed on rank 1, 0 changed "
        "on rank 2 (first.weight)"
    )


@pytest.mark.parametrize(("step", "code"), [(63, "DDP709"), (64, "DDP709"), (65, "DDP701")])
def test_later_changes_count_in_the_steps_that_every_rank_looks_at(
    written: Written, step: int, code: str
) -> None:
    same, other = prints("aa", start=step - 2), prints("bb", start=step)
    ranks(written, [*prints("aaaa", start=step - 2)], [*same, *other, edit(step, 1)])
    assert [each for each, _, _ in said(written)] == [code]


def test_equal_gradients_are_not_the_cause(written: Written) -> None:
    ranks(written, [*prints("aaaa", gradients="g"), clip(0)], list(prints("aabb", gradients="g")))
    assert [code for code, _, _ in said(written)] == ["DDP701"]


@pytest.mark.parametrize("guards", [0, 1, 2])
def test_the_only_guarded_line_is_likely(written: Written, tmp_path: Path, guards: int) -> None:
    train = tmp_path / "train.py"
    train.write_text("if rank == 0:\n    p.grad.data.mul_(0.5)\n" * guards)
    at = {"kind": "site", "phase": "backward", "path": str(train), "line": 1}
    for number, letters in enumerate(("aaaa", "aabb")):
        differing = prints(letters, gradients=f"g{number}")
        written.rank(number, [SITE, at, tensors([0, 1]), *differing])
    found = said(written)
    assert found == ([("DDP709", (0,), 2)] if guards == 1 else [("DDP701", (0, 1), 9)])


# -- the probe


class Module(torch.nn.Module):
    """What a DDP module is to the probe."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(3, 2)


@pytest.fixture
def told() -> list[JsonObject]:
    """What the rank has written."""
    return []


@pytest.fixture
def edits(told: list[JsonObject], monkeypatch: pytest.MonkeyPatch) -> Edits:
    """The edits of a rank that has a module and whose clipping is watched."""
    state = a_rank(told, light=False, step=SimpleNamespace(norm=None))
    monkeypatch.setattr(rank, "active", state.tracker)
    replicas = Replicas(state)
    ddp = Module()
    assert torch_private.reduced_parameters(ddp)
    replicas.alive.append(Replica(ddp, 0))
    for name in training.CLIPPING:
        monkeypatch.setattr(clip_grad, name, getattr(clip_grad, name))
    edits = Edits(state, replicas)
    edits.ddp = ddp  # type: ignore[attr-defined]
    monkeypatch.setattr(events, "clips", [edits.clips])
    training.install_clipping(clip_grad)
    return edits


def train(edits: Edits, steps: dict[int, str]) -> None:
    """Five steps; in some of them the gradients are clipped, or changed."""
    (each,) = edits._replicas.alive
    parameters = [each.parameter(index) for index in range(len(each.names))]
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        edits.backward_ended()
        how = steps.get(step, "")
        if how == "clip":
            clip_grad.clip_grad_norm_(parameters, 0.1)
        elif how == "none":
            parameters[1].grad = None
        elif how == "scale":
            parameters[0].grad *= 2
        edits.step_begins(None)
        edits.state.tracker.steps += 1


def test_a_rank_that_leaves_gradients_alone_writes_nothing(
    edits: Edits, told: list[JsonObject]
) -> None:
    train(edits, {})
    assert told == []


def test_a_rank_writes_when_it_begins_and_ceases_to_clip(
    edits: Edits, told: list[JsonObject]
) -> None:
    train(edits, {1: "clip", 2: "clip", 3: "clip"})
    kinds = [(each["kind"], each["step"]) for each in told]
    assert kinds == [("clip", 1), ("edit", 1), ("clip", 4), ("edit", 4)]
    first, _, last, _ = told
    assert first["call"] == "clip_grad_norm_"
    assert "call" not in last
    assert first["path"] == __file__


def test_that_it_ceased_is_written_with_the_step_however_late_it_is_noticed(
    edits: Edits, told: list[JsonObject]
) -> None:
    """Between the steps that all ranks look at nothing is called where nothing clips."""
    parameters = [torch.nn.Parameter(torch.ones(2))]

    def clipped(*steps: int) -> None:
        for step in steps:
            edits.state.tracker.steps = step
            clip_grad.clip_grad_norm_(parameters, 0.1)

    clipped(70, 71, 72)
    clipped(80)
    edits.state.tracker.steps = 90
    edits.rank_ends()
    edits.rank_ends()
    assert [(each["step"], each.get("call", "")) for each in told] == [
        (70, "clip_grad_norm_"),
        (73, ""),
        (80, "clip_grad_norm_"),
        (81, ""),
    ]


@pytest.mark.parametrize(("how", "name"), [("none", "module.bias"), ("scale", "module.weight")])
def test_gradients_that_are_changed_by_hand_are_named(
    edits: Edits, told: list[JsonObject], how: str, name: str
) -> None:
    train(edits, {2: how})
    assert [(each["step"], each["count"]) for each in told] == [(2, 1), (3, 0)]
    assert told[0]["names"] == [name.removeprefix("module.")]


@pytest.mark.usefixtures("edits")
def test_clipping_returns_and_raises_as_before() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    assert float(clip_grad.clip_grad_norm_([weight], 1.0)) == pytest.approx(18**0.5)
    with pytest.raises(TypeError):
        clip_grad.clip_grad_norm_()  # type: ignore[call-arg]


SCALE, UNSCALE, BACKWARD, CLIP, STEP = "scale", "unscale", "backward", "clip", "step"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([SCALE, BACKWARD, CLIP, UNSCALE, STEP], ["scaled"]),
        ([SCALE, BACKWARD, UNSCALE, CLIP, STEP], []),
        ([SCALE, BACKWARD, SCALE, BACKWARD, UNSCALE, CLIP, STEP], []),
        ([BACKWARD, CLIP, STEP], []),
        ([CLIP, BACKWARD, STEP], ["early"]),
        ([BACKWARD, STEP, CLIP], ["early"]),
        # Two optimizers: each is clipped before its step.
        ([BACKWARD, CLIP, STEP, CLIP, STEP], []),
        # Gradients that autograd.grad returned.
        ([CLIP, STEP], []),
    ],
)
def test_gradients_that_are_clipped_too_early(order: list[str], expected: list[str]) -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    edits = Edits(state, Replicas(state))
    calls: dict[str, Callable[[], None]] = {
        SCALE: edits.loss_scaled,
        UNSCALE: edits.unscales,
        BACKWARD: edits.backward_ended,
        CLIP: lambda: edits.clips("clip_grad_norm_", sys._getframe()),
        STEP: lambda: edits.step_begins(None),
    }
    for step in range(10):
        state.tracker.steps = step
        for name in order:
            calls[name]()
    assert [each["what"] for each in records if each["kind"] == "misplaced_clip"] == expected


def test_one_call_in_the_right_place_is_enough() -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    edits = Edits(state, Replicas(state))
    for step in range(10):
        state.tracker.steps = step
        edits.loss_scaled()
        edits.backward_ended()
        if step == 1:
            edits.unscales()
        edits.clips("clip_grad_norm_", sys._getframe())
        edits.unscales()
        edits.step_begins(None)
    assert "misplaced_clip" not in {each["kind"] for each in records}


def test_a_limit_multiplied_by_the_scale_is_meant(tmp_path: Path) -> None:
    for call, expected in (("clip(p, 1.0 * scaler.get_scale())", []), ("clip(p, 1.0)", ["DDP316"])):
        script = tmp_path / f"{len(call)}.py"
        script.write_text(f"{call}\n")
        early = {"kind": "misplaced_clip", "step": 2, "call": "clip", "what": "scaled"}
        record: JsonObject = {**early, "path": str(script), "line": 1}
        directory = tmp_path / str(len(call))
        directory.mkdir()
        made = Written(directory)
        made.rank(0, [record])
        made.rank(1, [record])
        assert [each.code for each in made.findings(status=0)] == expected
