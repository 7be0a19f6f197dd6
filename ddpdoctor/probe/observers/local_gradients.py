"""Gradients of a rank's own that are not finite, seen before the all-reduce spreads them.

One small parameter of each DDP module is watched, the first one: its gradient comes out of nearly
all of the backward pass, so what is NaN or infinite anywhere in it arrives there. Its sum is looked
at just before autograd accumulates it, and only then are the other parameters searched. On a GPU
the sum comes later: there the others are asked for as often as the budget allows.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

from ddpdoctor.probe.observers import finite, graphs, losses, norms
from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock

LARGEST = 1 << 16
"""Elements of a parameter that is watched, at most."""

MOST = 8
"""Gradients that are looked into; a job that goes on with NaN has them in every step."""

SHARE = 4
"""Of what diagnosis may cost, a quarter at most goes here: the others have to have their turn."""

NAMED = 4
"""Parameters that are named: the last ones, through which the backward came first."""

_HOOK = "local_gradients"
_SEARCH = "local_gradients.search"
_found = 0
_spent = 0


@shield.shielded
def _built(ddp: Any) -> None:
    state = rank.current()
    if state is None or not state.budget.enabled:
        return
    for name, parameter in torch_private.reduced_parameters(ddp):
        if norms.plain(parameter) and 0 < parameter.numel() <= LARGEST:
            node = torch_private.accumulator(parameter)
            if node is not None:
                node.register_prehook(_watcher(weakref.ref(ddp), name))
            return


def _watcher(module: weakref.ref[Any], name: str) -> Any:
    def before_accumulation(gradients: Any) -> None:
        if rank.active is None or _HOOK in shield.off:
            return
        try:
            _look(module, name, gradients[0])
        except Exception as error:
            shield.fault(_HOOK, error)

    return before_accumulation


def _look(module: weakref.ref[Any], name: str, gradient: Any) -> None:
    global _found, _spent
    state = rank.current()
    if state is None or _found >= MOST or SHARE * _spent > state.budget.earned():
        return
    if not norms.plain(gradient):
        return
    torch: Any = sys.modules["torch"]
    began = clock()
    with torch.no_grad():
        value = losses.reader(gradient.sum(dtype=torch.float32))
        if callable(value):
            # To search costs more than to look: it is done half as often.
            search = 2 * SHARE * _spent <= state.budget.earned()
            finite.local_gradient(value, _ask(module, name, search))
        elif value is not None and not math.isfinite(value):
            _found += 1
            names = _search(module, name)
            finite.local_gradient(value, lambda: names)
    cost = clock() - began
    _spent += cost
    state.budget.spend(cost)


def _search(module: weakref.ref[Any], name: str) -> list[str]:
    """The parameters on the CPU whose gradient so far is not finite."""
    named = _arrived(module)
    sizes = graphs.at_once([gradient for _, gradient in named])
    return _named([(each, sizes(place)) for place, (each, _) in enumerate(named)], name)


def _ask(module: weakref.ref[Any], name: str, search: bool) -> finite.Names:
    """Ask the devices which gradients so far are not finite; what names them when they told."""
    found, names = None, []
    if search and _SEARCH not in shield.off:
        try:
            named = _arrived(module)
            names = [each for each, _ in named]
            found = norms.largest([gradient for _, gradient in named])
        except Exception as error:
            # The sum is told without it.
            shield.fault(_SEARCH, error)

    def tell() -> list[str]:
        if found is None or not found.ready:
            return [name]
        return _named(list(zip(names, found.numbers(), strict=True)), name)

    return tell


def _named(sizes: list[tuple[str, float]], name: str) -> list[str]:
    """The parameters whose gradients are not finite, those that backward came to first."""
    return [each for each, size in sizes if not math.isfinite(size)][: -NAMED - 1 : -1] or [name]


def _arrived(module: weakref.ref[Any]) -> list[tuple[str, Any]]:
    """The gradients of this rank's own that have arrived so far, with their parameters' names."""
    ddp = module()
    # In a view of a bucket there may already be what the all-reduce left.
    if ddp is None or ddp.gradient_as_bucket_view:
        return []
    return [
        (each, parameter.grad)
        for each, parameter in torch_private.reduced_parameters(ddp)
        if parameter.grad is not None and graphs.measurable(parameter.grad)
    ]


def install() -> None:
    """Listen to the moments of training."""
    events.ddp_built.append(_built)
