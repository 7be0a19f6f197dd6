"""Which samples a pass gave, by their content alone: the smallest of the hashes of all of them.

Whatever a rank calls a sample, and in whatever order it draws them, equal samples have equal
hashes. Of two ranks the smallest hashes so show how much of their data is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from zlib import crc32

from ddpdoctor.probe.observers import hashing
from ddpdoctor.probe.observers.contents import leaves
from ddpdoctor.run.records import data as records

KEEP = 256
"""Hashes that are kept."""

WIDE = 16
"""Elements of a sample that are hashed."""

ROWS = 1024
"""Samples of a batch that are looked at, at most."""

_MASK = (1 << 48) - 1

Rows = Callable[[], list[int]]


class Sketch:
    """The smallest hashes of the samples of one pass; for the writing thread."""

    __slots__ = ("_limit", "_times", "looked")

    def __init__(self) -> None:
        self.looked = 0
        """Samples that were hashed."""
        self._times: dict[int, int] = {}
        self._limit = _MASK + 1

    def add(self, hashes: list[int]) -> None:
        """Some more samples."""
        self.looked += len(hashes)
        limit, times = self._limit, self._times
        for each in hashes:
            if each < limit:
                times[each] = times.get(each, 0) + 1
        if len(times) > 2 * KEEP:
            self._times = {each: times[each] for each in sorted(times)[:KEEP]}
            self._limit = max(self._times)

    def summary(self) -> records.Sketch:
        """Samples hashed, how often one of those kept came again, and the smallest hashes."""
        kept = tuple(sorted(self._times)[:KEEP])
        return records.Sketch(self.looked, sum(self._times[each] - 1 for each in kept), kept)


def rows(data: Any) -> Rows | None:
    """What hashes each sample of a batch, later: of the copies of a few elements of each.

    None where there is nothing to look at: the batch's widest part is not made of samples side by
    side, or lies on a device.
    """
    torch: Any = sys.modules["torch"]
    found = leaves(data)
    tensors = [each for each in found if type(each) is not list]
    if not tensors:
        return _texts(found[0]) if found else None
    leaf = max(tensors, key=lambda each: each.numel())
    if not leaf.is_contiguous() or leaf.layout is not torch.strided:
        return None
    with torch.no_grad():
        flat = leaf.detach().view(leaf.shape[0], -1)[:ROWS]
        width = flat.shape[1]
        # Words are padded at the end, as far as their batch needs it.
        words = leaf.dtype in (torch.int64, torch.int32)
        stride = 1 if words else max(1, width // WIDE)
        copy = flat[:, : stride * WIDE : stride].clone()
    return lambda: _hashes(copy)


def _texts(leaf: list[str]) -> Rows:
    kept = [text[:4096] for text in leaf[:ROWS]]
    return lambda: [crc32(text.encode("utf-8", "replace")) << 16 for text in kept]


def _hashes(copy: Any) -> list[int]:
    torch: Any = sys.modules["torch"]
    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
    numbers = copy.view(plain).to(torch.int64)
    weights = hashing.weights(numbers.shape[1])
    # The upper bits depend on all of the lower ones, and not the other way round.
    found: list[int] = ((numbers * weights).sum(1) >> 16).bitwise_and_(_MASK).tolist()
    return found
