"""Read and write messages of JSON, after both sides proved the id, and validate their fields.

What another node sends is data, never trusted. The decoder of the records sees to the types.
Whatever is used as an address, a path or a port, or comes into a line to type, also has an
alphabet, which `messages` declares beside the type; all other text has a length. A message with a
value beyond that is refused as a whole, since no node sends it. What is printed is escaped by the
renderers in any case, and each word of a line to type is quoted
(`ddpdoctor.preflight.check.typed`).
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

# -- validation


P = TypeVar("P", bound=Part)

LONGEST = 4096
"""Characters of a text that has no alphabet: a path, an error's words, a variable's value."""

MOST_NODES = 1 << 16

_LARGEST = 1e18
"""Of any number: bytes per second, seconds, a clock."""


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


# An underscore is in many a name of a machine. No word begins with a dash: it would be an option.
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
Count = Annotated[int, _within(0, MOST_NODES)]
Rank = Annotated[int | None, _within(0, MOST_NODES)]
Index = Annotated[int, _within(-1, MOST_NODES)]


def is_host(name: str) -> bool:
    """Whether a text is what :data:`Host` allows, and not empty."""
    return bool(name) and _fits(name, Host)


def is_interface(name: str) -> bool:
    """Whether a text is what :data:`Interface` allows."""
    return _fits(name, Interface)


def is_version(text: str) -> bool:
    """Whether a text is what :data:`Version` allows."""
    return _fits(text, Version)


def is_variable(name: str) -> bool:
    """Whether a text is what :data:`Variable` allows."""
    return _fits(name, Variable)


def _fits(value: Any, hint: Any) -> bool:
    return all(rule(value) for rule in get_args(hint)[1:])


def unpacked(declared: type[P], message: Mapping[str, object]) -> P:
    """A message of another node; a field that it lacks has its default.

    Raises:
        ValueError: A value is beyond what its field allows.
    """
    return _checked(decoder(declared)(message))


def unpacked_whole(declared: type[P], message: Mapping[str, object]) -> P:
    """The same of a message that has to be whole.

    Raises:
        ValueError: A field is missing, or a value is not what it may be.
    """
    return _checked(required(declared, message))


def _checked(part: P) -> P:
    _part(part, type(part).__name__.lower())
    return part


_known: dict[type[Part], list[tuple[str, Any]]] = {}


def _hints(declared: type[Part]) -> list[tuple[str, Any]]:
    """The fields of a class, and what each may hold."""
    if declared not in _known:
        hints = get_type_hints(declared, include_extras=True)
        _known[declared] = [(each.name, hints[each.name]) for each in fields(declared)]
    return _known[declared]


def _part(part: Part, where: str) -> None:
    for name, hint in _hints(type(part)):
        _value(getattr(part, name), hint, f"{where}.{name}")


def _value(value: Any, hint: Any, where: str) -> None:
    if isinstance(value, Part):
        _part(value, where)
    elif isinstance(value, str):
        if len(value) > LONGEST:
            raise ValueError(f"{where} is too long")
    elif isinstance(value, float) and not (math.isfinite(value) and abs(value) < _LARGEST):
        raise ValueError(f"{where} is no usable number")
    if get_origin(hint) is Annotated:
        if not _fits(value, hint):
            raise ValueError(f"{where} has a value that no node sends")
        return
    arguments = get_args(hint)
    if isinstance(value, tuple):
        every = len(arguments) == 2 and arguments[1] is ...
        for each, of in zip(value, arguments[:1] * len(value) if every else arguments, strict=True):
            _value(each, of, where)
    elif isinstance(value, dict):
        for name, each in value.items():
            _value(name, arguments[0], where)
            _value(each, arguments[1], where)


# -- wire


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
