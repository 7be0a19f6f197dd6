"""How good the link from one node to another is: round trip, bandwidth and losses, measured alone.

The time in which either end waited for a core is left out: on a busy machine a link looks slow.
Losses are counted of small messages, one at a time: those fill no queue, so that none of them is
lost where a link is merely slower than its sender.
"""

from __future__ import annotations

import asyncio
import statistics
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ddpdoctor.preflight.deadline import waited_for_core
from ddpdoctor.preflight.protocol.tcp_info import counts

MEASURE_S = 0.05
"""Seconds of sending for one measurement of the bandwidth."""

MOST_BYTES = 8 * 2**20
CHUNK = bytes(256 * 1024)

PINGS, LEAST_PINGS, PINGS_S = 100, 5, 0.3
"""Small messages forth and back: at most, at least, and the seconds after which none is sent."""

LIMIT = 10.0
"""Seconds for one measurement, after which the link is as slow as can be."""

ALL_PAIRS_UP_TO = 8
"""Nodes; with more, each is measured with log2(n) others, either way."""

RTT_FLOOR_S = 0.001
"""A round trip is an outlier only if it is so much longer as well: below, DDP does not feel it."""

LEAST_TO_COMPARE = 3
"""Links that have a median; of two neither is the usual one."""

FLOOR = 100e6 / 8 * 0.8
"""Bytes per second below which a link is slow whatever the others are: less than a network of
100 Mbit/s carries."""

CPU_BOUND = 10e9 / 8
"""Bytes per second from which on one connection in Python shows a machine's cores and memory, which
differ by more than half from one measurement to the next, and not the network."""

LOSSY, LEAST_LOST = 0.02, 3
"""The share of small messages that a link has to lose, and how many, to be called lossy."""

STARVED = 0.5
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


Cell = tuple[int, int]
"""The dialling (sending) node and the dialled one, by index."""


def shifts(nodes: int) -> list[int]:
    """How far apart in the ring the nodes of each round are.

    In a round every node sends to one other and receives from one: none is measured twice at a
    time.
    """
    if nodes <= ALL_PAIRS_UP_TO:
        return list(range(1, nodes))
    return [2**power for power in range((nodes - 1).bit_length()) if 2**power < nodes]


def better(one: Speed, other: Speed) -> Speed:
    """The better of two measurements of a link, in each respect; what was lost adds up."""
    return Speed(
        min(one.rtt, other.rtt),
        max(one.bandwidth, other.bandwidth),
        min(one.waited, other.waited),
        one.sent + other.sent,
        one.resent + other.resent,
    )


def outliers(measured: Mapping[Cell, Speed]) -> list[Cell]:
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
        speed.bandwidth < max(FLOOR, min(bandwidth / 2, CPU_BOUND))
    )


def suspects(measured: Mapping[Cell, Speed]) -> list[Cell]:
    """The links to measure again: outliers, and those on which anything was sent again."""
    resent = [cell for cell, speed in measured.items() if speed.resent]
    resent.sort(key=lambda cell: -measured[cell].resent)
    return list(dict.fromkeys([*outliers(measured), *resent]))


async def measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Speed:
    """The sending side, on a connection to a node that :func:`serve` answers on.

    Raises:
        OSError: The connection broke.
        asyncio.IncompleteReadError: It was closed.
        asyncio.TimeoutError: It took too long.
    """
    before = counts(writer).resent
    pinging = asyncio.ensure_future(_round_trips(reader, writer))
    await asyncio.wait({pinging}, timeout=LIMIT)
    resent = counts(writer).resent - before
    if not pinging.done():
        pinging.cancel()
        return Speed(LIMIT, 0.1, 0.0, max(1, LEAST_PINGS), resent)
    rtt, sent = pinging.result()
    acked, sending, waits = counts(writer).acked, time.monotonic(), waited_for_core()
    try:
        received, seconds, away, back = await asyncio.wait_for(_send(reader, writer), LIMIT)
    except asyncio.TimeoutError:
        # So much of it came, at least.
        passed = time.monotonic() - sending
        came = max(1, counts(writer).acked - acked)
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


async def _send(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, float, float, int]:
    began, sent = time.monotonic(), 0
    while sent < MOST_BYTES and (sent == 0 or time.monotonic() - began < MEASURE_S):
        writer.write(CHUNK)
        sent += len(CHUNK)
        await writer.drain()
    writer.write_eof()
    received, seconds, away, back = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    return received, seconds, away, back


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The receiving side: echo the pings, then count what comes and how long it takes."""
    for _ in range(PINGS):
        ping = await reader.readexactly(1)
        writer.write(_PONG.pack(waited_for_core()))
        if ping == LAST:
            break
    await reader.readexactly(1)
    resent = counts(writer).resent
    began, waits, received = time.monotonic(), waited_for_core(), 0
    while data := await reader.read(2**20):
        received += len(data)
    passed = time.monotonic() - began
    writer.write(_ANSWER.pack(received, passed, max(0.0, waited_for_core() - waits), resent))
    await writer.drain()
