"""Collectives called from Python: which one a rank is in, and how long it waited there.

DDP's own all-reduces run in C++ and are told by DDP's logger instead (see ``hooks.ddp``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpdoctor.probe import events, rank, shield
from ddpdoctor.probe.sites import caller
from ddpdoctor.probe.steps import StepTracker
from ddpdoctor.record import Phase, page_name

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)
"""The blocking functions of ``torch.distributed``."""

_WAIT = int(Phase.WAIT)
_HOOK = "collectives"
_pages: dict[str, bytes] = {}


def install(c10d: ModuleType) -> None:
    """Wrap the collectives before ``torch.distributed`` copies their names."""
    for name in NAMES:
        original = getattr(c10d, name, None)
        if original is not None:
            setattr(c10d, name, _wrapped(name, original))
    work_class = getattr(c10d, "Work", None)
    if work_class is not None:
        # What an asynchronous collective returns: here the rank waits for it.
        work_class.wait = _wrapped("Work.wait", work_class.wait)


def _show(tracker: StepTracker, name: str) -> None:
    tracker.collective = name
    state = rank.current()
    if state is not None:
        state.recorder.page.set_collective(_pages.setdefault(name, page_name(name)))


def enter(name: str) -> bool:
    """Begin to wait; False if this call is not to be followed (nested, other thread, no rank)."""
    try:
        tracker = rank.active
        if tracker is None or tracker.phase == _WAIT or _HOOK in shield.off:
            return False
        if not tracker.enter(_WAIT, caller()):
            return False
        _show(tracker, name)
    except Exception as error:
        shield.fault(_HOOK, error)
        return False
    return True


def leave(error: BaseException | None) -> None:
    """End the wait that :func:`enter` began."""
    try:
        tracker = rank.active
        if tracker is not None:
            tracker.leave(error)
            _show(tracker, "")
    except Exception as broken:
        shield.fault(_HOOK, broken)


def _wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # For Dynamo, which knows the answer, there is only the original.
        if rank.is_compiling():
            return original(*args, **kwargs)
        entered = enter(name)
        if entered:
            for told in events.collective_begins:
                told(name)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if entered:
                leave(error)
            raise
        if entered:
            leave(None)
        return result

    return collective
