"""Keep what is ours from the job: faults of hooks, and background threads.

A hook that raises is switched off, and the job goes on. Threads of ours are no business of a
debugger's or a fork's: from Python 3.12 on ``os.fork`` warns in a process of several threads, which
a rank that has not joined its group yet is by us alone.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

# -- A fault of ours stays ours: a hook that raises is switched off, and the job goes on


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


# -- threads


THREAD_PREFIX = "ddpdoctor-"
"""What the names of our threads begin with."""

_TASKS = "/proc/self/task"
_FORK_WARNING = "is multi-threaded, use of fork"


def background(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """A daemon thread, not started yet, that debugpy neither shows nor stops with the others.

    A rank that is stopped at a breakpoint still has to answer and to write its records. debugpy
    leaves its own threads alone, which it knows by these two attributes. An exception ends the
    thread, is recorded as a fault, and prints nothing.
    """

    def run() -> None:
        try:
            target(*args)
        except Exception as error:
            fault(f"thread {name}", error)

    thread = threading.Thread(target=run, name=THREAD_PREFIX + name, daemon=True)
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


def watch_forks() -> None:
    """Look at every fork of this process before it happens."""
    if sys.version_info >= (3, 12):
        os.register_at_fork(before=_before_fork)


@shielded
def _before_fork() -> None:
    """Keep the warning of this fork back if without us there would be none.

    Python shows it only after the hooks that run after a fork, so what keeps it back stays until
    then, or until it is in the way of nothing. Filters are left alone: to change them makes Python
    forget which warnings it has shown already.
    """
    show: Any = getattr(warnings, "_showwarnmsg", None)
    if show is None or isinstance(show, _SilentOnce) or not _is_alone():
        return
    warnings._showwarnmsg = _SilentOnce(show)  # type: ignore[attr-defined]


def _is_alone() -> bool:
    """Whether this process would have one thread if it were not for us."""
    ours = sum(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())
    return 0 < ours == len(os.listdir(_TASKS)) - 1


class _SilentOnce:
    """In place of what shows warnings, until the next of them."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def __call__(self, message: Any) -> None:
        if getattr(warnings, "_showwarnmsg", None) is self:
            warnings._showwarnmsg = self._show  # type: ignore[attr-defined]
        if _FORK_WARNING not in str(message.message) or not _is_alone():
            self._show(message)
