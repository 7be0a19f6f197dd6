"""What the probe records of losses, gradients, and models beside DDP that are evaluated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ddpdoctor.probe.observers import collective_calls
from ddpdoctor.probe.observers.buffers import OtherModels
from ddpdoctor.probe.observers.ddp_modules import Replica, Replicas
from ddpdoctor.probe.observers.gradients import Edits, Gradients, LossScale, Outside
from ddpdoctor.probe.observers.samples import Samples
from ddpdoctor.probe.runtime.sites import NOWHERE
from ddpdoctor.run.records.base import JsonObject
from tests.support.probed import Purse, a_rank

Loss = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    yield
    collective_calls.reduced_graphs.clear()


def begun(make: Loss, *, reduces: bool = False, times: int = 8) -> list[JsonObject]:
    """The records of a rank whose losses are made of a mean by ``make``."""
    records: list[JsonObject] = []
    state = a_rank(records)
    replicas = Replicas(state)
    replicas.alive.append(object())  # type: ignore[arg-type]
    watching = LossScale(state, replicas)
    weight = torch.ones(3, requires_grad=True)
    for _ in range(times):
        mean = (weight / 4).square().mean()
        if reduces:
            collective_calls._note_graph("all_reduce", mean, NOWHERE, 0)
        watching.graph_begins(make(mean))
    return records


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda mean: mean / 2, 0.5),
        (lambda mean: mean * 0.5, 0.5),
        (lambda mean: mean / 4 * 2, 0.5),
        (lambda mean: mean / 4, None),
        (lambda mean: mean, None),
        (lambda mean: mean / 2 + mean, None),
        (lambda mean: (mean / 2).exp(), None),
    ],
)
def test_a_loss_divided_by_the_number_of_ranks(make: Loss, factor: float | None) -> None:
    records = begun(make)
    assert [each["factor"] for each in records] == ([factor] if factor else [])
    assert begun(make, times=2) == []


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (lambda mean: mean / 2, 0.5),
        (lambda mean: mean, 1.0),
        (lambda mean: mean / 2 + mean.exp(), 0.5),
        (lambda mean: (mean.unsqueeze(0) / 2).sum(), 0.5),
        (lambda mean: mean.detach().requires_grad_() / 3, None),
    ],
)
def test_a_loss_that_was_reduced(make: Loss, factor: float | None) -> None:
    records = begun(make, reduces=True)
    assert [each["factor"] for each in records if each.get("call")] == ([factor] if factor else [])


def test_a_loss_that_is_reduced_behind_its_backward() -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    replicas = Replicas(state)
    replicas.alive.append(object())  # type: ignore[arg-type]
    watching = LossScale(state, replicas)
    weight = torch.ones(3, requires_grad=True)
    for _ in range(4):
        mean = weight.mean()
        watching.graph_begins(mean)
        collective_calls._note_graph("all_reduce", mean, NOWHERE, 0)
    assert records == []


def test_a_graph_is_only_noted_where_it_is_lost() -> None:
    loss = torch.ones(3, requires_grad=True).mean()
    with torch.no_grad():
        # As `torch.distributed.nn.functional.all_reduce` calls it.
        collective_calls._note_graph("all_reduce", loss, NOWHERE, 0)
    assert collective_calls.reduced_graphs == []


class Ddp:
    """What the observers read of a DDP module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.find_unused_parameters = True
        self.require_backward_grad_sync = True
        self.parameters_to_ignore: set[str] = set()


def replica_of(state: Any, module: torch.nn.Module) -> tuple[Ddp, Replicas, Replica]:
    ddp, replicas = Ddp(module), Replicas(state)
    replicas.ddp_built(ddp)
    return ddp, replicas, replicas.alive[0]


@pytest.mark.parametrize(("factor", "expected"), [(0.5, 0.5), (1.0, None), (None, None)])
def test_gradients_that_the_job_multiplies(factor: float | None, expected: float | None) -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    ddp, replicas, _ = replica_of(state, torch.nn.Linear(3, 1))
    edits = Edits(state, replicas)
    for step in range(6):
        state.tracker.steps = step
        for parameter in ddp.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        edits.backward_ended()
        for parameter in ddp.module.parameters():
            if factor is not None and parameter.grad is not None:
                parameter.grad.data.mul_(factor)
        edits.step_begins(None)
    found = [each["factors"] for each in records if each["kind"] == "gradient_scale"]
    assert found == ([[expected] * 4] if expected is not None else [])


def test_gradients_of_several_backwards_are_no_matter_of_ranks() -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    ddp, replicas, _ = replica_of(state, torch.nn.Linear(3, 1))
    edits = Edits(state, replicas)
    for step in range(6):
        state.tracker.steps = step
        for parameter in ddp.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        edits.backward_ended()
        edits.backward_ended()
        for parameter in ddp.module.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        edits.step_begins(None)
    assert "gradient_scale" not in {each["kind"] for each in records}


@pytest.mark.parametrize(("left", "expected"), [(1 << 40, 2), (-1, None)])
def test_gradients_of_zeros_are_searched_for_within_the_budget(
    left: int, expected: int | None
) -> None:
    records: list[JsonObject] = []
    state = a_rank(records, Purse(left))
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    ddp, replicas, replica = replica_of(state, module)
    pacing: Any = type("Pacing", (), {"settling": False})()
    gradients = Gradients(state, replicas, pacing)
    for number in range(1, 9):
        for index, parameter in enumerate(module.parameters()):
            # The first layer gets zeros, or no gradient. The second one gets some now and then.
            parameter.grad = torch.zeros_like(parameter) if index or number > 3 else None
            if index >= 2 and number == 5:
                parameter.grad = torch.ones_like(parameter)
        replica.reduced = number
        gradients._check(replica, ddp)
    gradients.rank_ends()
    found = [each["count"] for each in records if each["kind"] == "never_used"]
    assert found == ([expected] if expected is not None else [])


def test_a_first_evaluation_is_followed_ahead_of_the_budget() -> None:
    records: list[JsonObject] = []
    spent = Samples(a_rank(records, Purse(-1), armed=5))
    with torch.no_grad():
        assert [spent._evaluates(number) for number in range(3)] == [True, True, False]
        assert not Samples(a_rank(records, Purse(-1), armed=0))._evaluates(0)
    assert not spent._evaluates(0)


@pytest.mark.parametrize(("mode", "expected"), [("eval", ["Linear"]), ("train", [])])
def test_models_beside_ddp_that_are_evaluated(mode: str, expected: list[str]) -> None:
    records: list[JsonObject] = []
    state = a_rank(records, armed=7)
    ddp, replicas, _ = replica_of(state, torch.nn.Linear(3, 1))
    others = OtherModels(state, replicas)
    average = torch.nn.Linear(3, 1)
    for module in (ddp.module, average, average):
        others.model_evaluates(module)
        getattr(module, mode)()
    with torch.no_grad():
        for _ in range(3):
            others.batch_evaluated(None)
    found = [each for each in records if each["kind"] == "other_model"]
    assert [each["type"] for each in found] == expected
    norm = torch.linalg.vector_norm(average.weight.detach().double()).item()
    assert all(each["values"][0] == pytest.approx(norm) for each in found)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (("reduced", "step"), [0, 1, 2, 3]),
        (("passed by", "own", "step"), []),
        # A discriminator: its own backward, its step, and then that of the generator through it.
        (("own", "step", "reduced"), [0, 1, 2, 3]),
    ],
)
def test_parameters_that_are_trained_beside_a_module(
    order: tuple[str, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    ddp, replicas, replica = replica_of(state, torch.nn.Linear(3, 1))
    other = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*ddp.module.parameters(), other], lr=0.1)
    monkeypatch.setattr("ddpdoctor.probe.observers.gradients.all_made", lambda: [optimizer])
    outside = Outside(state, replicas)
    for step in range(4):
        state.tracker.steps = step
        for what in order:
            if what == "step":
                outside.step_begins(optimizer)
                continue
            outside.backward_begins()
            replica.reduced += what != "own"
            if what != "passed by":
                other.grad = torch.ones(2)
            outside.backward_ended()
    assert [each["step"] for each in records] == expected
    assert all([*each["gradients"]] == ["parameter 2 of shape (2,)"] for each in records)


def test_a_graph_whose_tensors_are_freed_is_left_alone() -> None:
    records: list[JsonObject] = []
    state = a_rank(records)
    replicas = Replicas(state)
    replicas.alive.append(object())  # type: ignore[arg-type]
    watching = LossScale(state, replicas)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight.detach()).mean() * weight.mean()
    torch.autograd.backward(loss)
    for _ in range(3):
        watching.graph_begins(loss)
        watching.graph_begins(None)
    assert records == []


def test_sparse_gradients_are_no_zeros() -> None:
    records: list[JsonObject] = []
    state = a_rank(records, Purse(1 << 40))
    module = torch.nn.Embedding(8, 2, sparse=True)
    ddp, replicas, replica = replica_of(state, module)
    pacing: Any = type("Pacing", (), {"settling": False})()
    gradients = Gradients(state, replicas, pacing)
    for number in range(1, 9):
        module.weight.grad = None
        torch.autograd.backward(module(torch.tensor([1, 3])).square().sum())
        replica.reduced = number
        gradients._check(replica, ddp)
    gradients.rank_ends()
    assert [each.get("count", 0) for each in records if each["kind"] == "never_used"] == [0]
