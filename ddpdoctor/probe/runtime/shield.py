"""A fault of ours stays ours: a hook that raises is switched off, and the job goes on."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from typing import Any, ParamSpec

P = ParamSpec("P")

off: set[str] = set()
"""The hooks that failed once; they do nothing any more."""

_report: Callable[[str, str], None] | None = None
faults: list[tuple[str, str]] = []
"""Faults from before there was a place to write them."""


def report_to(report: Callable[[str, str], None] | None) -> None:
    """Where faults go from now on; those that waited go there first."""
    global _report
    _report = report
    if report is not None:
        while faults:
            report(*faults.pop(0))


def fault(hook: str, error: BaseException) -> None:
    """Note a fault of ours in ``hook``, which goes off.

    Raises:
        Exception: ``error``, if a signal handler of the job's raised it: a DataLoader's, whose
            worker died, or a time limit's. Python runs it in whatever code the main thread is in.
    """
    if _is_of_handler(error):
        raise error
    try:
        if hook in off:
            return
        off.add(hook)
        if _report is not None:
            _report(hook, repr(error))
        elif len(faults) < 100:
            faults.append((hook, repr(error)))
    except Exception:
        pass


def _is_of_handler(error: BaseException) -> bool:
    """Whether the code of a signal handler is among what the exception went through."""
    try:
        handlers = map(signal.getsignal, signal.valid_signals())
        codes = {_code_of(each) for each in handlers if callable(each)}
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                return True
            trace = trace.tb_next
    except Exception:
        pass
    return False


def _code_of(handler: Any) -> object:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def hide_frame(error: BaseException) -> None:
    """Take the caller's own frame, a wrapper's, out of an exception that flies through it.

    Before a bare ``raise``: from Python 3.11 on the user's traceback then looks as it would without
    us. On 3.10 the frame stays, since there a bare ``raise`` restores the traceback it caught.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def name_of(function: Callable[..., object]) -> str:
    """What faults in a function are recorded as."""
    return f"{function.__module__}.{function.__qualname__}"


def call(function: Callable[[], object]) -> None:
    """Call a function once, without its exceptions, as `shielded` does."""
    if off and name_of(function) in off:
        return
    try:
        function()
    except Exception as error:
        fault(name_of(function), error)


def shielded(function: Callable[P, object]) -> Callable[P, None]:
    """``function`` without its exceptions: after the first one it does nothing any more.

    KeyboardInterrupt and SystemExit are the job's own and pass, and so does what one of its
    signal handlers raises.
    """
    name = name_of(function)

    @functools.wraps(function)
    def safe(*args: P.args, **kwargs: P.kwargs) -> None:
        if name in off:
            return
        try:
            function(*args, **kwargs)
        except Exception as error:
            fault(name, error)

    return safe
