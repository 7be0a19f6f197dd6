"""Collectives called from Python: which one a rank is in, what it is about, how long it waits.

DDP's own all-reduces run in C++ and are told by DDP's logger instead (see ``hooks.ddp``), and by
torch's Flight Recorder. A collective that is made of others (``all_gather_object``) counts as one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import calls
from ddpdoctor.probe.observers.calls import Call
from ddpdoctor.probe.observers.ledger import Ledger
from ddpdoctor.probe.observers.steps import StepTracker
from ddpdoctor.probe.runtime import events, rank, shield
from ddpdoctor.probe.runtime.sites import Site, caller, callers
from ddpdoctor.run.status import Phase, page_name

_WAIT = int(Phase.WAIT)
_HOOK = "collectives"
_RING = "collectives.ring"
_pages: dict[str, bytes] = {}


def install(c10d: ModuleType) -> None:
    """Wrap the collectives before ``torch.distributed`` copies their names."""
    for name in calls.TENSORS:
        original = getattr(c10d, name, None)
        if original is not None:
            setattr(c10d, name, _wrapped(name, calls.binder(name, original), original))
    work_class = getattr(c10d, "Work", None)
    if work_class is not None:
        # What an asynchronous collective returns: here the rank waits for it.
        work_class.wait = _waiting(work_class.wait)


def _show(tracker: StepTracker, name: str) -> None:
    tracker.collective = name
    page = _pages.get(name)
    if page is None:
        page = _pages[name] = page_name(name)
    state = rank.current()
    if state is not None:
        state.recorder.page.set_collective(page)


def _chain() -> tuple[Site, ...] | None:
    """The user's line and those that led to it, if the call is to be followed."""
    try:
        tracker = rank.active
        if tracker is None or tracker.phase == _WAIT or _HOOK in shield.off:
            return None
        return callers()
    except Exception as error:
        shield.fault(_HOOK, error)
        return None


def enter(name: str, site: Site | None = None) -> bool:
    """Begin to wait; False if this call is not to be followed (nested, other thread, no rank)."""
    try:
        tracker = rank.active
        if tracker is None or tracker.phase == _WAIT or _HOOK in shield.off:
            return False
        if not tracker.enter(_WAIT, site or caller()):
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


def _note(
    name: str, call: Callable[..., Call], chain: tuple[Site, ...], args: Any, kwargs: Any
) -> tuple[Ledger, int] | None:
    """Write the call down; where, or None if nothing was written."""
    state = rank.current()
    ledger = state.ledger if state is not None else None
    if ledger is None or _RING in shield.off:
        return None
    try:
        order = ledger.begin(name, call(*args, **kwargs), chain)
    except (TypeError, IndexError, AttributeError):
        # No such arguments: torch will say so itself.
        return None
    except Exception as error:
        shield.fault(_RING, error)
        ledger.set_partial()
        return None
    return (ledger, order) if order else None


def _note_elsewhere(call: Callable[..., Call], args: Any, kwargs: Any) -> None:
    """Say that another thread calls a collective, which has no place in the order that is known."""
    try:
        tracker, state = rank.active, rank.current()
        if tracker is None or state is None or tracker.is_here() or _RING in shield.off:
            return
        if state.ledger is not None:
            state.ledger.begin_elsewhere(call(*args, **kwargs))
    except (TypeError, IndexError, AttributeError):
        # No such arguments: torch will say so itself.
        return
    except Exception as error:
        shield.fault(_RING, error)


def _noted(noted: tuple[Ledger, int] | None, result: object) -> None:
    if noted is None:
        return
    ledger, order = noted
    try:
        ledger.returned(order, result)
    except Exception as error:
        shield.fault(_RING, error)


def _wrapped(
    name: str, call: Callable[..., Call], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # For Dynamo, which knows the answer, there is only the original.
        if rank.is_compiling():
            return original(*args, **kwargs)
        chain = _chain()
        entered = chain is not None and enter(name, chain[0])
        if not entered:
            _note_elsewhere(call, args, kwargs)
        noted = None
        if entered and chain is not None:
            noted = _note(name, call, chain, args, kwargs)
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
            _noted(noted, result)
            leave(None)
        return result

    return collective


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Work.wait``, which tells for what it waits."""

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank.is_compiling():
            return original(self, *args, **kwargs)
        entered = enter("Work.wait")
        noted = None
        if entered:
            for told in events.collective_begins:
                told("Work.wait")
            noted = _wait_begins(self)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if entered:
                leave(error)
            raise
        if entered:
            if noted is not None:
                noted.waited(time.time_ns())
            leave(None)
        return result

    return wait


def _wait_begins(work: object) -> Ledger | None:
    state = rank.current()
    ledger = state.ledger if state is not None else None
    if ledger is None or _RING in shield.off:
        return None
    try:
        return ledger if ledger.waits_for(work) else None
    except Exception as error:
        shield.fault(_RING, error)
        return None
