"""Describe values in one line for a debugger, without harm to the job.

No description runs code of the user, waits for a device, or starts threads. Only small CPU
tensors have statistics: on a GPU these would wait for its stream, which may wait for a rank that
the debugger holds.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

MAX_TEXT = 200  # Maximum characters of a value
MAX_CHILDREN = 100  # Maximum number of listed elements of a value

_MAX_FIGURES = 1 << 15  # From this many elements on no statistics: torch would compute in threads
_MAX_ROWS = 20  # Maximum number of listed rows of a tensor
_MAX_ITEMS = 6  # Maximum number of elements of a collection in its line
_MAX_BITS = 1 << 12  # Python refuses to write longer integers

_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", deque: "[]"}
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SPEAKING = {
    *(("torch", name) for name in ("dtype", "device", "Size")),
    *(("datetime", name) for name in ("date", "datetime", "timedelta")),
    *(("pathlib", name) for name in ("PosixPath", "WindowsPath")),
}
"""The module and name of types whose text is short and runs no code of the user."""


def summary(value: Any, depth: int = 2) -> str:
    """Describe a value in a line of at most `MAX_TEXT` characters.

    Elements of collections nested ``depth`` levels deep are part of the line.
    """
    try:
        text = _text(value, depth)
    except Exception as error:
        text = f"{type(value).__name__} ({type(error).__name__})"
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _text(value: Any, depth: int) -> str:
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_BITS:
        return f"int of {value.bit_length()} bits"
    if kind in (str, bytes):
        return repr(value[:MAX_TEXT])
    plain = value is None or value is ... or kind in (bool, int, float, complex)
    if plain or (kind.__module__.split(".")[0], kind.__name__) in _SPEAKING:
        return repr(value)
    if is_tensor(value):
        return tensor_summary(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return f"ndarray{list(value.shape)} {value.dtype}"
    if kind in _BRACKETS or kind in _MAPPINGS:
        return _collection(value, depth)
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, (type, FunctionType, MethodType, BuiltinFunctionType)):
        return f"{kind.__name__} {value.__qualname__}"
    return f"<{kind.__module__}.{kind.__qualname__}>".replace("<builtins.", "<")


def _collection(value: Any, depth: int) -> str:
    size = f"{type(value).__name__} of {len(value)}"
    if depth == 0 and value:
        return size
    items: list[str] = []
    is_mapping = type(value) in _MAPPINGS
    for item in value:
        if len(items) == _MAX_ITEMS:
            items.append("...")
            break
        text = summary(item, depth - 1)
        items.append(f"{text}: {summary(value[item], depth - 1)}" if is_mapping else text)
    brackets = _BRACKETS.get(type(value), "{}")
    more = f" ({size})" if len(value) > _MAX_ITEMS else ""
    comma = "," if type(value) is tuple and len(items) == 1 else ""
    return f"{brackets[0]}{', '.join(items)}{comma}{brackets[1]}{more}"


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor. torch may be missing."""
    return is_tensor_type(type(value))


def is_tensor_type(kind: type) -> bool:
    """Return whether a class is a tensor class."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(tensor, type) and issubclass(kind, tensor)


def holds_tensor(value: object, depth: int = 2) -> bool:
    """Return whether a value is a tensor, or a collection with one among its first elements."""
    if is_tensor(value):
        return True
    if depth == 0 or type(value) not in (*_BRACKETS, *_MAPPINGS):
        return False
    return any(holds_tensor(part, depth - 1) for _, part in children(value))


def tensor_summary(value: Any) -> str:
    """Return the shape, type, device, and, of a small CPU tensor, mean, deviation and NaNs."""
    torch = sys.modules["torch"]
    kind = type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    text = f"{kind}{list(value.shape)} {dtype} {value.device}"
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.device.type != "cpu" or not 0 < value.numel() < _MAX_FIGURES:
        return text
    try:
        with torch.no_grad():
            return f"{text} {_figures(value.detach())}"
    except Exception:
        # Not every dtype has these operations.
        return text


def _figures(tensor: Any) -> str:
    if tensor.numel() == 1:
        return repr(tensor.item())
    if not tensor.is_floating_point():
        return f"from {tensor.min().item()} to {tensor.max().item()}"
    numbers = tensor.double()
    finite = numbers[numbers.isfinite()]
    nan = int(numbers.isnan().sum())
    text = f"nan {nan}"
    if finite.numel() + nan < numbers.numel():
        text += f" inf {numbers.numel() - finite.numel() - nan}"
    if finite.numel():
        text = f"mean {finite.mean().item():.4g} std {finite.std(correction=0).item():.4g} {text}"
    return text


def children(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a value by name, `MAX_CHILDREN` at most. No property is read."""
    if is_tensor(value):
        names = ("shape", "dtype", "device", "requires_grad", "grad_fn")
        found = [(name, getattr(value, name)) for name in names]
        if value.is_leaf:
            found.append(("grad", value.grad))
        torch = sys.modules["torch"]
        if value.dim() and value.layout is torch.strided:
            with torch.no_grad():
                rows = min(len(value), _MAX_ROWS)
                # debugpy sorts by name.
                digits = len(str(rows - 1))
                found += [(f"[{row:0{digits}}]", value.detach()[row]) for row in range(rows)]
        return found
    kind = type(value)
    if kind in _MAPPINGS:
        items = list(value.items())[:MAX_CHILDREN]
        return [(key if type(key) is str else summary(key), item) for key, item in items]
    if kind in _BRACKETS:
        return [(f"[{index}]", item) for index, item in zip(range(MAX_CHILDREN), value)]  # noqa: B905
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return children(attributes) if type(attributes) is dict and kind is not type else []
