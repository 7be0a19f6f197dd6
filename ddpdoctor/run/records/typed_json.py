"""Decode JSON into declared types, and lines of journals into records.

A JSON object may come from another version, from a torn write, or from an attacker. Unknown keys
are skipped. A value that is not of its field's declared type counts as missing. So every returned
object has values of the declared types, and readers need no checks.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ddpdoctor.core import opening
from ddpdoctor.run.records import memory, model, process, supervisor, training
from ddpdoctor.run.records.base import JsonObject, Part, Record, key_of

# -- make typed objects from JSON: the only place where foreign or damaged input is judged


P = TypeVar("P", bound=Part)

_WORD = 1 << 63  # Limit of integers. No writer has larger ones, and some could not even be divided.


class _MisfitError(Exception):
    """A value is not of the declared type."""


_Convert = Callable[[Any], Any]


_decoders: dict[type[Part], Callable[[Mapping[str, object]], Any]] = {}


def decoder(declared: type[P]) -> Callable[[Mapping[str, object]], P]:
    """Return a function that makes an object of a class from JSON. It never raises."""
    known = _decoders.get(declared)
    if known is None:
        hints = get_type_hints(declared)
        layout = [
            (each.name, key_of(each.name), _converter(hints[each.name]), _default(each, hints))
            for each in fields(declared)
        ]

        def decoded(found: Mapping[str, object]) -> P:
            values: dict[str, Any] = {}
            for name, key, convert, default in layout:
                if key in found:
                    try:
                        values[name] = convert(found[key])
                        continue
                    except _MisfitError:
                        pass
                values[name] = default()
            return declared(**values)

        known = _decoders[declared] = decoded
    return known


def required(declared: type[P], found: Mapping[str, object]) -> P:
    """Make an object as :func:`decoder` does, from JSON that has to be complete.

    Raises:
        ValueError: A field without default is missing, or a value is of another type.
    """
    hints, values = get_type_hints(declared), {}
    try:
        for each in fields(declared):
            if key_of(each.name) in found or each.default is MISSING:
                values[each.name] = _converter(hints[each.name])(found[key_of(each.name)])
        return declared(**values)
    except (KeyError, TypeError, RecursionError, _MisfitError) as error:
        raise ValueError(f"damaged {declared.__name__.lower()}: {error}") from None


def _default(each: Any, hints: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes the value of a missing field."""
    if each.default is not MISSING:
        return lambda: each.default
    if each.default_factory is not MISSING:
        return each.default_factory  # type: ignore[no-any-return]
    return _blank(hints[each.name])


def _blank(hint: Any) -> Callable[[], Any]:
    """Return a function that makes the empty value of a type."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return _blank(type(None) if type(None) in arguments else arguments[0])
    if origin is tuple and arguments and arguments[-1] is not ...:
        parts = [_blank(each) for each in arguments]
        return lambda: tuple(part() for part in parts)
    if isinstance(origin, type) and issubclass(origin, Part):
        return lambda: decoder(origin)({})
    if isinstance(origin, type) and issubclass(origin, tuple) and hasattr(origin, "_fields"):
        fields = [_blank(each) for each in get_type_hints(origin).values()]
        return lambda: origin(*(field() for field in fields))
    return lambda: origin() if origin is not type(None) else None


def _converter(hint: Any) -> _Convert:
    """Return a function that converts JSON to a type, or raises `_MisfitError`."""
    plain = _PLAIN.get(hint)
    if plain is not None:
        return plain
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _any_of([_converter(each) for each in arguments])
    if origin is tuple:
        if arguments[-1] is ...:
            return _sequence(_converter(arguments[0]))
        return _fixed(tuple, [_converter(each) for each in arguments], len(arguments))
    if origin is dict:
        return _object if arguments[1] is Any else _mapping(_converter(arguments[1]))
    if issubclass(hint, Part):
        # Looked up when it is used: a part may contain another one of its type.
        return lambda found: decoder(hint)(_object(found))
    return _named_tuple(hint)


def _any_of(ways: list[_Convert]) -> _Convert:
    def convert(value: Any) -> Any:
        for way in ways:
            try:
                return way(value)
            except _MisfitError:
                continue
        raise _MisfitError

    return convert


def _sequence(part: _Convert) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list:
            raise _MisfitError
        return tuple([part(each) for each in value])

    return convert


def _fixed(make: Callable[[list[Any]], Any], parts: list[_Convert], least: int) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is not list or not least <= len(value) <= len(parts):
            raise _MisfitError
        return make([part(each) for part, each in zip(parts, value, strict=False)])

    return convert


def _named_tuple(hint: Any) -> _Convert:
    """Convert a list whose last values may be missing, or an object."""
    hints = get_type_hints(hint)
    names, defaults = hint._fields, hint._field_defaults
    parts = [_converter(hints[name]) for name in names]
    of_list = _fixed(lambda values: hint(*values), parts, len(parts) - len(defaults))
    blanks = [_blank(hints[name]) for name in names]

    def convert(value: Any) -> Any:
        if type(value) is not dict:
            return of_list(value)
        values = []
        for name, part, blank in zip(names, parts, blanks, strict=True):
            try:
                values.append(part(value[name]))
            except (KeyError, _MisfitError):
                values.append(defaults[name] if name in defaults else blank())
        return hint(*values)

    return convert


def _mapping(part: _Convert) -> _Convert:
    return lambda value: {key: part(each) for key, each in _object(value).items()}


def _object(value: Any) -> JsonObject:
    if type(value) is not dict:
        raise _MisfitError
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -_WORD <= value < _WORD:
        raise _MisfitError
    return value


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    return float(_integer(value))


def _exactly(kind: type) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise _MisfitError
        return value

    return convert


_PLAIN: dict[Any, _Convert] = {
    int: _integer,
    float: _number,
    str: _exactly(str),
    bool: _exactly(bool),
    type(None): _exactly(type(None)),
}


# -- read records back from lines of a journal. Lines of an unknown kind are skipped


def kinds_of(*modules: str) -> dict[str, type[Record]]:
    """Return the records that some loaded modules declare, by kind."""
    declared = (each for module in modules for each in vars(sys.modules[module]).values())
    return {
        each.kind: each
        for each in declared
        if isinstance(each, type) and issubclass(each, Record) and each.kind
    }


RANK_RECORDS = kinds_of(process.__name__, training.__name__, model.__name__, memory.__name__)
"""The records that processes of the job write, by kind."""

SUPERVISOR_RECORDS = {**kinds_of(supervisor.__name__), "fault": process.FaultRecord}
"""The records that the supervisor writes, by kind."""


def decode(
    line: Mapping[str, object], kinds: Mapping[str, type[Record]] = RANK_RECORDS
) -> Record | None:
    """Return the record of a JSON object, or None if its kind is not known."""
    kind = line.get("kind")
    declared = kinds.get(kind) if isinstance(kind, str) else None
    try:
        return None if declared is None else decoder(declared)(line)
    except RecursionError:
        # Parts may be nested deeply.
        return None


def parse(line: bytes, kinds: Mapping[str, type[Record]] = RANK_RECORDS) -> Record | None:
    """Return the record of a journal line.

    None if it is torn, not a record, or of an unknown kind.
    """
    try:
        found = opening.loads(line)
    except ValueError:
        return None
    return decode(found, kinds) if isinstance(found, dict) else None
