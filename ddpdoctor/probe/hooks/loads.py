"""GPUs that ``torch.load`` puts tensors on, and the lines that called it.

Without ``map_location`` every rank puts them where they were saved from, mostly the first GPU, and
makes a CUDA context there that stays.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield, torch_private
from ddpdoctor.probe.runtime.sites import caller
from ddpdoctor.run.records.base import JsonObject

MOST = 50
"""Different loads that a rank tells."""

_HOOK = "loads"

_told: set[tuple[str, int, str]] = set()
_early: list[JsonObject] = []
"""What was loaded before this process was a rank."""


def install(serialization: ModuleType) -> None:
    """Watch where each storage goes, below ``torch.load``, whose warnings blame its caller."""
    original = torch_private.restore_location(serialization)
    if original is None:
        return

    @functools.wraps(original)
    def _get_restore_location(map_location: Any) -> Any:
        restore = original(map_location)
        return restore if _HOOK in shield.off else _watched(restore, map_location is not None)

    serialization._get_restore_location = _get_restore_location  # type: ignore[attr-defined]
    events.ddp_built.append(_joined)


def _watched(restore: Callable[[Any, Any], Any], mapped: bool) -> Callable[[Any, Any], Any]:
    seen: set[Any] = set()

    def restore_location(storage: Any, location: Any) -> Any:
        result = restore(storage, location)
        try:
            device = result.device
            if device.type == "cuda" and device not in seen:
                seen.add(device)
                _loaded(device, mapped)
        except Exception as error:
            shield.fault(_HOOK, error)
        return result

    return restore_location


def _loaded(device: Any, mapped: bool) -> None:
    site = caller()
    key = (site.path, site.line, str(device))
    if key in _told or len(_told) >= MOST:
        return
    _told.add(key)
    record: JsonObject = {
        "kind": "gpu_load",
        "time": time.time_ns(),
        "device": str(device),
        "device_uuid": torch_private.device_uuid(sys.modules["torch"], device),
        "mapped": mapped,
        "path": site.path,
        "line": site.line,
    }
    state = rank.current()
    if state is None:
        _early.append(record)
    else:
        state.recorder.add(record)


@shield.shielded
def _joined(ddp: Any) -> None:
    state = rank.current()
    while state is not None and _early:
        state.recorder.add(_early.pop(0))


def forget() -> None:
    """In a forked child: nothing has been told yet."""
    _told.clear()
    _early.clear()
