"""Open the debug ports of ranks, and admit their owner."""

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.core.user_code import Location
from ddpdoctor.debug.clients import Clients, OtherNodes, Project, Serve
from ddpdoctor.debug.gateway_ranks import Ranks, Stop
from ddpdoctor.debug.root import RootPort
from ddpdoctor.run.names import CONTROL, debug_socket, short_path
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.system import peers

# -- admission: only the user who runs the job, and root


MAX_REFUSAL_SHARE = 0.4  # Maximum share of a core for refusals, for all sockets together
MAX_BATCH = 0.01  # Seconds of CPU time to accept connections before the event loop does other work
MIN_PAUSE = 0.005  # Minimum seconds for which a socket that has refused clients is paused
FLOOD_TIMEOUT = 2.0  # Seconds for which a socket has to lag before it is reported

ACCEPT_RETRY = 1.0
"""Seconds to wait if no connection can be accepted, for example without free descriptors."""

_RESET = struct.pack("ii", 1, 0)
_NO_RESET = struct.pack("ii", 0, 0)


class Admission:
    """Accept the connections of a run, and reset those of other users before a byte is read.

    Every account of the machine can open thousands of connections a second to a debug port. A
    refused connection costs no object, and refusals use at most `MAX_REFUSAL_SHARE` of a core.
    While a socket is paused because of them, the kernel queues new connections.

    Args:
        unidentified: Also admit clients at the TCP ports whose user cannot be determined.
        report: Takes one record for each refused user, and for each flood.
    """

    def __init__(self, unidentified: bool, report: Callable[[DebugRecord], None]) -> None:
        self._unidentified = unidentified
        self._report = report
        self._refused: set[int | None] = set()
        self._listeners: list[_Listener] = []

    def open(
        self, listener: socket.socket, place: str, serve: Serve, beside: str = ""
    ) -> Callable[[], None]:
        """Start accepting a listening socket's connections. Return a function that stops this.

        Args:
            listener: The socket.
            place: Its description for the user.
            serve: Serves a connection that is admitted.
            beside: A socket for the same clients that other users cannot reach.
        """
        opened = _Listener(self, listener, place, serve, beside)
        self._listeners.append(opened)

        def close() -> None:
            self._listeners.remove(opened)
            opened.close()

        return close

    def close(self) -> None:
        """Accept no more connections."""
        for listener in self._listeners:
            listener.close()

    @property
    def paused(self) -> int:
        """The number of sockets that currently accept no connections."""
        return sum(listener.paused is not None for listener in self._listeners)

    def admits(self, connection: socket.socket, place: str) -> bool:
        """Return whether a connection may be served. Report the first refusal of each user."""
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
            self._refused.add(uid)
            now = time.time_ns()
            self._report(DebugRecord(time=now, state="refused", uid=uid, why=why, endpoint=place))
        return False

    def report_flood(self, place: str, beside: str) -> None:
        """Report that refusals cannot keep up with the connections at a socket."""
        now = time.time_ns()
        self._report(DebugRecord(time=now, state="flooded", endpoint=place, beside=beside))


class _Listener:
    """One listening socket."""

    def __init__(
        self, admission: Admission, listener: socket.socket, place: str, serve: Serve, beside: str
    ) -> None:
        self._admission = admission
        self._socket = listener
        self._place = place
        self._serve = serve
        self._beside = beside
        self._behind: float | None = None
        """Start of the period in which more connections arrived than could be accepted."""
        self._is_reported = False
        self.paused: asyncio.TimerHandle | None = None  # The timer that ends a pause, or None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        # Accepted sockets inherit this. A reset is cheaper than an orderly end and leaves no state.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        if self.paused is not None:
            self.paused.cancel()
        self._loop.remove_reader(self._socket)

    def _accept(self) -> None:
        """Accept waiting connections for up to `MAX_BATCH` seconds."""
        began, cpu_began = time.monotonic(), time.thread_time()
        spent, refused = 0.0, False
        while spent < MAX_BATCH:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                self._behind = None
                break
            except ConnectionAbortedError:
                continue
            except OSError:
                self._pause(ACCEPT_RETRY)
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
            now = time.monotonic()
            self._behind = now if self._behind is None else self._behind
            if now - self._behind > FLOOD_TIMEOUT and not self._is_reported:
                self._is_reported = True
                self._admission.report_flood(self._place, self._beside)
        if refused:
            # Paused sockets share one budget.
            share = MAX_REFUSAL_SHARE / (1 + self._admission.paused)
            self._pause(max(MIN_PAUSE, spent / share - (time.monotonic() - began)))

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self.paused = self._loop.call_later(seconds, self._wake)

    def _wake(self) -> None:
        self.paused = None
        self._loop.add_reader(self._socket, self._accept)

    async def _take(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_RESET)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            # The run is over.
            writer.close()
            raise


# -- the gateway, which passes bytes between a debugger and its rank


class Gateway:
    """Serve the debug ports of one run.

    Args:
        ports: The listening sockets.
        sockets: The sockets in the run directory.
        unidentified: Also serve clients at the ports whose user cannot be determined.
        gate: Ranks that have to be attached before any may start. All if empty. None for no gate.
        ends_job: The first client that stops a session begun before the gate opened ends the
            job.
        hold_errors: Ranks stop at an uncaught exception, so timeouts are lifted from the start.
        expected: The number of ranks. None if it is unknown.
        project: Refuses clients of another project. None serves all.
    """

    def __init__(
        self,
        ports: Ports,
        sockets: RunSockets,
        *,
        unidentified: bool,
        gate: frozenset[int] | None,
        ends_job: bool,
        hold_errors: bool,
        expected: int | None,
        project: Project | None = None,
    ) -> None:
        self._ports = ports
        self._sockets = sockets
        self._ranks = Ranks(ports.numbers, gate=gate, hold_errors=hold_errors, expected=expected)
        self._clients = Clients(self._ranks, ends_job=ends_job, project=project)
        self._admission = Admission(unidentified, self._ranks.report)
        self._others = OtherNodes(
            self._ranks,
            self._clients,
            self._admission,
            partial(bind_block, ports.host),
            ports.numbers[0],
            sockets.directory,
        )
        self._root = RootPort(self._ranks, self._clients, self._others, sockets.directory)
        self._main_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-gateway", daemon=True)

    # -- called from the supervisor's thread

    def start(self, news: Callable[[], None]) -> None:
        """Serve in a thread, which calls ``news`` when there are new records."""
        self._ranks.news = news
        self._thread.start()

    def stop(self) -> None:
        """Close ports and sessions. Each client sees the end of its session."""
        self._stopping.set()
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: self._main_task and self._main_task.cancel())
            self._thread.join(2.0)
        self._ports.close()
        self._sockets.close()

    def take(self) -> list[DebugRecord]:
        """Return the records since the last call, for the journal."""
        return self._ranks.records()

    def tell(self, text: str, place: Location | None = None) -> None:
        """Print a line in the consoles of all clients, with a link to a place in the code."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._clients.tell, text, place)

    @property
    def ranks(self) -> dict[int, int]:
        """The port of each global rank that has connected, on this or another node."""
        return self._others.ports | {slot.rank: slot.port for slot in self._ranks.linked}

    @property
    def hosts(self) -> dict[int, str]:
        """The hosts of the ranks of other nodes."""
        return self._others.hosts

    @property
    def stops(self) -> list[Stop]:
        """The ranks that are held: at a breakpoint, or waiting for a client."""
        return self._ranks.stops

    @property
    def waits(self) -> list[object]:
        """The messages of ranks that wait for a debugger, while none is attached."""
        slots = self._ranks.slots
        return [slot.waits for slot in slots if slot.waits is not None and slot.session is None]

    # -- the gateway's own thread

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._report("broken", error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The default handler would write tracebacks between the job's lines.
        self._loop.set_exception_handler(self._fault)
        admission, sockets = self._admission, self._sockets
        admission.open(sockets.control, "the control socket of the ranks", self._ranks.take)
        for slot, listener, private, path in zip(
            self._ranks.slots, self._ports.listeners, sockets.listeners, sockets.paths, strict=True
        ):
            take = partial(self._clients.take, slot)
            admission.open(listener, f"debug port {slot.port}", take, beside=path)
            admission.open(private, path, partial(take, by_port=False))
        if self._ports.root is not None:
            place = f"debug port {self._ports.root.getsockname()[1]}"
            admission.open(self._ports.root, place, self._root.take)
        with contextlib.suppress(asyncio.CancelledError):
            self._main_task = asyncio.current_task()
            if not self._stopping.is_set():
                await asyncio.Event().wait()
        self._others.close()
        admission.close()
        tasks = list(self._ranks.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Record an error that no task awaited."""
        self._report("fault", context.get("exception") or context.get("message"))

    def _report(self, state: str, error: object) -> None:
        self._ranks.report(DebugRecord(time=time.time_ns(), state=state, error=repr(error)))


# -- ports and sockets


BACKLOG = 1024
"""Maximum connections in a port's queue. In a longer queue, kept full by a flood, a client would
wait longer.
"""

_LAST_PORT = 65535
_ATTEMPTS = 200


@dataclass(frozen=True)
class Ports:
    """A block of listening sockets."""

    host: str  # The address they are bound to
    listeners: tuple[socket.socket, ...]  # One per local rank, with consecutive ports
    moved: bool  # Whether the requested block was in use, so that another one was chosen
    root: socket.socket | None = None  # The socket for sessions with all ranks

    @property
    def numbers(self) -> tuple[int, ...]:
        """The port numbers, by local rank."""
        return tuple(listener.getsockname()[1] for listener in self.listeners)

    def close(self) -> None:
        """Stop listening."""
        for listener in self.listeners:
            listener.close()
        if self.root is not None:
            self.root.close()


class RunSockets:
    """The sockets of a run directory: the ranks' control socket, and one for each debug port.

    Raises:
        OSError: A socket cannot be created.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self._control_path = str(directory / CONTROL)
        self.control = _private_socket(self._control_path)
        self.paths = [str(directory / debug_socket(index)) for index in range(count)]
        self.listeners = [_private_socket(path) for path in self.paths]

    def close(self) -> None:
        """Stop listening, and remove the sockets, which cannot be copied with the directory."""
        for listener in (self.control, *self.listeners):
            listener.close()
        for path in (self._control_path, *self.paths):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _private_socket(path: str) -> socket.socket:
    """Return a listening Unix socket that only this user can reach."""
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


def bind_block(host: str, first: int, count: int) -> Ports:
    """Listen on the first free block of ``count`` ports at or after ``first``; 0 for any.

    Raises:
        DoctorError: There is no such block, or the address is not one of this machine.
    """
    start = first
    if not start:
        free = _listen(host, 0)
        if free is None:
            raise DoctorError(f"no port of {host} is free")
        with free:
            start = free.getsockname()[1]
    for attempt in range(_ATTEMPTS):
        at = start + attempt * count
        if at + count - 1 > _LAST_PORT:
            break
        with contextlib.ExitStack() as undo:
            listeners = []
            for port in range(at, at + count):
                listener = _listen(host, port)
                if listener is None:
                    break
                listeners.append(undo.enter_context(listener))
            else:
                undo.pop_all()
                return Ports(host, tuple(listeners), moved=bool(first) and attempt > 0)
    raise DoctorError(
        f"no block of {count} free ports from {start} on",
        "choose another --debug-port PORT, or turn the debugger off with --no-debug",
    )


def with_root(ports: Ports) -> Ports:
    """Also listen for sessions with all ranks, on the port before the others if it is free."""
    root = _listen(ports.host, ports.numbers[0] - 1) or _listen(ports.host, 0)
    return replace(ports, root=root)


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen on a port. Returns None if it is taken, or reserved."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # `create_server` sets SO_REUSEADDR, so sessions that have just ended do not block a port.
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise DoctorError(
            f"cannot listen on {host}: {error.strerror or error}",
            "--debug-host needs an address of this machine",
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable(host: str) -> str:
    """Return the address at which a client reaches ports that are bound to ``host``."""
    # The name localhost may lead a client to ::1, where anyone may listen.
    return {"0.0.0.0": LOOPBACK, "::": "::1", "localhost": LOOPBACK}.get(host, host)


def flooded(record: DebugRecord) -> str:
    """Return the warning for the ``flooded`` record of a port."""
    return f"warning: {record.endpoint} is flooded with connections, which may delay a debugger" + (
        f"; {record.beside} is not affected" if record.beside else ""
    )
