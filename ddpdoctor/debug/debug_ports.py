"""Where debuggers attach: a block of ports, one per rank of this node, and sockets beside them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.run.names import CONTROL, short_path
from ddpdoctor.run.records.supervisor import DebugRecord

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
