"""Protect the job from faults of hooks, and from the probe's threads.

A hook that raises is switched off, and the job goes on. Debuggers and forks ignore the probe's
threads. From Python 3.12 on, ``os.fork`` warns in a process with several threads. A rank that
has not joined its group yet has several only because of the probe.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

# -- faults of hooks

P = ParamSpec("P")

off: set[str] = set()  # hooks that failed once and do nothing any more

_report: Callable[[str, str], None] | None = None
faults: list[tuple[str, str]] = []  # faults from before there was a place to write them


def report_to(report: Callable[[str, str], None] | None) -> None:
    """Report faults to a function from now on, starting with those that were held back."""
    global _report
    _report = report
    if report is not None:
        while faults:
            report(*faults.pop(0))


def fault(hook: str, error: BaseException) -> None:
    """Note a fault of ours in ``hook``, and switch the hook off.

    Raises:
        Exception: ``error``, if a signal handler of the job raised it, such as for a dead
        DataLoader worker or a time limit. Python runs handlers in any code of the main thread.
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
    """Return whether the exception passed through the code of a signal handler."""
    try:
        handlers = map(signal.getsignal, signal.valid_signals())
        codes = {_code_of(each) for each in handlers if callable(each)}
        return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
    except Exception:
        pass
    return False


def _code_of(handler: Any) -> object:
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def hide_frame(error: BaseException) -> None:
    """Remove the frame of the wrapper that calls this from an exception that passes through it.

    Call it before a bare ``raise``. From Python 3.11 on the user's traceback then looks as it would
    without us. On 3.10 the frame stays, since a bare ``raise`` restores the traceback it caught.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def name_of(function: Callable[..., object]) -> str:
    """Return the name under which a function's faults are recorded."""
    return f"{function.__module__}.{function.__qualname__}"


def call(function: Callable[[], object]) -> None:
    """Call a function once without letting it raise, as `shielded` does."""
    if off and name_of(function) in off:
        return
    try:
        function()
    except Exception as error:
        fault(name_of(function), error)


def shielded(function: Callable[P, object]) -> Callable[P, None]:
    """Wrap a function so that it does not raise. After its first exception it does nothing.

    KeyboardInterrupt and SystemExit are the job's own and pass, as do exceptions of its signal
    handlers.
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

THREAD_PREFIX = "ddpdoctor-"  # prefix of our threads' names
_TASKS = "/proc/self/task"
_FORK_WARNING = "is multi-threaded, use of fork"


def background(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Make a daemon thread, not started yet, that debugpy neither shows nor stops.

    A rank that is stopped at a breakpoint still has to answer and to write its records. debugpy
    knows its own threads by these two attributes. An exception ends the thread, is recorded as a
    fault, and prints nothing.
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
    """Prepare for forks of this process."""
    if sys.version_info >= (3, 12):
        os.register_at_fork(before=_before_fork)


@shielded
def _before_fork() -> None:
    """Suppress the warning of this fork if there would be none without us.

    Python shows it only after the hooks that run after a fork, so the replacement stays until then,
    or until the next warning. Filters are left alone: changing them makes Python forget which
    warnings it has shown.
    """
    show: Any = getattr(warnings, "_showwarnmsg", None)
    if show is None or isinstance(show, _SilentOnce) or not _is_alone():
        return
    warnings._showwarnmsg = _SilentOnce(show)  # type: ignore[attr-defined]


def _is_alone() -> bool:
    """Return whether this process would have only one thread without us."""
    ours = sum(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())
    return 0 < ours == len(os.listdir(_TASKS)) - 1


class _SilentOnce:
    """Replaces the function that shows warnings, until the next warning."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def __call__(self, message: Any) -> None:
        if getattr(warnings, "_showwarnmsg", None) is self:
            warnings._showwarnmsg = self._show  # type: ignore[attr-defined]
        if _FORK_WARNING not in str(message.message) or not _is_alone():
            self._show(message)
