"""Follow torch's functions from the outputs of a model to its loss, in the step that is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime.shield import hide_frame, shielded
from ddpdoctor.probe.runtime.torch_private import function_mode
from ddpdoctor.run.capsule import ASSIGNED, Call, LossCalls, Ref, tensors_of

MAX_CALLS = 2000  # Calls that are kept
MAX_WATCHED = 16  # Elements of a tensor whose values are compared before each use

_VIEWS = ("get.T", "get.mT", "get.H", "get.mH", "get.real", "get.imag", "get.data")
_NOT_FOLLOWED = ("Tensor.backward", "Tensor.register_hook")
_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...))


class LossFollower:
    """A recorder of the calls that make a loss.

    A mode of torch's functions is on the stack from the end of a forward until the optimizer's
    step, and only if there is no other one, so that no other can be taken off in its place.

    Args:
        copied: Copies a tensor to the CPU.
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
            if sys._getframe(1).f_globals.get("__name__", "").startswith("ddpdoctor."):
                # Observers read tensors when their budget allows it, not alike on all ranks.
                return function(*args, **(kwargs or {}))
            try:
                return self._follower.called(function, args, kwargs or {})
            except BaseException as error:
                hide_frame(error)
                raise

    return Follow
