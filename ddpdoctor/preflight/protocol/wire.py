"""Exchange JSON messages between nodes: prove a shared id, frame messages, validate their fields.

What another node sends is never trusted. The decoder of the records checks the types. A text that
is used as an address, a path or a port, or that appears in a line to paste, also has an alphabet,
which the message declares beside the type. Any other text has a maximum length. A message with any
other value is refused as a whole, since no node sends it. The renderers escape what they print, and
every word of a line to paste is quoted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import math
import re
import secrets
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from ddpdoctor.core import opening
from ddpdoctor.run.records.base import Part, as_json
from ddpdoctor.run.records.typed_json import decoder, required

P = TypeVar("P", bound=Part)

# -- validation


MAX_TEXT = 4096
"""Characters of a text without an alphabet: a path, an error message, a variable's value."""

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


def _within(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: value is None or least <= value <= most


# Host names often have an underscore. No word begins with a dash: it would be an option.
Host = Annotated[str, _matches(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|")]
Interface = Annotated[str, _matches(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}|")]
Address = Annotated[str, _is_address]
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
    """Return whether a value is one that an annotated type, such as :data:`Host`, allows."""
    return all(rule(value) for rule in get_args(hint)[1:])


def unpacked(declared: type[P], message: Mapping[str, object], *, whole: bool = False) -> P:
    """Decode and validate a message of another node.

    A missing field, or one of another type, has its default, unless the message has to be whole.

    Raises:
        ValueError: A value is not allowed.
    """
    part = required(declared, message) if whole else decoder(declared)(message)
    _validate(part, declared, declared.__name__.lower())
    return part


_known: dict[type[Part], list[tuple[str, Any]]] = {}


def _hints(declared: type[Part]) -> list[tuple[str, Any]]:
    """Return the fields of a class, and what each may hold."""
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
"""The first words of a server, before its nonce. The number is the version of the protocol."""

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


MAX_OF_NODE = 4 << 20  # Bytes of a message of a node, which knows about itself and its links

MAX_OF_COORDINATOR = 64 << 20
"""Bytes of a message of the coordinator, which knows about every pair of nodes."""

_EXPANSION = 12
"""How many times its bytes a message may take in memory. Lists of empty lists take 25 times."""

_HEAD = struct.Struct("!I")

Message = Part | Mapping[str, Any]


class WireError(Exception):
    """The other side is gone, or does not speak the protocol."""


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
        """Send one message, or what :func:`packed` made of one.

        Raises:
            WireError: The other side is gone.
        """
        try:
            self.writer.write(message if isinstance(message, bytes) else packed(message))
            await self.writer.drain()
        except (OSError, RuntimeError) as error:
            raise WireError(str(error)) from error

    async def receive(self, seconds: float, most: int = MAX_OF_NODE) -> dict[str, Any]:
        """Return the next message, of at most so many bytes.

        Raises:
            WireError: None came within so many seconds, or it is damaged.
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
