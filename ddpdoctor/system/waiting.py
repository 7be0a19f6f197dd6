"""Waiting that works with any clock and any number of a descriptor.

Under libfaketime `time.sleep` fails from Python 3.11 on, and a lock's timeout never passes;
`select.select` takes no descriptor above 1023. Standard library only, since a keeper is a bare
interpreter.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable


def pause(seconds: float) -> None:
    """Let time pass."""
    select.select([], [], [], seconds)


def readable(descriptors: Iterable[int], seconds: float | None) -> list[int]:
    """Wait until one of some descriptors is readable, or at its end.

    Args:
        descriptors: Which.
        seconds: How long at most; None for as long as it takes.

    Returns:
        Those that are.
    """
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [found for found, _ in poller.poll(None if seconds is None else seconds * 1000)]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, for so long at most. Returns whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        pause(0.01)
    return holds
