"""A ``dataclass`` for records that costs little at import: a rank declares dozens and makes few.

The standard library compiles six methods for each class, most of a millisecond. Here those that are
alike for all are inherited, and a constructor is compiled when the first object is made: a tenth of
the time. To a type checker, to ``fields`` and to ``replace`` they are dataclasses.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Base:
        """What all of them inherit."""

else:

    def dataclass(*, frozen, slots, kw_only):
        """A class whose objects are frozen, and made by keywords alone."""
        assert frozen and kw_only

        def declare(cls):
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
            # Its own one: that of a base may have been compiled.
            made.__init__ = _first
            return made

        return declare

    class Base:
        """What all of them inherit."""

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


def _first(self: Any, **values: Any) -> None:
    """The constructor of a class of which no object was made yet."""
    cls = type(self)
    cls.__init__ = _constructor(cls)
    cls.__init__(self, **values)


def _constructor(cls: type[Any]) -> Any:
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
    # Compiled: where Python runs a text, it forgets that Ctrl-C has ended the process.
    exec(compile(source, "<record>", "exec"), known)
    return known["__init__"]
