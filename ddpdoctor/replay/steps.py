"""Load a kept step of a rank, and compute its forwards and backwards again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ddpdoctor.replay.definitions import Definitions
from ddpdoctor.run.capsule import Capsule, Forward, Source, read, tensors_of


def load(path: str, torch: Any, trusted: bool = False) -> Capsule:
    """Read a capsule with the classes of its script, and import as the rank did.

    Raises:
        Exception: What `read` raises.
    """

    def finder(source: Source) -> Callable[[str], Any]:
        for each in reversed(source.path):
            if each not in sys.path:
                sys.path.insert(0, each)
        script = source.script
        if not os.access(script, os.R_OK):
            # On another machine, or as another user, in the directory of the job.
            script = os.path.abspath(os.path.basename(script))
        return Definitions(script).find

    return read(path, torch, finder, trusted)


def forward(capsule: Capsule, each: Forward, torch: Any) -> Any:
    """Compute a forward again, from the state of the generators that it had."""
    states = each.generators
    torch.set_rng_state(states["torch"])
    device = next((value.device for value in capsule.module.parameters()), torch.device("cpu"))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "random" in states:
        import random

        random.setstate(states["random"])
    args, kwargs = _on((each.args, each.kwargs), device, torch)
    return capsule.module(*args, **kwargs)


def _on(value: Any, device: Any, torch: Any) -> Any:
    """Return nested lists, tuples and mappings with their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(each, device, torch) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on(each, device, torch) for each in value)
    return value


def restore(capsule: Capsule, torch: Any, device: str = "cpu") -> None:
    """Give the module the weights that it had before the step, and no gradients."""
    capsule.module.to("cpu")
    with torch.no_grad():
        own = dict(capsule.module.named_parameters()) | dict(capsule.module.named_buffers())
        for name, value in capsule.weights.items():
            if name in own:
                own[name].copy_(value)
    for parameter in capsule.module.parameters():
        parameter.grad = None
    capsule.module.to(device)


Outputs = dict[tuple[int, int], Any]
"""Tensors for the outputs of forwards, by forward and position."""


def local_gradients(
    capsule: Capsule,
    torch: Any,
    given: Outputs | None = None,
    returned: Outputs | None = None,
    device: str = "cpu",
    nudge: float = 0.0,
) -> dict[str, Any]:
    """Compute the gradients that a rank had before they were reduced.

    Args:
        capsule: Its step.
        torch: The torch module.
        given: Gradients of the outputs in place of those that the job's loss gave.
        returned: Gets copies of the outputs.
        device: Where it is computed.
        nudge: Relative size of random changes of the weights before.

    Raises:
        Exception: What the module raises.
    """
    restore(capsule, torch, device)
    if nudge:
        with torch.no_grad():
            for each in capsule.module.parameters():
                each.mul_(1 + nudge * torch.randn(each.shape))
    for number, each in enumerate(capsule.forwards):
        outputs = list(tensors_of(forward(capsule, each, torch), torch))
        if given is None:
            used = {at: each.gradients[at] for at in each.gradients if at < len(outputs)}
            used = {at: _replaced(outputs[at], value) for at, value in used.items()}
        else:
            used = {at: value for (of, at), value in given.items() if of == number}
        if returned is not None:
            returned.update({(number, at): e.detach() for at, e in enumerate(outputs)})
        if used:
            torch.autograd.backward(
                [outputs[at] for at in used],
                [used[at].to(outputs[at]) for at in used],
            )
    return gradients_of(capsule)


def _replaced(output: Any, gradient: Any) -> Any:
    """Let an output have a gradient in the backward. Return what that begins with.

    An output may be made of another one, such as a loss of the logits beside it. The gradient that
    was kept then has that part already.
    """
    gradient = gradient.to(output)
    output.register_hook(lambda _: gradient)
    return gradient


def gradients_of(capsule: Capsule) -> dict[str, Any]:
    """Return the gradients of the module's parameters."""
    return {
        name: each.grad.double()
        for name, each in capsule.module.named_parameters()
        if each.grad is not None
    }
