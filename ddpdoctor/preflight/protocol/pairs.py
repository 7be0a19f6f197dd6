"""Test the link between two nodes: dial as gloo would, measure latency, bandwidth and losses.

gloo's node with the higher address dials the one with the lower; a port of the listening side that
a firewall closes leaves it waiting without a limit. So every node dials every other, on a port of
the kernel's choice, with 64 KiB each way.

The speed is measured alone. The time in which either end waited for a core is left out: on a busy
machine a link looks slow. Losses are counted of small messages, one at a time: those fill no queue,
so that none of them is lost where a link is merely slower than its sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
import statistics
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddpdoctor.preflight.protocol import connecting
from ddpdoctor.preflight.protocol.connecting import (
    Closed,
    ConnectError,
    Patience,
    connect,
    listen,
    patient,
    words_of,
)
from ddpdoctor.preflight.protocol.wire import Address, Index, Port
from ddpdoctor.preflight.situation import waited_for_core
from ddpdoctor.run.records.base import Part

# -- tcp info


_TOTAL_RETRANS = struct.Struct("=I")
_TCP_BYTES = struct.Struct("=QQ")
_AT_RETRANS, _AT_BYTES, _TCP_INFO_SIZE = 100, 120, 136
"""Of Linux's struct tcp_info (uapi/linux/tcp.h), whose fields never move: tcpi_total_retrans, then
tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1."""


class TcpCounts(NamedTuple):
    """Of one connection so far.

    Attributes:
        resent: Segments that were sent again.
        acked: Bytes that the other end has acknowledged.
        received: Bytes that came.
    """

    resent: int = 0
    acked: int = 0
    received: int = 0


def tcp_counts(writer: asyncio.StreamWriter) -> TcpCounts:
    """What the kernel counts of a connection; zeros where it does not."""
    connection = writer.get_extra_info("socket")
    if sys.platform != "linux" or connection is None:
        return TcpCounts()
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
    except OSError:
        return TcpCounts()
    if len(info) < _TCP_INFO_SIZE:
        return TcpCounts()
    (resent,) = _TOTAL_RETRANS.unpack_from(info, _AT_RETRANS)
    return TcpCounts(resent, *_TCP_BYTES.unpack_from(info, _AT_BYTES))


# -- speeds


MEASURE_S = 0.05
"""Seconds of sending for one measurement of the bandwidth."""

MEASURE_BYTES = 8 * 2**20
CHUNK = bytes(256 * 1024)

PINGS, LEAST_PINGS, PINGS_S = 100, 5, 0.3
"""Small messages forth and back: at most, at least, and the seconds after which none is sent."""

MEASURE_LIMIT = 10.0
"""Seconds for one measurement, after which the link is as slow as can be."""

ALL_PAIRS_UP_TO = 8
"""Nodes; with more, each is measured with log2(n) others, either way."""

RTT_FLOOR_S = 0.001
"""A round trip is an outlier only if it is so much longer as well: below, DDP does not feel it."""

LEAST_TO_COMPARE = 3
"""Links that have a median; of two neither is the usual one."""

BANDWIDTH_FLOOR = 100e6 / 8 * 0.8
"""Bytes per second below which a link is slow whatever the others are: less than a network of
100 Mbit/s carries."""

CPU_BOUND = 10e9 / 8
"""Bytes per second from which on one connection in Python shows a machine's cores and memory, which
differ by more than half from one measurement to the next, and not the network."""

LOSSY, LEAST_LOST = 0.02, 3
"""The share of small messages that a link has to lose, and how many, to be called lossy."""

STARVED_SHARE = 0.5
"""The share of a measurement from which on waiting for a core leaves nothing to judge."""

PING, LAST = b"\x01", b"\x02"
_PONG = struct.Struct("!d")
"""For how long the dialled node has waited for a core so far."""

_ANSWER = struct.Struct("!QddQ")
"""Bytes that came, seconds it took, seconds of waiting for a core, and segments sent again."""


@dataclass(frozen=True)
class Speed:
    """A link in one direction.

    Attributes:
        rtt: Round trip in seconds.
        bandwidth: Bytes per second.
        waited: For which part of the measurement either end waited for a core.
        sent: Small messages, both ways.
        resent: Segments of these that were sent again.
    """

    rtt: float
    bandwidth: float
    waited: float = 0.0
    sent: int = 0
    resent: int = 0

    @property
    def lossy(self) -> bool:
        """Whether small messages are lost."""
        return self.resent >= LEAST_LOST and self.resent >= LOSSY * self.sent


NodePair = tuple[int, int]
"""The dialling (sending) node and the dialled one, by index."""


def ring_shifts(nodes: int) -> list[int]:
    """How far apart in the ring the nodes of each round are.

    In a round every node sends to one other and receives from one: none is measured twice at a
    time.
    """
    if nodes <= ALL_PAIRS_UP_TO:
        return list(range(1, nodes))
    return [2**power for power in range((nodes - 1).bit_length()) if 2**power < nodes]


def better_speed(one: Speed, other: Speed) -> Speed:
    """The better of two measurements of a link, in each respect; what was lost adds up."""
    return Speed(
        min(one.rtt, other.rtt),
        max(one.bandwidth, other.bandwidth),
        min(one.waited, other.waited),
        one.sent + other.sent,
        one.resent + other.resent,
    )


def slow_links(measured: Mapping[NodePair, Speed]) -> list[NodePair]:
    """The links under the floor, with half the median bandwidth or twice the median round trip.

    Whatever has 10 Gbit/s is fast enough for what one connection can tell. The worst comes first.
    """
    rtt, bandwidth = float("inf"), 0.0
    if len(measured) >= LEAST_TO_COMPARE:
        rtt = statistics.median(speed.rtt for speed in measured.values())
        bandwidth = statistics.median(speed.bandwidth for speed in measured.values())
    found = [cell for cell, speed in measured.items() if is_slow(speed, rtt, bandwidth)]
    return sorted(found, key=lambda cell: measured[cell].bandwidth)


def is_slow(speed: Speed, rtt: float, bandwidth: float) -> bool:
    """Whether a link is an outlier, given the medians, or under the floor."""
    return (speed.rtt > 2 * rtt and speed.rtt > rtt + RTT_FLOOR_S) or (
        speed.bandwidth < max(BANDWIDTH_FLOOR, min(bandwidth / 2, CPU_BOUND))
    )


def links_to_repeat(measured: Mapping[NodePair, Speed]) -> list[NodePair]:
    """The links to measure again: outliers, and those on which anything was sent again."""
    resent = [cell for cell, speed in measured.items() if speed.resent]
    resent.sort(key=lambda cell: -measured[cell].resent)
    return list(dict.fromkeys([*slow_links(measured), *resent]))


async def measure_link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Speed:
    """The sending side, on a connection to a node that :func:`serve` answers on.

    Raises:
        OSError: The connection broke.
        asyncio.IncompleteReadError: It was closed.
        asyncio.TimeoutError: It took too long.
    """
    before = tcp_counts(writer).resent
    pinging = asyncio.ensure_future(_round_trips(reader, writer))
    await asyncio.wait({pinging}, timeout=MEASURE_LIMIT)
    resent = tcp_counts(writer).resent - before
    if not pinging.done():
        pinging.cancel()
        return Speed(MEASURE_LIMIT, 0.1, 0.0, max(1, LEAST_PINGS), resent)
    rtt, sent = pinging.result()
    acked, sending, waits = tcp_counts(writer).acked, time.monotonic(), waited_for_core()
    try:
        received, seconds, away, back = await asyncio.wait_for(
            _send_bulk(reader, writer), MEASURE_LIMIT
        )
    except asyncio.TimeoutError:
        # So much of it came, at least.
        passed = time.monotonic() - sending
        came = max(1, tcp_counts(writer).acked - acked)
        return Speed(rtt, came / passed, (waited_for_core() - waits) / passed, 2 * sent, resent)
    # Both ends may have waited at once; the time of neither is the link's.
    share = min(1.0, (waited_for_core() - waits + away) / max(seconds, 1e-6))
    own = max(seconds * max(1 - share, 0.1), 1e-6)
    return Speed(rtt, received / own, share, 2 * sent, resent + back)


async def _round_trips(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[float, int]:
    """The fastest round trip without waits for a core, and how many there were."""
    until, rtt, away = time.monotonic() + PINGS_S, float("inf"), 0.0
    for number in range(1, PINGS + 1):
        last = number == PINGS or (number >= LEAST_PINGS and time.monotonic() > until)
        began, waits = time.monotonic(), waited_for_core()
        writer.write(LAST if last else PING)
        (there,) = _PONG.unpack(await reader.readexactly(_PONG.size))
        took = time.monotonic() - began
        lost = waited_for_core() - waits + (there - away if number > 1 else 0.0)
        away = there
        rtt = min(rtt, max(took - max(lost, 0.0), took / 10))
        if last:
            break
    return rtt, number


async def _send_bulk(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, float, float, int]:
    began, sent = time.monotonic(), 0
    while sent < MEASURE_BYTES and (sent == 0 or time.monotonic() - began < MEASURE_S):
        writer.write(CHUNK)
        sent += len(CHUNK)
        await writer.drain()
    writer.write_eof()
    received, seconds, away, back = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    return received, seconds, away, back


async def answer_measurement(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The receiving side: echo the pings, then count what comes and how long it takes."""
    for _ in range(PINGS):
        ping = await reader.readexactly(1)
        writer.write(_PONG.pack(waited_for_core()))
        if ping == LAST:
            break
    await reader.readexactly(1)
    resent = tcp_counts(writer).resent
    began, waits, received = time.monotonic(), waited_for_core(), 0
    while data := await reader.read(2**20):
        received += len(data)
    passed = time.monotonic() - began
    writer.write(_ANSWER.pack(received, passed, max(0.0, waited_for_core() - waits), resent))
    await writer.drain()


# -- pairs


BLOCK = 64 * 1024
"""Bytes sent each way: enough for packets of the largest size."""

PART = 8 * 1024
"""Bytes of it that arrive only where packets of full size do."""

STALL_LIMIT = 3.0
"""Seconds for 64 KiB that arrive in milliseconds where they arrive at all."""

CONNECTIONS_AT_ONCE = 256
EXCHANGES_AT_ONCE = 8
HOLD_S = 0.5
"""Seconds after which an exchange that goes on no longer counts among those."""

_SESSION_LIMIT = 60.0
_HELLO = struct.Struct("!16sIc")
_EXCHANGE, _SPEED = b"E", b"S"
_OK, _NOT_ME = b"\x01", b"\x00"
_BROKEN = (
    OSError,
    asyncio.IncompleteReadError,
    asyncio.TimeoutError,
    TimeoutError,
    struct.error,
)

Outcome = Literal[
    "ok",
    "dropped",  # no answer at all to the connection
    "refused",  # the machine, or a firewall, answers that there is no such port
    "unreachable",  # the network says that there is no route, or that it is prohibited
    "no host",  # the same, after no machine answered ARP
    "no files",  # the dialling node may open no more files
    "silent",  # connected, and then nothing
    "stranger",  # connected, to something else
    "forth",  # the 64 KiB from the dialling node did not arrive
    "back",  # the 64 KiB from the dialled node did not arrive
    "lossy",  # they arrived in part: packets of all sizes are lost
]

_OUTCOMES: dict[Closed, Outcome] = {
    "refused": "refused", "dropped": "dropped", "no host": "no host", "no files": "no files"
}  # fmt: skip
"""The outcome by why there is no connection; whatever is not here is `unreachable`."""

STALLS = ("forth", "back")
"""The outcomes of connections that open and lose large packets."""


@dataclass(frozen=True, slots=True)
class Target(Part):
    """Whom to dial: a node's index, and where it listens.

    Attributes:
        mss: Largest segment in bytes, to learn whether smaller packets pass; 0 for the kernel's.
    """

    index: Index = -1
    address: Address = ""
    port: Port = 0
    mss: Port = 0


@dataclass(frozen=True, slots=True)
class Dialled(Part):
    """What came of dialling a node.

    Attributes:
        outcome: An :data:`Outcome`.
        seconds: Until the outcome was known.
        error: The kernel's words, where it said any.
        passes: Bytes of the largest packets that pass where 64 KiB do not; 0 if none do.
    """

    outcome: str = ""
    seconds: float = 0.0
    error: str = ""
    passes: int = 0


def pair_token(token: bytes) -> bytes:
    """What the nodes show each other: of a coordinator's token, and no bytes of its choice.

    Whoever plays node 0 can have a node dial an address; it cannot have it say anything there.
    """
    return hashlib.sha256(b"ddpdoctor pair\0" + token).digest()[:16]


class Listener:
    """What the other nodes dial: it answers those of this check, and only those."""

    def __init__(self) -> None:
        self.token = b""
        self.index = -1
        self._server: asyncio.Server | None = None
        self._admission = connecting.Admission()

    async def open(self) -> int:
        """Listen on a port of the kernel's choice; the port."""
        listening = listen(0)
        self._server = await asyncio.start_server(self._answer, sock=listening, backlog=1024)
        return int(listening.getsockname()[1])

    def admit(self, index: int, token: bytes) -> None:
        """Answer those that have the token, as the node of this index."""
        self.index, self.token = index, token

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A cancellation ends the check, and asyncio would print it.
        with contextlib.suppress(*_BROKEN, asyncio.CancelledError):
            await asyncio.wait_for(self._session(reader, writer), _SESSION_LIMIT)
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        with self._admission.place(writer, str(peer[0]) if peer else "") as placed:
            if not placed:
                return
            hello = await connecting.proof_in_time(reader.readexactly(_HELLO.size))
        token, index, what = _HELLO.unpack(hello)
        if not self.token or not secrets.compare_digest(token, self.token):
            return
        writer.write(_OK if index == self.index else _NOT_ME)
        await writer.drain()
        if what == _SPEED:
            await answer_measurement(reader, writer)
            return
        await reader.readexactly(BLOCK)
        writer.write(_OK)
        await writer.drain()
        writer.write(await reader.readexactly(1) * BLOCK)
        await writer.drain()
        await reader.read()


async def dial_all(targets: Sequence[Target], token: bytes) -> list[Dialled]:
    """Dial several nodes and exchange 64 KiB each way with each; the results in their order.

    Never raises for what the network does.
    """
    async with patient() as patience:
        dialler = _Dialler(token, patience)
        return list(await asyncio.gather(*(dialler.dial(target) for target in targets)))


class _Dialler:
    """Dials many at once, and exchanges with few, so that one core can serve them all."""

    def __init__(self, token: bytes, patience: Patience) -> None:
        self._token = token
        self._patience = patience
        self._connecting = asyncio.Semaphore(CONNECTIONS_AT_ONCE)
        self._exchanging = asyncio.Semaphore(EXCHANGES_AT_ONCE)

    async def dial(self, target: Target) -> Dialled:
        async with self._connecting:
            began = time.monotonic()
            try:
                reader, writer = await connect(
                    target.address, target.port, mss=target.mss, patience=self._patience
                )
            except ConnectError as error:
                return _dialled(_OUTCOMES.get(error.kind, "unreachable"), began, error.words)
        try:
            return await self._exchange(target, reader, writer)
        finally:
            # What is unsent to a node that does not answer must not hold the connection open.
            writer.transport.abort()

    async def _exchange(
        self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Dialled:
        reached: list[Outcome] = ["silent"]
        await self._exchanging.acquire()
        began = time.monotonic()
        work = asyncio.ensure_future(_talk(target, self._token, reader, writer, reached))
        words = ""
        try:
            try:
                await asyncio.wait({work}, timeout=HOLD_S)
            finally:
                # One that stalls makes room for the others, and goes on beside them.
                self._exchanging.release()
            await self._patience.within(work, STALL_LIMIT)
        except TimeoutError:
            if reached[-1] in STALLS and max(tcp_counts(writer)[1:]) > PART:
                reached.append("lossy")
        except OSError as error:
            words = words_of(error)
        except asyncio.IncompleteReadError:
            words = "the connection was closed"
        finally:
            work.cancel()
        return _dialled(reached[-1], began, words)


async def _talk(
    target: Target,
    token: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    reached: list[Outcome],
) -> None:
    """The dialling side of an exchange; ``reached`` ends in how far it came.

    Raises:
        OSError: The connection broke.
        asyncio.IncompleteReadError: It was closed.
    """
    writer.write(_HELLO.pack(token, target.index, _EXCHANGE))
    if await reader.read(1) != _OK:
        reached.append("stranger")
        return
    reached.append("forth")
    writer.write(bytes(BLOCK))
    await reader.readexactly(1)
    reached.append("back")
    writer.write(_OK)
    await reader.readexactly(BLOCK)
    reached.append("ok")


def _dialled(outcome: Outcome, began: float, error: str = "") -> Dialled:
    # Of what went well no more is sent, since it is most of n² results.
    return Dialled(outcome, 0.0 if outcome == "ok" else round(time.monotonic() - began, 4), error)


async def dial_speed(target: Target, token: bytes) -> Speed | None:
    """Measure the link to a node; None if it broke."""
    try:
        reader, writer = await connect(target.address, target.port)
    except ConnectError:
        return None
    try:
        writer.write(_HELLO.pack(token, target.index, _SPEED))
        if await asyncio.wait_for(reader.read(1), STALL_LIMIT) != _OK:
            return None
        return await measure_link(reader, writer)
    except _BROKEN:
        return None
    finally:
        writer.transport.abort()
