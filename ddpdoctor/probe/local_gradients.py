"""Gradients of a rank's own that are not finite, seen before the all-reduce spreads them.

One small parameter of each DDP module is watched, the first one: its gradient comes out of nearly
all of the backward pass, so what is NaN or infinite anywhere in it arrives there. Its sum is looked
at just before autograd accumulates it, and only then are the other parameters searched.
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

from ddpdoctor.probe import events, finite, norms, rank, shield, torch_private
from ddpdoctor.probe.budget import clock
from ddpdoctor.probe.hooks import losses

LARGEST = 1 << 16
"""Elements of a parameter that is watched, at most."""

MOST = 8
"""Gradients that are looked into; a job that goes on with NaN has them in every step."""

SHARE = 4
"""Of what diagnosis may cost, a quarter at most goes here: the others have to have their turn."""

NAMED = 4
"""Parameters that are named: the last ones, through which the backward came first."""

_HOOK = "local_gradients"
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
        if value is not None and (callable(value) or not math.isfinite(value)):
            names = [name]
            if not callable(value):
                _found += 1
                names = _search(torch, module, name)
            finite.local_gradient(value, names)
    cost = clock() - began
    _spent += cost
    state.budget.spend(cost)


def _search(torch: Any, module: weakref.ref[Any], name: str) -> list[str]:
    """The parameters on the CPU whose gradient so far is not finite."""
    ddp = module()
    # In a view of a bucket there may already be what the all-reduce left.
    if ddp is None or ddp.gradient_as_bucket_view:
        return [name]
    found = [
        each
        for each, parameter in torch_private.reduced_parameters(ddp)
        if parameter.grad is not None
        and norms.plain(parameter.grad)
        and parameter.grad.device.type == "cpu"
        and not torch.isfinite(parameter.grad).all()
    ]
    return found[: -NAMED - 1 : -1] or [name]


def install() -> None:
    """Listen to the moments of training."""
    events.ddp_built.append(_built)
