"""Keep one step so that it can be computed again.

This is off unless the command asks for it, and may wait for a GPU. In that step, torch's functions
are followed from the outputs of a model to its loss.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddpdoctor.probe.runtime import rank
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.shield import hide_frame, shielded
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.probe.runtime.torch_private import function_mode
from ddpdoctor.run.capsule import (
    ASSIGNED,
    Call,
    Capsule,
    Forward,
    LossCalls,
    Ref,
    Source,
    plain_name,
    tensors_of,
    write,
)
from ddpdoctor.run.names import CAPSULE, capsule_file
from ddpdoctor.run.records.training import CapsuleRecord

# -- the calls that make a loss

MAX_CALLS = 2000  # Calls that are kept
MAX_WATCHED = 16  # Elements of a tensor whose values are compared before each use

_VIEWS = ("get.T", "get.mT", "get.H", "get.mH", "get.real", "get.imag", "get.data")
_NOT_FOLLOWED = ("Tensor.backward", "Tensor.register_hook")
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...))


class LossFollower:
    """A recorder of the calls that make a loss.

    A mode of torch's functions is on the stack from the end of a forward until the optimizer's
    step, and only if there is no other one, so that no other can be taken off in its place.
    ``copied`` copies a tensor to the CPU.
    """

    def __init__(self, copied: Callable[[Any], Any]) -> None:
        self.calls = LossCalls([], {}, {}, [])
        self._copied = copied
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # Keep ids valid
        self._watched: dict[int, Any] = {}  # Values of small tensors when they were last seen
        self._mode: Any = None
        self._trouble = ""  # Why the last call cannot be kept
        self.finished = False  # Whether nothing more is recorded

    def begin(self, forward: int, output: Any) -> None:
        """Follow what is made of the output of a forward."""
        torch = sys.modules["torch"]
        for place, tensor in enumerate(tensors_of(output, torch)):
            self.calls.outputs[self._number(tensor)] = (forward, place)
        if function_mode(torch) is not None:
            self._cannot("a function mode of torch was active")
        elif self._mode is None:
            self._mode = _mode_class(torch)(self)
            self._mode.__enter__()

    def end(self) -> None:
        """Leave the stack of modes. Does nothing within a call that the mode handles."""
        if self._mode is not None and function_mode(sys.modules["torch"]) is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None

    @shielded
    def loss(self, loss: Any) -> None:
        """Note the loss with which a backward begins."""
        number = self._numbers.get(id(loss))
        if number is None:
            self._cannot("the loss was not computed from the outputs by functions of torch")
        else:
            self.calls.losses.append(number)

    def _cannot(self, why: str) -> None:
        self.calls.why_not = self.calls.why_not or why

    def _number(self, tensor: Any) -> int:
        number = self._numbers[id(tensor)] = len(self._kept)
        self._kept.append(tensor)
        return number

    def called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function and record the call."""
        given: list[Any] = []
        self._begins(function, args, kwargs, given)
        result = function(*args, **kwargs)
        if given:
            self._ended(given[0], args, result)
        return result

    @shielded
    def _begins(self, function: Any, args: Any, kwargs: Any, given: list[Any]) -> None:
        """Append a call to ``given``, with arguments as they are before it."""
        name = _name(function)
        known = not name.startswith("get.") or name in _VIEWS
        if self.finished or self.calls.why_not or not known or name in _NOT_FOLLOWED:
            return
        self._trouble = ""
        replaced = self._replaced((args, kwargs), sys.modules["torch"])
        given.append(Call(name, replaced[0], replaced[1], ()))

    @shielded
    def _ended(self, call: Call, args: Any, result: Any) -> None:
        made = list(tensors_of(result, sys.modules["torch"]))
        changes = call.name == "Tensor.__setitem__"
        if not made and not changes:
            return
        if len(self.calls.calls) >= MAX_CALLS:
            self._trouble = f"the loss takes more than {MAX_CALLS} calls"
        if self._trouble:
            self._cannot(self._trouble)
            return
        numbers = tuple(self._number(each) for each in made)
        self.calls.calls.append(call._replace(results=numbers))
        seen = [*made, args[0]] if changes else made
        for each in seen:
            if each.numel() <= MAX_WATCHED:
                self._watched[self._numbers[id(each)]] = each.detach().clone()

    def _replaced(self, value: Any, torch: Any) -> Any:
        """Return arguments with numbers in place of tensors."""
        if isinstance(value, torch.Tensor):
            return self._ref(value, torch)
        if isinstance(value, dict):
            return {key: self._replaced(each, torch) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            made = [self._replaced(each, torch) for each in value]
            return made if isinstance(value, list) else tuple(made)
        if isinstance(value, slice):
            return slice(*self._replaced((value.start, value.stop, value.step), torch))
        plain = (torch.dtype, torch.device, torch.memory_format, torch.layout)
        if type(value) not in _PLAIN and not isinstance(value, plain):
            self._trouble = f"a call has an argument of type {type(value).__name__}"
        return value

    def _ref(self, tensor: Any, torch: Any) -> Ref:
        number = self._numbers.get(id(tensor))
        if number is None:
            if tensor.grad_fn is not None:
                self._cannot(f"{tensor.grad_fn.name()} is between the outputs and the loss")
            number = self._number(tensor)
            self.calls.given[number] = self._copied(tensor)
        elif (before := self._watched.get(number)) is not None:
            now = tensor.detach()
            if not torch.equal(now, before):
                # Such as by an all-reduce, which is no function of torch's own.
                self._watched[number] = now.clone()
                self.calls.calls.append(Call(ASSIGNED, (self._copied(tensor),), {}, (number,)))
        return Ref(number)


def _name(function: Any) -> str:
    """Return the name by which `ddpdoctor.replay.losses` finds a function."""
    owner = getattr(function, "__self__", None)
    if function.__name__ == "__get__":
        return f"get.{getattr(owner, '__name__', '')}"
    if getattr(function, "__objclass__", None) is not None:
        return f"Tensor.{function.__name__}"
    if function.__module__ == "torch._tensor":
        return f"Tensor.{function.__name__}"
    return f"{function.__module__}.{function.__name__}"


def _mode_class(torch: Any) -> Any:
    class Follow(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        """Shows each call to a follower."""

        def __init__(self, follower: LossFollower) -> None:
            super().__init__()
            self._follower = follower

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            try:
                return self._follower.called(function, args, kwargs or {})
            except BaseException as error:
                hide_frame(error)
                raise

    return Follow


# -- the step that is kept

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
            self._write(f"the loss is {number}")
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
