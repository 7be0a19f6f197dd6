"""Messages between the nodes of a check: JSON behind a length, after both sides proved the id."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.run.records.base import Part, as_json

GREETING = b"ddpdoctor check 1 "
"""What a coordinator says first, before its nonce; the number is the protocol's."""

GREETING_BYTES = len(GREETING) + 33

LARGEST = 64 << 20
"""Bytes of a message of the coordinator: the report holds what is known of every two nodes."""

OF_A_NODE = 4 << 20
"""Bytes of a message of a node, which knows of itself and of its ways to the others."""

_EXPANDS = 12
"""So many times its bytes may a message take in memory, as those do that are sent; a list of empty
lists takes 25 times."""

_HEAD = struct.Struct("!I")

Message = Part | Mapping[str, Any]


class WireError(Exception):
    """The other side is gone, or does not speak the protocol."""


def key_of(rdzv_id: str) -> bytes:
    """What both sides derive from the rendezvous id; it is never sent."""
    return hashlib.sha256(b"ddpdoctor check\0" + rdzv_id.encode()).digest()


def nonce() -> str:
    """A number used once, as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def proof(key: bytes, role: str, challenge: str) -> str:
    """Shows that this side knows the key, in answer to the other side's nonce."""
    return hmac.new(key, f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()


def proves(answer: object, key: bytes, role: str, challenge: str) -> bool:
    """Whether an answer is the proof that was asked for."""
    return isinstance(answer, str) and hmac.compare_digest(
        answer.encode(), proof(key, role, challenge).encode()
    )


def greeting(challenge: str) -> bytes:
    """The line that distinguishes a coordinator from any other service."""
    return GREETING + challenge.encode() + b"\n"


def challenge_in(line: bytes) -> str | None:
    """The nonce in a coordinator's greeting; None if it is no such line."""
    text = line.removeprefix(GREETING).rstrip(b"\n")
    if not line.startswith(GREETING) or len(text) != 32:
        return None
    return text.decode("ascii", "replace")


def packed(message: Message) -> bytes:
    """A message as it goes over the wire."""
    data = json.dumps(message, separators=(",", ":"), default=as_json).encode()
    return _HEAD.pack(len(data)) + data


class Link:
    """A connection that carries messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            WireError: The other side is gone.
        """
        await self.send_packed(packed(message))

    async def send_packed(self, data: bytes) -> None:
        """Send one message of :func:`packed`.

        Raises:
            WireError: The other side is gone.
        """
        try:
            self.writer.write(data)
            await self.writer.drain()
        except (OSError, RuntimeError) as error:
            raise WireError(str(error)) from error

    async def receive(self, seconds: float, most: int = OF_A_NODE) -> dict[str, Any]:
        """The next message, of so many bytes at most.

        Raises:
            WireError: There is none within so many seconds, or it is damaged.
        """
        try:
            return await asyncio.wait_for(self._receive(most), seconds)
        except asyncio.TimeoutError:
            raise WireError(f"no answer within {seconds:.0f} s") from None
        except asyncio.IncompleteReadError:
            raise WireError("the connection was closed") from None
        except (OSError, ValueError) as error:
            raise WireError(str(error)) from error

    async def _receive(self, most: int) -> dict[str, Any]:
        (length,) = _HEAD.unpack(await self.reader.readexactly(_HEAD.size))
        if length > most:
            raise ValueError("a message that is too large")
        data = await self.reader.readexactly(length)
        if opening.expanded(data) > max(_EXPANDS * most, opening.MOST_EXPANDED):
            raise ValueError("a message that takes too much memory")
        message = opening.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a message that is no JSON object")
        return message

    async def close(self) -> None:
        """Close it; never raises."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.close()
        with contextlib.suppress(OSError, RuntimeError, asyncio.TimeoutError):
            await asyncio.wait_for(self.writer.wait_closed(), 1)
