"""Where a loss stopped being finite, in graphs of real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddpdoctor.probe.observers import origins
from ddpdoctor.run.records.model import Origin

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="this torch does not tell whether a saved tensor has hooks: nothing is looked at",
)

INF, NAN = math.inf, math.nan


class Net(nn.Module):
    def __init__(self, between: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.between = between
        self.last = nn.Linear(4, 2, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4))

    def forward(self, inputs: Any) -> Any:
        return self.last(self.between(self.first(inputs)))


class Double(torch.autograd.Function):
    """A function of the job's own, whose result is infinite."""

    @staticmethod
    def forward(ctx: Any, inputs: Any) -> Any:
        ctx.save_for_backward(inputs)
        return inputs * INF

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class _Watched:
    """As much of a watched DDP module as is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())

    def parameter(self, index: int) -> Any:
        return self._parameters[index]


WATCHED: list[Any] = []
"""The replicas of the rank."""


@pytest.fixture
def watch() -> Iterator[Callable[[nn.Module], None]]:
    yield lambda model: WATCHED.append(_Watched(model))
    WATCHED.clear()


BATCH = torch.tensor([[1.0, 0.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])


def told(loss: Any) -> Origin:
    """What is told at once, and the same from a trace whose graph is gone."""
    found = origins.origin(loss, loss.item(), WATCHED)
    assert found is not None
    traced = origins.trace(loss, WATCHED)
    assert traced is not None
    trace, size = traced
    loss.backward()
    assert trace.ready and not trace.finite and size > 0
    assert trace.origin(loss.item()) == found
    return found


@pytest.mark.parametrize(
    ("between", "operations"),
    [
        (torch.log, ["log"]),
        (lambda x: x / x, ["div"]),
        (lambda x: (x - 1).sqrt(), ["sqrt"]),
        (lambda x: functional.relu(x).reciprocal(), ["reciprocal"]),
        (Double.apply, ["double"]),
        (lambda x: (x * 60).exp() * 1e30, ["exp"]),
    ],
)
def test_the_operation_and_the_module_before_it(
    between: Callable[[Any], Any], operations: list[str], watch: Callable[[nn.Module], None]
) -> None:
    net = Net(between)
    watch(net)
    found = told(functional.cross_entropy(net(BATCH), torch.tensor([0, 1])))
    source = found.infinite or found
    assert source.what == "operation"
    assert operations[0] in source.operations
    assert (source.module, source.within) == ("first", False)


def test_a_batch_that_was_not_finite(watch: Callable[[nn.Module], None]) -> None:
    net = Net(torch.tanh)
    watch(net)
    batch = BATCH.clone()
    batch[1, 2] = NAN
    found = told(net(batch).mean())
    assert found == Origin(what="input", operations=("mm",), module="first", within=True)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_which_one_of_several_that_are_alike(
    number: int, watch: Callable[[nn.Module], None]
) -> None:
    """Behind the model; what is alike in it does not count."""
    net = Net(lambda x: x * 2)
    watch(net)
    loss = net(BATCH).sum()
    for each in range(3):
        loss = loss * torch.tensor(NAN if each == number else 0.5)
    assert told(loss).order == (number, 3)


def test_a_parameter_that_was_not_finite(watch: Callable[[nn.Module], None]) -> None:
    net = Net(torch.tanh)
    watch(net)
    with torch.no_grad():
        net.last.weight[0, 0] = NAN
    assert told(net(BATCH).mean()).what == "parameter"


def test_a_mask_of_infinite_scores_is_not_blamed(watch: Callable[[nn.Module], None]) -> None:
    def attend(x: Any) -> Any:
        mask = torch.tensor([True, False, False, False])
        return x.masked_fill(mask, -INF).softmax(dim=1).log()

    net = Net(attend)
    watch(net)
    found = told(net(BATCH).mean())
    assert (found.infinite or found).operations == ("log",)


def test_hooks_of_the_job_are_not_called(watch: Callable[[nn.Module], None]) -> None:
    calls = []

    def inner(x: Any) -> Any:
        calls.append(x)
        return x.log().tanh() / 0

    def unpack(packed: Any) -> Any:
        calls.append(packed)
        return packed

    def saving(x: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return x.exp().log()

    net = Net(lambda x: saving(checkpoint(inner, x, use_reentrant=False)))
    watch(net)
    loss = net(BATCH).mean()
    before = len(calls)
    origins.origin(loss, loss.item(), WATCHED)
    assert len(calls) == before == 1
    loss.backward()
    assert len(calls) > before


def test_of_a_finite_loss_everything_is_finite() -> None:
    traced = origins.trace(Net(torch.tanh)(BATCH).mean(), WATCHED)
    assert traced is not None and traced[0].ready and traced[0].finite


def test_what_several_operations_keep_is_read_once() -> None:
    net = Net(functional.relu)
    traced = origins.trace(net(BATCH).mean(), WATCHED)
    assert traced is not None
    # The batch, two weights, and what came out of relu, which the last layer took.
    assert traced[1] == 4 * (BATCH.numel() + 16 + 8 + 8)


def test_a_large_graph_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "MAX_TRACED", 4)
    assert origins.trace(Net(torch.tanh)(BATCH).mean(), WATCHED) is None


def test_a_graph_that_was_freed_tells_nothing_and_nothing_is_raised() -> None:
    loss = Net(torch.log)(BATCH).mean()
    loss.backward()
    assert origins.origin(loss, loss.item(), WATCHED) is None


def test_the_gradients_are_the_same_bit_for_bit(watch: Callable[[nn.Module], None]) -> None:
    results = []
    for looked_at in (False, True):
        torch.manual_seed(0)
        net = Net(lambda x: functional.dropout(x.log(), 0.5))
        watch(net)
        loss = net(BATCH).mean()
        if looked_at:
            assert origins.origin(loss, loss.item(), WATCHED)
        loss.backward()
        results.append([bytes(cast("Any", each.grad).numpy()) for each in net.parameters()])
    assert results[0] == results[1]
