"""Find the lines of a log that are worth reading, at hundreds of megabytes a second.

A long log repeats itself: most lines differ from earlier ones only in their numbers. Therefore a
block is searched only if it has a line of a new shape (a line without its numbers).

C code (``_present.c``) determines which texts a block contains, if it was compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ddpdoctor.failures.lines import HEAD
from ddpdoctor.failures.table import TABLE

_compiled: Any = None
if not os.environ.get("DDPDOCTOR_PURE_PYTHON"):
    with contextlib.suppress(ImportError):
        _compiled = importlib.import_module("ddpdoctor.failures._present")

COMMON = (
    HEAD, "rror", "ERROR", "FATAL", "ailed", "xception", "NCCL WARN", "atchdog", "exitcode",
    "xit code", "return code", "ignal", "nterrupt", "Killed", "core dumped", "Segmentation fault",
    "what():", "terminate called", "out of memory", ": line ",
)  # fmt: skip
"""Texts of most failures."""

MAX_LINES = 500
"""Maximum lines read because of one text. A log that repeats itself for hours has nothing new."""

LATER = 4  # Lines of each later block that are still read because of it, the last ones
_NOISE = 20_000  # Maximum number of shapes that are known to be irrelevant
_AT_ONCE = 300  # Maximum lines of a block that are tried per text
_REST = 15  # Blocks until it is checked again whether lines repeat themselves
_LONG = 200  # Letters of each end of a shape that identify it

_OF_STATUS = (b" code", b"status", b"exitcode", b"ignal", b"rrno", b"Xid")
"""Precede a number that tells whether a process failed, so equal shapes differ in meaning."""

_FEW = 50  # Maximum number of new shapes in a block of a log that repeats itself

_NUMBERS = b"0123456789."


AT_THE_END = (
    "left-behind", "store-barrier-waits", "lightning-member", "loss-scale-falls",
    "semaphores-refused", "unused-listed", "first-process", "group-restarts",
)  # fmt: skip
"""Entries that are found at both ends of a log only, and count only if nothing follows."""


def _anchors() -> tuple[bytes, ...]:
    """Return the common texts, and a text for each entry of the table that has none of them."""
    found = dict.fromkeys(COMMON)
    for failure in TABLE:
        if failure.known.name in AT_THE_END:
            continue
        for example in failure.examples:
            if not any(text in example for text in found):
                found[max((each for each in failure.literals if each in example), key=len)] = None
    return tuple(text.encode() for text in found)


ANCHORS = _anchors()  # Lines outside of tracebacks are read only if they contain one of these

_TEXTS = tuple({*ANCHORS, *(text.encode() for each in TABLE for text in each.literals)})
"""Texts that are searched at the ends of a log."""

_SHAPES = {anchor: anchor.translate(None, _NUMBERS) for anchor in ANCHORS}
"""The anchors without numbers, as in a shape."""


class Scan:
    """Finds the relevant lines of a log."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(ANCHORS, 0)
        self._noise: set[bytes] = set()
        self._plain: set[bytes] = set()
        self._rest = 0
        """Blocks to search without a check for new shapes, after one whose lines all differ."""

    def is_nothing(self, line: bytes) -> None:
        """Remember that lines of this shape are irrelevant."""
        if len(self._noise) < _NOISE and not any(word in line for word in _OF_STATUS):
            self._noise.add(_shape(line))

    def starts(self, block: bytes, first: int) -> Iterator[int]:
        """Yield the offsets of a block's lines with an anchor, from an offset on."""
        found: dict[int, bytes] = {}
        for anchor in self._anchors(block, first):
            at = block.find(anchor, first)
            tries = 0
            while at >= 0 and self._counts[anchor] < MAX_LINES and tries < _AT_ONCE:
                at = block.find(anchor, self._add(block, at, anchor, found))
                tries += 1
            end = len(block)
            for _ in range(_AT_ONCE if at >= 0 else 0):
                # The end of a job comes last.
                last = block.rfind(anchor, at, end)
                if last < 0 or tries >= _AT_ONCE + LATER:
                    break
                end = block.rfind(b"\n", 0, last) + 1
                before = len(found)
                self._add(block, last, anchor, found)
                tries += len(found) - before
        for start in sorted(found):
            # Its shape may have become irrelevant meanwhile.
            if _shape(block[start : _line_around(block, start)[1]]) not in self._noise:
                self._counts[found[start]] += 1
                yield start

    def candidates(self, block: bytes, first: int) -> Iterator[int]:
        """Yield the offsets of a short block's lines that may match any entry of the table."""
        found = set[int]()
        for text in _held(block, first, _TEXTS):
            at = block.find(text, first)
            while at >= 0:
                start, end = _line_around(block, at)
                found.add(start)
                at = block.find(text, end)
        for start in sorted(found):
            if _shape(block[start : _line_around(block, start)[1]]) not in self._noise:
                yield start

    def _anchors(self, block: bytes, first: int) -> Sequence[bytes]:
        """Return the anchors that may be in lines of new shapes."""
        held = _held(block, first, ANCHORS)
        if self._rest or not held:
            self._rest = max(0, self._rest - 1)
            return held
        lines = block[first:]
        shapes = set(lines.translate(None, _NUMBERS).split(b"\n")) - self._plain
        shapes = {each for each in shapes if _ends(each) not in self._noise}
        if len(shapes) > max(_FEW, lines.count(b"\n") // 2):
            self._rest = _REST
        new = b"\n".join(shapes)
        held = [anchor for anchor in held if _SHAPES[anchor] in new]
        if not held and len(self._plain) < _NOISE:
            self._plain |= shapes
        return held

    def _add(self, block: bytes, at: int, anchor: bytes, found: dict[int, bytes]) -> int:
        start, end = _line_around(block, at)
        if _shape(block[start:end]) not in self._noise:
            found.setdefault(start, anchor)
        return end


def _held(block: bytes, first: int, texts: tuple[bytes, ...]) -> Sequence[bytes]:
    """Return the texts that a block contains. All of them without the C code."""
    if _compiled is None:
        return texts
    held: list[bytes] = _compiled.present(block, first, texts)
    return held


def _line_around(block: bytes, at: int) -> tuple[int, int]:
    end = block.find(b"\n", at)
    return block.rfind(b"\n", 0, at) + 1, end if end >= 0 else len(block)


def _shape(line: bytes) -> bytes:
    return _ends(line.rstrip(b"\r\n").translate(None, _NUMBERS))


def _ends(shape: bytes) -> bytes:
    """Return both ends of a shape, since text after a progress bar comes last."""
    return shape if len(shape) <= 2 * _LONG else shape[:_LONG] + shape[-_LONG:]
