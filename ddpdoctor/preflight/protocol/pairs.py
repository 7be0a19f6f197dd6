"""One node dials another as gloo would, on a port of the kernel's choice, with 64 KiB each way.

gloo's node with the higher address dials the one with the lower; a port of the listening side that
a firewall closes leaves it waiting without a limit. So every node dials every other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpdoctor.preflight.protocol import admission, speeds
from ddpdoctor.preflight.protocol.connecting import (
    Closed,
    ConnectError,
    Patience,
    connect,
    listen,
    patient,
    words_of,
)
from ddpdoctor.preflight.protocol.tcp_info import counts
from ddpdoctor.preflight.protocol.validation import Address, Index, Port
from ddpdoctor.run.records.base import Part

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
        self._admission = admission.Admission()

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
            hello = await admission.in_time(reader.readexactly(_HELLO.size))
        token, index, what = _HELLO.unpack(hello)
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
                return _result(_OUTCOMES.get(error.kind, "unreachable"), began, error.words)
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
            if reached[-1] in STALLS and max(counts(writer)[1:]) > PART:
                reached.append("lossy")
        except OSError as error:
            words = words_of(error)
        except asyncio.IncompleteReadError:
            words = "the connection was closed"
        finally:
            work.cancel()
        return _result(reached[-1], began, words)


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


def _result(outcome: Outcome, began: float, error: str = "") -> Dialled:
    # Of what went well no more is sent, since it is most of n² results.
    return Dialled(outcome, 0.0 if outcome == "ok" else round(time.monotonic() - began, 4), error)


async def speed(target: Target, token: bytes) -> speeds.Speed | None:
    """Measure the link to a node; None if it broke."""
    try:
        reader, writer = await connect(target.address, target.port)
    except ConnectError:
        return None
    try:
        writer.write(_HELLO.pack(token, target.index, _SPEED))
        if await asyncio.wait_for(reader.read(1), STALL_LIMIT) != _OK:
            return None
        return await speeds.measure(reader, writer)
    except _BROKEN:
        return None
    finally:
        writer.transport.abort()
