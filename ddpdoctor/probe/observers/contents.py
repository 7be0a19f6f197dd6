"""A look into a batch: its size, and hashes of a few elements of a few of its samples.

The elements are copied at once, since the batch is the job's to change; the copies are a few bytes
and are hashed later. What lies on a device is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

LEAVES = 3
"""Tensors, or lists of strings, of a batch that are looked at."""

WIDE = 16
"""Elements spread over a sample that are hashed."""

NARROW = 8
"""Elements at a sample's beginning, which stay the same however far its batch is padded."""

_DEPTH = 3

Hashes = Callable[[], list[list[int]]]


def batch_size(batch: Any, depth: int = _DEPTH) -> int:
    """The first dimension of the first tensor in a batch; 0 if there is none within reach."""
    try:
        return _size(batch, depth)
    except Exception:
        # A batch may be anything, lazy and broken mappings included.
        return 0


def _size(batch: Any, depth: int) -> int:
    if isinstance(batch, sys.modules["torch"].Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    if depth == 0:
        return 0
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        for item in batch[:8]:
            found = _size(item, depth - 1)
            if found:
                return found
    return 0


def leaves(data: Any, depth: int = 2) -> list[Any]:
    """The tensors and lists of strings of a batch, the first few."""
    torch: Any = sys.modules["torch"]
    if type(data) is torch.Tensor:
        return [data] if data.dim() and data.is_cpu and data.numel() else []
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], str):
        return [list(data)]
    if depth == 0:
        return []
    if isinstance(data, Mapping):
        data = list(data.values())[:8]
    found: list[Any] = []
    if isinstance(data, (list, tuple)):
        for item in data[:8]:
            found += leaves(item, depth - 1)
            if len(found) >= LEAVES:
                break
    return found[:LEAVES]


def hashes(data: Any, places: list[int], size: int | None) -> Hashes | None:
    """What makes the hashes of the samples at ``places``, a list for each; None if there are none.

    Args:
        data: The batch.
        places: Positions in the batch.
        size: How many samples it has; None if the batch is one sample as a whole.
    """
    copies = [
        copy
        for leaf in leaves(data)
        if (
            copy := _strings(leaf, places, size)
            if type(leaf) is list
            else _rows(leaf, places, size)
        )
    ]
    if not copies:
        return None
    return lambda: [list(row) for row in zip(*(c for copy in copies for c in copy()), strict=False)]


def _strings(
    leaf: list[str], places: list[int], size: int | None
) -> Callable[[], list[Any]] | None:
    if size is None:
        kept = ["\0".join(leaf[:64])[:4096]]
    elif len(leaf) != size:
        return None
    else:
        kept = [leaf[place][:4096] for place in places]
    return lambda: [[crc32(text.encode("utf-8", "replace")) for text in kept]]


def _rows(leaf: Any, places: list[int], size: int | None) -> Callable[[], list[Any]] | None:
    torch: Any = sys.modules["torch"]
    if not leaf.is_contiguous() or leaf.layout is not torch.strided:
        return None
    if size is None:
        flat = leaf.detach().view(1, -1)
    elif leaf.shape[0] != size:
        return None
    else:
        flat = leaf.detach().view(size, -1)
    with torch.no_grad():
        begin = flat[:, :NARROW]
        stride = max(1, flat.shape[1] // WIDE)
        spread = flat[:, ::stride][:, :WIDE]
        if size is not None:
            begin, spread = begin[places], spread[places]
        begin, spread = begin.clone(), spread.clone()
    return lambda: [_hash(begin), _hash(spread)]


def _hash(copy: Any) -> list[int]:
    torch: Any = sys.modules["torch"]
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    return [crc32(repr(row).encode()) for row in copy.contiguous().view(plain).tolist()]
