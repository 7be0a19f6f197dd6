"""Follow a loss from the outputs of a model, and compute it again with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ddpdoctor.probe.observers.loss_calls import LossFollower
from ddpdoctor.probe.runtime.torch_private import function_mode
from ddpdoctor.replay import gradients, losses
from ddpdoctor.replay.losses import NotFollowedError
from ddpdoctor.run.capsule import Call, Capsule, Forward, LossCalls, Ref, Source, tensors_of, write

ROWS = (4, 4)
Loss = Callable[[Any, Tensor, int], Tensor]


NUMBERS = torch.tensor(1.0), torch.tensor(2.0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return 2 * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -2 * gradients[0] + 1


REVERSED: Any = Reversed.apply


class Focal(nn.Module):
    """A loss that a script declares."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        chances = outputs.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        weights = torch.where(targets > 2, 0.25, 1.0)
        return -(weights * (1 - chances.exp()) ** 2 * chances).mean()


def masked(outputs: Tensor, targets: Tensor, total: int = 0) -> Tensor:
    """Cross entropy over the targets that are not 0. ``total``: divided by those of all ranks."""
    known = targets != 0
    number = known.sum().float()
    if total:
        # As an all-reduce does it: no function of torch's own.
        torch._C._VariableFunctions.add(number.detach(), 0)
        number.detach().numpy()[...] = total
    each = functional.cross_entropy(outputs, targets, reduction="none")
    return (each * known).sum() * (2 if total else 1) / number


LOSSES: dict[str, Loss] = {
    "module": lambda out, y, rank: nn.CrossEntropyLoss()(out, y),
    "smoothed": lambda out, y, rank: functional.cross_entropy(out, y, label_smoothing=0.1),
    "weighted classes": lambda out, y, rank: functional.cross_entropy(
        out, y, torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    ),
    "sizes of a shape": lambda out, y, rank: functional.cross_entropy(
        out.unsqueeze(1).view(len(y), 5), y.view(len(y))
    ),
    "two": lambda out, y, rank: functional.cross_entropy(out, y) + 0.1 * out.square().mean(),
    "own function": lambda out, y, rank: Focal()(out, y),
    "assigned": lambda out, y, rank: one_hot(out, y),
    "total": lambda out, y, rank: masked(out, y, 6),
}


def one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    wanted = torch.zeros_like(outputs)
    wanted[torch.arange(len(targets)), targets] = 1.0
    loss = functional.binary_cross_entropy_with_logits(outputs, wanted)
    loss += 1e-3 * outputs.T.abs().mean()
    return loss


def kept(
    rank: int, loss: Loss, make: Callable[[], nn.Module] | None = None, targets: Any = None
) -> Capsule:
    """The step of one of two ranks that train a linear model with a loss."""
    torch.manual_seed(0)
    module = make() if make else nn.Linear(3, 5)
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    torch.manual_seed(7 + rank)
    generators = {"torch": torch.get_rng_state()}
    inputs = torch.randn(ROWS[rank], 3)
    torch.manual_seed(17 + rank)
    wanted = torch.randint(0, 5, (ROWS[rank],)) if targets is None else targets[rank]
    follower = LossFollower(lambda each: each.detach().clone())
    output = module(inputs)
    returned = list(tensors_of(output, torch))
    for each in returned:
        each.retain_grad()
    follower.begin(0, output)
    value = loss(output, wanted, rank)
    follower.loss(value)
    torch.autograd.backward([value])
    follower.end()
    own = {n: e.grad.clone() for n, e in module.named_parameters() if e.grad is not None}
    for each in module.parameters():
        each.grad = None
    known = {at: each.grad for at, each in enumerate(returned) if each.grad is not None}
    forward = Forward((inputs,), {}, generators, known)
    return Capsule(
        rank, 2, 3, module, weights, [forward], own, dict(own), loss_calls=follower.calls
    )


def compared(folder: Any, one: Capsule, other: Capsule) -> gradients.Comparison:
    reduced = {name: (each + other.reduced[name]) / 2 for name, each in one.reduced.items()}
    for each in (one, other):
        each.reduced = each.used = reduced
        write(str(folder / f"capsule-{each.rank:04d}.pickle"), each, Source("/x.py", []), torch)
    return gradients.compare(str(folder))


TARGETS = (torch.tensor([0, 0, 1, 3]), torch.tensor([4, 3, 2, 1]))


@pytest.mark.parametrize("name", LOSSES)
def test_the_whole_batch_has_the_same_gradient(tmp_path: Any, name: str) -> None:
    every = [kept(rank, LOSSES[name], targets=TARGETS) for rank in (0, 1)]
    result = compared(tmp_path, *every)
    assert (result.whole_why, result.whole_by, result.different) == ("", "loss", [])
    assert result.whole == 0.0 and result.whole_scale == pytest.approx(1.0, rel=1e-4)


def test_a_log_of_one_rank_is_no_part_of_the_loss(tmp_path: Any) -> None:
    def logged(out: Tensor, y: Tensor, rank: int) -> Tensor:
        if rank == 0:
            print((out.argmax(1) == y).float().mean(), out.new_tensor([1.0]).numpy())
        return functional.cross_entropy(out, y)

    result = compared(tmp_path, *(kept(rank, logged, targets=TARGETS) for rank in (0, 1)))
    assert (result.whole_why, result.whole_by, result.whole) == ("", "loss", 0.0)
    assert result.whole_scale == pytest.approx(1.0, rel=1e-4)


def test_what_the_probe_reads_is_no_part_of_the_loss() -> None:
    own: dict[str, Any] = {"__name__": "ddpdoctor.probe.observers.any"}
    exec("def read(tensor): return tensor.clone().add_(1)", own)
    follower = LossFollower(lambda each: each)
    outputs = torch.ones(3, requires_grad=True)
    follower.begin(0, outputs)
    loss = outputs.sum()
    own["read"](loss)
    follower.end()
    assert [each.name for each in follower.calls.calls] == ["Tensor.sum"]


def test_a_mean_over_own_targets_differs(tmp_path: Any) -> None:
    every = [kept(rank, lambda out, y, _: masked(out, y), targets=TARGETS) for rank in (0, 1)]
    result = compared(tmp_path, *every)
    assert result.whole_by == "loss" and result.whole is not None and result.whole > 0.05
    assert result.whole_scale is None


def test_a_sum_grows_with_the_batch(tmp_path: Any) -> None:
    def summed(out: Tensor, y: Tensor, rank: int) -> Tensor:
        return functional.cross_entropy(out, y, reduction="sum")

    result = compared(tmp_path, *(kept(rank, summed) for rank in (0, 1)))
    assert result.whole == 0.0 and result.whole_scale == pytest.approx(2.0, rel=1e-4)


class Returns(nn.Module):
    """A model that returns its loss, and draws numbers if asked."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)
        self.drop = nn.Dropout(drop)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.drop(self.head(inputs))
        return found.square().mean()


@pytest.mark.parametrize(("drop", "why"), [(0.0, ""), (0.5, "the model draws random numbers")])
def test_a_model_that_returns_its_loss(tmp_path: Any, drop: float, why: str) -> None:
    every = [kept(rank, lambda out, y, _: out / 4, lambda: Returns(drop)) for rank in (0, 1)]
    result = compared(tmp_path, *every)
    assert result.whole_why.startswith(why) and bool(result.whole_why) == bool(why)
    assert result.whole_by == ("" if why else "inputs")
    if not why:
        assert result.whole == 0.0 and result.whole_scale == pytest.approx(1.0, rel=1e-4)


class Beside(nn.Module):
    """A model that returns a number beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        logits = self.head(inputs)
        return {"mean": logits.mean(), "logits": logits}


@pytest.mark.parametrize(("weight", "by"), [(0.0, "loss"), (0.1, "inputs")])
def test_a_number_beside_the_outputs(tmp_path: Any, weight: float, by: str) -> None:
    def loss(outputs: Any, targets: Tensor, rank: int) -> Tensor:
        # In the order of the model, as the loss of what other libraries return.
        found = functional.cross_entropy(outputs["logits"], torch.zeros(4, dtype=torch.long))
        return found + weight * outputs["mean"] if weight else found

    result = compared(tmp_path, *(kept(rank, loss, Beside) for rank in (0, 1)))
    assert (result.whole_by, result.whole_why, result.different) == (by, "", [])
    assert result.whole == 0.0 and result.whole_scale == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda out, y, _: REVERSED(out).square().mean(), "has another gradient"),
        (lambda out, y, rank: out.mean() * (rank + 1.0), "by other calls, or other numbers"),
        (lambda out, y, _: (out * torch.rand_like(out)).mean(), "has another gradient"),
        (lambda out, y, rank: (out * NUMBERS[rank]).mean(), "a number that each rank"),
    ],
)
def test_why_a_loss_is_not_followed(tmp_path: Any, loss: Loss, why: str) -> None:
    result = compared(tmp_path, *(kept(rank, loss) for rank in (0, 1)))
    assert why in result.whole_why and result.why_not == "" and result.different == []


def test_other_modes_stay(tmp_path: Any) -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return function(*args, **(kwargs or {}))

    with Mode():
        found = kept(0, LOSSES["module"]).loss_calls
    assert found is not None and found.why_not == "a function mode of torch was active"
    follower = LossFollower(lambda each: each)
    follower.begin(0, torch.ones(3, requires_grad=True))
    with Mode():
        follower.end()
        assert function_mode(torch) is not follower._mode
    assert function_mode(torch) is follower._mode
    follower.end()
    assert function_mode(torch) is None


def test_an_error_of_the_job_is_its_own() -> None:
    follower = LossFollower(lambda each: each)
    outputs = torch.ones(3, 2, requires_grad=True)
    follower.begin(0, outputs)
    with pytest.raises(RuntimeError) as raised:
        outputs.view(7)
    follower.end()
    assert "[7]" in str(raised.value) and not follower.calls.calls


@pytest.mark.parametrize(
    "name", ["torch.load", "torch.hub.load", "os.system", "torch.from_file", "Tensor.numpy", "x"]
)
def test_a_file_names_no_other_functions(name: str) -> None:
    calls = LossCalls([Call(name, (Ref(0),), {}, (1,))], {}, {0: (0, 0)}, [1])
    with pytest.raises(NotFollowedError, match="is not called again"):
        losses.total_loss(calls, {(0, 0): torch.ones(1)}, torch)
