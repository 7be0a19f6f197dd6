"""Connections that have not proved yet that they are of this check: few, and not for long.

A port of a check is open to whoever reaches it. Until a caller has proved that it knows the
rendezvous id it may hold little: a connection for a few seconds, and of one address only some.
Where all places are taken the oldest one goes, since a node proves it within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from ddpdoctor.preflight.protocol.connecting import patient

T = TypeVar("T")

MOST = 2048
"""Connections without a proof at a time; half of the files that this process may open, if less."""

MOST_OF_ADDRESS = 32
"""And of one address: a node has one or two; behind a translation of addresses are several."""

SECONDS = 5.0
"""For the proof, of the time that this process gets."""

BYTES = 4096
"""Most bytes of a message without a proof."""


class Admission:
    """The connections that are not admitted yet.

    Attributes:
        turned_away: How many were closed for lack of a place.
    """

    def __init__(self) -> None:
        self.turned_away = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if files == resource.RLIM_INFINITY else max(16, min(MOST, files // 2))
        self._waiting: dict[asyncio.StreamWriter, str] = {}
        self._of: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, writer: asyncio.StreamWriter, address: str) -> Iterator[bool]:
        """A place for a connection until it has proved what it is; False if it gets none."""
        network = _network(address)
        if self._of[network] >= MOST_OF_ADDRESS:
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


async def in_time(proof: Awaitable[T]) -> T:
    """What a caller says to prove itself.

    Raises:
        TimeoutError: It did not within :data:`SECONDS`.
    """
    async with patient() as patience:
        return await patience.within(proof, SECONDS)


def _network(address: str) -> str:
    """What one machine may call from: its address, and of IPv6 a whole subnet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if found.version == 4 else str(ipaddress.ip_network(f"{address}/64", False))
