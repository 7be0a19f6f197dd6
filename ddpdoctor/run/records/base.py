"""The base classes of journal records, and how a record becomes a line of JSON.

Each kind of record is a frozen dataclass, declared once in a module of this package: a rank or the
supervisor constructs it, :func:`ddpdoctor.run.records.decode.decode` reads it back. Standard
library only, since the job's interpreter may have nothing else.

A field that a writer always knows has no default; one that has its default is left out of the
line. To read a line that lacks a field, or holds something else there, gives the default, or the
empty value of the field's type (0, "", (), None, False).
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.declaring import Base, dataclass

EVERY = 1 << 62

JsonObject = dict[str, Any]
"""What JSON holds in braces: of files that are no journals, and of messages."""


class CodeFrame(NamedTuple):
    """One frame of a stack; in JSON a list of the three."""

    path: str
    line: int
    function: str = ""


class Part(Base):
    """A JSON object that is a part of a record."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Part):
    """A line of a journal. The docstring of a subclass says what it reports."""

    kind: ClassVar[str] = ""
    """What ``kind`` says in the line."""
    kept: ClassVar[int] = EVERY
    """How many of them, the first ones, are written again at the head of each new segment, so that
    rotation does not lose them; the newest are there anyway. 0 for those of which only the newest
    matter, `EVERY` for those that cannot become many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRecord(Record):
    """A record about a line of the user's code."""

    path: str = ""
    """Absolute; empty where no line is known."""
    line: int = 0

    @property
    def location(self) -> Location | None:
        """The line, None where none is known."""
        return Location(self.path, self.line) if self.path else None


def as_json(part: Part) -> JsonObject:
    """A record, or a part of one, as JSON has it: ``kind`` first, without what has its default."""
    found: JsonObject = {"kind": part.kind} if isinstance(part, Record) else {}
    for name, key, default in _layout(type(part)):
        value = getattr(part, name)
        # By type first: to compare what the job made may run its code, or wait for a GPU.
        if value is not default and not (type(value) is type(default) and value == default):
            found[key] = value
    return found


_layouts: dict[type[Part], list[tuple[str, str, object]]] = {}


def _layout(kind: type[Part]) -> list[tuple[str, str, object]]:
    """The fields of a class: name, key in JSON, and default (`dataclasses.MISSING` without one)."""
    known = _layouts.get(kind)
    if known is None:
        known = [(each.name, key_of(each.name), each.default) for each in fields(kind)]
        _layouts[kind] = known
    return known


def key_of(name: str) -> str:
    """The key of a field: its name, less the underscore that keeps it from being a keyword."""
    return name.removesuffix("_")


def encode(record: Record) -> bytes:
    """One journal line; a record that cannot be encoded becomes one of its kind that says so."""
    try:
        return json_line(as_json(record))
    except Exception as error:
        return json_line({"kind": record.kind, "unsayable": type(error).__name__})


def json_line(found: JsonObject) -> bytes:
    """One line of JSON; a value JSON has no word for becomes the name of its type.

    Not its ``repr``: that may be the job's own code, or wait for a GPU, and a rank's writing thread
    runs neither.

    Raises:
        TypeError: A key is no string.
        ValueError: It contains itself.
    """
    return json.dumps(found, separators=(",", ":"), default=_plain).encode() + b"\n"


def _plain(value: object) -> JsonObject | str:
    return as_json(value) if isinstance(value, Part) else f"<{type(value).__name__}>"
