"""Ask torch about a device of any kind, without waiting for it.

Each kind has a module with CUDA's functions (``torch.cuda``, ``torch.xpu``, ``torch.npu``), as far
as its makers wrote them, and from 2.6 on torch has ``torch.accelerator`` and ``torch.Event``. What
neither has is unknown.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any


def _module(device: Any) -> Any:
    """Return the module of a device's kind, or None."""
    return getattr(sys.modules["torch"], str(device).partition(":")[0], None)


def name_of(device: Any) -> str:
    """Return a device's name. Empty if not known."""
    try:
        return str(_module(device).get_device_name(device))
    except Exception:
        return ""


def total_memory(device: Any) -> int | None:
    """Return the bytes of a device's memory."""
    try:
        return int(_module(device).get_device_properties(device).total_memory)
    except Exception:
        return None


def allocated_memory(device: Any) -> tuple[int, int, int]:
    """Return the allocated, reserved and most allocated bytes of torch's allocator on a device.

    Raises:
        Exception: The allocator has no counters.
    """
    of_kind = getattr(_module(device), "memory_stats_as_nested_dict", None)
    if of_kind is not None:
        found = of_kind(device)
        given, taken = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
        return int(given["current"]), int(taken["current"]), int(given["peak"])
    flat = sys.modules["torch"].accelerator.memory_stats(device)
    names = "allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak"
    allocated, reserved, peak = (int(flat[name]) for name in names)
    return allocated, reserved, peak


@lru_cache
def has_events(kind: str) -> bool:
    """Return whether events of torch show what a kind of device has done."""
    torch: Any = sys.modules["torch"]
    if kind == "cuda":
        return True
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator and accelerator.current_accelerator()
    return current is not None and current.type == kind and hasattr(torch, "Event")


def record_event(device: Any) -> Any:
    """Return an event that is done once the device has done what was queued so far."""
    torch: Any = sys.modules["torch"]
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
