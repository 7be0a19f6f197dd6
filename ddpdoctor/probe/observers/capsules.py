"""Keep one step so that it can be computed again.

This is off unless the command asks for it, and may wait for a GPU.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from ddpdoctor.probe.observers.loss_calls import LossFollower
from ddpdoctor.probe.runtime import rank
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.shield import shielded
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.capsule import (
    ODD_LOSS,
    Capsule,
    Forward,
    Source,
    plain_name,
    tensors_of,
    write,
)
from ddpdoctor.run.names import CAPSULE, capsule_file
from ddpdoctor.run.records.training import CapsuleRecord

MAX_FORWARDS = 64  # maximum number of forwards of a step that are kept


def _copied(value: Any) -> Any:
    """Return nested lists, tuples and mappings with copies of their tensors on the CPU."""
    torch = sys.modules["torch"]
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value


class Capsules(Observer):
    """One step of the first DDP module, kept as a capsule (`ddpdoctor.run.capsule`)."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        asked = os.environ.get(CAPSULE, "")
        self._number = int(asked) if asked.isdigit() else None
        self._ddp: weakref.ref[Any] | None = None
        self._step = -1
        self._forwards: list[Forward] = []
        self._weights: dict[str, Any] = {}
        self._reduced: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        self._carried = False
        self._follower: LossFollower | None = None

    def ddp_built(self, ddp: Any) -> None:
        """Follow the forwards of the first module."""
        if self._ddp is None:
            self._ddp = weakref.ref(ddp)
            ddp.register_forward_pre_hook(self._begins, with_kwargs=True)
            ddp.register_forward_hook(self._ended, with_kwargs=True)

    def _begins(self, ddp: Any, args: Any, kwargs: Any) -> None:
        self._pause()
        self._keep(ddp.module, args, kwargs)

    def _ended(self, ddp: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._follow(output)

    @property
    def _wanted(self) -> bool:
        on = sys.modules["torch"].is_grad_enabled() and rank.current() is self.state
        return on and self._number in (None, self.state.tracker.steps)

    @shielded
    def _keep(self, module: Any, args: Any, kwargs: Any) -> None:
        """Keep the inputs of a forward, and the weights if it is the first one."""
        if not self._wanted:
            return
        step = self.state.tracker.steps
        if step != self._step:
            self._step, self._forwards = step, []
            self._weights, self._reduced, self._used = {}, {}, {}
            self._follower = None if self._number is None else LossFollower(_copied)
        if len(self._forwards) >= MAX_FORWARDS:
            return
        every = self._number is None
        if not self._forwards:
            self._carried = False
            if not every:
                # Otherwise the step fails before it changes them.
                self._weights = {name: _copied(each) for name, each in _named(module)}
        inputs = (args, kwargs) if every else _copied((args, kwargs))
        self._forwards.append(Forward(inputs[0], dict(inputs[1]), _generators()))

    @shielded
    def _follow(self, output: Any) -> None:
        """Keep the gradients with which the backward of the outputs begins."""
        if self._number is None or not self._wanted or not self._forwards:
            return
        kept, torch = self._forwards[-1].gradients, sys.modules["torch"]
        for place, each in enumerate(tensors_of(output, torch)):
            if each.requires_grad:
                each.register_hook(lambda gradient, at=place: kept.update({at: _copied(gradient)}))
        if self._follower is not None:
            self._follower.begin(len(self._forwards) - 1, output)

    @shielded
    def _pause(self) -> None:
        if self._follower is not None:
            self._follower.end()

    def graph_begins(self, loss: Any) -> None:
        """Note the loss."""
        if self._follower is not None and self._wanted and self._forwards:
            self._follower.loss(loss)

    def backward_begins(self) -> None:
        """Note whether there are gradients before the first backward of the step."""
        if not self._reduced:
            self._carried = any(bool(each.any()) for each in self._gradients().values())

    def backward_ended(self) -> None:
        """Keep the gradients before they are clipped or unscaled."""
        self._reduced = self._gradients() or self._reduced

    def step_begins(self, optimizer: Any) -> None:
        """Keep the gradients as the optimizer gets them."""
        self._pause()
        self._used = self._gradients() or self._used

    def _gradients(self) -> dict[str, Any]:
        """Return copies of the gradients if this step is to be kept."""
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None or self._number is None or not self._wanted or not self._forwards:
            return {}
        named = _named(ddp.module)
        return {name: _copied(each.grad) for name, each in named if each.grad is not None}

    def step_ended(self, optimizer: Any, number: int) -> None:
        """Write the step that is to be kept."""
        if self._forwards and self._number == self._step:
            self._pause()
            if self._follower is not None:
                self._follower.finished = True
            self._write("")
            self._forwards = []

    def loss_began(self, loss: Any, value: Any) -> None:
        """Keep a step with a loss that is not finite."""
        number = value if isinstance(value, float) else float(loss)
        if self._number is None and self._forwards and number - number != 0.0:
            self._write(f"{ODD_LOSS}{number}")
            self._number, self._forwards = -1, []

    def rank_fails(self, error: BaseException) -> None:
        """Keep the step in which an exception ends the rank."""
        if self._number is None and self._forwards:
            self._write(f"{type(error).__name__}: {error}"[:500])

    def _write(self, error: str) -> None:
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is None:
            return
        distributed = sys.modules["torch"].distributed
        main = sys.modules["__main__"]
        number = distributed.get_rank()
        capsule = Capsule(
            rank=number,
            world_size=distributed.get_world_size(),
            step=self._step,
            module=ddp.module,
            weights=self._weights or {name: _copied(each) for name, each in _named(ddp.module)},
            forwards=self._forwards,
            reduced=self._reduced,
            used=self._used,
            carried=self._carried,
            loss_calls=self._follower.calls if self._follower is not None else None,
            error=error,
        )
        size, why = 0, ""
        try:
            path = os.path.join(rank.run_directory(), capsule_file(number))
            script = os.path.abspath(getattr(main, "__file__", None) or "")
            size = write(path, capsule, Source(script, list(sys.path)), sys.modules["torch"])
        except Exception as broken:
            # Pickling a module of the job may raise anything.
            why = f"{type(broken).__name__}: {broken}"[:300]
        self.state.add(
            CapsuleRecord(
                time=time.time_ns(), step=self._step, bytes=size, why_not=why, **caller().place
            ),
            1,
        )


def _named(module: Any) -> Iterator[tuple[str, Any]]:
    for named in (module.named_parameters(), module.named_buffers()):
        yield from ((plain_name(name), each) for name, each in named)


def _generators() -> dict[str, Any]:
    """Return the states of the random number generators, without drawing from them."""
    torch = sys.modules["torch"]
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy.random" in sys.modules:
        found["numpy"] = sys.modules["numpy.random"].get_state()
    if "random" in sys.modules:
        found["random"] = sys.modules["random"].getstate()
    return found
