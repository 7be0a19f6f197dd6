"""The data under a data set: subsets, concatenations and wrappers, down to the bottom.

Two ranks that draw index 7 from different subsets draw different samples. What they drew is
compared in the numbers of the data at the bottom; that these are the same on all ranks is for the
samples to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

DEPTH = 6
"""Data sets within data sets that are followed."""

COST = 150
"""Nanoseconds that an index takes to be followed."""


class Bottom(NamedTuple):
    """A data set that is a part of others, and what it is in their numbers."""

    lookup: list[int] | None
    """By index, the number of the sample at the bottom; None if it would take too long to know."""
    length: int
    """Samples at the bottom."""
    subset: Any
    """The outermost subset."""


class _TooDear(Exception):
    pass


class _Walk:
    """One way down."""

    def __init__(self, left: int) -> None:
        self.subset: Any = None
        self.length = 0
        self._left = left
        self._spaces: dict[int, range] = {}

    def numbers(self, dataset: Any, depth: int) -> Sequence[int]:
        """By index, the number of the sample at the bottom."""
        if depth:
            if is_subset(dataset):
                if self.subset is None:
                    self.subset = dataset
                return self._chosen(dataset, depth)
            parts = _attribute(dataset, "datasets")
            if isinstance(parts, (list, tuple)) and _attribute(dataset, "cumulative_sizes"):
                # A ConcatDataset.
                each = [self.numbers(part, depth - 1) for part in parts]
                self._pay(sum(map(len, each)))
                return list(chain.from_iterable(each))
            inner = _attribute(dataset, "dataset")
            if inner is not None and len(inner) == len(dataset):
                # A wrapper that maps each sample to one: of a transform, say.
                return self.numbers(inner, depth - 1)
        space = self._spaces.get(id(dataset))
        if space is None:
            space = range(self.length, self.length + len(dataset))
            self._spaces[id(dataset)] = space
            self.length = space.stop
        return space

    def _chosen(self, subset: Any, depth: int) -> list[int]:
        indices = subset.indices
        self._pay(len(indices))
        inner = self.numbers(subset.dataset, depth - 1)
        plain = indices.tolist() if hasattr(indices, "tolist") else indices
        return [inner[index] for index in plain]

    def _pay(self, indices: int) -> None:
        self._left -= indices * COST
        if self._left < 0:
            raise _TooDear


def is_subset(dataset: Any) -> bool:
    """Whether it is torch's own Subset, or one that looks like it."""
    return hasattr(dataset, "indices") and hasattr(dataset, "dataset")


def _attribute(dataset: Any, name: str) -> Any:
    # Not getattr, which may be code of the job's.
    return getattr(dataset, "__dict__", {}).get(name)


def bottom(dataset: Any, left: int) -> Bottom | None:
    """What lies under a data set; None if there is no subset in it, so that it is itself all.

    Args:
        dataset: A map-style data set.
        left: Nanoseconds that it may take.
    """
    if not _holds_subset(dataset, DEPTH):
        return None
    walk = _Walk(left)
    try:
        numbers = walk.numbers(dataset, DEPTH)
    except _TooDear:
        return Bottom(None, 0, walk.subset)
    return Bottom(list(numbers), walk.length, walk.subset)


def _holds_subset(dataset: Any, depth: int) -> bool:
    if is_subset(dataset):
        return True
    if not depth:
        return False
    parts = _attribute(dataset, "datasets")
    if isinstance(parts, (list, tuple)):
        return any(_holds_subset(part, depth - 1) for part in parts[:64])
    inner = _attribute(dataset, "dataset")
    return inner is not None and _holds_subset(inner, depth - 1)
