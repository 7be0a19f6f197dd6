"""Find where in the forward pass a loss stopped being finite, in the graph of its backward.

The search follows non-finite results from the loss down to the first one. Autograd keeps the
tensors that an operation needs for its backward, usually its inputs or its result. We read them
before backward frees them, keep only numbers and names, and recompute nothing. A loss on the CPU is
traced when it is not finite. A loss on a GPU is read some steps later, when its graph is freed, so
all sizes are requested beforehand. No hook of the job is called.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ddpdoctor.probe.observers import readback
from ddpdoctor.probe.observers import readback as readback_module
from ddpdoctor.probe.observers.ddp_modules import Replica
from ddpdoctor.probe.observers.readback import Readback
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.run.records.model import Origin

# -- the operations behind a loss, and the magnitudes of the tensors kept for backward

UNKNOWN = -1  # placeholder for a missing operation or size

Sizes = Callable[[int], float]
"""By place, the largest magnitude in a tensor. NaN if any element is NaN, and 0 if unknown."""

_Key = tuple[int, Any, tuple[tuple[int, int], ...]]


class Kept(NamedTuple):
    """A tensor that an operation keeps for its backward."""

    own: bool  # whether it is the operation's own result
    maker: int  # the operation that computed it, or `UNKNOWN`
    trained: bool  # whether gradients flow into it
    size: int  # the place of its size, or `UNKNOWN`


class Operation(NamedTuple):
    """An operation of the forward, read from its backward node."""

    name: str
    below: tuple[int, ...]  # the operations that computed its inputs
    kept: tuple[Kept, ...]
    complete: bool  # whether all kept tensors could be read
    parameter: str | None  # the parameter's name, if this is a named parameter
    size: int  # the place of the parameter's size
    ran: int  # order of execution, -1 if unknown


def read_graph(
    loss: Any, names: dict[int, str], most: int
) -> tuple[list[Operation], list[Any]] | None:
    """Return the operations that computed a loss, at most ``most``, and the tensors to measure.

    ``names`` holds the parameters' names by ``id``. Return None for a graph that is too large.
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
        # The result of one operation is an input of another, perhaps transposed. Measure it once.
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
    """Return whether the device can compute the magnitude of a tensor."""
    return bool(
        readback.is_plain(tensor)
        and tensor.layout is sys.modules["torch"].strided
        and tensor.element_size() > 1
        and tensor.numel()
    )


def sizes_at_once(tensors: Sequence[Any]) -> Sizes:
    """Return the sizes of tensors on the CPU, computed on demand."""
    known: dict[int, float] = {UNKNOWN: 0.0}

    def size(place: int) -> float:
        found = known.get(place)
        if found is None:
            tensor = tensors[place].detach()
            found = 0.0
            # Any other device would make us wait.
            if tensor.device.type == "cpu":
                least, most = (each.item() for each in tensor.aminmax())
                found = math.nan if math.isnan(most) else max(-least, most)
            known[place] = found
        return found

    return size


# -- the search

MAX_OPERATIONS = 20_000  # maximum number of operations in a searched graph
MAX_TRACED = 4096  # the same for a loss that may be finite
NAMED_OPERATIONS = 4  # maximum number of named operations whose results were not kept
SINGULAR = frozenset(
    {"acos", "acosh", "asin", "atanh", "digamma", "div", "erfinv", "exp", "lgamma"}
    | {"linalg_vector_norm", "log", "log10", "log1p", "log2", "logsumexp", "norm", "pow"}
    | {"reciprocal", "rsqrt", "sqrt", "std", "tan", "var", "xlogy"}
)
"""Operations that can turn small numbers into NaN or infinity. Others must overflow."""

_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def origin(loss: Any, value: float, replicas: Sequence[Replica]) -> Origin | None:
    """Find where a loss on the CPU stopped being finite. None if the graph does not show it."""
    with sys.modules["torch"].no_grad():
        found = read_graph(loss, _names(replicas), MAX_OPERATIONS)
        if found is None:
            return None
        operations, tensors = found
        return _Search(operations, sizes_at_once(tensors), math.isnan(value)).run()


class Trace:
    """The sizes of all tensors that a loss was computed from, which a device computes.

    Holds only names and numbers of the graph.
    """

    def __init__(self, operations: list[Operation], readback: Readback) -> None:
        self._operations = operations
        self._readback = readback

    @property
    def ready(self) -> bool:
        """Return whether the device has computed all sizes. Never waits."""
        return self._readback.ready

    @property
    def finite(self) -> bool:
        """Return whether all of them are finite, once they are ready."""
        return all(map(math.isfinite, self._readback.numbers()))

    def origin(self, value: float) -> Origin | None:
        """Find where the loss stopped being finite, once they are ready, as `origin` does."""
        numbers = self._readback.numbers()

        def sizes(place: int) -> float:
            return 0.0 if place == UNKNOWN else float(numbers[place])

        return _Search(self._operations, sizes, math.isnan(value)).run()


def trace(loss: Any, replicas: Sequence[Replica]) -> tuple[Trace, int] | None:
    """Request from the device the sizes of all tensors that a loss was computed from.

    Returns:
        The trace, and the number of bytes that the device reads for it. None if the graph shows
        nothing.
    """
    with sys.modules["torch"].no_grad():
        found = read_graph(loss, _names(replicas), MAX_TRACED)
        if found is None or not found[1]:
            return None
        operations, tensors = found
        readback = readback_module.largest_magnitudes(tensors)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return None if readback is None else (Trace(operations, readback), size)


def _names(replicas: Sequence[Replica]) -> dict[int, str]:
    """Return the names of DDP's parameters by their ``id``."""
    return {
        id(parameter): name
        for each in replicas
        for index, name in enumerate(each.names)
        if (parameter := each.parameter(index)) is not None
    }


class _Search:
    """One walk from a loss down its operations and the magnitudes of their kept tensors.

    Infinite values may be an intended mask, so ``nan`` restricts the search to NaN.
    """

    def __init__(self, operations: Sequence[Operation], sizes: Sizes, nan: bool) -> None:
        self._operations = operations
        self._sizes = sizes
        self._nan = nan

    def run(self, start: int = 0) -> Origin | None:
        at: int | None = start if self._operations else None
        while at is not None:
            at, found = self._region(at)
            if found is not None:
                return found
        return None

    def _region(self, bad: int) -> tuple[int | None, Origin | None]:
        """Go from a bad result to the next one below it, or return the origin.

        Operations without a kept result form one region with those below them.
        """
        queue, known = [bad], {bad}
        tellers: list[int] = []
        for number in queue:
            further = self._judge_inputs(number)
            if further is not None:
                return further
            kept = self._operations[number].kept
            fine = {each.maker for each in kept if not each.own}
            if fine and number != bad:
                tellers.append(number)
            children = [
                each
                for each in self._operations[number].below
                if each not in known and each not in fine
            ]
            known.update(children)
            further = self._judge_results(number, children)
            if further is not None:
                return further
            # Continue below an operation without a kept result: its result is unknown.
            for child in children:
                operation = self._operations[child]
                if operation.size == UNKNOWN and not any(each.own for each in operation.kept):
                    queue.append(child)
        if not all(self._operations[number].complete for number in queue):
            return None, None
        suspects = [each for each in (*tellers, bad) if self._word(each) in SINGULAR]
        numbers = (suspects or [*tellers, bad])[-NAMED_OPERATIONS:]
        return None, self._origin("operation", numbers, numbers[0])

    def _judge_results(
        self, number: int, children: list[int]
    ) -> tuple[int | None, Origin | None] | None:
        """Judge the results of the operations below one. Return None if they are finite."""
        for child in children:
            below = self._operations[child]
            if below.size != UNKNOWN:
                if self._bad(below.size):
                    return None, self._origin("parameter", [number], number)
            elif any(self._bad(each.size) for each in below.kept if each.own):
                return child, None
        return None

    def _judge_inputs(self, number: int) -> tuple[int | None, Origin | None] | None:
        """Judge the kept inputs of an operation. Return None if all of them are finite."""
        operation = self._operations[number]
        inputs = [kept for kept in operation.kept if not kept.own]
        for kept in inputs:
            if self._bad(kept.size):
                if kept.maker in operation.below:
                    return kept.maker, None
                if not kept.trained:
                    return None, self._origin("input", [number], number)
        infinite = next(
            (each for each in inputs if self._nan and math.isinf(self._sizes(each.size))), None
        )
        if infinite is None:
            return None
        # An infinite input made this result NaN. Find the origin of the input.
        before: Origin | None = None
        if infinite.maker != UNKNOWN:
            before = _Search(self._operations, self._sizes, nan=False).run(infinite.maker)
        return None, replace(self._origin("operation", [number], number), infinite=before)

    def _bad(self, place: int) -> bool:
        size = self._sizes(place)
        return math.isnan(size) if self._nan else not math.isfinite(size)

    def _word(self, number: int) -> str:
        return _words(self._operations[number].name)

    def _origin(self, what: str, numbers: list[int], at: int) -> Origin:
        distance, names = next(self._parameters(at), (0, []))
        return Origin(
            what=what,
            operations=tuple(self._word(each) for each in numbers),
            module=names[0].rpartition(".")[0] if names else None,
            # At most a transposition is between a layer's operation and its weight.
            within=bool(names) and distance <= 2,
            order=self._order(numbers[0]) if len(numbers) == 1 else None,
        )

    def _order(self, number: int) -> tuple[int, int] | None:
        """Return the position of an operation among those of its name after the model's layers."""
        operations = self._operations
        if any(each.ran < 0 for each in operations):
            return None
        trained = {index for index, each in enumerate(operations) if each.size != UNKNOWN}
        layers = [each.ran for each in operations if trained.intersection(each.below)]
        last = max(layers, default=-1)
        word = self._word(number)
        alike = [
            each.ran
            for index, each in enumerate(operations)
            if each.ran > last and index not in trained and _words(each.name) == word
        ]
        mine = operations[number].ran
        return (sum(each < mine for each in alike), len(alike)) if mine in alike else None

    def _parameters(self, number: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the named parameters nearest to an operation, with their distance."""
        level, known, distance = [number], {number}, 0
        while level:
            below = []
            names = []
            for each in level:
                operation = self._operations[each]
                if operation.parameter is not None:
                    names.append(operation.parameter)
                for child in operation.below:
                    if child not in known:
                        known.add(child)
                        below.append(child)
            if names:
                yield distance, names
            level, distance = below, distance + 1


def _words(name: str) -> str:
    """Turn ``NllLossBackward0`` into ``nll_loss``."""
    bare = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return _WORD_BREAK.sub("_", bare).lower()
