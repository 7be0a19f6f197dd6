"""The debug ports of a run: passes bytes between a debugger and the rank that it wants.

The supervisor listens; a rank starts debugpy only when the first client has sent its first message.
No rank listens: for each session it makes one more connection to the supervisor's control socket.
All of it lives on one thread with its own event loop, so that a slow client holds up nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ddpdoctor.debug.admission import Admission
from ddpdoctor.debug.clients import Clients
from ddpdoctor.debug.debug_ports import Doors, Ports
from ddpdoctor.debug.ranks import Ranks
from ddpdoctor.debug.slots import Slots, Stop
from ddpdoctor.run.records.supervisor import DebugRecord


class Gateway:
    """Serves the debug ports of one run.

    Args:
        ports: The listening sockets.
        doors: Those in the run directory, which are open.
        unidentified: Serve clients at the ports whose user cannot be determined, too.
        gate: Ranks that have to be attached before any may start; all of them if empty; None for
            no gate.
        ends_job: The first client that stops a session it began before the gate was open ends the
            job.
        hold_errors: Ranks hold at an uncaught exception, so timeouts are lifted from the start.
        expected: How many ranks there will be, None if only they know.
    """

    def __init__(
        self,
        ports: Ports,
        doors: Doors,
        *,
        unidentified: bool,
        gate: frozenset[int] | None,
        ends_job: bool,
        hold_errors: bool,
        expected: int | None,
    ) -> None:
        self._ports = ports
        self._doors = doors
        self._slots = Slots(ports.numbers)
        self._admission = Admission(unidentified, self._slots.report)
        self._ranks = Ranks(self._slots, gate=gate, hold_errors=hold_errors, expected=expected)
        self._clients = Clients(self._slots, self._ranks, ends_job=ends_job)
        self._main_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-gateway", daemon=True)

    # -- from the supervisor's thread

    def start(self, news: Callable[[], None]) -> None:
        """Serve, from its own thread, which calls ``news`` when there is some to take."""
        self._slots.news = news
        self._thread.start()

    def stop(self) -> None:
        """Close ports and sessions; a client sees the end of its session."""
        self._stopping.set()
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel)
            self._thread.join(2.0)
        self._ports.close()
        self._doors.close()

    def take(self) -> list[DebugRecord]:
        """What has happened since the last call: ``debug`` records for the journal."""
        return self._slots.take()

    @property
    def ranks(self) -> dict[int, int]:
        """The port of each global rank that has said hello."""
        return {slot.rank: slot.port for slot in self._slots.linked}

    @property
    def stops(self) -> list[Stop]:
        """The ranks that are held: at a breakpoint, or waiting for a client."""
        return self._slots.stops

    # -- the thread

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._report("broken", error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Else asyncio would write its tracebacks between the job's lines.
        self._loop.set_exception_handler(self._fault)
        admission, doors = self._admission, self._doors
        admission.open(doors.control, "the control socket of the ranks", self._ranks.take)
        for slot, listener, door, path in zip(
            self._slots, self._ports.listeners, doors.listeners, doors.paths, strict=True
        ):
            take = partial(self._clients.take, slot)
            admission.open(listener, f"debug port {slot.port}", take, beside=path)
            admission.open(door, path, take)
        with contextlib.suppress(asyncio.CancelledError):
            self._main_task = asyncio.current_task()
            if not self._stopping.is_set():
                await asyncio.Event().wait()
        admission.close()
        tasks = list(self._slots.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of ours that no task waited for: into the records, not on the screen."""
        self._report("fault", context.get("exception") or context.get("message"))

    def _report(self, state: str, error: object) -> None:
        self._slots.report(DebugRecord(time=time.time_ns(), state=state, error=repr(error)))

    def _cancel(self) -> None:
        if self._main_task is not None:
            self._main_task.cancel()
