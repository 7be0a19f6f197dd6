"""What the writing thread puts on the status page for who watches: the last step, the memory.

torch's allocator is asked on the training thread, between two steps: it is guarded by a lock that a
thread may hold while it waits for the GPU, and a second thread that waits for that lock would keep
Python's from all others, in the very hang that somebody wants to look into.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.run.status import Parts, StatusPage

EVERY = 1_000_000_000
"""Nanoseconds between two looks at the memory."""

_NEVER = 1 << 62
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Vitals:
    """The vital signs of one rank.

    Args:
        page: The rank's status page.
    """

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._parts: Parts | None = None
        self._shown: Parts | None = None
        self._allocator: tuple[int, int, int] | None = None
        self._device: Any = None
        self._looked = 0
        self.due = _NEVER
        """When :meth:`ask` is wanted, on the clock of the steps; never without a GPU."""

    # -- the training thread

    def use_device(self, device: Any) -> None:
        """The rank computes on this CUDA device."""
        self._device = device
        self.due = 0
        self._page.set_gpu(torch_private.device_uuid(sys.modules["torch"], device))

    def ask(self, now: int) -> None:
        """Ask the allocator, which reports its counters and does not touch the device."""
        self.due = now + EVERY
        try:
            counters = sys.modules["torch"].cuda.memory_stats_as_nested_dict(self._device)
            given, taken = counters["allocated_bytes"]["all"], counters["reserved_bytes"]["all"]
            self._allocator = (int(given["current"]), int(taken["current"]), int(given["peak"]))
        except Exception:
            # Another allocator was plugged in, which counts nothing.
            self._allocator, self.due = None, _NEVER

    # -- the writing thread

    def wrote(self, parts: Parts) -> None:
        """A step was written to the journal."""
        self._parts = parts

    def store(self) -> None:
        """Put on the page what is new."""
        now = time.time_ns()
        self._page.set_beat(now)
        if self._parts is not None and self._parts is not self._shown:
            self._shown = self._parts
            self._page.set_parts(self._parts)
        if abs(now - self._looked) >= EVERY:
            self._looked = now
            self._page.set_memory(_resident(), self._allocator)


def _resident() -> int | None:
    """Bytes of memory of this process."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(file, 256).split()[1]) * _PAGE
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return None
