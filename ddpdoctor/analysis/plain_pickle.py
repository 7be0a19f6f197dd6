"""Reads pickles of plain data: dictionaries, lists, tuples, texts and numbers, and nothing else.

Python's own unpickler can be kept from importing and calling, but not from allocating gigabytes for
a few bytes of a hostile file. Here the opcodes that import, call or build objects do not exist, and
the memory that the others take is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MOST_MEMORY = 96 << 20
"""Bytes that the objects of a file may take, about."""

_CONTAINER = 120
"""Bytes that a container or a text takes on a 64-bit machine, its place in another one included."""

_PLACE = 8
"""Bytes that a place on the stack takes."""

_LONGEST = 8
"""Bytes of an integer: what a clock or a counter has."""


class DamagedPickleError(ValueError):
    """The file is no pickle of plain data, is cut short, or takes too much memory."""


def loads(data: bytes) -> Any:
    """Read a pickle; no code of it runs, and nothing is imported.

    Containers of the result may be shared or contain themselves: follow them to a fixed depth.

    Raises:
        DamagedPickleError: It has other objects, is damaged, or takes more than `MOST_MEMORY`.
    """
    try:
        return _Machine(data).run()
    except (IndexError, struct.error, KeyError, TypeError, AttributeError):
        raise DamagedPickleError("is damaged or cut short") from None


class _Machine:
    """The stack machine that a pickle is a program for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._left = MOST_MEMORY
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stacks under each mark."""
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Follow the opcodes to the end."""
        data, operations = self._data, _OPERATIONS
        while True:
            code = data[self._at]
            self._at += 1
            if code == _BINGET:
                # Half of the opcodes of a real file.
                self._push(self._memo[data[self._at]])
                self._at += 1
                continue
            if code == _STOP:
                return self._stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise DamagedPickleError(f"holds more than plain data (opcode {code:#04x})")
            operation(self)

    def _take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise DamagedPickleError("is cut short")
        self._at += size
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise DamagedPickleError(f"takes more than {MOST_MEMORY >> 20} MB")

    def _push(self, value: Any, size: int = _PLACE) -> None:
        self._count(size)
        self._stack.append(value)

    def _since_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._below.pop()
        return found

    # -- one opcode each

    def skip(self, size: int) -> None:
        """PROTO, FRAME."""
        self._take(size)

    def constant(self, value: Any) -> None:
        """NONE, NEWTRUE, NEWFALSE."""
        self._push(value)

    def integer(self, size: int, signed: bool) -> None:
        """BININT1, BININT2, BININT."""
        self._push(int.from_bytes(self._take(size), "little", signed=signed), 40)

    def long(self) -> None:
        """LONG1."""
        size = self._number(1)
        if size > _LONGEST:
            raise DamagedPickleError("has an integer of more than 64 bits")
        self.integer(size, signed=True)

    def float(self) -> None:
        """BINFLOAT."""
        self._push(struct.unpack(">d", self._take(8))[0], 32)

    def text(self, size: int) -> None:
        """SHORT_BINUNICODE, BINUNICODE, BINUNICODE8."""
        raw = self._take(self._number(size))
        self._push(raw.decode("utf-8", "replace"), _CONTAINER + 4 * len(raw))

    def empty(self, kind: Callable[[], Any]) -> None:
        """EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE."""
        self._push(kind(), _CONTAINER)

    def mark(self) -> None:
        """MARK."""
        self._count(_CONTAINER)
        self._below.append(self._stack)
        self._stack = []

    def tuple(self, size: int | None) -> None:
        """TUPLE, TUPLE1, TUPLE2, TUPLE3."""
        if size is None:
            items = self._since_mark()
        else:
            items = [self._stack.pop() for _ in range(size)][::-1]
        self._push(tuple(items), _CONTAINER + _PLACE * len(items))

    def append(self) -> None:
        """APPEND."""
        self._fill([self._stack.pop()])

    def appends(self) -> None:
        """APPENDS."""
        self._fill(self._since_mark())

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise DamagedPickleError("is damaged")
        target.extend(items)

    def set_item(self) -> None:
        """SETITEM."""
        value = self._stack.pop()
        self._set([self._stack.pop(), value])

    def set_items(self) -> None:
        """SETITEMS."""
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        # A key that is a tuple of tuples would be hashed to any depth.
        if type(target) is not dict or not all(type(each) in (str, int) for each in items[::2]):
            raise DamagedPickleError("is damaged")
        self._count(_CONTAINER * (len(items) // 2))
        target.update(zip(items[::2], items[1::2], strict=False))

    def remember(self, size: int) -> None:
        """BINPUT, LONG_BINPUT, MEMOIZE."""
        self._count(_CONTAINER)
        self._memo[self._number(size) if size else len(self._memo)] = self._stack[-1]

    def recall(self) -> None:
        """LONG_BINGET."""
        self._push(self._memo[self._number(4)])


_STOP = ord(".")
_BINGET = ord("h")
_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda each: each.skip(1),
    0x95: lambda each: each.skip(8),
    ord("N"): lambda each: each.constant(None),
    0x88: lambda each: each.constant(True),
    0x89: lambda each: each.constant(False),
    ord("K"): lambda each: each.integer(1, signed=False),
    ord("M"): lambda each: each.integer(2, signed=False),
    ord("J"): lambda each: each.integer(4, signed=True),
    0x8A: _Machine.long,
    ord("G"): _Machine.float,
    0x8C: lambda each: each.text(1),
    ord("X"): lambda each: each.text(4),
    0x8D: lambda each: each.text(8),
    ord("]"): lambda each: each.empty(list),
    ord("}"): lambda each: each.empty(dict),
    ord(")"): lambda each: each.empty(tuple),
    ord("("): _Machine.mark,
    ord("t"): lambda each: each.tuple(None),
    0x85: lambda each: each.tuple(1),
    0x86: lambda each: each.tuple(2),
    0x87: lambda each: each.tuple(3),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("q"): lambda each: each.remember(1),
    ord("r"): lambda each: each.remember(4),
    0x94: lambda each: each.remember(0),
    ord("j"): _Machine.recall,
}
