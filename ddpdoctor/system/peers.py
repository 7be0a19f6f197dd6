"""Whose process is at the other end of a connection on this machine.

Every account reaches a loopback port, so the port alone says nothing. For TCP the kernel's table of
sockets names the owner, for Unix sockets the connection itself does.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Protocol

from ddpdoctor.system.proc import listeners

_ESTABLISHED = 1
_TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_MAPPED = bytes(10) + b"\xff\xff"
"""What an IPv4 address has before it in an IPv6 socket."""

_ATTEMPTS = 3
"""A table that is being changed may miss a line once."""


class Connection(Protocol):
    """A connected socket, or what asyncio gives in its place."""

    @property
    def family(self) -> int:
        """``AF_INET``, ``AF_INET6`` or ``AF_UNIX``."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        """As a socket's."""

    def getsockname(self) -> tuple[object, ...]:
        """As a socket's."""

    def getpeername(self) -> tuple[object, ...]:
        """As a socket's."""


class UnknownPeerError(Exception):
    """Nothing says whose connection this is; ``str`` says why."""


class GoneError(UnknownPeerError):
    """The peer has closed its end already."""


def is_trusted(uid: int) -> bool:
    """Whether a user may do all that the user of this process may."""
    return uid in (0, os.geteuid())


def user(connection: Connection) -> int:
    """The uid of the process at the other end.

    Raises:
        GoneError: The peer has closed its end.
        UnknownPeerError: It is on another machine or in another network namespace, or this system
            does not know.
    """
    try:
        unix = connection.family == socket.AF_UNIX
        uid = _unix_user(connection) if unix else _tcp_peer(connection)[0]
    except OSError as error:
        gone = error.errno == errno.ENOTCONN
        raise (GoneError if gone else UnknownPeerError)(error.strerror or str(error)) from None
    if uid == _number("/proc/sys/kernel/overflowuid") and not _all_users_have_numbers():
        raise UnknownPeerError("its user has no number in this user namespace")
    return uid


def inode(connection: Connection) -> int:
    """The inode of the TCP socket at the other end, by which it is found among a process's files.

    Raises:
        UnknownPeerError: As of :func:`user`, or no process has accepted the connection yet.
    """
    try:
        return _tcp_peer(connection)[1]
    except OSError as error:
        raise UnknownPeerError(error.strerror or str(error)) from None


def _unix_user(connection: Connection) -> int:
    if not hasattr(socket, "SO_PEERCRED"):
        raise UnknownPeerError("this system does not know the user of a connection")
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _tcp_peer(connection: Connection) -> tuple[int, int]:
    """The uid and the inode of the socket at the other end."""
    if not hasattr(socket, "TCP_INFO") or not os.path.exists("/proc/thread-self/net/tcp"):
        raise UnknownPeerError("this system does not know the user of a connection")
    ours, theirs = connection.getsockname(), connection.getpeername()
    for _ in range(_ATTEMPTS):
        found = _owner(theirs, ours)
        if not _is_open(connection):
            raise GoneError("the connection is closed already")
        # While our end is open no other socket can have had the addresses of its peer.
        if found is not None:
            return found
    raise UnknownPeerError("it comes from another machine or network namespace")


def _is_open(connection: Connection) -> bool:
    """Whether neither side has closed its end."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def _owner(source: tuple[object, ...], target: tuple[object, ...]) -> tuple[int, int] | None:
    """The uid and the inode of the open socket with these addresses.

    In this thread's network namespace.
    """
    for family, table in _TABLES.items():
        try:
            words = f" {_word(source, family)} {_word(target, family)} {_ESTABLISHED:02X} "
        except ValueError:
            continue
        try:
            with open(f"/proc/thread-self/net/{table}", "rb") as file:
                _, found, after = file.read().partition(words.encode())
        except FileNotFoundError:
            # Without IPv6 there is no table of it.
            continue
        # Behind the state: queues, timer, retransmissions, uid, timeout, inode.
        fields = after.split(None, 6)[:6] if found else []
        # A socket without a process has no inode, and the table gives it to root.
        if len(fields) == 6 and fields[5] != b"0":
            return int(fields[3]), int(fields[5])
    return None


def listener(port: int) -> int | None:
    """The user who listens on a TCP port of this network namespace; None if no one is seen to."""
    return next((each.uid for each in listeners() if each.port == port), None)


def _word(address: tuple[object, ...], family: int) -> str:
    """An address as the table has it: 32-bit words in this machine's order, and the port."""
    host, port = str(address[0]).partition("%")[0], address[1]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    if family == socket.AF_INET6 and len(packed) == 4:
        packed = _MAPPED + packed
    elif family == socket.AF_INET and len(packed) == 16:
        if not packed.startswith(_MAPPED):
            raise ValueError(host)
        packed = packed[len(_MAPPED) :]
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _all_users_have_numbers() -> bool:
    """Whether this user namespace knows every uid; in another, unknown ones all look the same."""
    try:
        with open("/proc/self/uid_map") as file:
            return file.read().split() == ["0", "0", "4294967295"]
    except OSError:
        return False
