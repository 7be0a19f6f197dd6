"""One node dials another as gloo would, on a port of the kernel's choice, with 64 KiB each way.

gloo's node with the higher address dials the one with the lower; a port of the listening side that
a firewall closes leaves it waiting without a limit. So every node dials every other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddpdoctor.preflight.protocol import speeds
from ddpdoctor.preflight.protocol.connecting import ARP_S, CONNECT_LIMIT, Patience

BLOCK = 64 * 1024
"""Bytes sent each way: enough for packets of the largest size."""

STALL_LIMIT = 3.0
"""Seconds for 64 KiB that arrive in milliseconds where they arrive at all."""

CONNECTIONS_AT_ONCE = 256
EXCHANGES_AT_ONCE = 8
HOLD_S = 0.5
"""Seconds after which an exchange that goes on no longer counts among those."""

_SESSION_LIMIT = 60.0
_HELLO = struct.Struct("!16sIc")
_EXCHANGE = b"E"
_SPEED = b"S"
_OK = b"\x01"
_NOT_ME = b"\x00"

Outcome = Literal[
    "ok",
    "dropped",  # no answer at all to the connection
    "refused",  # somebody answers that there is no such port
    "unreachable",  # the network says that there is no way, or that it is prohibited
    "nobody",  # the same, after nobody answered ARP
    "silent",  # connected, and then nothing
    "stranger",  # connected, to something else
    "forth",  # the 64 KiB from the dialling node did not arrive
    "back",  # the 64 KiB from the dialled node did not arrive
]


STALLS = ("forth", "back")
"""The outcomes of connections that open and lose large packets."""


@dataclass(frozen=True)
class Target:
    """Whom to dial: a node's index, and where it listens.

    Attributes:
        mss: Largest segment in bytes, to learn whether smaller packets pass; 0 for the kernel's.
    """

    index: int
    address: str
    port: int
    mss: int = 0


@dataclass(frozen=True)
class Result:
    """What came of dialling; times in seconds.

    Attributes:
        seconds: Until the outcome was known.
        error: The kernel's words, where it said any.
    """

    outcome: Outcome
    seconds: float = 0.0
    error: str = ""

    def packed(self) -> dict[str, Any]:
        """For a message; of what went well no more is told, since it is most of n² results."""
        if self.outcome == "ok":
            return {"outcome": "ok"}
        return {key: value for key, value in asdict(self).items() if value}


class Listener:
    """What the other nodes dial: it answers those of this check, and only those."""

    def __init__(self) -> None:
        self.token = b""
        self.index = -1
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen on a port of the kernel's choice; the port."""
        listening = _listening_socket()
        self._server = await asyncio.start_server(self._answer, sock=listening)
        return int(listening.getsockname()[1])

    def admit(self, index: int, token: bytes) -> None:
        """Answer those that have the token, as the node of this index."""
        self.index, self.token = index, token

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._session(reader, writer), _SESSION_LIMIT)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, struct.error):
            pass
        except asyncio.CancelledError:
            # The check is over; asyncio would print it.
            pass
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        token, index, what = _HELLO.unpack(await reader.readexactly(_HELLO.size))
        if not self.token or not secrets.compare_digest(token, self.token):
            return
        writer.write(_OK if index == self.index else _NOT_ME)
        await writer.drain()
        if what == _SPEED:
            await speeds.serve(reader, writer)
            return
        await reader.readexactly(BLOCK)
        writer.write(_OK)
        await writer.drain()
        writer.write(await reader.readexactly(1) * BLOCK)
        await writer.drain()
        await reader.read()


def _listening_socket() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("", 0), backlog=1024)


@dataclass
class _Stage:
    """How far an exchange has come."""

    name: Outcome = "silent"


async def dial_all(targets: list[Target], token: bytes) -> list[Result]:
    """Dial several nodes and exchange 64 KiB each way with each; the results in their order.

    Never raises for what the network does.
    """
    async with Patience() as patience:
        dialler = _Dialler(token, patience)
        return list(await asyncio.gather(*(dialler.dial(target) for target in targets)))


class _Dialler:
    """Dials many at once, and exchanges with few, so that one core can serve them all."""

    def __init__(self, token: bytes, patience: Patience) -> None:
        self._token = token
        self._patience = patience
        self._connecting = asyncio.Semaphore(CONNECTIONS_AT_ONCE)
        self._exchanging = asyncio.Semaphore(EXCHANGES_AT_ONCE)

    async def dial(self, target: Target) -> Result:
        async with self._connecting:
            began = time.monotonic()
            try:
                reader, writer = await self._patience.within(_connect(target), CONNECT_LIMIT)
            except TimeoutError:
                return _result("dropped", began)
            except OSError as error:
                outcome = _connect_outcome(error, time.monotonic() - began)
                return _result(outcome, began, _words(error))
        try:
            return await self._exchange(target, reader, writer)
        finally:
            # What is unsent to a node that does not answer must not hold the connection open.
            writer.transport.abort()

    async def _exchange(
        self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Result:
        stage = _Stage()
        await self._exchanging.acquire()
        began = time.monotonic()
        work = asyncio.ensure_future(_talk(target, self._token, reader, writer, stage))
        try:
            try:
                await asyncio.wait({work}, timeout=HOLD_S)
            finally:
                # One that stalls makes room for the others, and goes on beside them.
                self._exchanging.release()
            outcome = await self._patience.within(work, STALL_LIMIT)
        except TimeoutError:
            return _result(stage.name, began)
        except (OSError, asyncio.IncompleteReadError) as error:
            return _result(stage.name, began, _words(error))
        finally:
            work.cancel()
        return _result(outcome, began)


async def _talk(
    target: Target,
    token: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    stage: _Stage,
) -> Outcome:
    """The dialling side of an exchange.

    Raises:
        OSError: The connection broke.
        asyncio.IncompleteReadError: It was closed.
    """
    writer.write(_HELLO.pack(token, target.index, _EXCHANGE))
    if await reader.read(1) != _OK:
        return "stranger"
    stage.name = "forth"
    writer.write(bytes(BLOCK))
    await reader.readexactly(1)
    stage.name = "back"
    writer.write(_OK)
    await reader.readexactly(BLOCK)
    return "ok"


def _result(outcome: Outcome, began: float, error: str = "") -> Result:
    return Result(outcome, round(time.monotonic() - began, 4), error)


async def speed(target: Target, token: bytes) -> speeds.Speed | None:
    """Measure the link to a node; None if it broke."""
    try:
        reader, writer = await asyncio.wait_for(_connect(target), CONNECT_LIMIT)
    except (asyncio.TimeoutError, OSError):
        return None
    try:
        writer.write(_HELLO.pack(token, target.index, _SPEED))
        if await asyncio.wait_for(reader.read(1), STALL_LIMIT) != _OK:
            return None
        return await speeds.measure(reader, writer)
    except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, struct.error):
        return None
    finally:
        writer.transport.abort()


async def _connect(target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        if target.mss:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, target.mss)
        await loop.sock_connect(made, (target.address, target.port))
        return await asyncio.open_connection(sock=made)
    except BaseException:
        made.close()
        raise


def _connect_outcome(error: OSError, seconds: float) -> Outcome:
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno == errno.ETIMEDOUT:
        return "dropped"
    if error.errno == errno.EHOSTUNREACH and seconds > ARP_S:
        return "nobody"
    return "unreachable"


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return "the connection was closed"
