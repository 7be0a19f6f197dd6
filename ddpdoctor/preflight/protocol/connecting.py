"""Open TCP connections, say why one fails, and limit callers that have not proved the id.

A port of a check is open to whoever reaches it. Until a caller has proved that it knows the
rendezvous id it may hold little: a connection for a few seconds, and of one address only some.
Where all places are taken the oldest one goes, since a node proves it within milliseconds.

An ICMP echo tells a machine that is down from a port that is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Literal, TypeVar

# -- opens a TCP connection; where that fails, says what the network said


T = TypeVar("T")

TICK_S = 0.05

CONNECT_LIMIT = 3.5
"""Seconds. Lost SYNs are sent again after 1 and 3; that no machine answers ARP is known after 3."""

ARP_S = 2.0
"""A host is called unreachable sooner if a router says so, later if no machine answered ARP."""

Closed = Literal[
    "refused",  # the machine, or a firewall, answers that there is no such port
    "dropped",  # no answer at all
    "prohibited",  # a firewall says that it is not allowed, by ICMP or on this machine
    "no route",  # this machine has no route to it
    "unreachable",  # a router says that there is none
    "no host",  # no machine has that address
    "no files",  # this process, or this machine, may open no more files
]

NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
"""What a connection needs as well: a file."""

_FORBIDDING = frozenset({9, 10, 13})
"""Codes of ICMP's "destination unreachable": network, host, communication prohibited."""

_RECVERR = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
"""IP_RECVERR and IPV6_RECVERR, which Python does not name. Linux reports what came by ICMP in
answer to a connection since 5.8."""

_EXTENDED_ERROR = struct.Struct("=IBBBBII")
"""struct sock_extended_err: errno, origin, type, code, pad, info, data."""

_BY_ICMP = 2


class ConnectError(Exception):
    """There is no connection.

    Attributes:
        words: The kernel's.
        sender: Who said so by ICMP; empty if that is not known, or it was this machine.
    """

    def __init__(self, kind: Closed, words: str = "", sender: str = "") -> None:
        super().__init__(kind)
        self.kind: Closed = kind
        self.words = words
        self.sender = sender


class Patience:
    """Counts the time that this process gets, in ticks: a busy machine is no broken network.

    A tick that comes late, because others have the cores, counts as one tick.
    """

    def __init__(self) -> None:
        self._had = 0.0

    async def within(self, awaited: Awaitable[T], seconds: float) -> T:
        """What ``awaited`` returns.

        Raises:
            TimeoutError: It did not come back within so many seconds of this process's time.
        """
        task = asyncio.ensure_future(awaited)
        until = self._had + seconds
        try:
            while not task.done():
                left = until - self._had
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait({task}, timeout=max(TICK_S, left))
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def tick(self) -> None:
        """Count, until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._had += min(time.monotonic() - began, 2 * TICK_S)


@contextlib.asynccontextmanager
async def patient() -> AsyncIterator[Patience]:
    """A clock that counts while the block runs."""
    patience = Patience()
    ticking = asyncio.ensure_future(patience.tick())
    try:
        yield patience
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


def family_of(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def connect(
    address: str,
    port: int,
    limit: float = CONNECT_LIMIT,
    *,
    mss: int = 0,
    patience: Patience | None = None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect within so many seconds of this process's time.

    Args:
        address: Of the machine.
        port: Of the machine.
        limit: Seconds.
        mss: Largest segment in bytes; 0 for the kernel's.
        patience: A clock that several connections share.

    Raises:
        ConnectError: There is no connection.
    """
    if patience is None:
        async with patient() as patience:
            return await connect(address, port, limit, mss=mss, patience=patience)
    family = family_of(address)
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        # Else it is a kernel without IPv6.
        kind: Closed = "no files" if error.errno in NO_FILES else "no route"
        raise ConnectError(kind, words_of(error)) from None
    began = time.monotonic()
    try:
        made.setblocking(False)
        if mss:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mss)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                made.setsockopt(*_RECVERR[family], 1)
        loop = asyncio.get_running_loop()
        await patience.within(loop.sock_connect(made, (address, port)), limit)
        return await asyncio.open_connection(sock=made)
    except TimeoutError:
        made.close()
        raise ConnectError("dropped") from None
    except OSError as error:
        failure = _failure(made, error, time.monotonic() - began)
        made.close()
        raise failure from None
    except BaseException:
        made.close()
        raise


def _failure(made: socket.socket, error: OSError, seconds: float) -> ConnectError:
    code, sender = _unreachable_message(made)
    with contextlib.suppress(OSError):
        if sender == made.getsockname()[0]:
            # This machine's own kernel, when ARP had no answer or its own rule rejects.
            sender = ""
    words = words_of(error)
    if error.errno in NO_FILES:
        return ConnectError("no files", words)
    if error.errno in (errno.EACCES, errno.EPERM) or code in _FORBIDDING:
        return ConnectError("prohibited", words, sender)
    if error.errno == errno.ECONNREFUSED:
        return ConnectError("refused", words, sender)
    if sender:
        return ConnectError("unreachable", words, sender)
    if error.errno == errno.ENETUNREACH:
        return ConnectError("no route", words)
    if error.errno == errno.EHOSTUNREACH and seconds > ARP_S:
        return ConnectError("no host", words)
    return ConnectError("unreachable", words)


def _unreachable_message(made: socket.socket) -> tuple[int, str]:
    """The code of the ICMP message that ended a connection over IPv4, and its sender."""
    if sys.platform != "linux" or made.family != socket.AF_INET:
        return -1, ""
    try:
        _, ancillary, _, _ = made.recvmsg(512, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except OSError:
        return -1, ""
    for level, kind, data in ancillary:
        if (level, kind) == _RECVERR[socket.AF_INET] and len(data) >= 24:
            _, origin, _, code, *_ = _EXTENDED_ERROR.unpack_from(data)
            if origin == _BY_ICMP:
                # Behind it the sender's struct sockaddr_in: family, port, address.
                return code, socket.inet_ntoa(data[20:24])
    return -1, ""


def words_of(error: OSError) -> str:
    """The kernel's words for an error, without the number."""
    return os.strerror(error.errno) if error.errno else str(error)


def listen(port: int) -> socket.socket:
    """Listen on all addresses, as torch's store does; port 0 is one of the kernel's choice.

    Raises:
        OSError: The port is taken, or not allowed.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as error:
            # Without IPv6 addresses "::" cannot be bound; a taken port is taken for both.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


# -- connections that have not proved yet that they are of this check: few, and not for long


MOST_UNPROVED = 2048
"""Connections without a proof at a time; half of the files that this process may open, if less."""

MOST_UNPROVED_OF_ADDRESS = 32
"""And of one address: a node has one or two; behind a translation of addresses are several."""

PROOF_SECONDS = 5.0
"""For the proof, of the time that this process gets."""

PROOF_BYTES = 4096
"""Most bytes of a message without a proof."""


class Admission:
    """The connections that are not admitted yet.

    Attributes:
        turned_away: How many were closed for lack of a place.
    """

    def __init__(self) -> None:
        self.turned_away = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = (
            MOST_UNPROVED
            if files == resource.RLIM_INFINITY
            else max(16, min(MOST_UNPROVED, files // 2))
        )
        self._waiting: dict[asyncio.StreamWriter, str] = {}
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, writer: asyncio.StreamWriter, address: str) -> Iterator[bool]:
        """A place for a connection until it has proved what it is; False if it gets none."""
        network = _network_of(address)
        if self._of[network] >= MOST_UNPROVED_OF_ADDRESS:
            self.turned_away += 1
            yield False
            return
        if len(self._waiting) >= self._most:
            self.turned_away += 1
            oldest = next(iter(self._waiting))
            self._leave(oldest)
            oldest.transport.abort()
        self._waiting[writer] = network
        self._of[network] += 1
        try:
            yield True
        finally:
            self._leave(writer)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        network = self._waiting.pop(writer, None)
        if network is not None:
            self._of[network] -= 1
            if not self._of[network]:
                del self._of[network]


async def proof_in_time(proof: Awaitable[T]) -> T:
    """What a caller says to prove itself.

    Raises:
        TimeoutError: It did not within :data:`SECONDS`.
    """
    async with patient() as patience:
        return await patience.within(proof, PROOF_SECONDS)


def _network_of(address: str) -> str:
    """What one machine may call from: its address, and of IPv6 a whole subnet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if found.version == 4 else str(ipaddress.ip_network(f"{address}/64", False))


# -- echo


ECHO_TRIES = 2

_ICMP_TYPES = {
    socket.AF_INET: (socket.IPPROTO_ICMP, 8, 0),
    socket.AF_INET6: (socket.IPPROTO_ICMPV6, 128, 129),
}
"""Protocol, and the types of an echo request and its reply (RFC 792, RFC 4443)."""

_ICMP_HEADER = struct.Struct("!BBHHH")
"""Type, code, checksum, identifier, sequence number."""

_ECHO_BYTES = 16


async def echoes(address: str, limit: float) -> bool:
    """Whether a machine answers an echo request; False also where this process may not ask.

    Args:
        address: Of the machine.
        limit: Seconds for each of the two tries.
    """
    family = family_of(address)
    asking = _icmp_socket(family)
    if asking is None:
        return False
    with asking:
        asking.setblocking(False)
        loop = asyncio.get_running_loop()
        payload = os.urandom(_ECHO_BYTES)
        async with patient() as patience:
            for number in range(1, ECHO_TRIES + 1):
                # A firewall on the way may say that it is not allowed.
                with contextlib.suppress(TimeoutError, OSError):
                    if number == 1:
                        asking.connect((address, 0))
                    await loop.sock_sendall(asking, _echo_request(family, number, payload))
                    await patience.within(_echo_reply(asking, family, payload), limit)
                    return True
    return False


def _icmp_socket(family: socket.AddressFamily) -> socket.socket | None:
    """A socket for echo requests, if this process may have one.

    Linux gives it to the groups of ``net.ipv4.ping_group_range``, macOS to everybody; else it takes
    a raw one, which is for root.
    """
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        with contextlib.suppress(OSError):
            return socket.socket(family, kind, _ICMP_TYPES[family][0])
    return None


def _echo_request(family: socket.AddressFamily, number: int, payload: bytes) -> bytes:
    kind = _ICMP_TYPES[family][1]
    identifier = os.getpid() & 0xFFFF
    unsummed = _ICMP_HEADER.pack(kind, 0, 0, identifier, number) + payload
    # Of ICMPv6 the kernel makes the checksum, since the addresses are part of it.
    return _ICMP_HEADER.pack(kind, 0, _checksum(unsummed), identifier, number) + payload


def _checksum(data: bytes) -> int:
    """The checksum of RFC 1071, of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


async def _echo_reply(asking: socket.socket, family: socket.AddressFamily, payload: bytes) -> None:
    """Return once the reply is there; a raw socket also gets what is meant for others."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(asking, 512)
        if family == socket.AF_INET and data[:1] and data[0] >> 4 == 4:
            # A raw socket, and any on macOS, gets the IP header as well.
            data = data[4 * (data[0] & 15) :]
        if data[:1] == bytes([_ICMP_TYPES[family][2]]) and data[_ICMP_HEADER.size :] == payload:
            return
