"""Wrap the functions that make process groups, and the collectives called from Python.

A process becomes a rank in ``init_process_group``. For each collective we record its name, its
arguments and the rank's wait. DDP's own all-reduces run in C++. DDP's logger (see ``hooks.ddp``)
and torch's Flight Recorder contain them. A collective that consists of others
(``all_gather_object``) counts as one.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from sys import exc_info
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import collective_calls, failures, job_launch
from ddpdoctor.probe.observers.collective_calls import Call, Ledger
from ddpdoctor.probe.runtime import debugger, events, hot, rank, shield, stacks, torch_groups
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.hot import Chain
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.probe.runtime.wrapping import around
from ddpdoctor.run.status import Phase, page_name


def install_groups(c10d: ModuleType) -> None:
    """Wrap the functions of ``torch.distributed.distributed_c10d`` that make process groups.

    Runs before ``torch.distributed`` copies the names, so every way to reach them is wrapped.
    """
    for name in ("init_process_group", "new_group", "split_group"):
        if hasattr(c10d, name):
            _wrap_constructor(c10d, name, joins=name == "init_process_group")


@shield.shielded
def _declare(kwargs: dict[str, Any]) -> None:
    """Declare that ``init_process_group`` is called, with the number of ranks if known."""
    stacks.declare()
    asked = kwargs.get("world_size", -1)
    elsewhere = kwargs.get("init_method") not in (None, "env://") or "store" in kwargs
    size = None if elsewhere else rank.environment_int("WORLD_SIZE")
    stacks.joining = asked if isinstance(asked, int) and asked > 0 else size or 0


@shield.shielded
def _offer(distributed: Any) -> None:
    """Offer this rank to debuggers."""
    debugger.joined(
        {
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
            "local_rank": rank.environment_int("LOCAL_RANK"),
        }
    )


@shield.shielded
def _note_store(arguments: dict[str, Any]) -> None:
    """Record the address of a store that no process will open, since the call may never return."""
    record = job_launch.unopened_store(arguments, caller()) if rank.current() is None else None
    if record is not None:
        failures.write_stray(record)


def _wrap_constructor(c10d: ModuleType, name: str, joins: bool) -> None:
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            # torch reports it.
            bound = None
        if joins:
            arguments = dict(bound.arguments) if bound is not None else {}
            _declare(arguments)
            _note_store(arguments)
        asked = bound.arguments.get("timeout") if bound is not None else None
        if bound is not None and isinstance(asked, timedelta) and torch_groups.least_timeout():
            # A rank that stops in the debugger arrives late.
            bound.arguments["timeout"] = max(asked, torch_groups.least_timeout())
            args, kwargs = bound.args, bound.kwargs
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if torch_groups.least_timeout():
            _lift_timeout(c10d, asked)
        if joins:
            stacks.joining = 0
            torch = sys.modules["torch"]
            for subscriber in events.group_joined:
                subscriber(torch)
            _offer(torch.distributed)
        return result

    setattr(c10d, name, make_group)


@shield.shielded
def _lift_timeout(c10d: ModuleType, asked: object) -> None:
    if isinstance(asked, timedelta):
        torch_groups.note_backends(list(torch_groups.backends(c10d)), asked)
    torch_groups.update_timeouts()


# -- collectives

_WAIT = int(Phase.WAIT)
_HOOK = "collectives"
_RING = "collectives.ring"
_cached_page_name = functools.cache(page_name)

Noted = tuple[Ledger, int]  # a recorded call: its ledger and its order


def install_collectives(c10d: ModuleType) -> None:
    """Wrap the collectives before ``torch.distributed`` copies their names."""
    for name in collective_calls.TENSORS:
        if hasattr(c10d, name) and not _install_compiled(c10d, name):
            begin = _begin(name, collective_calls.binder(name, getattr(c10d, name)))
            around(c10d, name, _HOOK, begin, _end, compiled=True)
    # An asynchronous collective returns a Work. The rank waits in its `wait`.
    around(getattr(c10d, "Work", None), "wait", _HOOK, _wait_begins, _wait_ended, waits=True)


def _install_compiled(c10d: ModuleType, name: str) -> bool:
    """Wrap a collective with compiled code. Return False if there is none for it.

    The outer function is Python, since Dynamo rewrites only collectives that are Python functions.
    """
    original = getattr(c10d, name)
    places = collective_calls.parameter_places(name, original) if hot.core is not None else None
    if places is None:
        return False
    first, peer = collective_calls.TENSORS[name].endswith("[0]"), name in ("send", "recv")
    in_python = hot.core.Around(
        original, _HOOK, _begin(name, collective_calls.binder(name, original)), _end
    )
    followed = hot.core.Collective(name, original, in_python, *places, first, peer).call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if rank.is_tracing():
            return original(*args, **kwargs)
        if exc_info()[1] is not None:
            failures.collective_called(name)
        try:
            return followed(args, kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    setattr(c10d, name, call)
    return True


def enter(name: str) -> bool:
    """Begin a wait. Return False if the call is not followed (nested, other thread, no rank)."""
    tracker = rank.active
    if tracker is None or tracker.phase == _WAIT or not tracker.enter(_WAIT, caller()):
        return False
    tracker.collective = name
    tracker.page.set_collective(_cached_page_name(name))
    return True


def leave(error: BaseException | None) -> None:
    """End the wait that :func:`enter` began."""
    tracker = rank.active
    if tracker is not None:
        tracker.leave(error)
        tracker.collective = ""
        tracker.page.set_collective(b"")


def waited(begun: object, result: object, error: BaseException | None) -> None:
    """End the wait of a call that `wrapping.around` has wrapped."""
    leave(error)


def _begin(name: str, bind: Callable[..., Call]) -> Callable[..., object]:
    lines = Chain()
    shown = page_name(name)

    def begin(*args: Any, **kwargs: Any) -> object:
        tracker = rank.active
        if tracker is None:
            return None
        if tracker.phase != _WAIT:
            began = clock() if tracker.clocked else 0
            if exc_info()[1] is not None:
                failures.collective_called(name)
            chain = lines.sites()
            if tracker.enter(_WAIT, chain[0]):
                tracker.collective = name
                tracker.page.set_collective(shown)
                tracker.collectives += 1
                if "reduce" in name:
                    tracker.reductions += 1
                elif "gather" in name:
                    tracker.gathers += 1
                noted = _note_call(name, bind, chain, args, kwargs) or True
                if began:
                    tracker.spent += clock() - began
                return noted
        if not tracker.is_here():
            _note_elsewhere(bind, args, kwargs)
        return None

    return begin


def _end(begun: Noted | bool, result: object, error: BaseException | None) -> None:
    if error is None and begun is not True:
        ledger, order = begun  # type: ignore[misc]
        try:
            ledger.returned(order, result)
        except Exception as broken:
            shield.fault(_RING, broken)
    leave(error)


def _ledger() -> Ledger | None:
    state = rank.current()
    return state.ledger if state is not None and _RING not in shield.off else None


def _note_call(
    name: str, bind: Callable[..., Call], chain: tuple[Site, ...], args: Any, kwargs: Any
) -> Noted | None:
    """Record a call. Return its ledger and order, or None if nothing was recorded."""
    ledger = _ledger()
    if ledger is None:
        return None
    try:
        order = ledger.begin(name, bind(*args, **kwargs), chain)
    except (TypeError, IndexError, AttributeError):
        # torch reports wrong arguments itself.
        return None
    except Exception as error:
        shield.fault(_RING, error)
        ledger.set_partial()
        return None
    return (ledger, order) if order else None


def _note_elsewhere(bind: Callable[..., Call], args: Any, kwargs: Any) -> None:
    """Record that another thread calls a collective. Its position in the order is unknown."""
    ledger = _ledger()
    try:
        if ledger is not None:
            ledger.begin_elsewhere(bind(*args, **kwargs))
    except (TypeError, IndexError, AttributeError):
        # torch reports wrong arguments itself.
        return
    except Exception as error:
        shield.fault(_RING, error)


def _wait_begins(work: object, *args: Any, **kwargs: Any) -> object:
    if not enter("Work.wait"):
        return None
    tracker = rank.active
    if tracker is not None:
        tracker.collectives += 1
    ledger = _ledger()
    try:
        return ledger if ledger is not None and ledger.waits_for(work) else True
    except Exception as error:
        shield.fault(_RING, error)
        return True


def _wait_ended(begun: Ledger | bool, result: object, error: BaseException | None) -> None:
    if error is None and isinstance(begun, Ledger):
        begun.waited(time.time_ns())
    leave(error)
