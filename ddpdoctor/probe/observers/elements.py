"""Elements of tensors as records, evenly spaced: how far replicas are apart, not only whether."""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Sequence
from typing import Any

from ddpdoctor.probe.observers.hashing import flattened
from ddpdoctor.probe.observers.readback import Readback

MOST = 4096
"""Elements of a tensor that are written."""


class Elements:
    """Some elements of one tensor, on their way.

    To be made with gradients off.

    Args:
        tensor: A tensor whose bits lie in one plain block of memory.
        most: How many elements; all, if it has no more.
    """

    def __init__(self, tensor: Any, most: int = MOST) -> None:
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

    def packed(self) -> list[Any]:
        """How many elements the tensor has, and those looked at, as JSON can say it."""
        return [self.count, self.format, _text(self.format, self.read.numbers())]


def _text(letter: str, numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}{letter}", *numbers)).decode()
