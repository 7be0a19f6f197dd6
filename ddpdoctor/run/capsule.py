"""The file with one step of a rank: everything needed to repeat its forward and backward.

A pickle in which each tensor is stored as bytes, so that the reader decides how to create the
tensors. Unpickling runs code, so only files of the reader's account are read.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddpdoctor.core import opening

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
    error: str = ""  # The exception that ended the rank in this step


class Source(NamedTuple):
    """Where the classes of a capsule are declared."""

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

    The classes are the last dimension, or the second of pictures.
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
        """Store tensors apart. A process group cannot be stored."""
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
    partial = f"{path}.part"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        pickle.dump((tuple(source), pickler.tensors, body.getvalue()), file, protocol=5)
        size = file.tell()
    os.replace(partial, path)
    return size


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: bytes, tensors: list[Any], find: Callable[[str], Any]) -> None:
        super().__init__(io.BytesIO(body))
        self._tensors = tensors
        self._find = find

    def persistent_load(self, pid: Any) -> Any:
        """Return a stored tensor, and None for a process group."""
        kind, place = pid
        return self._tensors[place] if kind == "tensor" else None

    def find_class(self, module: str, name: str) -> Any:
        """Return a class. Those of ``__main__`` come from the script."""
        if module == "__main__":
            return self._find(name)
        return super().find_class(module, name)


def read(path: str, torch: Any, finder: Callable[[Source], Callable[[str], Any]]) -> Capsule:
    """Read a capsule. This runs code of the file.

    Args:
        path: The file.
        torch: The torch module.
        finder: Returns a function that returns a class of ``__main__`` by its name.

    Raises:
        ForeignError: It belongs to another account.
        OSError: It cannot be read.
        Exception: It is damaged, or its module cannot be made, whatever that raises.
    """
    data = opening.contents(Path(path), 2 * MAX_BYTES, owners=(os.getuid(),))
    source, tensors, body = pickle.loads(data)
    find = finder(Source(*source))
    capsule = _Unpickler(body, [_tensor(each, torch) for each in tensors], find).load()
    if not isinstance(capsule, Capsule):
        raise ValueError("no capsule")
    return capsule


def _tensor(stored: StoredTensor, torch: Any) -> Any:
    dtype = getattr(torch, stored.dtype)
    if stored.data:
        flat = torch.frombuffer(bytearray(stored.data), dtype=dtype)
        tensor = flat.reshape(stored.shape)
    else:
        tensor = torch.empty(stored.shape, dtype=dtype)
    if stored.is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=stored.requires_grad)
    return tensor.requires_grad_() if stored.requires_grad else tensor
