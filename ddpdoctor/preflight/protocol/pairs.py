"""Test the link between two nodes: dial as gloo would, measure latency, bandwidth and losses.

gloo's node with the higher address dials the one with the lower. If a firewall closes the port of
the listening side, that side waits without a limit. So every node dials every other, on a port that
the kernel chooses, and sends 64 KiB each way.

Speeds are measured one link at a time. Time in which either end waited for a core is left out: on a
busy machine a link looks slow. Losses are counted on small messages, sent one at a time. Those fill
no queue, so that none is lost just because a link is slower than its sender.
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

from ddpdoctor.preflight.protocol import wire
from ddpdoctor.preflight.situation import waited_for_core
from ddpdoctor.run.records.base import Part

# -- the kernel's counters of a connection


_TCP_INFO = struct.Struct("=100xI16xQQ")
"""Three fields of Linux's struct tcp_info (uapi/linux/tcp.h), which never move: tcpi_total_retrans,
tcpi_bytes_acked and tcpi_bytes_received, from Linux 4.1 on."""


class TcpCounts(NamedTuple):
    """Segments sent again, bytes acknowledged by the other end, and bytes received."""

    resent: int = 0
    acked: int = 0
    received: int = 0


def tcp_counts(writer: asyncio.StreamWriter) -> TcpCounts:
    """Return the counts of a connection; zeros if the kernel does not report them."""
    connection = writer.get_extra_info("socket")
    if sys.platform == "linux" and connection is not None:
        with contextlib.suppress(OSError, struct.error):
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            return TcpCounts(*_TCP_INFO.unpack(info))
    return TcpCounts()


# -- speeds


MEASURE_S = 0.05  # Seconds of sending for one measurement of the bandwidth

MEASURE_BYTES = 8 * 2**20
CHUNK = bytes(256 * 1024)

PINGS, MIN_PINGS, PINGS_S = 100, 5, 0.3
"""Small messages to exchange: maximum and minimum number, and seconds after which to stop."""

MEASURE_TIMEOUT = 10.0  # Seconds for one measurement, after which the link is as slow as can be
ALL_PAIRS_UP_TO = 8  # With more nodes, each is measured with log2(n) others in either direction

MIN_EXTRA_RTT_S = 0.001
"""Minimum excess of an outlier's round trip over the median. DDP does not notice less."""

MIN_TO_COMPARE = 3  # Minimum number of links for a median. Of two, neither is the usual one.

MIN_BANDWIDTH = 100e6 / 8 * 0.8
"""Bytes per second below which any link is slow: less than 100 Mbit/s carries."""

SLOW_NETWORK = 2.5e9 / 8
"""Bytes per second up to which a link may be that of a management network of 1 Gbit/s."""

FAR_FASTER = 3  # Factor by which a network that no library uses must be faster for a warning

CPU_BOUND = 10e9 / 8
"""Bytes per second above which one connection in Python measures cores and memory, not the network.
Such speeds vary by more than half from one measurement to the next."""

LOSSY, MIN_LOST = 0.02, 3
"""Minimum share and number of small messages that a lossy link loses."""

STARVED_SHARE = 0.5
"""Share of time waiting for a core above which a measurement proves nothing about the link."""

PING, LAST = b"\x01", b"\x02"
_PONG = struct.Struct("!d")  # How long the dialled node has waited for a core so far

_ANSWER = struct.Struct("!QddQ")
"""Bytes received, seconds, seconds of waiting for a core, and segments sent again."""


@dataclass(frozen=True, slots=True)
class Speed(Part):
    """A link in one direction."""

    rtt: float  # Round trip in seconds
    bandwidth: float  # Bytes per second
    waited: float = 0.0  # The share of the time in which either end waited for a core
    sent: int = 0  # Small messages, in both directions
    resent: int = 0  # Number of their segments that were sent again

    @property
    def lossy(self) -> bool:
        """Whether small messages are lost."""
        return self.resent >= MIN_LOST and self.resent >= LOSSY * self.sent


NodePair = tuple[int, int]  # The dialling (sending) node and the dialled one, by index


def ring_shifts(nodes: int) -> list[int]:
    """Return the distance in the ring between the two nodes of a pair, for each round.

    In a round every node sends to one other and receives from one, so that none is measured twice
    at once.
    """
    if nodes <= ALL_PAIRS_UP_TO:
        return list(range(1, nodes))
    return [2**power for power in range((nodes - 1).bit_length()) if 2**power < nodes]


def better_speed(one: Speed, other: Speed) -> Speed:
    """Combine two measurements of a link: the better of each value, and the sum of the losses."""
    return Speed(
        min(one.rtt, other.rtt),
        max(one.bandwidth, other.bandwidth),
        min(one.waited, other.waited),
        one.sent + other.sent,
        one.resent + other.resent,
    )


def slow_links(measured: Mapping[NodePair, Speed]) -> list[NodePair]:
    """Return the slow links, the slowest first.

    A link is slow below the minimum or half the median bandwidth, or above twice the median round
    trip.
    """
    rtt, bandwidth = float("inf"), 0.0
    if len(measured) >= MIN_TO_COMPARE:
        rtt = statistics.median(speed.rtt for speed in measured.values())
        bandwidth = statistics.median(speed.bandwidth for speed in measured.values())
    found = [cell for cell, speed in measured.items() if is_slow(speed, rtt, bandwidth)]
    return sorted(found, key=lambda cell: measured[cell].bandwidth)


def is_slow(speed: Speed, rtt: float, bandwidth: float) -> bool:
    """Return whether a link is an outlier, given the medians, or below the minimum."""
    return (speed.rtt > 2 * rtt and speed.rtt > rtt + MIN_EXTRA_RTT_S) or (
        speed.bandwidth < max(MIN_BANDWIDTH, min(bandwidth / 2, CPU_BOUND))
    )


def links_to_repeat(measured: Mapping[NodePair, Speed]) -> list[NodePair]:
    """Return the links to measure again: outliers, and those on which anything was sent again."""
    resent = [cell for cell, speed in measured.items() if speed.resent]
    resent.sort(key=lambda cell: -measured[cell].resent)
    return list(dict.fromkeys([*slow_links(measured), *resent]))


async def measure_link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Speed:
    """Measure as the sending side, on a connection to a node that runs `answer_measurement`.

    Raises:
        OSError: The connection broke.
        asyncio.IncompleteReadError: It was closed.
        asyncio.TimeoutError: It took too long.
    """
    before = tcp_counts(writer).resent
    pinging = asyncio.ensure_future(_round_trips(reader, writer))
    await asyncio.wait({pinging}, timeout=MEASURE_TIMEOUT)
    resent = tcp_counts(writer).resent - before
    if not pinging.done():
        pinging.cancel()
        return Speed(MEASURE_TIMEOUT, 0.1, 0.0, max(1, MIN_PINGS), resent)
    rtt, sent = pinging.result()
    acked, sending, waits = tcp_counts(writer).acked, time.monotonic(), waited_for_core()
    try:
        received, seconds, away, back = await asyncio.wait_for(
            _send_bulk(reader, writer), MEASURE_TIMEOUT
        )
    except asyncio.TimeoutError:
        # At least what was acknowledged arrived.
        passed = time.monotonic() - sending
        came = max(1, tcp_counts(writer).acked - acked)
        return Speed(rtt, came / passed, (waited_for_core() - waits) / passed, 2 * sent, resent)
    # Both ends may have waited at once. The link is not to blame for either.
    share = min(1.0, (waited_for_core() - waits + away) / max(seconds, 1e-6))
    own = max(seconds * max(1 - share, 0.1), 1e-6)
    return Speed(rtt, received / own, share, 2 * sent, resent + back)


async def _round_trips(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[float, int]:
    """Return the fastest round trip without waits for a core, and the number of round trips."""
    until, rtt, away = time.monotonic() + PINGS_S, float("inf"), 0.0
    for number in range(1, PINGS + 1):
        last = number == PINGS or (number >= MIN_PINGS and time.monotonic() > until)
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
    """Run the receiving side: echo the pings, then count the bytes that arrive and their time."""
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


# -- connections between two nodes


BLOCK = 64 * 1024  # Bytes sent each way: enough for packets of the largest size
PART = 8 * 1024  # If more bytes than this arrived, full-size packets got through
STALL_TIMEOUT = 3.0  # Seconds for 64 KiB, which arrive in milliseconds or not at all

CONNECTIONS_AT_ONCE = 256
EXCHANGES_AT_ONCE = 8  # Exchanges at a time, so that one core can serve them all
HOLD_S = 0.5  # Seconds after which an exchange no longer counts among them

_SESSION_TIMEOUT = 60.0
_HELLO = struct.Struct("!16sIc")
_EXCHANGE, _SPEED = b"E", b"S"
_OK, _NOT_ME = b"\x01", b"\x00"
_BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, TimeoutError, struct.error)

Outcome = Literal[
    "ok",
    "dropped",  # no answer at all to the connection
    "refused",  # the machine, or a firewall, answers that there is no such port
    "unreachable",  # the network says that there is no route, or that it is prohibited
    "no route",  # the dialling node has no route to it
    "no host",  # the same, after no machine answered ARP
    "no files",  # the dialling node may open no more files
    "silent",  # connected, but then nothing was received
    "other service",  # connected to something else
    "forth",  # the 64 KiB from the dialling node did not arrive
    "back",  # the 64 KiB from the dialled node did not arrive
    "lossy",  # they arrived in part: packets of all sizes are lost
]

_OUTCOMES: dict[wire.Closed, Outcome] = {
    "refused": "refused", "dropped": "dropped", "no host": "no host", "no files": "no files",
    "no route": "no route",
}  # fmt: skip
"""The outcome by why there is no connection. Everything else is `unreachable`."""

STALLS = ("forth", "back")  # The outcomes of connections that open and lose large packets


@dataclass(frozen=True, slots=True)
class Target(Part):
    """A node to dial: its index, and where it listens."""

    index: wire.Index = -1
    address: wire.Address = ""
    port: wire.Port = 0
    mss: wire.Port = 0
    """Largest segment in bytes, to learn whether smaller packets pass; 0 for the kernel's."""


@dataclass(frozen=True, slots=True)
class Dialled(Part):
    """The result of dialling a node."""

    outcome: str = ""  # An :data:`Outcome`
    seconds: float = 0.0
    """Time until the outcome was known. 0 for ``ok``, as are most of the n² results."""
    error: str = ""  # The kernel's error message
    passes: int = 0  # Bytes of the largest packets that pass where 64 KiB do not; 0 if none do
    address: wire.Address = ""  # The address that was dialled. The coordinator sets it.


def pair_token(token: bytes) -> bytes:
    """Derive the token that nodes show each other from the coordinator's.

    A fake coordinator can make a node dial an address, but cannot choose what it sends there.
    """
    return hashlib.sha256(b"ddpdoctor pair\0" + token).digest()[:16]


class Listener:
    """The server that the other nodes dial. It answers only nodes of this check."""

    def __init__(self) -> None:
        self.token = b""
        self.index = -1
        self._server: asyncio.Server | None = None
        self._admission = wire.Admission()

    async def open(self) -> int:
        """Listen on a port that the kernel chooses. Return the port."""
        listening = wire.listen(0)
        self._server = await asyncio.start_server(self._answer, sock=listening, backlog=1024)
        return int(listening.getsockname()[1])

    def admit(self, index: int, token: bytes) -> None:
        """Start answering nodes that have the token, as the node with this index."""
        self.index, self.token = index, token

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio would print the cancellation that ends the check.
        with contextlib.suppress(*_BROKEN, asyncio.CancelledError):
            await asyncio.wait_for(self._session(reader, writer), _SESSION_TIMEOUT)
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        with self._admission.place(writer, str(peer[0]) if peer else "") as placed:
            if not placed:
                return
            hello = await wire.proof_in_time(reader.readexactly(_HELLO.size))
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
    """Dial several nodes and exchange 64 KiB each way with each. Return the results in their order.

    Never raises for network errors.
    """
    with wire.ProcessClock() as clock:
        dialler = _Dialler(token, clock)
        return list(await asyncio.gather(*map(dialler.dial, targets)))


class _Dialler:
    """Dials many nodes at once, and exchanges data with few of them."""

    def __init__(self, token: bytes, clock: wire.ProcessClock) -> None:
        self._token = token
        self._clock = clock
        self._connecting = asyncio.Semaphore(CONNECTIONS_AT_ONCE)
        self._exchanging = asyncio.Semaphore(EXCHANGES_AT_ONCE)

    async def dial(self, target: Target) -> Dialled:
        async with self._connecting:
            began = time.monotonic()
            try:
                reader, writer = await wire.connect(
                    target.address, target.port, mss=target.mss, clock=self._clock
                )
            except wire.ConnectError as error:
                outcome = _OUTCOMES.get(error.kind, "unreachable")
                return Dialled(outcome, round(time.monotonic() - began, 4), error.words)
        try:
            return await self._exchange(target, reader, writer)
        finally:
            # Unsent data to a node that does not answer must not hold the connection open.
            writer.transport.abort()

    async def _exchange(
        self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Dialled:
        reached: list[Outcome] = ["silent"]
        await self._exchanging.acquire()
        began = time.monotonic()
        work = asyncio.ensure_future(self._talk(target, reader, writer, reached))
        words = ""
        try:
            try:
                await asyncio.wait({work}, timeout=HOLD_S)
            finally:
                # A stalled exchange frees its slot and goes on while others run.
                self._exchanging.release()
            await self._clock.within(work, STALL_TIMEOUT)
        except TimeoutError:
            if reached[-1] in STALLS and max(tcp_counts(writer)[1:]) > PART:
                reached.append("lossy")
        except OSError as error:
            words = wire.words_of(error)
        except asyncio.IncompleteReadError:
            words = "the connection was closed"
        finally:
            work.cancel()
        if reached[-1] == "ok":
            return Dialled("ok")
        return Dialled(reached[-1], round(time.monotonic() - began, 4), words)

    async def _talk(
        self,
        target: Target,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        reached: list[Outcome],
    ) -> None:
        """Run the dialling side of an exchange. Append to ``reached`` how far it got."""
        writer.write(_HELLO.pack(self._token, target.index, _EXCHANGE))
        if await reader.read(1) != _OK:
            reached.append("other service")
            return
        reached.append("forth")
        writer.write(bytes(BLOCK))
        await reader.readexactly(1)
        reached.append("back")
        writer.write(_OK)
        await reader.readexactly(BLOCK)
        reached.append("ok")


async def dial_speed(target: Target, token: bytes) -> Speed | None:
    """Measure the link to a node. Return None if the connection broke."""
    try:
        reader, writer = await wire.connect(target.address, target.port)
    except wire.ConnectError:
        return None
    try:
        writer.write(_HELLO.pack(token, target.index, _SPEED))
        if await asyncio.wait_for(reader.read(1), STALL_TIMEOUT) != _OK:
            return None
        return await measure_link(reader, writer)
    except _BROKEN:
        return None
    finally:
        writer.transport.abort()
