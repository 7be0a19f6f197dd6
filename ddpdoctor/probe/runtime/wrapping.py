"""Puts calls of ours around functions of torch and of Python.

What the wrapped function returns and raises stays as it is, and no frame of ours shows in the
traceback (from Python 3.11 on). Where an owner has no such function nothing is wrapped, and what
depends on it is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

from ddpdoctor.probe.runtime import hot, rank, shield

Begin = Callable[..., Any]
End = Callable[[Any, Any, "BaseException | None"], object]


def before(owner: Any, name: str, function: Callable[..., object]) -> None:
    """Call ``function`` with the arguments of ``owner.name`` before each call of it."""
    original = getattr(owner, name, None)
    if original is None:
        return
    safely = shield.shielded(function)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        safely(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise

    setattr(owner, name, call)


def after(owner: Any, name: str, function: Callable[..., object]) -> None:
    """Call ``function`` with result and arguments of each call of ``owner.name`` that returned."""
    original = getattr(owner, name, None)
    if original is None:
        return
    safely = shield.shielded(function)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            raise
        safely(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


def around(
    owner: Any,
    name: str,
    hook: str,
    begin: Begin,
    end: End,
    *,
    compiled: bool = False,
    idle: str = "",
    backward: bool = False,
    waits: bool = False,
) -> None:
    """Call ``begin`` and ``end`` around each call of ``owner.name`` in a rank.

    Args:
        owner: The class or module.
        name: Of the function.
        hook: What a fault in either is recorded as; then both go off.
        begin: Gets the arguments. If it returns None there is no end.
        end: Gets what ``begin`` returned, the result and the exception.
        compiled: Whether Dynamo may come here, for which there is only the original then.
        idle: An attribute of the first argument; where it is true there is nothing to call.
        backward: Whether it is autograd's engine, which compiled code follows in light steps.
        waits: Whether it is of no account within a collective, which waits.
    """
    original = getattr(owner, name, None)
    if original is None:
        return

    if hot.core is not None and not compiled and not idle:
        # Of what is no Python function Dynamo would break the graph.
        made = hot.core.Around(original, hook, begin, end, backward, waits)
        setattr(owner, name, functools.update_wrapper(made, original))
        return
    off = shield.off

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if compiled and (rank.is_tracing() or (idle and getattr(args[0], idle, True))):
            return original(*args, **kwargs)
        begun = None
        if rank.active is not None and hook not in off:
            try:
                begun = begin(*args, **kwargs)
            except Exception as broken:
                shield.fault(hook, broken)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            shield.hide_frame(error)
            if begun is not None:
                _end(hook, end, begun, error)
            raise
        if begun is not None:
            try:
                end(begun, result, None)
            except Exception as broken:
                shield.fault(hook, broken)
        return result

    setattr(owner, name, call)


def _end(hook: str, end: End, begun: Any, error: BaseException) -> None:
    try:
        end(begun, None, error)
    except Exception as broken:
        shield.fault(hook, broken)


CODES = tuple(
    code
    for function in (before, after, around)
    for code in function.__code__.co_consts
    if isinstance(code, CodeType)
)
"""What is put around functions, as Dynamo knows it: it is not to compile that."""
