"""Where in the forward pass a loss stopped being finite, read from the graph of its backward.

Autograd keeps what an operation needs for its backward, mostly its inputs or its result. So from
the loss downwards those that are not finite are followed to the first one, before backward frees
them. Nothing is computed again, and no hook of the job is called.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from ddpdoctor.probe import norms, torch_private
from ddpdoctor.probe.replicas import watched
from ddpdoctor.record import Record

MOST_NODES = 20_000
"""Operations that are looked at; a larger graph is given up."""

NAMED = 4
"""Operations that are named where what they gave was not kept."""

SINGULAR = frozenset(
    {"acos", "acosh", "asin", "atanh", "digamma", "div", "erfinv", "exp", "lgamma"}
    | {"linalg_vector_norm", "log", "log10", "log1p", "log2", "logsumexp", "norm", "pow"}
    | {"reciprocal", "rsqrt", "sqrt", "std", "tan", "var", "xlogy"}
)
"""Operations that make numbers of no size out of small ones; others have to overflow for it."""

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def origin(loss: Any, value: float) -> Record | None:
    """Where a loss on the CPU became what it is.

    Args:
        loss: The tensor that backward begins with.
        value: Its value, which is not finite.

    Returns:
        ``what``: ``input`` (something without a gradient that entered an operation, such as a batch
        or a constant), ``parameter`` or ``operation``; ``operations``: their names, the first to
        run first; ``module``: the one whose parameters are nearest; ``within``: whether the
        operation uses them itself; ``infinite``: the same of an infinite value that entered the
        operation, if NaN came out of it. None if the graph does not tell.
    """
    names = {
        id(parameter): name
        for each in watched
        for index, name in enumerate(each.names)
        if (parameter := each.parameter(index)) is not None
    }
    with sys.modules["torch"].no_grad():
        return _Search(names, math.isnan(value)).run(loss.grad_fn)


class _Search:
    """One walk from a loss downwards.

    Args:
        names: The parameters' names by ``id``.
        nan: Whether NaN is looked for, or infinite values as well: those may be meant as a mask.
    """

    def __init__(self, names: dict[int, str], nan: bool) -> None:
        self._names = names
        self._nan = nan
        self._left = MOST_NODES

    def run(self, node: Any) -> Record | None:
        while node is not None:
            below, found = self._region(node)
            if found is not None:
                return found
            node = below
        return None

    def _region(self, bad: Any) -> tuple[Any, Record | None]:
        """From a node whose result is bad to the next one below it; or what is found instead."""
        queue, known = [bad], {bad}
        tellers: list[Any] = []
        blind = False
        for node in queue:
            self._left -= 1
            if self._left < 0:
                return None, None
            children = [child for child, _ in node.next_functions if child is not None]
            saved, complete = torch_private.saved_tensors(node)
            blind |= not complete
            inputs = [tensor for own, tensor in saved if not own]
            fine = set()
            for tensor in inputs:
                if not self._bad(tensor):
                    fine.add(tensor.grad_fn)
                elif tensor.grad_fn in children:
                    return tensor.grad_fn, None
                elif tensor.grad_fn is None and not tensor.requires_grad:
                    return None, self._told("input", [node], node)
            infinite = next((each for each in inputs if self._nan and _infinite(each)), None)
            if infinite is not None:
                return None, self._from_infinite(node, infinite)
            if inputs and node is not bad:
                tellers.append(node)
            for child in children:
                if child in known or child in fine:
                    continue
                known.add(child)
                parameter = getattr(child, "variable", None)
                if parameter is not None:
                    if self._bad(parameter):
                        return None, self._told("parameter", [node], node)
                    continue
                results = [tensor for own, tensor in torch_private.saved_tensors(child)[0] if own]
                if any(self._bad(each) for each in results):
                    return child, None
                if not results:
                    queue.append(child)
        if blind:
            return None, None
        suspects = [each for each in (*tellers, bad) if _words(each.name()) in SINGULAR]
        nodes = (suspects or [*tellers, bad])[-NAMED:]
        return None, self._told("operation", nodes, nodes[0])

    def _from_infinite(self, node: Any, tensor: Any) -> Record:
        """NaN came out of an operation that an infinite value went into: where that began."""
        found = self._told("operation", [node], node)
        if tensor.grad_fn is not None:
            further = _Search(self._names, nan=False)
            further._left = self._left
            found["infinite"] = further.run(tensor.grad_fn)
        return found

    def _bad(self, tensor: Any) -> bool:
        least, most = _range(tensor)
        return math.isnan(least) if self._nan else not math.isfinite(most - least)

    def _told(self, what: str, nodes: list[Any], at: Any) -> Record:
        distance, names = next(self._parameters(at), (0, []))
        # Between a layer's operation and its weight there is at most a transposition.
        return {
            "what": what,
            "operations": [_words(each.name()) for each in nodes],
            "module": names[0].rpartition(".")[0] if names else None,
            "within": bool(names) and distance <= 2,
        }

    def _parameters(self, node: Any) -> Iterator[tuple[int, list[str]]]:
        """The named parameters nearest to an operation, with their distance."""
        level, known, distance = [node], {node}, 0
        while level and len(known) < MOST_NODES:
            below = []
            names = []
            for each in level:
                name = self._names.get(id(getattr(each, "variable", None)))
                if name is not None:
                    names.append(name)
                for child, _ in each.next_functions:
                    if child is not None and child not in known:
                        known.add(child)
                        below.append(child)
            if names:
                yield distance, names
            level, distance = below, distance + 1


def _range(tensor: Any) -> tuple[float, float]:
    """The least and the greatest element, both NaN where any element is; zeros if unknown."""
    if not norms.plain(tensor) or not tensor.numel() or tensor.device.type != "cpu":
        return 0.0, 0.0
    least, most = tensor.detach().aminmax()
    return least.item(), most.item()


def _infinite(tensor: Any) -> bool:
    return any(map(math.isinf, _range(tensor)))


def _words(name: str) -> str:
    """``NllLossBackward0`` as ``nll_loss``."""
    bare = re.sub(r"Backward\d*$", "", name.rpartition("::")[2])
    return _WORDS.sub("_", bare).lower()
