"""Open the debug ports of ranks, and let their owner in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.debug.clients import Clients
from ddpdoctor.debug.gateway_ranks import Ranks, Slots, Stop
from ddpdoctor.run.names import CONTROL, short_path
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system import peers

# -- who may come in: the user whose job this is, and root


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


# -- the debug ports of a run: passes bytes between a debugger and the rank that it wants


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


# -- debug ports


BACKLOG = 1024
"""Connections that the kernel queues while others flood a port. A client waits longer in a longer
queue, if the flood keeps it full."""

_LAST = 65535
_ATTEMPTS = 200


@dataclass(frozen=True)
class Ports:
    """A block of listening sockets.

    Attributes:
        host: The address they are bound to.
        listeners: One per local rank, ascending by port, with no port left out in between.
        moved: Whether the block that was asked for was taken.
    """

    host: str
    listeners: tuple[socket.socket, ...]
    moved: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        """The port numbers, by local rank."""
        return tuple(listener.getsockname()[1] for listener in self.listeners)

    def close(self) -> None:
        """Stop listening."""
        for listener in self.listeners:
            listener.close()


class Doors:
    """The sockets of a run directory: the ranks' control socket, and one beside each port.

    Args:
        directory: The run directory.
        count: The number of ports.

    Raises:
        OSError: A socket cannot be made.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self._control_path = str(directory / CONTROL)
        self.control = _private_socket(self._control_path)
        self.paths = [str(directory / f"debug-{index}.sock") for index in range(count)]
        self.listeners = [_private_socket(path) for path in self.paths]

    def close(self) -> None:
        """Stop listening."""
        for door in (self.control, *self.listeners):
            door.close()
        # Nothing listens there any more, and a socket cannot be copied with the directory.
        for path in (self._control_path, *self.paths):
            with contextlib.suppress(OSError):
                os.unlink(path)


def bind_block(host: str, first: int, count: int) -> Ports:
    """Take the first free block of ``count`` ports at or after ``first``.

    Args:
        host: The address to bind to.
        first: The port of local rank 0; 0 for any free block.
        count: Number of ports.

    Raises:
        DoctorError: There is no such block, or the address is not one of this machine.
    """
    start = first or _any_port(host)
    for attempt in range(_ATTEMPTS):
        at = start + attempt * count
        if at + count - 1 > _LAST:
            break
        listeners = _bind(host, at, count)
        if listeners is not None:
            return Ports(host, listeners, moved=bool(first) and attempt > 0)
    raise DoctorError(
        f"no block of {count} free ports from {start} on",
        "choose another --debug-port PORT, or turn the debugger off with --no-debug",
    )


def _bind(host: str, at: int, count: int) -> tuple[socket.socket, ...] | None:
    """Listen on ports ``at`` and following; None if one of them is taken."""
    with contextlib.ExitStack() as undo:
        listeners = []
        for port in range(at, at + count):
            listener = _listen(host, port)
            if listener is None:
                return None
            undo.callback(listener.close)
            listeners.append(listener)
        undo.pop_all()
        return tuple(listeners)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """Where a client connects for ports that are bound to ``host``."""
    # By the name, a client may come to ::1, where anyone may listen.
    return {"0.0.0.0": LOOPBACK, "::": "::1", "localhost": LOOPBACK}.get(host, host)


def _listen(host: str, port: int) -> socket.socket | None:
    try:
        # `create_server` sets SO_REUSEADDR: sessions that ended a moment ago do not block a port.
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise DoctorError(
            f"cannot listen on {host}: {error.strerror or error}",
            "--debug-host needs an address of this machine",
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def flooded(record: DebugRecord) -> str:
    """Return what to do about the ``flooded`` record of a port."""
    return (
        f"warning: {record.door} is flooded with connections, which may delay a debugger; "
        f"{record.beside} is not affected"
    )


def _any_port(host: str) -> int:
    listener = _listen(host, 0)
    if listener is None:
        raise DoctorError(f"no port of {host} is free")
    with listener:
        port: int = listener.getsockname()[1]
    return port


def _private_socket(path: str) -> socket.socket:
    """A Unix socket that listens, for this user alone."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_path(path) as short:
            made.bind(short)
            os.chmod(short, 0o600)
        made.listen(128)
    except OSError:
        made.close()
        raise
    return made
