"""Writes what the hooks saw: the status page at once, the journal from another thread.

A hook appends to a bounded queue and returns; a full queue drops and counts. The thread drains it a
few times a second, so a slow or full disk costs the job nothing but the record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from ddpdoctor.probe.runtime.threads import background
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.records.base import Record, encode
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.status import StatusPage

FLUSH_EVERY = 0.25
"""Seconds between two writes of the journal."""

ROUNDS = round(1 / FLUSH_EVERY)
"""How often the writing thread wakes in a second."""

QUEUE = 20_000
"""Records that wait at most; a step every 12.5 microseconds would fill it."""

AT_ONCE = 32
"""Records that are made before the GIL is offered to other threads: half a millisecond."""

Lazy = Callable[[bool], "bytes | Record"]
"""Makes a line, or a record, in the writing thread; the argument says: this is the last chance."""


class NotYet(Exception):
    """A lazy record cannot be made yet; it and the lazy ones behind it wait for the next round.

    What a host knows does not: a GPU that hangs comes to nothing any more.
    """


class Recorder:
    """The recorder of one rank.

    Args:
        page: The rank's status page.
        journal: The rank's journal.
    """

    def __init__(self, page: StatusPage, journal: Journal) -> None:
        self.page = page
        self.dropped = 0
        self.each_round: list[Callable[[], None]] = []
        """Called by the writing thread every `FLUSH_EVERY` seconds, and once at the end."""
        self.each_second: list[Callable[[], None]] = []
        """The same, once a second."""
        self._journal = journal
        self._queue: deque[Record | Lazy] = deque()
        self._writing = threading.Lock()
        # Held until the end: to wait for an Event takes Python code, four times a second.
        self._running = threading.Lock()
        self._running.acquire()
        self._failed = False
        self._thread = background("journal", self._run)

    def start(self) -> None:
        """Start the writing thread."""
        self._thread.start()

    def add(self, record: Record | Lazy) -> None:
        """Queue a record; never blocks, never raises."""
        if len(self._queue) >= QUEUE:
            self.dropped += 1
        else:
            self._queue.append(record)

    def add_now(self, record: Record) -> None:
        """Write a record, and what is queued if the writing thread is not at it: no waiting.

        For why a process ends that native code may end the next moment. It takes a
        system call, so it is not for what happens at every step.
        """
        line = encode(record)
        try:
            self._journal.write_now(line)
        except (OSError, ValueError):
            # Should some of the disk be free again, the writing thread finds out.
            self.add(record)
        self.flush(0.0)

    def flush(self, timeout: float, last: bool = False) -> None:
        """Write what is queued, waiting at most ``timeout`` seconds for the writing thread."""
        if not self._writing.acquire(timeout=timeout):
            return
        try:
            self._drain(last)
        finally:
            self._writing.release()

    @property
    def is_writing(self) -> bool:
        """Whether this is the writing thread."""
        return threading.current_thread() is self._thread

    def close(self, timeout: float) -> None:
        """Stop the thread and write the rest."""
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
            if not rounds % ROUNDS:
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
            # Also if Ctrl-C comes meanwhile.
            self._queue.extendleft(reversed(held))
        if not batch:
            return
        if self._failed:
            self.dropped += len(batch)
            return
        try:
            self._journal.write(batch)
        except (OSError, ValueError):
            # The supervisor sees the flag and says it, once for all ranks.
            self._failed = True
            self.dropped += len(batch)
            self.page.set_unwritten()
