"""Norms of tensors, without waiting for the device that computes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ddpdoctor.probe.observers.readback import Readback, capturing
from ddpdoctor.probe.runtime import torch_private


def plain(tensor: Any) -> bool:
    """Whether looking at a tensor is a matter of this rank alone: a DTensor's may not be."""
    torch: Any = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        # To put the pieces of a sparse one together, a GPU would have to be waited for.
        and (tensor.device.type == "cpu" or (tensor.is_cuda and tensor.layout is torch.strided))
        and tensor.is_floating_point()
    )


def norms(tensors: Sequence[Any]) -> Readback | None:
    """The 2-norms of plain tensors, in double precision; None if they cannot be had now."""
    torch: Any = sys.modules["torch"]
    if not tensors or capturing(torch):
        return None
    with torch.no_grad():
        dense = (
            each.detach() if each.layout is torch.strided else each.detach().coalesce().values()
            for each in tensors
        )
        return Readback([torch.linalg.vector_norm(each, dtype=torch.float64) for each in dense])


def gradients_and_values(parameters: Sequence[Any]) -> Readback | None:
    """The norms of gradient and value of each parameter in turn; None if they cannot be had now."""
    return norms([tensor for each in parameters for tensor in (each.grad, each)])


def has_plain_gradient(parameter: Any) -> bool:
    """Whether a parameter and its gradient are plain."""
    return parameter.grad is not None and plain(parameter) and plain(parameter.grad)


def largest(tensors: Sequence[Any]) -> Readback | None:
    """The greatest magnitude in each of strided tensors that are plain and not empty.

    In double precision: NaN where an element is. None if they cannot be had now.
    """
    torch: Any = sys.modules["torch"]
    if not tensors or capturing(torch):
        return None
    kinds: dict[tuple[Any, Any], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    with torch.no_grad():
        found = [
            (indices, torch_private.largest(torch, [tensors[index] for index in indices]))
            for indices in kinds.values()
        ]
        return Readback.gathered(len(tensors), found)
