"""One pass over a data loader: which samples it drew, and what some of them held.

Indices are hashed and counted in the writing thread. Of every index space all ranks keep the same
small pseudo-random part, so that what two ranks drew of it tells exactly whether they overlap.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from zlib import crc32

from ddpdoctor.probe.observers.contents import Hashes
from ddpdoctor.probe.observers.loops import runs_to_end
from ddpdoctor.probe.observers.sketches import Rows, Sketch
from ddpdoctor.probe.runtime.recorder import Lazy
from ddpdoctor.run.records.data import Head, PassRecord

SAMPLE = 128
"""Indices of an index space that are followed one by one."""

CONTENTS = 64
"""Those of them whose content is hashed, too."""

CLOSED = ("ended", "left")
"""States of a pass that draws no more."""

HEAD = 64
"""Draws at the beginning whose order has its own hash."""

FIRST = 16
"""Samples of the first batch whose content is hashed in any case."""

_MASK = (1 << 64) - 1
_BITS = (1 << 53) - 1

Draw = tuple[Any, ...]


@functools.lru_cache(maxsize=16)
def sample_of(length: int) -> tuple[int, ...]:
    """The indices below ``length`` that every rank follows, in an order that is no one's."""
    if length <= SAMPLE:
        return tuple(range(length))
    found: dict[int, None] = {}
    number = 0
    while len(found) < SAMPLE:
        number += 1
        mixed = number * 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
        found[(mixed ^ (mixed >> 31)) % length] = None
    return tuple(found)


def digest_of(numbers: Iterable[Any]) -> int:
    """A hash of whole numbers in their order, the same in every process."""
    return hash(tuple(map(operator.index, numbers))) & _BITS


def _plain(indices: Draw) -> tuple[int, ...]:
    """Indices as whole numbers, whatever they are."""
    try:
        return tuple(map(operator.index, indices))
    except Exception:
        # Words, tuples with a size, tensors of several elements: no index space.
        return tuple(crc32(repr(index).encode()) for index in indices)


def _meets(wanted: frozenset[int], indices: tuple[Any, ...]) -> bool:
    try:
        return not wanted.isdisjoint(indices)
    except TypeError:
        # Indices of a kind of their own, lists say.
        return False


class Pass:
    """What one pass over a loader drew.

    The training thread calls :meth:`draw` and :meth:`see`; what :meth:`as_it_is` returns does the
    rest in the writing thread.

    Args:
        record: What is known when the pass begins.
        followed: By index as it is drawn, the index in the space that all ranks share.
        share_at: Draws at which the pass has drawn more than its share.
        lookup: By index as it is drawn, the index in that space, for each; None if they are one.
    """

    __slots__ = (
        "_awaited", "_contents", "_digested", "_drawn", "_falls", "_head", "_hits",
        "_keys", "_opaque", "_order", "_pending", "_repeats", "_rows", "_seen", "_sketch",
        "batches", "collectives", "draws", "fetched", "followed", "joins", "lookup",
        "marks", "over", "record", "share_at",
    )  # fmt: skip

    def __init__(
        self,
        record: PassRecord,
        followed: dict[int, int] | None = None,
        share_at: int = 0,
        lookup: list[int] | None = None,
    ) -> None:
        self.record = record
        self.followed = followed or {}
        self.share_at = share_at
        self.lookup = lookup
        self.collectives = 0, 0, 0
        """Collectives that the rank had called when the pass began; reductions and gathers of them.
        """
        self.batches = 0
        """Batches of indices drawn so far."""
        self.draws = 0
        """Samples drawn so far, prefetched ones included."""
        self.fetched = 0
        """Batches that the training loop got."""
        self.marks = 0
        """Batches after which a backward pass came."""
        self.joins = False
        self.over = False
        self._keys = frozenset(self.followed)
        length = record.length or 0
        inside = frozenset(sample_of(length)[:: 1 if length <= CONTENTS else SAMPLE // CONTENTS])
        self._contents = frozenset(index for index, name in self.followed.items() if name in inside)
        self._awaited: deque[list[tuple[int, int, int]]] = deque(maxlen=4096)
        self._pending: deque[Draw | Rows | list[tuple[Any, Hashes]]] = deque()
        self._digested = self._seen = self._drawn = 0
        self._head: list[int] = []
        self._order = 0
        self._hits: dict[int, None] = {}
        self._repeats = 0
        self._falls = 0
        self._opaque = False
        self._rows: list[tuple[int | None, ...]] = []
        self._sketch = Sketch()

    # -- in the training thread

    def draw(self, batch: Any) -> bool:
        """The sampler gave a batch of indices; whether the pass now exceeds its share."""
        indices = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        self._pending.append(indices)
        self._drawn += 1
        before = self.draws
        self.draws += len(indices)
        if before < HEAD:
            self._begin(indices[: HEAD - before])
        wanted = self._contents
        looked: list[tuple[int, int, int]] = []
        if before == 0 or _meets(wanted, indices):
            size, lookup = len(indices), self.lookup
            looked = [
                (place, index if lookup is None else lookup[index], size)
                for place, index in enumerate(indices)
                if type(index) is int and (index in wanted or (before == 0 and place < FIRST))
            ]
        self._awaited.append(looked)
        return before < self.share_at <= self.draws

    def _begin(self, indices: Draw) -> None:
        """Keep the names of the first draws."""
        lookup = self.lookup
        if lookup is not None:
            with contextlib.suppress(TypeError, IndexError):
                indices = tuple(lookup[index] for index in indices)
        self._head.extend(indices)

    def arrived(self) -> list[tuple[int, int, int]]:
        """A batch arrived, in the order drawn: what to look at, as position, index, batch size."""
        return self._awaited.popleft() if self._awaited else []

    def see(self, names: list[int | None], contents: Hashes) -> None:
        """Keep what samples held; ``contents`` hashes them later, and holds copies only."""
        self._pending.append([(names, contents)])
        self._drawn += 1

    def gave(self, rows: Rows) -> None:
        """A batch arrived; ``rows`` hashes its samples later, and holds copies only."""
        self._pending.append(rows)
        self._drawn += 1

    def as_it_is(self, state: str) -> Lazy:
        """The record of the pass as it stands now."""
        upto = self._drawn
        head = tuple(self._head)
        record = replace(
            self.record, state=state, fetched=self.fetched, marks=self.marks, joins=self.joins
        )

        def made(last: bool) -> PassRecord:
            self._digest(upto)
            return self._summed_up(record, head)

        return made

    def digested(self) -> Lazy:
        """No record, but what was drawn up to now is hashed, and let go."""
        upto = self._drawn

        def nothing(last: bool) -> bytes:
            self._digest(upto)
            return b""

        return nothing

    # -- in the writing thread

    def _digest(self, upto: int) -> None:
        while self._digested < upto:
            item = self._pending.popleft()
            self._digested += 1
            if isinstance(item, tuple):
                self._count(item)
                continue
            if callable(item):
                # A tensor of a kind that has no plain bits.
                with contextlib.suppress(Exception):
                    self._sketch.add(item())
                continue
            for names, contents in item:
                try:
                    hashes = contents()
                except Exception:
                    # A tensor of a kind that has no plain bits.
                    continue
                self._rows += [(name, *row) for name, row in zip(names, hashes, strict=False)]

    def _count(self, indices: Draw) -> None:
        if set(map(type, indices)) != {int}:
            try:
                indices = tuple(map(operator.index, indices))
            except Exception:
                self._opaque = True
                indices = _plain(indices)
        self._seen += len(indices)
        self._order = hash((self._order, indices))
        self._falls += sum(map(operator.gt, indices, indices[1:]))
        hits = self._keys.intersection(indices)
        if hits:
            known = self._hits
            for index in indices:
                if index in hits:
                    name = self.followed[index]
                    self._repeats += name in known
                    known[name] = None

    def _summed_up(self, record: PassRecord, head: Draw) -> PassRecord:
        trained = record.marks > 0
        looked = record.state in CLOSED and self._sketch.looked and trained
        return replace(
            record,
            draws=self._seen,
            order=self._order & _BITS,
            falls=self._falls,
            repeats=self._repeats,
            opaque=self._opaque,
            # Of an evaluation nothing depends on which samples they were.
            hits=tuple(self._hits) if trained and not self._opaque else (),
            rows=tuple(self._rows) if trained else (),
            head=Head(len(head), digest_of(_plain(head))),
            sketch=self._sketch.summary() if looked else None,
            to_end=(
                record.state == "trains"
                and record.batches is not None
                and runs_to_end(record.path, record.line)
            ),
        )
