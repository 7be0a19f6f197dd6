"""The file with one step of a rank: everything needed to repeat its forward and backward.

A pickle in which each tensor is stored as bytes, so that the reader decides how to create the
tensors. Unpickling runs code, so only files of the reader's account are read, and what a model has
no use for is refused. That is no sandbox: whoever computes a model runs its code.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core import opening

PARTIAL = ".part"  # End of the name of a file that is being written
ODD_LOSS = "a loss of "  # How the error of a step begins whose loss is not finite
MAX_BYTES = 4 << 30  # Maximum bytes of the tensors of a kept step


class StoredTensor(NamedTuple):
    """A tensor without torch."""

    dtype: str  # ``float32``
    shape: tuple[int, ...]
    data: bytes
    is_parameter: bool = False
    requires_grad: bool = False


@dataclass
class Forward:
    """One forward of the module, and the gradient with which its backward began."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: dict[str, Any]  # States of the random number generators before it
    gradients: dict[int, Any] = field(default_factory=dict)
    """Gradients of its outputs, by their position among the tensors that it returned."""


class Ref(NamedTuple):
    """A tensor in the calls of a loss, by its number."""

    number: int


ASSIGNED = "assigned"
"""Name of a call that was none: a tensor got another value, such as by an all-reduce."""


class Call(NamedTuple):
    """A call of a function of torch."""

    name: str  # ``torch.nn.functional.mse_loss``, ``Tensor.sum``, ``get.T`` or `ASSIGNED`
    args: tuple[Any, ...]  # With `Ref` in place of tensors, as in ``kwargs``
    kwargs: dict[str, Any]
    results: tuple[int, ...]  # Numbers of the tensors that it returned


@dataclass
class LossCalls:
    """The calls that made the losses of a step from the outputs of its forwards."""

    calls: list[Call]
    given: dict[int, Any]  # Tensors from elsewhere, such as targets and masks, by number
    outputs: dict[int, tuple[int, int]]
    """By number: the forward, and the position among the tensors that it returned."""
    losses: list[int]  # Numbers of the tensors with which backwards began
    why_not: str = ""  # Why the losses cannot be made of these calls


@dataclass
class Capsule:
    """One step of one rank."""

    rank: int
    world_size: int
    step: int
    module: Any
    weights: dict[str, Any]  # Parameters and buffers before the step
    forwards: list[Forward]
    reduced: dict[str, Any] = field(default_factory=dict)
    """Gradients of the parameters after the last backward of the step."""
    used: dict[str, Any] = field(default_factory=dict)  # The same, as passed to the optimizer
    carried: bool = False  # Whether parameters had gradients before the first backward
    loss_calls: LossCalls | None = None
    error: str = ""  # The exception that ended the rank in this step


class Source(NamedTuple):
    """The places where the classes of a capsule are declared."""

    script: str  # The path of ``__main__``
    path: list[str]  # ``sys.path`` of the rank


class TooLargeError(Exception):
    """The tensors of a step are larger than `MAX_BYTES`."""


def tensors_of(value: Any, torch: Any) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples, mappings and objects with fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each, torch)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_of(each, torch)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_of(vars(value), torch)


def row_sizes(gradient: Any) -> Any:
    """Return the sum of the absolute gradients of each prediction: of a sample, token or pixel.

    The classes are the last dimension, or the second one for images.
    """
    if gradient.dim() == 1:
        return gradient.abs()
    return gradient.abs().sum(1 if gradient.dim() > 3 else -1)


def stored(tensor: Any, is_parameter: bool = False) -> StoredTensor:
    """Copy a tensor's values. Waits for its GPU."""
    plain = tensor.detach().cpu().contiguous()
    size = plain.numel() * plain.element_size()
    data = ctypes.string_at(plain.data_ptr(), size) if size else b""
    name = str(plain.dtype).removeprefix("torch.")
    return StoredTensor(name, tuple(plain.shape), data, is_parameter, bool(tensor.requires_grad))


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, torch: Any) -> None:
        super().__init__(file, protocol=5)
        self._torch = torch
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # Keep ids valid
        self._size = 0
        self.tensors: list[StoredTensor] = []

    def persistent_id(self, value: Any) -> Any:
        """Store tensors separately. A process group cannot be stored."""
        if isinstance(value, self._torch.Tensor):
            place = self._places.get(id(value))
            if place is None:
                self._size += value.numel() * value.element_size()
                if self._size > MAX_BYTES:
                    raise TooLargeError(f"more than {MAX_BYTES >> 30} GiB of tensors")
                place = self._places[id(value)] = len(self.tensors)
                self._kept.append(value)
                self.tensors.append(stored(value, isinstance(value, self._torch.nn.Parameter)))
            return "tensor", place
        if isinstance(value, self._torch.distributed.ProcessGroup):
            return "group", 0
        return None

    def reducer_override(self, value: Any) -> Any:
        """Store a compiled module as it was before, since it need not be fast."""
        if type(value).__name__ == "OptimizedModule" and hasattr(value, "_orig_mod"):
            return given_back, (value._orig_mod,)
        return NotImplemented


def given_back(value: Any) -> Any:
    """Return the value. The file refers to this function in place of a compiled module."""
    return value


def plain_name(name: str) -> str:
    """Return the name that a parameter has without compiled modules."""
    return name.replace("_orig_mod.", "")


def write(path: str, capsule: Capsule, source: Source, torch: Any) -> int:
    """Write a capsule and return its size in bytes.

    Raises:
        TooLargeError: Its tensors are too large.
        OSError: The file cannot be written.
        Exception: Its module cannot be pickled, whatever that raises.
    """
    body = io.BytesIO()
    pickler = _Pickler(body, torch)
    pickler.dump(capsule)
    partial = path + PARTIAL
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            pickle.dump((tuple(source), pickler.tensors, body.getvalue()), file, protocol=5)
            size = file.tell()
        os.replace(partial, path)
    except OSError:
        # Such as by a full disk.
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return size


class RefusedError(Exception):
    """The file refers to something that no model needs, such as ``os.system``."""


_KNOWN = {
    "builtins": "bool bytearray bytes complex dict float frozenset getattr int list object range "
    "set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "copyreg": "_reconstructor",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "functools": "partial",
    "fractions": "Fraction",
    "operator": "itemgetter",
    "pathlib": "Path PosixPath PurePath PurePosixPath",
    "types": "MappingProxyType SimpleNamespace",
    "uuid": "UUID",
}
"""Names of the standard library that a file may refer to. Functions of ``math`` are known, too."""

_TORCH = (
    "torch.nn", "torch._C._nn", "torch.amp", "torch.ao", "torch.distributions", "torch.utils.hooks",
    "torch.functional", "torch.special", "torch.linalg",
)  # fmt: skip
"""Modules of torch whose names are known. Of others, those are known that are no functions."""


def _checked(found: Any, name: str, torch: Any) -> Any:
    """Return what a file refers to.

    Raises:
        RefusedError: No model needs it.
    """
    module = str(getattr(found, "__module__", None) or "")
    root = module.partition(".")[0]
    known = True
    if isinstance(found, type(sys)):
        known = False
    elif root in sys.stdlib_module_names and root != "math":
        known = getattr(found, "__name__", "") in _KNOWN.get(module, "").split()
    elif root == "torch" and not module.startswith(_TORCH):
        plain = (torch.Size, torch.device, torch.dtype, torch.Generator)
        owners = (torch.Tensor, torch._C.TensorBase, torch._C._VariableFunctionsClass)
        models = isinstance(found, type) and issubclass(found, (torch.nn.Module, *plain, *owners))
        methods = not isinstance(found, type) and name[:1] != "_" and hasattr(torch.Tensor, name)
        known = models or methods or not callable(found)
    if not known:
        raise RefusedError(f"{module}.{name}" if module else name)
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, body: bytes, tensors: list[Any], find: Callable[[str], Any], torch: Any, trusted: bool
    ) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors
        self._find = find
        self._torch = torch
        self._trusted = trusted

    def persistent_load(self, pid: Any) -> Any:
        """Return a stored tensor, and None for a process group."""
        kind, place = pid
        return self._tensors[place] if kind == "tensor" else None

    def find_class(self, module: str, name: str) -> Any:
        """Return a class. Those of ``__main__`` come from the script."""
        found = self._find(name) if module == "__main__" else super().find_class(module, name)
        if self._trusted:
            return found
        found = _checked(found, name.rpartition(".")[2], self._torch)
        return self._attribute if found is getattr else found

    def _attribute(self, owner: Any, name: str) -> Any:
        """Return an attribute, such as a method that a model keeps."""
        functions = self._torch._C._VariableFunctionsClass
        known = owner is not functions or hasattr(self._torch.Tensor, name)
        if name.startswith("_") or isinstance(owner, type(sys)) or not known:
            raise RefusedError(f"the attribute {name}")
        return getattr(owner, name)


class _Tables(pickle.Unpickler):
    """Reads the part of a file that has tensors and no other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the one class that is there."""
        if (module, name) != (StoredTensor.__module__, StoredTensor.__name__):
            raise RefusedError(f"{module}.{name}")
        return StoredTensor


def read(
    path: str, torch: Any, finder: Callable[[Source], Callable[[str], Any]], trusted: bool = False
) -> Capsule:
    """Read a capsule. This runs code of the file.

    Args:
        path: The file.
        torch: The torch module.
        finder: Returns a function that returns a class of ``__main__`` by its name.
        trusted: Whether the file may refer to anything.

    Raises:
        ForeignError: It belongs to another account.
        RefusedError: It refers to something that no model needs.
        OSError: It cannot be read.
        Exception: It is damaged, or its module cannot be made, whatever that raises.
    """
    data = opening.contents(Path(path), 2 * MAX_BYTES, owners=(os.getuid(),))
    source, stored, body = _Tables(io.BytesIO(data)).load()
    tensors = [_tensor(each, torch) for each in stored]
    capsule = _Unpickler(body, tensors, finder(Source(*source)), torch, trusted).load()
    if not isinstance(capsule, Capsule):
        raise ValueError("not a capsule")
    return capsule


def _tensor(stored: StoredTensor, torch: Any) -> Any:
    dtype = getattr(torch, stored.dtype)
    size = torch.empty((), dtype=dtype).element_size() * math.prod(stored.shape)
    if size != len(stored.data):
        raise ValueError("a tensor of another size than its shape")
    if stored.data:
        flat = torch.frombuffer(bytearray(stored.data), dtype=dtype)
        tensor = flat.reshape(stored.shape)
    else:
        tensor = torch.empty(stored.shape, dtype=dtype)
    if stored.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=stored.requires_grad)
    return tensor.requires_grad_() if stored.requires_grad else tensor
