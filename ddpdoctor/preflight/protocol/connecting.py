"""Opens a TCP connection; where that fails, says what the network said."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeVar

T = TypeVar("T")

TICK_S = 0.05


class Patience:
    """Counts the time that this process gets, in ticks; within ``async with``.

    A tick that comes late, because others have the cores, counts as one tick.
    """

    def __init__(self) -> None:
        self._had = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Patience:
        self._ticking = asyncio.ensure_future(self._tick())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._ticking is not None
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking

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

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._had += min(time.monotonic() - began, 2 * TICK_S)


CONNECT_LIMIT = 3.5
"""Seconds. Lost SYNs are sent again after 1 and 3; that nobody answers ARP is known after 3."""

ARP_S = 2.0
"""A host is called unreachable sooner if a router says so, later if nobody answered ARP."""

Closed = Literal[
    "refused",  # somebody answers that there is no such port
    "dropped",  # no answer at all
    "prohibited",  # a firewall says that it is not allowed, by ICMP or on this machine
    "no route",  # this machine does not know a way there
    "unreachable",  # somebody on the way says that there is none
    "nobody",  # no machine has that address
]

_FORBIDDING = frozenset({9, 10, 13})
"""Codes of ICMP's "destination unreachable": network, host, communication prohibited."""

_RECVERR = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
"""IP_RECVERR and IPV6_RECVERR, which Python does not name. Linux tells what came by ICMP in answer
to a connection since 5.8."""

_EXTENDED_ERROR = struct.Struct("=IBBBBII")
"""struct sock_extended_err: errno, origin, type, code, pad, info, data."""

_BY_ICMP = 2


@dataclass(frozen=True)
class Failure:
    """Why there is no connection.

    Attributes:
        words: The kernel's.
        sender: Who said so by ICMP; empty if nobody did, or it is not known.
    """

    kind: Closed
    words: str = ""
    sender: str = ""


class ConnectError(Exception):
    """There is no connection."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.kind)
        self.failure = failure


async def connect(
    address: str, port: int, limit: float = CONNECT_LIMIT
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect within so many seconds of this process's time.

    Raises:
        ConnectError: There is no connection.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        # A kernel without IPv6.
        raise ConnectError(Failure("no route", _words(error))) from None
    began = time.monotonic()
    try:
        made.setblocking(False)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                made.setsockopt(*_RECVERR[family], 1)
        async with Patience() as patience:
            loop = asyncio.get_running_loop()
            await patience.within(loop.sock_connect(made, (address, port)), limit)
        return await asyncio.open_connection(sock=made)
    except TimeoutError:
        made.close()
        raise ConnectError(Failure("dropped")) from None
    except OSError as error:
        failure = _failure(made, error, time.monotonic() - began)
        made.close()
        raise ConnectError(failure) from None
    except BaseException:
        made.close()
        raise


def _failure(made: socket.socket, error: OSError, seconds: float) -> Failure:
    code, sender = _told_by_icmp(made)
    with contextlib.suppress(OSError):
        if sender == made.getsockname()[0]:
            # This machine's own kernel, when ARP had no answer or a rule of its own rejects.
            sender = ""
    words = _words(error)
    if error.errno in (errno.EACCES, errno.EPERM) or code in _FORBIDDING:
        return Failure("prohibited", words, sender)
    if error.errno == errno.ECONNREFUSED:
        return Failure("refused", words, sender)
    if error.errno == errno.ETIMEDOUT:
        return Failure("dropped")
    if sender:
        return Failure("unreachable", words, sender)
    if error.errno == errno.ENETUNREACH:
        return Failure("no route", words)
    if error.errno == errno.EHOSTUNREACH and seconds > ARP_S:
        return Failure("nobody", words)
    return Failure("unreachable", words)


def _told_by_icmp(made: socket.socket) -> tuple[int, str]:
    """The code of the "unreachable" message that ended a connection over IPv4, and its sender."""
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


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
