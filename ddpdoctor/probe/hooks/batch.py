"""How many samples a batch holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_DEPTH = 3


def size(batch: Any, depth: int = _DEPTH) -> int:
    """The first dimension of the first tensor in a batch; 0 if there is none within reach."""
    try:
        return _size(batch, depth)
    except Exception:
        # A batch may be anything, lazy and broken mappings included.
        return 0


def _size(batch: Any, depth: int) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(batch, torch.Tensor):
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
