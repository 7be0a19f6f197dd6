"""Norms of tensors, told without waiting for the device that computes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ddpdoctor.probe.observers.readback import Readback, capturing
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.recorder import Lazy, NotYet
from ddpdoctor.run.records.base import JsonObject


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
        return Readback([_norm(torch, tensor) for tensor in tensors])


def _norm(torch: Any, tensor: Any) -> Any:
    dense = tensor.detach()
    if dense.layout is not torch.strided:
        dense = dense.coalesce().values()
    return torch.linalg.vector_norm(dense, dtype=torch.float64)


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
        return Readback.gathered(
            len(tensors),
            [
                (indices, torch_private.largest(torch, [tensors[index] for index in indices]))
                for indices in kinds.values()
            ],
        )


def lazy(numbers: Sequence[Readback], record: Callable[[list[float]], JsonObject]) -> Lazy:
    """A record that is made in the writing thread, as soon as the numbers are there."""

    def make(last: bool) -> bytes | JsonObject:
        if all(each.ready for each in numbers):
            return record([number for each in numbers for number in each.numbers()])
        if not last:
            raise NotYet
        # A device that never came so far: there is nothing to tell.
        return b""

    return make
