"""A loss without waiting for the device that computes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_SLOTS = 64
_ring: list[Any] = []
_next = 0

Loss = Callable[[], "float | None"]


def reader(loss: Any) -> Loss | float | None:
    """The loss, or for one on a GPU a function that reads it after the step's events passed.

    A GPU's loss is copied into a slot of pinned memory without blocking; the slots go round, so a
    reading that comes more than a few dozen steps late would see a later loss, never a wrong wait.
    """
    if loss.device.type == "cpu":
        value = loss.item()
        return float(value) if isinstance(value, (int, float)) else None
    torch: Any = sys.modules["torch"]
    if loss.device.type != "cuda" or type(loss) is not torch.Tensor:
        return None
    if torch.cuda.is_current_stream_capturing():
        return None
    global _next
    if not _ring:
        _ring.extend(torch.empty(_SLOTS, dtype=torch.float64, device="cpu", pin_memory=True))
    slot = _ring[_next]
    _next = (_next + 1) % _SLOTS
    with torch.no_grad():
        slot.copy_(loss.detach().reshape(()), non_blocking=True)
    return lambda: float(slot)
