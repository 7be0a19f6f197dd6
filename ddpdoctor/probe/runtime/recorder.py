"""Write the hooks' records: the status page at once, the journal from another thread.

A hook appends to a bounded queue and returns. A full queue drops records and counts them. The
thread drains it a few times a second, so a slow or full disk costs the job only records. It also
updates the vital signs on the status page: the last step, the memory.

The training thread reads torch's allocator between two steps. A thread may hold the allocator's
lock while it waits for the GPU. If another thread waited for that lock, it would hold the GIL
during the hang that is being examined.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import torch_devices, torch_private
from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.records.base import Record, encode
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.status import Parts, StatusPage

# -- vital signs

MEMORY_EVERY = 1_000_000_000  # nanoseconds between two readings of the memory
_NEVER = 1 << 62
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Vitals:
    """The vital signs of one rank, written to its status page."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._parts: Parts | None = None
        self._shown: Parts | None = None
        self._allocator: tuple[int, int, int] | None = None
        self._device: Any = None
        self._looked = 0
        self.due = _NEVER  # time of the next `ask`, on the clock of the steps; never without a GPU

    # -- in the training thread

    def use_device(self, device: Any) -> None:
        """Note the device that the rank computes on."""
        self._device = device
        self.due = 0
        self._page.set_gpu(torch_private.device_uuid(sys.modules["torch"], device))

    def ask(self, now: int) -> None:
        """Read the allocator's counters, which does not touch the device."""
        self.due = now + MEMORY_EVERY
        try:
            self._allocator = torch_devices.allocated_memory(self._device)
        except Exception:
            # A custom allocator has no counters.
            self._allocator, self.due = None, _NEVER

    # -- in the writing thread

    def wrote(self, parts: Parts) -> None:
        """Note a step that was written to the journal."""
        self._parts = parts

    def store(self) -> None:
        """Write changed values to the page."""
        now = time.time_ns()
        self._page.set_beat(now)
        if self._parts is not None and self._parts is not self._shown:
            self._shown = self._parts
            self._page.set_parts(self._parts)
        if abs(now - self._looked) >= MEMORY_EVERY:
            self._looked = now
            found = statm()
            self._page.set_memory(None if found is None else found[1], self._allocator)


def statm(pid: int | str = "self") -> tuple[int, int, int] | None:
    """Return the bytes of virtual, resident and shared memory of a process."""
    try:
        with open(f"/proc/{pid}/statm", "rb", buffering=0) as file:
            size, resident, shared = file.read(256).split()[:3]
        return int(size) * _PAGE_SIZE, int(resident) * _PAGE_SIZE, int(shared) * _PAGE_SIZE
    except (OSError, ValueError):
        return None


# -- the journal

FLUSH_EVERY = 0.25  # seconds between two writes of the journal
ROUNDS_PER_SECOND = round(1 / FLUSH_EVERY)
QUEUE_SIZE = 20_000  # maximum number of queued records, those of 0.25 s at 12.5 us per step
AT_ONCE = 32  # number of records (half a millisecond) after which the GIL is offered to others

Lazy = Callable[[bool], "bytes | Record"]
"""Makes a line or a record in the writing thread. Its argument is True in the last
call."""


class NotYet(Exception):
    """A lazy record cannot be made yet. It and later lazy records wait for the next round.

    Other records do not wait, since a hanging GPU may never finish.
    """


class Recorder:
    """The recorder of one rank, with its status page and its journal."""

    def __init__(self, page: StatusPage, journal: Journal) -> None:
        self.page = page
        self.dropped = 0
        self.each_round: list[Callable[[], None]] = []
        """Called by the writing thread every `FLUSH_EVERY` seconds, and once at the end."""
        self.each_second: list[Callable[[], None]] = []  # the same, once a second
        self._journal = journal
        self._queue: deque[Record | Lazy] = deque()
        self._writing = threading.Lock()
        # Held until the end. Waiting for an Event would run Python code four times a second.
        self._running = threading.Lock()
        self._running.acquire()
        self._failed = False
        self._thread = background("journal", self._run)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def add(self, record: Record | Lazy) -> None:
        """Queue a record. Never blocks and never raises."""
        if len(self._queue) >= QUEUE_SIZE:
            self.dropped += 1
        else:
            self._queue.append(record)

    def add_now(self, record: Record, flush: bool = True) -> None:
        """Write a record now. With ``flush``, also write the queue unless the thread is writing it.

        Used for the reason of an exit, because native code may end the process at any moment. The
        system call is too expensive for every step.
        """
        line = encode(record)
        try:
            self._journal.write_now(line)
        except (OSError, ValueError):
            # If the disk has room again, the writing thread will write it.
            self.add(record)
        if flush:
            self.flush(0.0)

    def flush(self, timeout: float, last: bool = False) -> None:
        """Write the queue. Wait at most ``timeout`` seconds for the writing thread."""
        if not self._writing.acquire(timeout=timeout):
            return
        try:
            self._drain(last)
        finally:
            self._writing.release()

    @property
    def is_writing(self) -> bool:
        """Return whether this is the writing thread."""
        return threading.current_thread() is self._thread

    def close(self, timeout: float) -> None:
        """Stop the writing thread and write the rest."""
        with contextlib.suppress(RuntimeError):
            self._running.release()
        if not self.is_writing and self._thread.is_alive():
            self._thread.join(timeout)
        self.flush(timeout, last=True)
        self._call(self.each_round)
        self._call(self.each_second)
        self._journal.close()

    def _run(self) -> None:
        rounds = 0
        while not self._running.acquire(timeout=FLUSH_EVERY):
            if self._queue:
                with self._writing:
                    self._drain(last=False)
            self._call(self.each_round)
            rounds += 1
            if not rounds % ROUNDS_PER_SECOND:
                self._call(self.each_second)

    def _call(self, calls: list[Callable[[], None]]) -> None:
        for call in tuple(calls):
            try:
                call()
            except Exception as error:
                calls.remove(call)
                hook = call.__module__.rpartition(".")[2]
                self.add(FaultRecord(hook=hook, error=type(error).__name__))

    def _drain(self, last: bool) -> None:
        batch: list[Record | bytes] = []
        held: list[Lazy] = []
        try:
            for count in range(len(self._queue)):
                if count % AT_ONCE == AT_ONCE - 1:
                    # The training thread may wait for the GIL.
                    time.sleep(0)
                item = self._queue.popleft()
                if held and callable(item):
                    held.append(item)
                    continue
                try:
                    batch.append(item(last) if callable(item) else item)
                except NotYet:
                    assert callable(item)
                    held.append(item)
                except Exception as error:
                    batch.append(FaultRecord(hook="journal", error=type(error).__name__))
        finally:
            # A Ctrl-C may arrive at this point.
            self._queue.extendleft(reversed(held))
        if not batch:
            return
        if self._failed:
            self.dropped += len(batch)
            return
        try:
            self._journal.write(batch)
        except (OSError, ValueError):
            # The supervisor sees the flag and reports it once for all ranks.
            self._failed = True
            self.dropped += len(batch)
            self.page.set_unwritten()
