"""Who may come in: the user whose job this is, and root."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable

from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system import peers

SHARE = 0.4
"""The most of one core that refusals take, at all sockets together."""

BATCH = 0.01
"""Seconds of CPU time for connections before the loop's other work has its turn."""

REST = 0.005
"""Seconds, at least, in which a socket that has refused clients accepts none."""

FLOOD = 2.0
"""Seconds for which a socket has to be behind before that is reported."""

NO_FILES = 1.0
"""Seconds to wait where no connection can be accepted, for want of files, say."""

_RESET = struct.pack("ii", 1, 0)
_NO_RESET = struct.pack("ii", 0, 0)

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Admission:
    """Accepts the connections of a run, and resets those of other users before a byte is read.

    Every account of the machine can open thousands of connections a second to a debug port. Nothing
    is made for one that is refused, and refusals take no more than `SHARE` of a core. While a
    socket rests from them, the kernel queues what comes.

    Args:
        unidentified: Admit clients at the TCP ports whose user cannot be determined, too.
        report: Takes a record for each user that is refused, and for each flood, once.
    """

    def __init__(self, unidentified: bool, report: Callable[[DebugRecord], None]) -> None:
        self._unidentified = unidentified
        self._report = report
        self._refused: set[int | None] = set()
        self._doors: list[_Door] = []

    def open(self, listener: socket.socket, place: str, serve: Serve, beside: str = "") -> None:
        """Accept the connections of a listening socket from now on.

        Args:
            listener: The socket.
            place: What it is, for a person.
            serve: Serves a connection that is admitted.
            beside: A socket for the same clients that other users cannot reach.
        """
        self._doors.append(_Door(self, listener, place, serve, beside))

    def close(self) -> None:
        """Accept no more connections."""
        for door in self._doors:
            door.close()

    @property
    def resting(self) -> int:
        """The number of sockets that accept nothing at the moment."""
        return sum(door.rests for door in self._doors)

    def admits(self, connection: socket.socket, place: str) -> bool:
        """Return whether a connection is served.

        Args:
            connection: The connection.
            place: Where it comes in, for a person.
        """
        try:
            uid: int | None = peers.user(connection)
            why = ""
        except peers.GoneError:
            return False
        except peers.UnknownPeerError as error:
            if self._unidentified:
                return True
            uid, why = None, str(error)
        if uid is not None and peers.is_trusted(uid):
            return True
        if uid not in self._refused:
            # Once: whoever is refused could fill the terminal with it.
            self._refused.add(uid)
            now = time.time_ns()
            self._report(DebugRecord(time=now, state="refused", uid=uid, why=why, door=place))
        return False

    def report_flood(self, place: str, beside: str) -> None:
        """Report that refusals cannot keep up with the connections at a place."""
        now = time.time_ns()
        self._report(DebugRecord(time=now, state="flooded", door=place, beside=beside))


class _Door:
    """One listening socket."""

    def __init__(
        self, admission: Admission, listener: socket.socket, place: str, serve: Serve, beside: str
    ) -> None:
        self._admission = admission
        self._listener = listener
        self._place = place
        self._serve = serve
        self._beside = beside
        self._behind: float | None = None
        """Since when more has come than could be accepted."""
        self._is_reported = False
        self._wakes: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        # Accepted sockets inherit it. It is cheaper than an orderly end, and leaves nothing behind.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._loop.add_reader(listener, self._accept)

    @property
    def rests(self) -> bool:
        """Whether it accepts nothing at the moment."""
        return self._wakes is not None

    def close(self) -> None:
        """Accept no more connections."""
        if self._wakes is not None:
            self._wakes.cancel()
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        """Accept what has come, for a moment."""
        began, cpu_began = time.monotonic(), time.thread_time()
        spent, refused = 0.0, False
        while spent < BATCH:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                self._behind = None
                break
            except ConnectionAbortedError:
                continue
            except OSError:
                self._rest(NO_FILES)
                return
            if self._admission.admits(connection, self._place):
                task = self._loop.create_task(self._take(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                connection.close()
                refused = True
            spent = time.thread_time() - cpu_began
        else:
            self._fall_behind()
        if refused:
            # Those that rest share what all may take.
            share = SHARE / (1 + self._admission.resting)
            self._rest(max(REST, spent / share - (time.monotonic() - began)))

    def _fall_behind(self) -> None:
        now = time.monotonic()
        if self._behind is None:
            self._behind = now
        elif now - self._behind > FLOOD and not self._is_reported:
            self._is_reported = True
            self._admission.report_flood(self._place, self._beside)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._wakes = self._loop.call_later(seconds, self._wake)

    def _wake(self) -> None:
        self._wakes = None
        self._loop.add_reader(self._listener, self._accept)

    async def _take(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_RESET)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            # The run is over.
            writer.close()
            raise
