"""Numbers that were computed on a device, without waiting for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any


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


def capturing(torch: Any) -> bool:
    """Whether a CUDA graph is being captured on this thread."""
    # Not is_available(), which would initialize the driver before the job forks its workers.
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
