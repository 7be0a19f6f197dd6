"""Connections between nodes: open them, prove a shared id, exchange validated JSON messages.

Data from another node is never trusted. The decoder of the records checks the types. A text that
is used as an address, a path or a port, or that appears in a line to paste, also has an alphabet,
which the message declares beside the type. Any other text has a maximum length. A message with any
other value is refused as a whole, since no node sends it. The renderers escape what they print, and
every word of a line to paste is quoted.

The port is open to any caller. Until a caller has proved that it knows the id, its
connection lasts a few seconds, and an address may hold only some of them. When all places are taken
the oldest connection is closed, because a node proves the id within milliseconds.

An ICMP echo distinguishes a machine that is down from one whose port is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import math
import os
import re
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ddpdoctor.core import opening
from ddpdoctor.run.records.base import Part, as_json
from ddpdoctor.run.records.typed_json import decoder, required

P = TypeVar("P", bound=Part)

# -- validation


MAX_TEXT = 4096
"""Maximum characters of a text without an alphabet: a path, an error message, a value."""

MAX_NODES = 1 << 16

_MAX_NUMBER = 1e18  # The limit of any number: bytes per second, seconds, a clock


def _matches(pattern: str) -> Callable[[Any], bool]:
    compiled = re.compile(pattern, re.ASCII)
    return lambda value: compiled.fullmatch(value) is not None


def _is_address(value: str) -> bool:
    try:
        return not value or ("%" not in value and bool(ipaddress.ip_address(value)))
    except ValueError:
        return False


def _is_network(value: str) -> bool:
    try:
        return not value or ("%" not in value and bool(ipaddress.ip_network(value)))
    except ValueError:
        return False


def _within(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: value is None or least <= value <= most


# Host names often have an underscore. No word begins with a dash: it would be an option.
Host = Annotated[str, _matches(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|")]
Interface = Annotated[str, _matches(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}|")]
Address = Annotated[str, _is_address]
Network = Annotated[str, _is_network]
Version = Annotated[str, _matches(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}|")]
Variable = Annotated[str, _matches(r"[A-Za-z_][A-Za-z0-9_]{0,127}")]
Hexadecimal = Annotated[str, _matches(r"[0-9a-f]{0,64}")]
Printable = Annotated[str, str.isprintable]
Word = Annotated[str, _matches(r"[a-z0-9 -]{0,32}")]
Code = Annotated[str, _matches(r"[A-Z]{2,6}[0-9]{3}|")]
Port = Annotated[int, _within(0, 65535)]
Count = Annotated[int, _within(0, MAX_NODES)]
Rank = Annotated[int | None, _within(0, MAX_NODES)]
Index = Annotated[int, _within(-1, MAX_NODES)]


def fits(value: Any, hint: Any) -> bool:
    """Return whether an annotated type, such as :data:`Host`, allows a value."""
    return all(rule(value) for rule in get_args(hint)[1:])


def unpacked(declared: type[P], message: Mapping[str, object], *, whole: bool = False) -> P:
    """Decode and validate a message of another node.

    A missing field, or one of another type, gets its default, unless the message has to be whole.

    Raises:
        ValueError: A value is not allowed.
    """
    part = required(declared, message) if whole else decoder(declared)(message)
    _validate(part, declared, declared.__name__.lower())
    return part


_known: dict[type[Part], list[tuple[str, Any]]] = {}


def _hints(declared: type[Part]) -> list[tuple[str, Any]]:
    """Return the fields of a class, with the annotated type of each."""
    if declared not in _known:
        hints = get_type_hints(declared, include_extras=True)
        _known[declared] = [(each.name, hints[each.name]) for each in fields(declared)]
    return _known[declared]


def _validate(value: Any, hint: Any, where: str) -> None:
    if isinstance(value, Part):
        for name, of in _hints(type(value)):
            _validate(getattr(value, name), of, f"{type(value).__name__.lower()}.{name}")
    elif isinstance(value, str) and len(value) > MAX_TEXT:
        raise ValueError(f"{where} is too long")
    elif isinstance(value, float) and not (math.isfinite(value) and abs(value) < _MAX_NUMBER):
        raise ValueError(f"{where} is not a usable number")
    if get_origin(hint) is Annotated:
        if not fits(value, hint):
            raise ValueError(f"{where} has a value that no node sends")
        return
    arguments = get_args(hint)
    if isinstance(value, tuple):
        every = len(arguments) == 2 and arguments[1] is ...
        for each, of in zip(value, arguments[:1] * len(value) if every else arguments, strict=True):
            _validate(each, of, where)
    elif isinstance(value, dict):
        for name, each in value.items():
            _validate(name, arguments[0], where)
            _validate(each, arguments[1], where)


# -- the proof of the id


GREETING = b"ddpdoctor meeting 1 "
"""The first bytes of a server, before its nonce. The number is the version of the protocol."""

GREETING_BYTES = len(GREETING) + 33


def key_of(identifier: str) -> bytes:
    """Derive a key from the id that both sides share. The id is never sent."""
    return hashlib.sha256(b"ddpdoctor meeting\0" + identifier.encode()).digest()


def nonce() -> str:
    """Return a random number to be used once, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def proof(key: bytes, role: str, challenge: str) -> str:
    """Prove that this side knows the key, in answer to the other side's nonce."""
    return hmac.new(key, f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()


def proves(answer: object, key: bytes, role: str, challenge: str) -> bool:
    """Return whether an answer is the right proof."""
    return isinstance(answer, str) and hmac.compare_digest(
        answer.encode(), proof(key, role, challenge).encode()
    )


def greeting(challenge: str) -> bytes:
    """Return the line that distinguishes this server from any other service."""
    return GREETING + challenge.encode() + b"\n"


def challenge_in(line: bytes) -> str | None:
    """Return the nonce in a greeting; None if the line is not a greeting."""
    text = line.removeprefix(GREETING).rstrip(b"\n")
    if not line.startswith(GREETING) or len(text) != 32:
        return None
    return text.decode("ascii", "replace")


# -- messages


MAX_OF_NODE = 4 << 20  # Maximum bytes of a node's message, which is about itself and its links

MAX_OF_COORDINATOR = 64 << 20
"""Maximum bytes of the coordinator's message, which is about every pair of nodes."""

_EXPANSION = 12
"""Maximum factor by which a message may grow in memory. Lists of empty lists grow 25 times."""

_HEAD = struct.Struct("!I")
HEAD_BYTES = _HEAD.size

Message = Part | Mapping[str, Any]


class WireError(Exception):
    """The other side is gone, or does not speak the protocol."""


class Late(WireError):
    """No message came in time."""


def packed(message: Message) -> bytes:
    """Encode a message, with its length in front."""
    data = json.dumps(message, separators=(",", ":"), default=as_json).encode()
    return _HEAD.pack(len(data)) + data


class Link:
    """A connection that carries messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, message: Message | bytes) -> None:
        """Send one message, which :func:`packed` may have encoded already.

        Raises:
            WireError: The other side is gone.
        """
        try:
            self.writer.write(message if isinstance(message, bytes) else packed(message))
            await self.writer.drain()
        except (OSError, RuntimeError) as error:
            raise WireError(str(error)) from error

    async def receive(self, seconds: float, most: int = MAX_OF_NODE) -> dict[str, Any]:
        """Return the next message, of at most ``most`` bytes.

        Raises:
            WireError: No message arrived within ``seconds``, or it is damaged.
        """
        try:
            return await asyncio.wait_for(self._receive(most), seconds)
        except asyncio.TimeoutError:
            raise Late(f"no answer within {seconds:.0f} s") from None
        except asyncio.IncompleteReadError:
            raise WireError("the connection was closed") from None
        except (OSError, ValueError) as error:
            raise WireError(str(error)) from error

    async def _receive(self, most: int) -> dict[str, Any]:
        (length,) = _HEAD.unpack(await self.reader.readexactly(_HEAD.size))
        if length > most:
            raise ValueError("a message that is too large")
        data = await self.reader.readexactly(length)
        if opening.expanded(data) > max(_EXPANSION * most, opening.MOST_EXPANDED):
            raise ValueError("a message that takes too much memory")
        message = opening.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a message that is not a JSON object")
        return message

    async def close(self) -> None:
        """Close the connection. Never raises."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()
        with contextlib.suppress(OSError, RuntimeError, asyncio.TimeoutError):
            await asyncio.wait_for(self.writer.wait_closed(), 1)


# -- connections, and why there is none


T = TypeVar("T")

TICK_S = 0.05

CONNECT_TIMEOUT = 3.5  # Seconds. A lost SYN is sent again after 1 and 3 s. ARP gives up after 3 s.

ARP_S = 2.0
"""A router reports an unreachable host sooner than this, an unanswered ARP request later."""

Closed = Literal[
    "refused",  # the machine, or a firewall, answers that there is no such port
    "dropped",  # no answer at all
    "prohibited",  # a firewall says that it is not allowed, by ICMP or on this machine
    "no route",  # this machine has no route to it
    "unreachable",  # a router reports that there is no route
    "no host",  # no machine has that address
    "no files",  # this process, or this machine, may open no more files
]

NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})

_PROHIBITED = frozenset({9, 10, 13})
"""Codes of ICMP "destination unreachable": network, host, communication prohibited."""

_RECVERR = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
"""IP_RECVERR and IPV6_RECVERR, which Python does not name. Since 5.8, Linux reports ICMP messages
about a connection in this way."""

_EXTENDED_ERROR = struct.Struct("=IBBBBII")
"""struct sock_extended_err: errno, origin, type, code, pad, info, data."""

_BY_ICMP = 2


class ConnectError(Exception):
    """No connection could be made. ``words`` is the kernel's error message.

    Attributes:
        sender: The address that rejected it by ICMP; empty if unknown or this machine.
    """

    def __init__(self, kind: Closed, words: str = "", sender: str = "") -> None:
        super().__init__(kind)
        self.kind: Closed = kind
        self.words = words
        self.sender = sender


class ProcessClock:
    """Counts the time that this process gets, since a busy machine is not a broken network.

    A tick that is late because other processes have the cores counts as at most two ticks. The
    clock runs within ``with``.

    Attributes:
        lost: Seconds not counted.
    """

    def __enter__(self) -> ProcessClock:
        self._seconds, self.lost, self._ticked = 0.0, 0.0, time.monotonic()
        self._tick()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        now = time.monotonic()
        counted = min(now - self._ticked, 2 * TICK_S)
        self._seconds += counted
        self.lost += now - self._ticked - counted
        self._ticked = now
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    async def within(self, awaited: Awaitable[T], seconds: float) -> T:
        """Return the result of ``awaited``.

        Raises:
            TimeoutError: It took more than ``seconds`` of this clock.
        """
        task = asyncio.ensure_future(awaited)
        until = self._seconds + seconds
        try:
            while not task.done():
                left = until - self._seconds
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait({task}, timeout=max(TICK_S, left))
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # Awaiting the task itself would hide a cancellation of the caller.
                await asyncio.wait({task})
            if not task.cancelled():
                # Otherwise asyncio logs that the error was not retrieved.
                task.exception()


def _family_of(address: str) -> socket.AddressFamily:
    """Return whether an address is IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


async def connect(
    address: str,
    port: int,
    limit: float = CONNECT_TIMEOUT,
    *,
    mss: int = 0,
    clock: ProcessClock | None = None,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect within ``limit`` seconds of this process's time. Connections may share ``clock``.

    ``mss`` is the largest segment in bytes, 0 for the kernel's default.

    Raises:
        ConnectError: There is no connection.
    """
    if clock is None:
        with ProcessClock() as clock:
            return await connect(address, port, limit, mss=mss, clock=clock)
    family = _family_of(address)
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        # Any other error means a kernel without IPv6.
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
        await clock.within(loop.sock_connect(made, (address, port)), limit)
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
    code, sender = _icmp_message(made)
    with contextlib.suppress(OSError):
        if sender == made.getsockname()[0]:
            # This machine's own kernel, after an unanswered ARP request or by its own firewall.
            sender = ""
    kind: Closed = "unreachable"
    if error.errno in NO_FILES:
        kind = "no files"
    elif error.errno in (errno.EACCES, errno.EPERM) or code in _PROHIBITED:
        kind = "prohibited"
    elif error.errno == errno.ECONNREFUSED:
        kind = "refused"
    elif error.errno == errno.ENETUNREACH and not sender:
        kind = "no route"
    elif error.errno == errno.EHOSTUNREACH and not sender and seconds > ARP_S:
        kind = "no host"
    return ConnectError(kind, words_of(error), "" if kind == "no files" else sender)


def _icmp_message(made: socket.socket) -> tuple[int, str]:
    """Return the code and the sender of the ICMP message that ended an IPv4 connection."""
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
                # The sender's struct sockaddr_in follows: family, port, address.
                return code, socket.inet_ntoa(data[20:24])
    return -1, ""


def words_of(error: OSError) -> str:
    """Return the kernel's message for an error, without the number."""
    return os.strerror(error.errno) if error.errno else str(error)


def listen(port: int) -> socket.socket:
    """Listen on all addresses, as torch's store does. Port 0 lets the kernel choose.

    Raises:
        OSError: The port is taken, or not allowed.
    """
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as error:
            # Without IPv6 addresses "::" cannot be bound. A taken port is taken for both.
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)


# -- connections without a proof of the id: few, and not for long


MAX_UNPROVED = 2048
"""Connections without a proof at a time, or half of the files this process may open if less."""

MAX_UNPROVED_OF_ADDRESS = 32
"""The same for one address. A node needs one or two; behind NAT there may be several nodes."""

PROOF_SECONDS = 5.0  # Seconds for the proof, of the time that this process gets
PROOF_BYTES = 4096  # Bytes of a message without a proof


class Admission:
    """The connections that are not admitted yet, and the number that was turned away."""

    def __init__(self) -> None:
        self.turned_away = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limited = files != resource.RLIM_INFINITY
        self._most = max(16, min(MAX_UNPROVED, files // 2)) if limited else MAX_UNPROVED
        self._waiting: dict[asyncio.StreamWriter, str] = {}

    @contextlib.contextmanager
    def place(self, writer: asyncio.StreamWriter, address: str) -> Iterator[bool]:
        """Hold a place for a connection until it has proved the id; False if it gets none."""
        # A socket for both families shows IPv4 in the form of IPv6.
        address = address.removeprefix("::ffff:")
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address).version == 6:
                # One machine may call from any address of its subnet.
                address = str(ipaddress.ip_network(f"{address}/64", strict=False))
        if sum(each == address for each in self._waiting.values()) >= MAX_UNPROVED_OF_ADDRESS:
            self.turned_away += 1
            yield False
            return
        if len(self._waiting) >= self._most:
            self.turned_away += 1
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        self._waiting[writer] = address
        try:
            yield True
        finally:
            self._waiting.pop(writer, None)


async def proof_in_time(proof: Awaitable[T]) -> T:
    """Return the caller's proof.

    Raises:
        TimeoutError: It took more than :data:`PROOF_SECONDS`.
    """
    with ProcessClock() as clock:
        return await clock.within(proof, PROOF_SECONDS)


# -- ICMP echo


ECHO_TRIES = 2

_ICMP_TYPES = {
    socket.AF_INET: (socket.IPPROTO_ICMP, 8, 0),
    socket.AF_INET6: (socket.IPPROTO_ICMPV6, 128, 129),
}
"""Protocol, and the types of an echo request and its reply (RFC 792, RFC 4443)."""

_ICMP_HEADER = struct.Struct("!BBHHH")  # Type, code, checksum, identifier, sequence number


async def echoes(address: str, limit: float) -> bool:
    """Return whether a machine answers one of two echo requests within ``limit`` seconds each.

    Return False if this process may not send them.
    """
    family = _family_of(address)
    protocol, request, _ = _ICMP_TYPES[family]
    asking = None
    # Linux allows the first kind to groups in ``net.ipv4.ping_group_range``, macOS to all users.
    # The second kind needs root.
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        with contextlib.suppress(OSError):
            asking = asking or socket.socket(family, kind, protocol)
    if asking is None:
        return False
    with asking:
        asking.setblocking(False)
        loop = asyncio.get_running_loop()
        payload = os.urandom(16)
        with ProcessClock() as clock:
            for number in range(1, ECHO_TRIES + 1):
                header = (os.getpid() & 0xFFFF, number)
                # The kernel computes the checksum of ICMPv6, which includes the addresses.
                checksum = _checksum(_ICMP_HEADER.pack(request, 0, 0, *header) + payload)
                # A firewall on the way may reject it.
                with contextlib.suppress(TimeoutError, OSError):
                    if number == 1:
                        asking.connect((address, 0))
                    packet = _ICMP_HEADER.pack(request, 0, checksum, *header) + payload
                    await loop.sock_sendall(asking, packet)
                    await clock.within(_echo_reply(asking, family, payload), limit)
                    return True
    return False


def _checksum(data: bytes) -> int:
    """Return the checksum of RFC 1071 of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


async def _echo_reply(asking: socket.socket, family: socket.AddressFamily, payload: bytes) -> None:
    """Wait for the reply. A raw socket also receives replies to other processes."""
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(asking, 512)
        if family == socket.AF_INET and data[:1] and data[0] >> 4 == 4:
            # A raw socket, and any socket on macOS, also receives the IP header.
            data = data[4 * (data[0] & 15) :]
        if data[:1] == bytes([_ICMP_TYPES[family][2]]) and data[_ICMP_HEADER.size :] == payload:
            return
