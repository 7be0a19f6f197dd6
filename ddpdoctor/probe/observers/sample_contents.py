"""Identify samples by hashes of their elements, by sketches of a pass, and by the base data set.

A few elements of a few samples of a batch are copied at once, since the job may change the batch.
The copies are small and are hashed later. Tensors on a device are skipped.

Equal samples have equal hashes, independent of index and order: the smallest hashes of two ranks
(`Sketch`) show how much of their data is the same. Two ranks that draw index 7 from different
subsets draw different samples, so draws are compared by the index in the innermost data set
(`bottom_of`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

from ddpdoctor.probe.observers import readback
from ddpdoctor.run.records import training as records

# -- the size of a batch, and hashes of a few elements of a few of its samples

MAX_LEAVES = 3  # maximum number of hashed tensors or lists of strings of a batch
SPREAD_ELEMENTS = 16  # number of hashed elements spread over a sample
FIRST_ELEMENTS = 8  # number of hashed elements at a sample's beginning, unaffected by padding
_BATCH_DEPTH = 3
_PLAIN_TYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Hashes = Callable[[], list[list[int]]]


def batch_size(batch: Any, depth: int = _BATCH_DEPTH) -> int:
    """Return the first dimension of the first tensor in a batch, or 0 without a tensor."""
    try:
        return _size(batch, depth)
    except Exception:
        # A batch may be any object, including lazy and broken mappings.
        return 0


def _size(batch: Any, depth: int) -> int:
    if isinstance(batch, sys.modules["torch"].Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    if depth == 0:
        return 0
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        for item in batch[:8]:
            found = _size(item, depth - 1)
            if found:
                return found
    return 0


def leaves(data: Any, depth: int = 2) -> list[Any]:
    """Return the first few tensors and lists of strings of a batch."""
    torch: Any = sys.modules["torch"]
    if type(data) is torch.Tensor:
        return [data] if data.dim() and data.is_cpu and data.numel() else []
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], str):
        return [list(data)]
    if depth == 0:
        return []
    if isinstance(data, Mapping):
        data = list(data.values())[:8]
    found: list[Any] = []
    if isinstance(data, (list, tuple)):
        for item in data[:8]:
            found += leaves(item, depth - 1)
            if len(found) >= MAX_LEAVES:
                break
    return found[:MAX_LEAVES]


def sample_hashes(data: Any, places: list[int], size: int | None) -> Hashes | None:
    """Return a function that hashes a batch's samples at ``places``, or None if there are none.

    ``size`` is the number of samples. It is None if the batch is a single sample.
    """
    copies = [
        copy
        for leaf in leaves(data)
        if (
            copy := _string_hashes(leaf, places, size)
            if type(leaf) is list
            else _row_hashes(leaf, places, size)
        )
    ]
    if not copies:
        return None
    return lambda: [list(row) for row in zip(*(c for copy in copies for c in copy()), strict=False)]


def _string_hashes(
    leaf: list[str], places: list[int], size: int | None
) -> Callable[[], list[Any]] | None:
    if size is None:
        kept = ["\0".join(leaf[:64])[:4096]]
    elif len(leaf) != size:
        return None
    else:
        kept = [leaf[place][:4096] for place in places]
    return lambda: [[crc32(text.encode("utf-8", "replace")) for text in kept]]


def _row_hashes(leaf: Any, places: list[int], size: int | None) -> Callable[[], list[Any]] | None:
    torch: Any = sys.modules["torch"]
    if not leaf.is_contiguous() or leaf.layout is not torch.strided:
        return None
    if size is None:
        size, places = 1, [0]
        flat = leaf.detach().view(1, -1)
    elif leaf.shape[0] != size:
        return None
    else:
        flat = leaf.detach().view(size, -1)
    with torch.no_grad():
        stride = max(1, flat.shape[1] // SPREAD_ELEMENTS)
        begin = flat[:, :FIRST_ELEMENTS][places].clone()
        spread = flat[:, ::stride][:, :SPREAD_ELEMENTS][places].clone()
    return lambda: [_hash_rows(begin), _hash_rows(spread)]


def _hash_rows(copy: Any) -> list[int]:
    plain = getattr(sys.modules["torch"], _PLAIN_TYPES[copy.element_size()])
    return [crc32(repr(row).encode()) for row in copy.contiguous().view(plain).tolist()]


# -- sketches

SKETCH_SIZE = 256  # number of kept hashes
MAX_SKETCHED = 1024  # maximum number of hashed samples of a batch
_SKETCH_MASK = (1 << 48) - 1

Rows = Callable[[], list[int]]


class Sketch:
    """The smallest hashes of the samples of one pass, for the writing thread."""

    def __init__(self) -> None:
        self.count = 0  # number of hashed samples
        self._times: dict[int, int] = {}
        self._limit = _SKETCH_MASK + 1

    def add(self, hashes: list[int]) -> None:
        """Add some samples."""
        self.count += len(hashes)
        limit, times = self._limit, self._times
        for each in hashes:
            if each < limit:
                times[each] = times.get(each, 0) + 1
        if len(times) > 2 * SKETCH_SIZE:
            self._times = {each: times[each] for each in sorted(times)[:SKETCH_SIZE]}
            self._limit = max(self._times)

    def summary(self) -> records.Sketch:
        """Return the number of samples, the repeats among the kept ones, and the hashes."""
        kept = tuple(sorted(self._times)[:SKETCH_SIZE])
        return records.Sketch(self.count, sum(self._times[each] - 1 for each in kept), kept)


def sketch_rows(data: Any) -> Rows | None:
    """Return a function that hashes each sample of a batch later, from copies of a few elements.

    Return None if the batch's widest part does not consist of samples or is on a device.
    """
    torch: Any = sys.modules["torch"]
    found = leaves(data)
    tensors = [each for each in found if type(each) is not list]
    if not tensors:
        if not found:
            return None
        texts = [text[:4096] for text in found[0][:MAX_SKETCHED]]
        return lambda: [crc32(text.encode("utf-8", "replace")) << 16 for text in texts]
    leaf = max(tensors, key=lambda each: each.numel())
    if not leaf.is_contiguous() or leaf.layout is not torch.strided:
        return None
    with torch.no_grad():
        flat = leaf.detach().view(leaf.shape[0], -1)[:MAX_SKETCHED]
        width = flat.shape[1]
        # Tokens are padded at the end, up to the longest sample of the batch.
        words = leaf.dtype in (torch.int64, torch.int32)
        stride = 1 if words else max(1, width // SPREAD_ELEMENTS)
        copy = flat[:, : stride * SPREAD_ELEMENTS : stride].clone()

    def hashes() -> list[int]:
        numbers = copy.view(getattr(torch, _PLAIN_TYPES[copy.element_size()])).to(torch.int64)
        weights = readback.hash_weights(numbers.shape[1])
        # The upper bits depend on all lower bits, but not vice versa.
        found: list[int] = ((numbers * weights).sum(1) >> 16).bitwise_and_(_SKETCH_MASK).tolist()
        return found

    return hashes


# -- the epoch and the shuffling of an iterable data set

MAX_PARTS = 64  # maximum number of inspected objects below a data set
_EPOCHS = ("epoch", "_epoch", "current_epoch", "cur_epoch")


def order_of(dataset: Any) -> tuple[int | None, bool]:
    """Return a data set's epoch, and whether the name of one of its parts mentions shuffling.

    Read only attributes of the data set and of the objects that it wraps. Run no code of theirs.
    """
    epoch: int | None = None
    shuffles = False
    queue, seen = [dataset], {id(dataset)}
    for part in queue:
        names = getattr(part, "__dict__", None)
        if not isinstance(names, dict) or isinstance(part, type):
            continue
        shuffles = shuffles or "shuffl" in type(part).__name__.lower()
        for name, value in list(names.items()):
            if epoch is None and name in _EPOCHS and type(value) is int:
                epoch = value
            shuffles = shuffles or (value is True and "shuffl" in name.lower())
            for each in value[:16] if isinstance(value, (list, tuple)) else (value,):
                if hasattr(each, "__dict__") and id(each) not in seen and len(queue) < MAX_PARTS:
                    seen.add(id(each))
                    queue.append(each)
    return epoch, shuffles


# -- the data under a data set: subsets, concatenations and wrappers, down to the bottom

MAX_NESTED = 6  # maximum number of nested data sets
INDEX_COST = 150  # nanoseconds to follow an index


class Bottom(NamedTuple):
    """The innermost data set below subsets, and the index of each sample in it."""

    lookup: list[int] | None
    """By index, the index in the innermost data set. None if the mapping would take too long."""
    length: int  # number of samples of the innermost data set
    subset: Any  # the outermost subset


class _TooDear(Exception):
    pass


class _Walk:
    """A path down through nested data sets."""

    def __init__(self, left: int) -> None:
        self.subset: Any = None
        self.length = 0
        self._left = left
        self._spaces: dict[int, range] = {}

    def numbers(self, dataset: Any, depth: int) -> Sequence[int]:
        """Return for each index the index in the innermost data set."""
        if depth:
            if is_subset(dataset):
                if self.subset is None:
                    self.subset = dataset
                indices = dataset.indices
                self._pay(len(indices))
                inner = self.numbers(dataset.dataset, depth - 1)
                plain = indices.tolist() if hasattr(indices, "tolist") else indices
                return [inner[index] for index in plain]
            parts = _attribute(dataset, "datasets")
            if isinstance(parts, (list, tuple)) and _attribute(dataset, "cumulative_sizes"):
                # torch's ConcatDataset
                each = [self.numbers(part, depth - 1) for part in parts]
                self._pay(sum(map(len, each)))
                return list(chain.from_iterable(each))
            inner = _attribute(dataset, "dataset")
            if inner is not None and len(inner) == len(dataset):
                # A wrapper that maps samples one to one, such as a transform.
                return self.numbers(inner, depth - 1)
        space = self._spaces.get(id(dataset))
        if space is None:
            space = range(self.length, self.length + len(dataset))
            self._spaces[id(dataset)] = space
            self.length = space.stop
        return space

    def _pay(self, indices: int) -> None:
        self._left -= indices * INDEX_COST
        if self._left < 0:
            raise _TooDear


def is_subset(dataset: Any) -> bool:
    """Return whether a data set is torch's Subset or a similar class."""
    return hasattr(dataset, "indices") and hasattr(dataset, "dataset")


def _attribute(dataset: Any, name: str) -> Any:
    # `getattr` may run code of the job.
    return getattr(dataset, "__dict__", {}).get(name)


def bottom_of(dataset: Any, left: int) -> Bottom | None:
    """Return the innermost data set of a map-style data set, or None if it contains no subset.

    Take at most ``left`` nanoseconds.
    """
    if not _holds_subset(dataset, MAX_NESTED):
        return None
    walk = _Walk(left)
    try:
        numbers = walk.numbers(dataset, MAX_NESTED)
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
