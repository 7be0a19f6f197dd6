"""The operations behind a loss, and how large what they keep for backward is.

Autograd keeps what an operation needs for its backward, mostly its inputs or its result. Here that
is read before backward frees it, and only numbers and names are kept of it. On a GPU all sizes are
asked for at once, and come later; no hook of the job is called.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.runtime import torch_private

UNKNOWN = -1
"""In place of a number: no such operation, or no size."""

Sizes = Callable[[int], float]
"""By place, the greatest magnitude in a tensor: NaN if any element is; 0 where it is unknown."""

_Key = tuple[int, Any, tuple[tuple[int, int], ...]]


class Kept(NamedTuple):
    """A tensor that an operation keeps for its backward."""

    own: bool
    """Whether it is the operation's own result."""
    maker: int
    """The operation that it came out of, or `UNKNOWN`."""
    trained: bool
    """Whether gradients flow into it."""
    size: int
    """The place of its size, or `UNKNOWN` where it has none."""


class Operation(NamedTuple):
    """One operation of the forward, as its backward knows it."""

    name: str
    below: tuple[int, ...]
    """The operations whose results entered it."""
    kept: tuple[Kept, ...]
    complete: bool
    """Whether all that it keeps could be looked at."""
    parameter: str | None
    """The name of the parameter that is here, where one does that is known."""
    size: int
    """The place of that parameter's size, of any parameter."""
    ran: int
    """Operations that ran later have greater numbers; -1 where that is not known."""


def read(loss: Any, names: dict[int, str], most: int) -> tuple[list[Operation], list[Any]] | None:
    """The operations behind a loss, and the tensors whose sizes they speak of.

    Args:
        loss: The tensor that backward begins with.
        names: The parameters' names by ``id``.
        most: Operations of a graph that is not too large.

    Returns:
        None for a graph that is too large.
    """
    root = loss.grad_fn
    if root is None:
        return [], []
    nodes, numbers = [root], {root: 0}
    below: list[tuple[int, ...]] = []
    for node in nodes:
        found = []
        for child, _ in node.next_functions:
            if child is None:
                continue
            number = numbers.get(child)
            if number is None:
                number = numbers[child] = len(nodes)
                nodes.append(child)
            found.append(number)
        below.append(tuple(found))
        if len(nodes) > most:
            return None
    tensors: list[Any] = []
    places: dict[_Key, int] = {}

    def place(tensor: Any) -> int:
        if not measurable(tensor):
            return UNKNOWN
        # What one operation gave, another one took, transposed perhaps: it is looked at once.
        laid = tuple(sorted(zip(tensor.stride(), tensor.shape, strict=True)))
        key = (tensor.data_ptr(), tensor.dtype, laid)
        found = places.get(key)
        if found is None:
            found = places[key] = len(tensors)
            tensors.append(tensor)
        return found

    operations = []
    for node, children in zip(nodes, below, strict=True):
        saved, complete = torch_private.saved_tensors(node)
        variable = getattr(node, "variable", None)
        operations.append(
            Operation(
                node.name(),
                children,
                tuple(
                    Kept(
                        own,
                        UNKNOWN if tensor.grad_fn is None else numbers.get(tensor.grad_fn, UNKNOWN),
                        tensor.requires_grad,
                        place(tensor),
                    )
                    for own, tensor in saved
                ),
                complete,
                names.get(id(variable)),
                UNKNOWN if variable is None else place(variable),
                torch_private.sequence_of(node),
            )
        )
    return operations, tensors


def measurable(tensor: Any) -> bool:
    """Whether a tensor has a size that its device can compute."""
    return bool(
        norms.plain(tensor)
        and tensor.layout is sys.modules["torch"].strided
        and tensor.element_size() > 1
        and tensor.numel()
    )


def at_once(tensors: Sequence[Any]) -> Sizes:
    """The sizes of tensors on the CPU, each computed when it is asked for."""
    known: dict[int, float] = {UNKNOWN: 0.0}

    def size(place: int) -> float:
        found = known.get(place)
        if found is None:
            tensor = tensors[place].detach()
            found = 0.0
            # Any other device would have to be waited for.
            if tensor.device.type == "cpu":
                least, most = (each.item() for each in tensor.aminmax())
                found = math.nan if math.isnan(most) else max(-least, most)
            known[place] = found
        return found

    return size


def computed(numbers: Sequence[float]) -> Sizes:
    """Sizes that were computed already."""
    return lambda place: 0.0 if place == UNKNOWN else numbers[place]
