"""Which values the fields of a message may have: what another node sends is data, never trusted.

The decoder of the records sees to the types. Whatever is used as an address, a path or a port, or
comes into a line to type, also has an alphabet, which `messages` declares beside the type; all
other text has a length. A message with a value beyond that is refused as a whole, since no node
sends it. What is printed is escaped by the renderers in any case, and each word of a line to type
is quoted (`ddpdoctor.preflight.check.typed`).
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from ddpdoctor.run.records.base import Part
from ddpdoctor.run.records.decoder import decoder, required

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
Code = Annotated[str, _matches(r"DDP[0-9]{3}|")]
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
