"""Threads of ours in a rank: in the background, and none of a debugger's business."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import shield

PREFIX = "ddpdoctor-"
"""What the names of our threads begin with."""


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
