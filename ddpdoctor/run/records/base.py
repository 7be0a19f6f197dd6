"""The base classes of journal records, and how a record becomes a line of JSON.

Each kind of record is a frozen dataclass, declared once in a module of this package. A rank or the
supervisor constructs it, and :func:`ddpdoctor.run.records.typed_json.decode` reads it back. Only
the standard library is used, since the job's interpreter may have nothing else.

A field that a writer always knows has no default. A field with its default is left out of the
line. A line that lacks a field, or has a value of another type, is read as the default, or as the
empty value of the field's type (0, "", (), None, False).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ddpdoctor.core.user_code import Location

JsonObject = dict[str, Any]  # A JSON object of a file other than a journal, or of a message

# -- A `dataclass` that costs little at import: a rank declares dozens of records and makes few.
#
# The standard library compiles six methods for each class, which takes most of a millisecond. Here
# common methods are inherited, and a constructor is compiled with the first object: a tenth of the
# time. Type checkers, `fields` and `replace` see ordinary dataclasses.


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Base:
        """The common base of all records and their parts."""

else:

    def dataclass(*, frozen, slots, kw_only):
        """Declare a class with frozen objects and keyword arguments only."""
        assert frozen and kw_only

        def declare(cls):
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
            # Not inherited: the constructor of a base may already be compiled.
            made.__init__ = _compile_constructor
            return made

        return declare

    class Base:
        """The common base of all records and their parts."""

        __slots__ = ()

        def __eq__(self, other):
            if other.__class__ is not self.__class__:
                return NotImplemented
            return _values(self) == _values(other)

        def __hash__(self):
            return hash(_values(self))

        def __repr__(self):
            names = [each.name for each in dataclasses.fields(self)]
            text = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            return f"{type(self).__qualname__}({text})"

        def __setattr__(self, name, value):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")

        def __setstate__(self, state):
            for name, value in state[1].items():
                object.__setattr__(self, name, value)

        def __delattr__(self, name):
            raise FrozenInstanceError(f"cannot delete field {name!r}")


def _values(record: Any) -> tuple[Any, ...]:
    return tuple([getattr(record, each.name) for each in dataclasses.fields(record)])


def _compile_constructor(self: Any, **values: Any) -> None:
    """Replace the constructor of a class by a compiled one, and call that."""
    cls = type(self)
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    arguments, lines = [], []
    for each in dataclasses.fields(cls):
        name = value = each.name
        if each.default_factory is not MISSING:
            known[f"_make_{name}"] = each.default_factory
            arguments.append(f"{name}=_missing")
            value = f"_make_{name}() if {name} is _missing else {name}"
        elif each.default is not MISSING:
            known[f"_default_{name}"] = each.default
            arguments.append(f"{name}=_default_{name}")
        else:
            arguments.append(name)
        lines.append(f"_set(self, {name!r}, {value})")
    star = ", *, " if arguments else ""
    source = f"def __init__(self{star}{', '.join(arguments)}): {'; '.join(lines) or 'pass'}"
    # A code object, since `exec` of a text makes Python forget that Ctrl-C has ended the process.
    exec(compile(source, "<record>", "exec"), known)
    cls.__init__ = known["__init__"]
    cls.__init__(self, **values)


# -- Base classes of records


EVERY = 1 << 62  # `Record.kept` of rare kinds: keep all


class CodeFrame(NamedTuple):
    """One frame of a stack. In JSON a list of the three."""

    path: str
    line: int
    function: str = ""


class Part(Base):
    """A JSON object that is part of a record."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Part):
    """A line of a journal. The docstring of a subclass says what it reports.

    A subclass names its kind: ``class SaveRecord(Record, kind="save", kept=16)``.
    """

    kind: ClassVar[str] = ""  # The value of ``kind`` in the line
    kept: ClassVar[int] = EVERY
    """Number of first records that survive rotation: they are repeated at the head of each new
    segment. 0 if only the newest ones matter, `EVERY` for rare kinds."""

    def __init_subclass__(cls, kind: str = "", kept: int | None = None) -> None:
        # Without arguments for the second class that `slots` makes, which has the attributes.
        if kind:
            cls.kind = kind
        if kept is not None:
            cls.kept = kept


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRecord(Record):
    """A record about a line of the user's code."""

    path: str = ""  # Absolute. Empty if no line is known.
    line: int = 0

    @property
    def location(self) -> Location | None:
        """The line, None if no line is known."""
        return Location(self.path, self.line) if self.path else None


# -- Encoding


def as_json(part: Part) -> JsonObject:
    """Return a record, or a part of one, as JSON: ``kind`` first, without default values."""
    found: JsonObject = {"kind": part.kind} if isinstance(part, Record) else {}
    for name, key, default in _layout(type(part)):
        value = getattr(part, name)
        # Types first: comparing an object of the job may run its code, or wait for a GPU.
        if value is not default and not (type(value) is type(default) and value == default):
            found[key] = value
    return found


def document(value: Any) -> Any:
    """Return a part as a JSON object with every field, for output that people and tools read.

    Named tuples become objects, too. :func:`ddpdoctor.run.records.typed_json.decoder` reads it.
    """
    if isinstance(value, Part):
        return {key: document(getattr(value, name)) for name, key, _ in _layout(type(value))}
    if isinstance(value, tuple):
        if hasattr(value, "_asdict"):
            return {name: document(each) for name, each in value._asdict().items()}
        return [document(each) for each in value]
    return value


_layouts: dict[type[Part], list[tuple[str, str, object]]] = {}


def _layout(kind: type[Part]) -> list[tuple[str, str, object]]:
    """Return name, JSON key and default (`dataclasses.MISSING` without one) of each field."""
    known = _layouts.get(kind)
    if known is None:
        known = [(each.name, key_of(each.name), each.default) for each in fields(kind)]
        _layouts[kind] = known
    return known


def key_of(name: str) -> str:
    """Return the JSON key of a field: its name without the underscore of ``pass_``."""
    return name.removesuffix("_")


def encode(record: Record) -> bytes:
    """Return a journal line. A record that cannot be encoded becomes one that says so."""
    try:
        return json_line(as_json(record))
    except Exception as error:
        return json_line({"kind": record.kind, "unsayable": type(error).__name__})


def json_line(found: JsonObject) -> bytes:
    """Return one line of JSON. A value that JSON cannot express becomes the name of its type.

    Its ``repr`` could run the job's code or wait for a GPU, which a rank's writing thread must not.

    Raises:
        TypeError: A key is not a string.
        ValueError: It contains itself.
    """
    return json.dumps(found, separators=(",", ":"), default=_plain).encode() + b"\n"


def _plain(value: object) -> JsonObject | str:
    return as_json(value) if isinstance(value, Part) else f"<{type(value).__name__}>"
