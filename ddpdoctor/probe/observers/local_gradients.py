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
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.observers import graphs, norms, readback
from ddpdoctor.probe.observers.finite import Losses, Names
from ddpdoctor.probe.runtime import events, hot, rank, shield, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState

LARGEST = 1 << 16
"""Elements of a parameter that is watched, at most."""

MOST = 8
"""Gradients that are looked into; a job that goes on with NaN has them in every step."""

SHARE = 4
"""Of what diagnosis may cost, a quarter at most goes here: the others have to have their turn."""

NAMED = 4
"""Parameters that are named: the last ones, through which the backward came first."""

_SEARCH = "local_gradients.search"


class _Watched:
    """A parameter, and what is to be called before its gradient is accumulated.

    Args:
        parameter: The parameter; the node of autograd that does it would keep it alive.
        call: What is called.
    """

    def __init__(self, parameter: Any, call: Callable[[Any], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._call = call
        self._handle: Any = None
        self._watching = False

    def watch(self) -> None:
        """Call it from now on."""
        parameter = self._parameter()
        if self._watching or parameter is None or torch_private.compiles_autograd():
            return
        self._watching = self._handle is not None and torch_private.hook_again(
            self._handle, self._call
        )
        if not self._watching:
            node = torch_private.accumulator(parameter)
            if node is not None:
                self._handle = node.register_prehook(self._call)
                self._watching = True

    def let_go(self) -> None:
        """Call it no more."""
        if self._watching:
            self._handle.remove()
            self._watching = False


class LocalGradients(Observer):
    """Those of one rank."""

    def __init__(self, state: RankState, losses: Losses) -> None:
        super().__init__(state)
        self._losses = losses
        self._found = 0
        self._spent = 0
        self._watched: list[_Watched] = []

    def ddp_built(self, ddp: Any) -> None:
        """Watch a parameter of the module."""
        for name, parameter in torch_private.reduced_parameters(ddp):
            if norms.plain(parameter) and 0 < parameter.numel() <= LARGEST:
                self._watched.append(_Watched(parameter, self._watcher(weakref.ref(ddp), name)))
                self.wake("backward_begins", "step_ended")
                return

    def _watcher(self, module: weakref.ref[Any], name: str) -> Callable[[Any], None]:
        look = shield.shielded(self._look)
        tracker = self.state.tracker

        def before_accumulation(gradients: Any) -> None:
            if rank.active is tracker and not tracker.light:
                look(module, name, gradients[0])

        return hot.deferring(before_accumulation)

    def backward_begins(self) -> None:
        """Watch in steps that are seen in full: in the others autograd is to call nothing."""
        for each in self._watched:
            each.watch()
        self.rest("backward_begins")

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Watch no longer, until the next step that is seen in full."""
        sparse = self.state.tracker.sparse
        if not self.state.tracker.light:
            return
        for each in self._watched:
            each.let_go()
        self.rest("step_ended")
        events.before_step((number + 2 + sparse & ~sparse) - 1, self._watch_again)

    def _watch_again(self) -> None:
        self.wake("backward_begins", "step_ended")

    def _look(self, module: weakref.ref[Any], name: str, gradient: Any) -> None:
        budget = self.state.budget
        if self._found >= MOST or SHARE * self._spent > budget.earned():
            return
        if not norms.plain(gradient):
            return
        torch: Any = sys.modules["torch"]
        began = clock()
        with torch.no_grad():
            value = readback.loss_reader(gradient.sum(dtype=torch.float32))
            if callable(value):
                # To search costs more than to look: it is done half as often.
                search = 2 * SHARE * self._spent <= budget.earned()
                self._losses.gradient(value, _ask(module, name, search))
            elif value is not None and not math.isfinite(value):
                self._found += 1
                names = _search(module, name)
                self._losses.gradient(value, lambda: names)
        cost = clock() - began
        self._spent += cost
        budget.spend(cost)


def _search(module: weakref.ref[Any], name: str) -> list[str]:
    """The parameters on the CPU whose gradient so far is not finite."""
    named = _arrived(module)
    sizes = graphs.at_once([gradient for _, gradient in named])
    return _named([(each, sizes(place)) for place, (each, _) in enumerate(named)], name)


def _ask(module: weakref.ref[Any], name: str, search: bool) -> Names:
    """Ask the devices which gradients so far are not finite; what names them when they answered."""
    found, names = None, []
    if search and _SEARCH not in shield.off:
        try:
            named = _arrived(module)
            names = [each for each, _ in named]
            found = norms.largest([gradient for _, gradient in named])
        except Exception as error:
            # The sum is recorded without it.
            shield.fault(_SEARCH, error)

    def answer() -> list[str]:
        if found is None or not found.ready:
            return [name]
        return _named(list(zip(names, found.numbers(), strict=True)), name)

    return answer


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
