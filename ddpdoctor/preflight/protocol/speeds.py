"""How fast the link from one node to another is: round trip and bandwidth, measured alone."""

from __future__ import annotations

import asyncio
import statistics
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

MEASURE_S = 0.05
"""Seconds of sending for one measurement of the bandwidth."""

MOST_BYTES = 8 * 2**20
CHUNK = bytes(256 * 1024)
PINGS = 10
LIMIT = 10.0
"""Seconds for one measurement, after which the link is as slow as can be."""

ALL_PAIRS_UP_TO = 8
"""Nodes; with more, each is measured with log2(n) others, either way."""

RTT_FLOOR_S = 0.001
"""A round trip is an outlier only if it is so much longer as well: below, DDP does not feel it."""

_ANSWER = struct.Struct("!Qd")


@dataclass(frozen=True)
class Speed:
    """A link in one direction: round trip in seconds, bandwidth in bytes per second."""

    rtt: float
    bandwidth: float


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
    """The better of two measurements of a link, in each respect."""
    return Speed(min(one.rtt, other.rtt), max(one.bandwidth, other.bandwidth))


def outliers(measured: Mapping[Cell, Speed]) -> list[Cell]:
    """The links with half the median bandwidth or twice the median round trip; worst first."""
    if len(measured) < 2:
        return []
    rtt = statistics.median(speed.rtt for speed in measured.values())
    bandwidth = statistics.median(speed.bandwidth for speed in measured.values())
    found = [cell for cell, speed in measured.items() if is_slow(speed, rtt, bandwidth)]
    return sorted(found, key=lambda cell: measured[cell].bandwidth)


def is_slow(speed: Speed, rtt: float, bandwidth: float) -> bool:
    """Whether a link is an outlier, given the medians."""
    return (speed.rtt > 2 * rtt and speed.rtt > rtt + RTT_FLOOR_S) or (
        speed.bandwidth < bandwidth / 2
    )


async def measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Speed:
    """The sending side, on a connection to a node that :func:`serve` answers on.

    Raises:
        OSError: The connection broke.
        asyncio.IncompleteReadError: It was closed.
        asyncio.TimeoutError: It took too long.
    """
    return await asyncio.wait_for(_measure(reader, writer), LIMIT)


async def _measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Speed:
    rtt = float("inf")
    for _ in range(PINGS):
        began = time.monotonic()
        writer.write(b"\x01")
        await reader.readexactly(1)
        rtt = min(rtt, time.monotonic() - began)
    began, sent = time.monotonic(), 0
    while sent < MOST_BYTES and (sent == 0 or time.monotonic() - began < MEASURE_S):
        writer.write(CHUNK)
        sent += len(CHUNK)
        await writer.drain()
    writer.write_eof()
    received, seconds = _ANSWER.unpack(await reader.readexactly(_ANSWER.size))
    return Speed(rtt, received / max(seconds, 1e-6))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The receiving side: echo the pings, then count what comes and how long it takes."""
    for _ in range(PINGS):
        writer.write(await reader.readexactly(1))
    await reader.readexactly(1)
    began, received = time.monotonic(), 0
    while data := await reader.read(2**20):
        received += len(data)
    writer.write(_ANSWER.pack(received, time.monotonic() - began))
    await writer.drain()
