"""Compute the gradient that one rank would have with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpdoctor.replay.losses import NotFollowedError, joined, total_loss, whole_loss
from ddpdoctor.replay.steps import Outputs, forward, gradients_of, local_gradients, restore
from ddpdoctor.run.capsule import Capsule, Forward, LossCalls, tensors_of

Gradients = dict[str, Any]
Steps = Sequence[tuple[Capsule, Outputs, Gradients]]
"""The steps of all ranks, with the outputs and the gradients of each."""


def gradient_by_loss(
    steps: Steps, tolerance: float, torch: Any
) -> tuple[Gradients, list[int | float]]:
    """Return the gradient of the loss that is computed with the outputs of all ranks.

    Returns:
        The gradients by parameter, and the numbers among the arguments of the loss's calls.

    Raises:
        NotFollowedError: The loss cannot be computed again.
    """
    calls = [_calls(capsule) for capsule, _, _ in steps]
    leaves = [
        {at: each.clone().requires_grad_(each.is_floating_point()) for at, each in outputs.items()}
        for _, outputs, _ in steps
    ]
    factors = [
        _factor(
            capsule, _derived(total_loss(each, own, torch), own, torch), local, tolerance, torch
        )
        for (capsule, _, local), each, own in zip(steps, calls, leaves, strict=True)
    ]
    if max(factors) - min(factors) > tolerance * max(map(abs, factors)):
        raise NotFollowedError("computed again, the ranks' losses have other weights")
    if len(steps) == 1:
        return steps[0][2], []
    loss, numbers = whole_loss(calls, leaves, torch)
    found: Gradients = {}
    for (capsule, _, _), own in zip(steps, leaves, strict=True):
        given = _derived(loss, own, torch)
        local = local_gradients(capsule, torch, {at: factors[0] * e for at, e in given.items()})
        for name, each in local.items():
            found[name] = found.get(name, 0) + each
    return found, numbers


def _calls(capsule: Capsule) -> LossCalls:
    if capsule.loss_calls is None:
        raise NotFollowedError("its calls were not recorded")
    return capsule.loss_calls


def _derived(loss: Any, outputs: Outputs, torch: Any) -> Outputs:
    """Return the gradients of a loss with respect to outputs."""
    places = [at for at, each in outputs.items() if each.requires_grad]
    if not loss.requires_grad:
        raise NotFollowedError("the loss does not depend on the outputs")
    values = torch.autograd.grad(
        loss, [outputs[at] for at in places], retain_graph=True, allow_unused=True
    )
    return {at: each for at, each in zip(places, values, strict=True) if each is not None}


def _factor(
    capsule: Capsule, computed: Outputs, local: Gradients, tolerance: float, torch: Any
) -> float:
    """Return the scale of the job's own backward, such as a GradScaler's.

    Args:
        capsule: The step of a rank.
        computed: Gradients of its outputs, by its loss.
        local: Gradients of its parameters, as they were in the job.
        tolerance: Relative difference of equal gradients.
        torch: The torch module.

    Raises:
        NotFollowedError: The loss was another one in the job.
    """
    again = local_gradients(capsule, torch, computed)
    square = sum(float(each.square().sum()) for each in again.values())
    product = sum(float((local[name] * e).sum()) for name, e in again.items() if name in local)
    factor = product / square if square else 0.0
    apart = sum(
        float((each - factor * again.get(name, 0)).square().sum()) for name, each in local.items()
    )
    if factor <= 0 or apart > (tolerance * factor) ** 2 * square:
        raise NotFollowedError(
            f"computed again, the loss of rank {capsule.rank} has another gradient: it is made of "
            "more than calls of torch"
        )
    return factor


def gradient_by_inputs(steps: Steps, torch: Any) -> tuple[Gradients, list[int | float]]:
    """Return the gradient of a model that is given the inputs of all ranks, as by its loss.

    Raises:
        NotFollowedError: It cannot be computed.
        Exception: What the module raises.
    """
    every = [capsule for capsule, _, _ in steps]
    first = every[0]
    if len({len(each.forwards) for each in every}) > 1:
        raise NotFollowedError("the ranks made different numbers of forwards")
    calls = [_calls(each) for each in every]
    restore(first, torch)
    outputs: Outputs = {}
    for number, own in enumerate(first.forwards):
        inputs = _joined(
            [(e.forwards[number].args, e.forwards[number].kwargs) for e in every], torch
        )
        whole = Forward(inputs[0], inputs[1], own.generators)
        returned = forward(first, whole, torch)
        if not torch.equal(torch.get_rng_state(), own.generators["torch"]):
            raise NotFollowedError("the model draws random numbers in its forward")
        outputs.update({(number, at): e for at, e in enumerate(tensors_of(returned, torch))})
    loss, numbers = whole_loss(calls, [own for _, own, _ in steps], torch, outputs)
    loss.backward()
    return gradients_of(first), numbers


def _joined(values: Sequence[Any], torch: Any) -> Any:
    """Return the arguments of the ranks as one, with their tensors behind each other."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return joined(values, torch)
    if isinstance(first, dict) and all(
        isinstance(e, dict) and e.keys() == first.keys() for e in values
    ):
        return {key: _joined([each[key] for each in values], torch) for key in first}
    if isinstance(first, (list, tuple)) and all(len(each) == len(first) for each in values):
        return type(first)(_joined(each, torch) for each in zip(*values, strict=True))
    if any(each != first for each in values):
        raise NotFollowedError("the ranks give their models other values than tensors")
    return first
