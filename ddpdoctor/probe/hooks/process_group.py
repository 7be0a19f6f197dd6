"""How process groups are made: ``init_process_group`` is the moment a process becomes a rank."""

from __future__ import annotations

import functools
import inspect
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

from ddpdoctor.probe.observers import failures, ports
from ddpdoctor.probe.runtime import debugger, events, rank, shield, stacks, timeouts, torch_groups
from ddpdoctor.probe.runtime.sites import caller


def install(c10d: ModuleType) -> None:
    """Wrap what makes process groups in ``torch.distributed.distributed_c10d``.

    Runs before ``torch.distributed`` copies the names, so every way to reach them is wrapped.
    """
    for name in ("init_process_group", "new_group", "split_group"):
        if hasattr(c10d, name):
            _wrap(c10d, name, joins=name == "init_process_group")


@shield.shielded
def _declare(kwargs: dict[str, Any]) -> None:
    """``init_process_group`` is called; for how many ranks, as far as it is easy to see."""
    stacks.declare()
    asked = kwargs.get("world_size", -1)
    elsewhere = kwargs.get("init_method") not in (None, "env://") or "store" in kwargs
    size = None if elsewhere else rank.environment_int("WORLD_SIZE")
    stacks.joining = asked if isinstance(asked, int) and asked > 0 else size or 0


def _joined() -> None:
    stacks.joining = 0
    torch = sys.modules["torch"]
    for subscriber in events.group_joined:
        subscriber(torch)
    _offer(torch.distributed)


@shield.shielded
def _offer(distributed: Any) -> None:
    """This rank may be debugged."""
    debugger.joined(
        {
            "rank": distributed.get_rank(),
            "world_size": distributed.get_world_size(),
            "local_rank": rank.environment_int("LOCAL_RANK"),
        }
    )


@shield.shielded
def _note_store(arguments: dict[str, Any]) -> None:
    """Write down the address of a store that no process will open: the call may never return."""
    record = ports.unopened(arguments, caller()) if rank.current() is None else None
    if record is not None:
        failures.stray(record)


def _wrap(c10d: ModuleType, name: str, joins: bool) -> None:
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            # torch says so.
            bound = None
        if joins:
            arguments = dict(bound.arguments) if bound is not None else {}
            _declare(arguments)
            _note_store(arguments)
        asked = bound.arguments.get("timeout") if bound is not None else None
        if bound is not None and isinstance(asked, timedelta) and timeouts.least():
            # Whoever is in the debugger comes late.
            bound.arguments["timeout"] = max(asked, timeouts.least())
            args, kwargs = bound.args, bound.kwargs
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if timeouts.least():
            _lift(c10d, asked)
        if joins:
            _joined()
        return result

    setattr(c10d, name, make_group)


@shield.shielded
def _lift(c10d: ModuleType, asked: object) -> None:
    if isinstance(asked, timedelta):
        timeouts.made(list(torch_groups.backends(c10d)), asked)
    timeouts.sweep()
