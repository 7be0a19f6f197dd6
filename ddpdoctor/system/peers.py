"""Find the user at the other end of a connection on this machine.

Every account can connect to a loopback port, so the port alone identifies no user. The
kernel knows the owner of a TCP socket, by a ``sock_diag`` request or else by ``/proc/net/tcp``. A
Unix socket reports its peer itself.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
from typing import NamedTuple

from ddpdoctor.system.proc import listeners

# -- Owners of TCP sockets by ``sock_diag``


ESTABLISHED = 1  # The state of a connection that neither side has closed

_LISTENS = 10
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = (0xFFFFFFFF, 0xFFFFFFFF)
HEADER = struct.Struct("=IHHII")  # ``struct nlmsghdr``: length, type, flags, sequence number, port

_WANTED = struct.Struct("=BBBxI")
"""The head of ``struct inet_diag_req_v2``: family, protocol, extensions, states."""

_FOUND = struct.Struct("=BB62xII")  # ``struct inet_diag_msg``: family, state, ..., uid, inode


class Found(NamedTuple):
    """A TCP socket of this network namespace."""

    state: int
    uid: int
    inode: int  # 0 if its process has closed it. Then the uid may be root's.


def find_socket(source: tuple[object, ...], target: tuple[object, ...]) -> Found | None:
    """Look up the socket of a connection by its own address (``getsockname``) and its peer's.

    Return None if this network namespace has none with these addresses.

    Raises:
        OSError: The kernel lacks ``sock_diag``, or refuses the request.
    """
    request = _request(source, target)
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG) as kernel:
        # Connected to the kernel (port 0), it receives no message from another process.
        kernel.connect((0, 0))
        kernel.send(
            HEADER.pack(HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
            + request
        )
        # The kernel responds before `send` returns.
        answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    if HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, HEADER.size)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    _, *fields = _FOUND.unpack_from(answer, HEADER.size)
    found = Found(*fields)
    # Without such a socket the kernel returns one that listens on this address.
    return None if found.state == _LISTENS else found


def _request(source: tuple[object, ...], target: tuple[object, ...]) -> bytes:
    """Return ``struct inet_diag_req_v2`` for one TCP socket."""
    family = socket.AF_INET6 if ":" in str(source[0]) else socket.AF_INET
    near, far = (
        socket.inet_pton(family, str(each[0]).partition("%")[0]) for each in (source, target)
    )
    # The interface is part of a link-local address.
    interface = source[3] if len(source) > 3 else 0
    return (
        _WANTED.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
        + struct.pack("!HH16s16s", source[1], target[1], near, far)
        + struct.pack("=III", interface, *_NO_COOKIE)
    )


# -- Peers of connections


_TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_MAPPED = bytes(10) + b"\xff\xff"  # The prefix of an IPv4 address in an IPv6 socket
_ATTEMPTS = 3  # Number of attempts, since a changing table may miss a line


class UnknownPeerError(Exception):
    """The owner of a connection is not known. The text says why."""


class GoneError(UnknownPeerError):
    """The peer has closed its end."""


def is_trusted(uid: int) -> bool:
    """Return whether a user has all rights of this process's user."""
    return uid in (0, os.geteuid())


def user(connection: socket.socket) -> int:
    """Return the uid of the process at the other end.

    Raises:
        GoneError: The peer has closed its end.
        UnknownPeerError: It is on another machine or in another network namespace, or this system
            does not report it.
    """
    try:
        unix = connection.family == socket.AF_UNIX
        uid = _unix_user(connection) if unix else _tcp_peer(connection)[0]
    except OSError as error:
        gone = error.errno == errno.ENOTCONN
        raise (GoneError if gone else UnknownPeerError)(error.strerror or str(error)) from None
    if uid == _overflow_uid():
        raise UnknownPeerError("its user has no number in this user namespace")
    return uid


def inode(connection: socket.socket) -> int:
    """Return the inode of the TCP socket at the other end, by which its process is found.

    Raises:
        UnknownPeerError: As for :func:`user`, or no process has accepted the connection yet.
    """
    try:
        return _tcp_peer(connection)[1]
    except OSError as error:
        raise UnknownPeerError(error.strerror or str(error)) from None


def _unix_user(connection: socket.socket) -> int:
    if not hasattr(socket, "SO_PEERCRED"):
        raise UnknownPeerError("this system cannot tell which user opened a connection")
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _tcp_peer(connection: socket.socket) -> tuple[int, int]:
    """Return the uid and the inode of the socket at the other end."""
    if not (hasattr(socket, "TCP_INFO") and hasattr(socket, "AF_NETLINK")):
        raise UnknownPeerError("this system cannot tell which user opened a connection")
    ours, theirs = connection.getsockname(), connection.getpeername()
    # A cheap check first, since a flood usually closes its connections at once.
    _check_open(connection)
    for _ in range(_ATTEMPTS):
        found = _owner(theirs, ours)
        # While our end is open, no other socket can use the addresses of its peer.
        _check_open(connection)
        if found is not None:
            return found
    raise UnknownPeerError("it comes from another machine or network namespace")


def _check_open(connection: socket.socket) -> None:
    """Raise `GoneError` if one side has closed its end."""
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
        raise GoneError("the connection is closed already")


def _owner(source: tuple[object, ...], target: tuple[object, ...]) -> tuple[int, int] | None:
    """Return uid and inode of an open socket in this thread's network namespace.

    ``target`` is the address of our end of the connection, which is open. Raises GoneError if the
    socket was closed, but our end does not know yet.
    """
    with contextlib.suppress(OSError):
        found = find_socket(source, target)
        if found is not None:
            if found.state != ESTABLISHED or not found.inode:
                raise GoneError("the connection is closed already")
            return found.uid, found.inode
        # A kernel without the TCP module finds no socket, not even ours.
        if find_socket(target, source) is not None:
            return None
    return _owner_by_table(source, target)


def _owner_by_table(
    source: tuple[object, ...], target: tuple[object, ...]
) -> tuple[int, int] | None:
    """Return uid and inode from ``/proc/net/tcp``, which lists all sockets."""
    for family, table in _TABLES.items():
        try:
            words = f" {_word(source, family)} {_word(target, family)} {ESTABLISHED:02X} "
        except ValueError:
            continue
        try:
            with open(f"/proc/thread-self/net/{table}", "rb") as file:
                _, found, after = file.read().partition(words.encode())
        except FileNotFoundError:
            # There is no table for IPv6 without IPv6.
            continue
        # After the state: queues, timer, retransmissions, uid, timeout, inode.
        fields = after.split(None, 6)[:6] if found else []
        # The table assigns a socket without a process to root, with inode 0.
        if len(fields) == 6 and fields[5] != b"0":
            return int(fields[3]), int(fields[5])
    return None


def listener(port: int, host: str | None = None) -> int | None:
    """Return the user who listens on a TCP port of this network namespace, or None.

    ``host`` is the address of this machine to which a client connects, by default any.
    """
    for _ in range(_ATTEMPTS):
        found = {each.address: each.uid for each in listeners() if each.port == port}
        wanted = found if host is None else _listened(host, port)
        uid = next((found[each] for each in wanted if each in found), None)
        if uid is not None:
            return uid
    return None


def _listened(host: str, port: int) -> list[str]:
    """Return the table's words for sockets that accept clients at an address.

    As in the kernel, a socket bound to exactly that address comes before one bound to all.
    """
    exact, every = [], []
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with contextlib.suppress(ValueError, OSError):
            exact.append(_word((host, port), family))
            every.append(_word((everywhere, port), family))
    return exact + every


def _word(address: tuple[object, ...], family: int) -> str:
    """Return an address as in the table: 32-bit words in host byte order, and the port."""
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


@functools.cache
def _overflow_uid() -> int | None:
    """Return the uid of users that this user namespace does not map. None if it maps all."""
    try:
        with open("/proc/self/uid_map") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return None
    except (OSError, ValueError):
        pass
    try:
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
