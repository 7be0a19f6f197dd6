"""Numbers that were computed on a device, without waiting for it."""

from __future__ import annotations

import base64
import itertools
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ddpdoctor.probe.observers.hashing import flattened
from ddpdoctor.probe.runtime.recorder import Lazy, NotYet
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.replicas import PackedTensor

MOST_ELEMENTS = 4096
"""Elements of a tensor that are written."""


class Readback:
    """0-dimensional tensors of one dtype as numbers, as soon as their devices have computed them.

    Only the numbers are kept, never the tensors that they were computed from. On the CPU they are
    there at once; from a GPU they come into pinned memory, and an event says when.
    """

    def __init__(self, scalars: Sequence[Any]) -> None:
        self._count = len(scalars)
        self._parts: list[tuple[list[int], Any, Any]] = []
        places: dict[Any, list[int]] = {}
        for index, scalar in enumerate(scalars):
            places.setdefault(scalar.device, []).append(index)
        torch: Any = sys.modules["torch"]
        for indices in places.values():
            self._take(indices, torch.stack([scalars[index] for index in indices]))

    @classmethod
    def gathered(cls, count: int, parts: Iterable[tuple[list[int], Any]]) -> Readback:
        """The numbers of 1-dimensional tensors, each with its place among so many."""
        made = cls([])
        made._count = count
        for indices, vector in parts:
            made._take(indices, vector)
        return made

    @classmethod
    def of(cls, vector: Any) -> Readback:
        """The numbers of a 1-dimensional tensor."""
        return cls.gathered(len(vector), [(list(range(len(vector))), vector)])

    def _take(self, indices: list[int], found: Any) -> None:
        """Fetch the numbers of a 1-dimensional tensor, each with its place."""
        torch: Any = sys.modules["torch"]
        device = found.device
        if device.type != "cuda":
            self._parts.append((indices, found.tolist(), None))
            return
        slots = torch.empty(len(indices), dtype=found.dtype, device="cpu", pin_memory=True)
        slots.copy_(found, non_blocking=True)
        passed = torch.cuda.Event()
        passed.record(torch.cuda.current_stream(device))
        self._parts.append((indices, slots, passed))

    @property
    def ready(self) -> bool:
        """Whether all devices have passed; never waits."""
        return all(passed is None or passed.query() for _, _, passed in self._parts)

    def numbers(self) -> list[Any]:
        """The numbers, in the order of the tensors; once it is ready."""
        found: list[Any] = [None] * self._count
        for indices, values, passed in self._parts:
            listed = values if passed is None else values.tolist()
            for index, value in zip(indices, listed, strict=True):
                found[index] = value
        return found


class Elements:
    """Some elements of one tensor, evenly spaced, on their way; to be made with gradients off.

    Args:
        tensor: A tensor whose bits lie in one plain block of memory.
        most: How many elements; all, if it has no more.
    """

    def __init__(self, tensor: Any, most: int = MOST_ELEMENTS) -> None:
        torch: Any = sys.modules["torch"]
        self.count: int = tensor.numel()
        every = max(1, -(-self.count // most))
        some = flattened(tensor.detach())[::every]
        if some.is_complex():
            # Real and imaginary parts, each an element.
            some = torch.view_as_real(some.resolve_conj()).reshape(-1)
            self.count *= 2
        # In single precision all shorter ones are exact.
        short = some.is_floating_point() and some.element_size() < 8
        self.format = "f" if short else "d"
        self.read = Readback.of(some.to(torch.float32 if short else torch.float64))

    def packed(self) -> PackedTensor:
        """How many elements the tensor has, and those looked at, once they are ready."""
        numbers = self.read.numbers()
        data = struct.pack(f"<{len(numbers)}{self.format}", *numbers)
        return PackedTensor(self.count, self.format, base64.b64encode(data).decode())


def when_ready(reads: Sequence[Readback], record: Callable[[list[Any]], Record]) -> Lazy:
    """A record that the writing thread makes of the numbers of all, as soon as these are there."""

    def make(last: bool) -> bytes | Record:
        if all(each.ready for each in reads):
            return record([number for each in reads for number in each.numbers()])
        if not last:
            raise NotYet
        # A device that never came so far: nothing is known.
        return b""

    return make


def capturing(torch: Any) -> bool:
    """Whether a CUDA graph is being captured on this thread."""
    # Not is_available(), which would initialize the driver before the job forks its workers.
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


# -- losses

Loss = Callable[[], "float | None"]

_SLOTS = 64
_rings: dict[Any, Iterator[Any]] = {}
"""By dtype, slots of pinned memory that go round."""


def loss_reader(loss: Any) -> Loss | float | None:
    """The loss, or for one on a GPU a function that reads it after the step's events passed.

    A GPU's loss is copied into a slot of pinned memory without blocking; the slots go round, so a
    reading that comes more than a few dozen steps late would see a later loss, never a wrong wait.
    """
    if loss.device.type == "cpu":
        value = loss.item()
        return float(value) if isinstance(value, (int, float)) else None
    torch: Any = sys.modules["torch"]
    if loss.device.type != "cuda" or type(loss) is not torch.Tensor:
        return None
    if torch.cuda.is_current_stream_capturing() or loss.is_complex():
        return None
    ring = _rings.get(loss.dtype)
    if ring is None:
        # Of the same dtype: else a kernel would convert it first.
        slots = torch.empty(_SLOTS, dtype=loss.dtype, device="cpu", pin_memory=True)
        ring = _rings[loss.dtype] = itertools.cycle(slots.unbind())
    slot = next(ring)
    with torch.no_grad():
        slot.copy_(loss.detach().reshape(()), non_blocking=True)
    return lambda: float(slot)
