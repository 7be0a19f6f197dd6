"""The ring of the last collectives that a rank called from Python, in a memory-mapped file.

Fixed-size entries are followed by the texts that they refer to by number. A store takes about a
microsecond and survives SIGKILL. Standard library only, since ranks load this.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ddpdoctor.core.opening import whole
from ddpdoctor.run import mapped

FORMAT = 2  # Version 2 added the callers of a call
ENTRIES = 64  # Number of collectives in the ring
ASYNC = 1  # Flag: called with ``async_op=True``
POINT_TO_POINT = 2  # Flag: ``send`` or ``recv``, which are not ordered in a group

_MAGIC = b"DDPRING\0"
_HEAD = struct.Struct("<8sIIII")
_NUMBER = struct.Struct("<q")
_COUNT_AT, _WAITED_AT, _FLAGS_AT, _TEXTS_AT = 32, 40, 48, 56
_ENTRY = struct.Struct("<qqqqqHHHHHBBi4I")
_REST = struct.Struct("<HHHHHBBi4I")
_TIMES = struct.Struct("<qqq")  # The beginning of an entry: order, start and end
_ENTRIES_AT = 64
_ENDED_AT = 16
_PLACES = tuple(_ENTRIES_AT + place * _ENTRY.size for place in range(ENTRIES))
_TEXT_AT = _ENTRIES_AT + ENTRIES * _ENTRY.size
SIZE = 32 << 10  # Bytes of the file

_INTEGER = 0xFFFFFFFF
_CHAIN = "\x1f"  # First character of a text that refers to other texts: a line and its callers


def chain_text(numbers: Sequence[int]) -> str:
    """Return a text for several lines, by the numbers of their texts, innermost first."""
    return _CHAIN + " ".join(map(str, numbers))


def entry_rest(
    texts: tuple[int, int, int, int, int], shape: Sequence[int], root: int, flags: int
) -> tuple[int, ...]:
    """Return the end of a call's entry. `RingWriter.begin` explains the arguments."""
    dimensions = (each & _INTEGER for each in (*shape, 0, 0, 0, 0)[:4])
    return (*texts, len(shape), flags, root, *dimensions)


def packed_rest(rest: tuple[int, ...]) -> bytes:
    """Return the end of a call's entry as it is stored."""
    return _REST.pack(*rest)


class Collective(NamedTuple):
    """One call of a collective."""

    order: int  # Number of the call on this rank, in any group, from 1
    began: int  # Unix nanoseconds
    ended: int
    """Unix nanoseconds. 0 while it runs, or if it is asynchronous and was never waited for."""
    sequence: int  # Number of the call in its group, from 1. 0 for a send or a recv.
    name: str  # ``all_reduce``
    group: str  # Name and ranks: ``0|0-3``. The default group is called ``0``.
    dtype: str  # ``float32``. Empty without a tensor.
    reduce: str  # ``SUM``. Empty if nothing is reduced.
    shape: tuple[int, ...]  # The first four dimensions
    numel: int  # Elements of the tensor, -1 without one
    root: int  # Global rank of source, destination or peer, -1 without one
    asynchronous: bool
    point_to_point: bool
    site: str  # ``path:line`` of the user's code. Empty if not known.
    callers: tuple[str, ...] = ()  # The calling lines, innermost first


class Ring(NamedTuple):
    """The contents of a ring."""

    calls: int  # Number of calls so far
    waited: int  # The order of the asynchronous call that the rank waits for, or 0
    partial: bool  # Whether calls may be missing: the compiler removed some, or the hook failed
    collectives: tuple[Collective, ...]  # The newest ones, oldest of them first


class RingWriter:
    """Writes the ring to a file, which must not exist.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self.memory = self._memory = mapped.create(path, SIZE)
        """The mapped file, for C code that stores into it directly."""
        _HEAD.pack_into(self._memory, 0, _MAGIC, FORMAT, ENTRIES, _ENTRY.size, _TEXT_AT)
        self._store: Callable[..., None] = partial(_ENTRY.pack_into, self._memory)
        self._end: Callable[[int, int], None] = partial(_NUMBER.pack_into, self._memory)
        self._count: Callable[[int], None] = partial(_NUMBER.pack_into, self._memory, _COUNT_AT)
        self.waits_for: Callable[[int], None] = partial(_NUMBER.pack_into, self._memory, _WAITED_AT)
        """Store the order of the asynchronous call that the rank waits for, or 0."""
        self.count = 0
        self._written = 0
        self._texts = 0
        self.text("")

    def text(self, text: str) -> int:
        """Store a text and return its number, or 0 (the empty text) if there is no room."""
        raw = text.replace("\n", " ").encode("utf-8", "replace") + b"\n"
        end = _TEXT_AT + self._written + len(raw)
        if end > SIZE or self._texts >= 0xFFFF:
            return 0
        self._memory[end - len(raw) : end] = raw
        self._written += len(raw)
        _NUMBER.pack_into(self._memory, _TEXTS_AT, self._written)
        self._texts += 1
        return self._texts - 1

    def begin(
        self,
        now: int,
        sequence: int,
        texts: tuple[int, int, int, int, int],
        shape: Sequence[int],
        numel: int,
        root: int,
        flags: int,
    ) -> int:
        """Record the start of a call.

        Args:
            now: Unix nanoseconds.
            sequence: Number of the call in its group.
            texts: Numbers of the texts for name, group, dtype, reduce operation, and call site (or
                line and callers, see `chain_text`).
            shape: Shape of the tensor.
            numel: Elements of the tensor, -1 without one.
            root: Global rank of source, destination or peer, -1 without one.
            flags: `ASYNC`, `POINT_TO_POINT`.

        Returns:
            The call's order.
        """
        order = self.count + 1
        self.begin_as(order, now, sequence, numel, entry_rest(texts, shape, root, flags))
        return order

    def begin_as(
        self, order: int, now: int, sequence: int, numel: int, rest: tuple[int, ...]
    ) -> None:
        """Record the start of a call. `entry_rest` made ``rest``, once for each line of code."""
        self.count = order
        self._store(_PLACES[order % ENTRIES], order, now, 0, sequence, numel, *rest)
        self._count(order)

    def end(self, order: int, now: int) -> None:
        """Record the end of a call at ``now``, in Unix nanoseconds."""
        if self.count - order < ENTRIES:
            self._end(_PLACES[order % ENTRIES] + _ENDED_AT, now)

    def set_partial(self) -> None:
        """Record that calls may be missing."""
        _NUMBER.pack_into(self._memory, _FLAGS_AT, 1)


def read_ring(path: str, newest: int = ENTRIES) -> Ring:
    """Read the newest collectives in the ring of a process, live or not.

    Raises:
        UnreadableError: It is another file, truncated, or of a newer format.
        OSError: The file cannot be opened.
    """
    return parse_ring(mapped.read(path, SIZE), path, newest)


def parse_ring(raw: bytes, path: str, newest: int = ENTRIES) -> Ring:
    """Parse a ring that was read from ``path``.

    Raises:
        UnreadableError: It is another file, truncated, or of a newer format.
    """
    mapped.check(raw, path, "a ring of collectives", _MAGIC, FORMAT, SIZE)
    _, version, entries, size, text_at = _HEAD.unpack_from(raw)
    if size != _ENTRY.size or entries != ENTRIES:
        raise mapped.UnreadableError(f"{path} has format {version}; this ddpdoctor reads {FORMAT}")
    (written,) = _NUMBER.unpack_from(raw, _TEXTS_AT)
    texts = raw[text_at : text_at + written].decode("utf-8", "replace").split("\n")
    every = _ENTRY.iter_unpack(raw[_ENTRIES_AT : _ENTRIES_AT + ENTRIES * _ENTRY.size])
    ordered = sorted(entry for entry in every if entry[0])
    chains = {text: _lines(text, texts) for text in texts if text.startswith(_CHAIN)}
    return Ring(
        _NUMBER.unpack_from(raw, _COUNT_AT)[0],
        _NUMBER.unpack_from(raw, _WAITED_AT)[0],
        bool(_NUMBER.unpack_from(raw, _FLAGS_AT)[0]),
        tuple(_collective(entry, texts, chains) for entry in ordered[-newest:]),
    )


def moved(raw: bytes, later: int) -> bytes:
    """Return a ring whose times are ``later`` nanoseconds later."""
    copy = bytearray(raw)
    for at in _PLACES:
        order, began, ended = _TIMES.unpack_from(raw, at)
        if order:
            _TIMES.pack_into(copy, at, order, began + later, ended + later if ended else 0)
    return bytes(copy)


def _lines(chain: str, texts: list[str]) -> tuple[str, ...]:
    numbers = [whole(each) for each in chain[1:].split(" ")]
    return tuple(texts[each] for each in numbers if 0 < each < len(texts)) or ("",)


def _collective(
    entry: tuple[int, ...], texts: list[str], chains: dict[str, tuple[str, ...]]
) -> Collective:
    # One statement without a loop, since a thousand ranks have 64 entries each.
    order, began, ended, sequence, numel, name, group, dtype, reduce, site, *rest = entry
    dimensions, flags, root, *shape = rest
    try:
        at = chains.get(texts[site]) or (texts[site],)
        return Collective(
            order, began, ended, sequence, texts[name], texts[group], texts[dtype], texts[reduce],
            tuple(shape[:dimensions]), numel, root, flags & ASYNC != 0, flags & POINT_TO_POINT != 0,
            at[0], at[1:],
        )  # fmt: skip
    except IndexError:
        # A new entry may refer to a text that is not stored yet.
        return _collective(entry, [*texts, *[""] * (1 + max(entry[5:10]) - len(texts))], chains)
