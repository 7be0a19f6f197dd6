"""Hashes of a module's tensors as fingerprints have them."""

from __future__ import annotations

import base64
import hashlib
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ddpdoctor.probe.observers.hashing import hash_of, hashable
from ddpdoctor.probe.observers.optimizers import parameters_of
from ddpdoctor.probe.observers.readback import Readback
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.run.records.replicas import FingerprintRecord

MOST_TENSORS = 4096
"""Tensors of a module of which a rich fingerprint has a hash each."""

LARGEST = 3.4e38
"""Norms from here on are written as infinite: in single precision they are."""


class ModuleHashes:
    """The hashes of one module, on their way; to be made with gradients off.

    Args:
        number: The module's.
        parameters: Those that DDP keeps equal.
        rich: Whether gradients are hashed, too, and each tensor has a hash and a norm.
    """

    def __init__(self, number: int, parameters: list[Any], rich: bool) -> None:
        self._number = number
        self._parameters = hashes_of(parameters)
        self._gradients: Readback | None = None
        self._norms: Readback | None = None
        if rich:
            gradients = [each.grad for each in parameters]
            self._gradients = hashes_of(g for g in gradients if g is not None and hashable(g))
            self._norms = tensor_norms(parameters[:MOST_TENSORS])

    def reads(self) -> list[Readback]:
        """What has to be ready."""
        reads = (self._parameters, self._gradients, self._norms)
        return [each for each in reads if each is not None]

    def record(self, step: int, armed: int) -> FingerprintRecord:
        """The record, once they are."""
        hashes, gradients, norms = self._parameters.numbers(), self._gradients, self._norms
        return FingerprintRecord(
            step=step,
            module=self._number,
            armed=armed,
            parameters=combined(hashes),
            gradients=None if gradients is None else combined(gradients.numbers()),
            detail=None if norms is None else packed(hashes, norms.numbers()),
        )


def compared_tensors(ddp: Any) -> list[tuple[str, Any]]:
    """Names and parameters that DDP keeps equal, trained or not."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", None) or set()
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if name not in ignored and hashable(parameter)
    ]


def hashes_of(tensors: Iterable[Any]) -> Readback:
    """The hashes of tensors, on their way; with gradients off."""
    return Readback([hash_of(each) for each in tensors])


def packed(hashes: Iterable[int], norms: Iterable[float]) -> str:
    """Per tensor, four bytes of its hash and its norm, as text."""
    data = b"".join(
        # The upper half: it depends on all bits.
        struct.pack("<If", hash_ >> 32 & 0xFFFFFFFF, norm if norm < LARGEST else norm * math.inf)
        for hash_, norm in zip(hashes, norms, strict=False)
    )
    return base64.b64encode(data).decode()


def combined(hashes: Sequence[int]) -> str:
    """One hash of many; of an empty sequence, too."""
    data = struct.pack(f"<{len(hashes)}q", *hashes)
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def tensor_norms(tensors: Sequence[Any]) -> Readback:
    """A norm per tensor, in double precision as no other fits all; 0 for what has none."""
    torch: Any = sys.modules["torch"]
    found = [
        torch.linalg.vector_norm(each.detach(), dtype=torch.float64)
        if each.is_floating_point() and each.element_size() > 1
        else torch.zeros((), dtype=torch.float64, device=each.device)
        for each in tensors
    ]
    return Readback(found)


def state_hashes(optimizers: Iterable[Any]) -> Readback | None:
    """The hashes of the tensors of the optimizers' states, in the order of their parameters."""
    tensor: Any = sys.modules["torch"].Tensor
    found = []
    for optimizer in optimizers:
        if torch_private.is_sharded(optimizer):
            continue
        for parameter in parameters_of(optimizer):
            values = optimizer.state.get(parameter)
            if isinstance(values, dict):
                kept = (each for each in values.values() if isinstance(each, tensor))
                found += [each for each in kept if hashable(each)]
    return hashes_of(found) if found else None
