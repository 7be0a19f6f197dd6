"""How process groups are made: ``init_process_group`` is the moment a process becomes a rank."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

from ddpdoctor.probe.hooks import errors
from ddpdoctor.probe.observers import ports
from ddpdoctor.probe.runtime import debugger, events, rank, shield, stacks, timeouts, torch_private
from ddpdoctor.probe.runtime.sites import caller


def install(c10d: ModuleType) -> None:
    """Wrap what makes process groups in ``torch.distributed.distributed_c10d``.

    Runs before ``torch.distributed`` copies the names, so every way to reach them is wrapped.
    """
    _wrap(c10d, "init_process_group", _joined, before=_joins)
    for name in ("new_group", "split_group"):
        if hasattr(c10d, name):
            _wrap(c10d, name, _nothing)


def _joins(arguments: dict[str, Any]) -> None:
    _declare(arguments)
    _note_store(arguments)


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
    for tell in events.group_joined:
        tell(torch)
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
    record = ports.unopened(arguments) if rank.current() is None else None
    if record is not None:
        site = caller()
        errors.stray({**record, "path": site.path, "line": site.line})


def _nothing(*_: object) -> None:
    pass


def _wrap(
    c10d: ModuleType,
    name: str,
    after: Callable[[], None],
    before: Callable[[dict[str, Any]], None] = _nothing,
) -> None:
    original = getattr(c10d, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        before(_bound(signature, args, kwargs))
        asked: object = None
        if timeouts.least():
            args, kwargs, asked = _without_timeout(signature, args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        if timeouts.least():
            _lift(c10d, asked)
        after()
        return result

    setattr(c10d, name, make_group)


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        # The call will say so itself.
        return {}


def _without_timeout(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], object]:
    """A call with the timeout lifted, and the one asked for: who is in the debugger comes late."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        # The call will say so itself.
        return args, kwargs, None
    asked = bound.arguments.get("timeout")
    if not isinstance(asked, timedelta):
        return args, kwargs, None
    bound.arguments["timeout"] = max(asked, timeouts.least())
    return bound.args, bound.kwargs, asked


@shield.shielded
def _lift(c10d: ModuleType, asked: object) -> None:
    if isinstance(asked, timedelta):
        timeouts.made(list(torch_private.backends(c10d)), asked)
    timeouts.sweep()
