"""Threads of ours in a rank: in the background, and none of a debugger's or a fork's business.

From Python 3.12 on ``os.fork`` warns in a process of several threads, which a rank that has not
joined its group yet is by us alone.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import shield

PREFIX = "ddpdoctor-"
"""What the names of our threads begin with."""

_TASKS = "/proc/self/task"
_WORDS = "is multi-threaded, use of fork"


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
            shield.fault(f"thread {name}", error)

    thread = threading.Thread(target=run, name=PREFIX + name, daemon=True)
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    return thread


def watch_forks() -> None:
    """Look at every fork of this process before it happens."""
    if sys.version_info >= (3, 12):
        os.register_at_fork(before=_before)


@shield.shielded
def _before() -> None:
    """Keep the warning of this fork back if without us there would be none.

    Python shows it only after the hooks that run after a fork, so what keeps it back stays until
    then, or until it is in the way of nothing. Filters are left alone: to change them makes Python
    forget which warnings it has shown already.
    """
    show: Any = getattr(warnings, "_showwarnmsg", None)
    if show is None or isinstance(show, _Silent) or not _is_alone():
        return
    warnings._showwarnmsg = _Silent(show)  # type: ignore[attr-defined]


def _is_alone() -> bool:
    """Whether this process would have one thread if it were not for us."""
    ours = sum(thread.name.startswith(PREFIX) for thread in threading.enumerate())
    return 0 < ours == len(os.listdir(_TASKS)) - 1


class _Silent:
    """In place of what shows warnings, until the next of them."""

    def __init__(self, show: Any) -> None:
        self._show = show

    def __call__(self, message: Any) -> None:
        if getattr(warnings, "_showwarnmsg", None) is self:
            warnings._showwarnmsg = self._show  # type: ignore[attr-defined]
        if _WORDS not in str(message.message) or not _is_alone():
            self._show(message)
