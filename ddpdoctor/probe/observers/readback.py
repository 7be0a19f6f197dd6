"""Compute hashes and norms of tensors on their device, and read them without waiting for it.

Hashes are sums of a tensor's bits, weighted by position, modulo 2**64. ``torch.hash_tensor`` (from
2.9) is an exclusive or, which does not change if elements are swapped or an even number of signs
changes. Our hash detects both, on every version of torch, at the same cost. Integer sums are exact
in any order and on any device. No random number generator is used.
"""

from __future__ import annotations

import base64
import itertools
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ddpdoctor.probe.runtime import torch_devices, torch_private
from ddpdoctor.probe.runtime.recorder import Lazy, NotYet
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import PackedTensor

# -- bitwise hashes of tensors

PIECE = 1 << 20  # number of elements hashed at once, which takes less than 17 MiB of memory
GPU_PIECE = 1 << 18  # the same on a GPU, whose memory may be nearly full: less than 5 MiB
MANY_PIECES = 64  # number of pieces above which a GPU uses larger ones

_SMALL_TENSOR = 1 << 12
_hash_weights: dict[Any, Any] = {}


def hashable(tensor: Any) -> bool:
    """Return whether a tensor is of no subclass and its bits can be read as one block."""
    torch: Any = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and (tensor.device.type == "cpu" or torch_devices.has_events(tensor.device.type))
        and not tensor.is_quantized
    )


def hash_of(tensor: Any) -> Any:
    """Return the hash of a tensor's bits, an int64 scalar on its device. Needs gradients off."""
    torch: Any = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = flattened(tensor)
    size = flat.element_size()
    parts = flat.view(torch.int32 if size >= 4 else torch.int16 if size == 2 else torch.int8)
    count = parts.numel()
    on_cpu = flat.device.type == "cpu"
    most = _piece_size(count, on_cpu)
    weights = _weights_for(torch, min(count, most), flat.device)
    numbers = parts.to(torch.int64) if count <= _SMALL_TENSOR else None
    if numbers is not None:
        # Only the CPU has torch.dot for integers.
        weights = weights[:count]
        return torch.dot(numbers, weights) if on_cpu else (numbers * weights).sum()
    total = None
    for index, start in enumerate(range(0, count, most)):
        piece = parts[start : start + most]
        if on_cpu:
            found = _hash_words(torch, piece, weights)
        else:
            found = (piece * weights[: piece.numel()]).sum()
        # All pieces have the same weights. A different odd factor for each distinguishes them.
        found = found * (2 * index + 1)
        total = found if total is None else total + found
    return total


def hash_pieces(tensor: Any) -> int:
    """Return the number of pieces in which a tensor on a GPU is hashed."""
    count = tensor.numel()
    return -(-count // _piece_size(count, False)) or 1


def _piece_size(count: int, on_cpu: bool) -> int:
    return PIECE if on_cpu or count > MANY_PIECES * GPU_PIECE else GPU_PIECE


def flattened(tensor: Any) -> Any:
    """Return all elements in one dimension, in the order of memory where that needs no copy."""
    torch: Any = sys.modules["torch"]
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def _hash_words(torch: Any, piece: Any, weights: Any) -> Any:
    """Hash eight bytes at a time on the CPU, and separately the bits that the weights miss."""
    each = 8 // piece.element_size()
    if piece.storage_offset() % each:
        piece = piece.clone()
    whole = piece.numel() // each * each
    words = piece[:whole].view(torch.int64)
    count = words.numel()
    found = torch.dot(words, weights[:count])
    # A word's sign bit contributes the same with each odd weight, so hash these bits separately.
    signs = words < 0
    eighths = count // 8
    if eighths:
        packed = signs[: eighths * 8].view(torch.int64)
        found = found + 3 * torch.dot(packed, weights[:eighths])
    rest = signs[eighths * 8 :].to(torch.int64)
    found = found + 5 * torch.dot(rest, weights[: rest.numel()])
    tail = piece[whole:].to(torch.int64)
    return found + 7 * torch.dot(tail, weights[: tail.numel()])


def hash_weights(count: int) -> Any:
    """Return the first few weights, on the CPU."""
    torch: Any = sys.modules["torch"]
    return _weights_for(torch, count, torch.device("cpu"))[:count]


def _weights_for(torch: Any, count: int, device: Any) -> Any:
    """Return at least this many weights, at most those of a piece. They are cached."""
    weights = _hash_weights.get(device)
    if weights is None or len(weights) < count:
        size = next((each for each in (_SMALL_TENSOR, GPU_PIECE) if count <= each), PIECE)
        weights = torch.arange(1, size + 1, dtype=torch.int64, device="cpu")
        # Odd weights without a pattern, the same on every version (splitmix64).
        weights.mul_(0x9E3779B97F4A7C15 - (1 << 64))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            high = weights.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
            weights.bitwise_xor_(high).mul_(factor - (1 << 64) if factor >> 63 else factor)
        weights.bitwise_or_(1)
        if device.type == "cuda":
            # Computing them on the GPU would load half a dozen kernels.
            weights = weights.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            weights = weights.to(device)
        _hash_weights[device] = weights
    return weights


# -- numbers that were computed on a device, without waiting for it

MAX_ELEMENTS = 4096  # maximum number of written elements of a tensor


class Readback:
    """Read 0-dimensional tensors of one dtype once their devices have computed them.

    Only the numbers are kept, not the source tensors. On the CPU they are read at once. From a GPU
    they are copied into pinned memory, and an event shows when they have arrived.
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
        """Read the numbers of 1-dimensional tensors, each with its place among ``count``."""
        made = cls([])
        made._count = count
        for indices, vector in parts:
            made._take(indices, vector)
        return made

    @classmethod
    def of(cls, vector: Any) -> Readback:
        """Read the numbers of a 1-dimensional tensor."""
        return cls.gathered(len(vector), [(list(range(len(vector))), vector)])

    def _take(self, indices: list[int], found: Any) -> None:
        """Copy the numbers of a 1-dimensional tensor, each with its place."""
        torch: Any = sys.modules["torch"]
        device = found.device
        if device.type == "cpu":
            self._parts.append((indices, found.tolist(), None))
            return
        slots = torch.empty(len(indices), dtype=found.dtype, device="cpu", pin_memory=True)
        slots.copy_(found, non_blocking=True)
        self._parts.append((indices, slots, torch_devices.record_event(device)))

    @property
    def ready(self) -> bool:
        """Return whether all devices are done. Never waits."""
        return all(passed is None or passed.query() for _, _, passed in self._parts)

    def numbers(self) -> list[Any]:
        """Return the numbers in the order of the tensors. Call it once they are ready."""
        found: list[Any] = [None] * self._count
        for indices, values, passed in self._parts:
            listed = values if passed is None else values.tolist()
            for index, value in zip(indices, listed, strict=True):
                found[index] = value
        return found


class Elements:
    """At most ``most`` evenly spaced elements of a `hashable` tensor. Made with gradients off."""

    def __init__(self, tensor: Any, most: int = MAX_ELEMENTS) -> None:
        torch: Any = sys.modules["torch"]
        self.count: int = tensor.numel()
        every = max(1, -(-self.count // most))
        some = flattened(tensor.detach())[::every]
        if some.is_complex():
            # Real and imaginary parts are separate elements.
            some = torch.view_as_real(some.resolve_conj()).reshape(-1)
            self.count *= 2
        # Single precision holds all shorter types exactly.
        short = some.is_floating_point() and some.element_size() < 8
        self.format = "f" if short else "d"
        self.read = Readback.of(some.to(torch.float32 if short else torch.float64))

    def packed(self) -> PackedTensor:
        """Return the total number of elements and the values read. Call it when they are ready."""
        numbers = self.read.numbers()
        data = struct.pack(f"<{len(numbers)}{self.format}", *numbers)
        return PackedTensor(self.count, self.format, base64.b64encode(data).decode())


def when_ready(reads: Sequence[Readback], record: Callable[[list[Any]], Record]) -> Lazy:
    """Return a function for the writing thread that makes a record once all numbers are ready."""

    def make(last: bool) -> bytes | Record:
        if all(each.ready for each in reads):
            return record([number for each in reads for number in each.numbers()])
        if not last:
            raise NotYet
        # The device never finished.
        return b""

    return make


def capturing(torch: Any) -> bool:
    """Return whether a CUDA graph is being captured on this thread."""
    # is_available() would initialize the driver before the job forks workers.
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


# -- losses

Loss = Callable[[], "float | None"]

_LOSS_SLOTS = 64
_loss_rings: dict[Any, Iterator[Any]] = {}  # by dtype, slots of pinned memory that are reused


def loss_reader(loss: Any) -> Loss | float | None:
    """Return the loss, or for a GPU a function that reads it once the step's events have passed.

    A GPU's loss is copied into a slot of pinned memory without blocking. Slots are reused, so
    reading it more than a few dozen steps later returns a later loss, but never waits.
    """
    if loss.device.type == "cpu":
        value = loss.item()
        return float(value) if isinstance(value, (int, float)) else None
    torch: Any = sys.modules["torch"]
    if loss.device.type != "cuda" or type(loss) is not torch.Tensor:
        return None
    if torch.cuda.is_current_stream_capturing() or loss.is_complex():
        return None
    ring = _loss_rings.get(loss.dtype)
    if ring is None:
        # With the same dtype, no kernel has to convert it first.
        slots = torch.empty(_LOSS_SLOTS, dtype=loss.dtype, device="cpu", pin_memory=True)
        ring = _loss_rings[loss.dtype] = itertools.cycle(slots.unbind())
    slot = next(ring)
    with torch.no_grad():
        slot.copy_(loss.detach().reshape(()), non_blocking=True)
    return lambda: float(slot)


# -- norms of tensors, without waiting for the device that computes them


def is_plain(tensor: Any) -> bool:
    """Return whether this rank can read a tensor by itself. A DTensor may be spread over ranks."""
    torch: Any = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        # Reading a sparse tensor would wait for the GPU.
        and (tensor.device.type == "cpu" or (tensor.is_cuda and tensor.layout is torch.strided))
        and tensor.is_floating_point()
    )


def norms_of(tensors: Sequence[Any]) -> Readback | None:
    """Return the 2-norms of plain tensors in double precision. None while a graph is captured."""
    torch: Any = sys.modules["torch"]
    if not tensors or capturing(torch):
        return None
    with torch.no_grad():
        dense = (
            each.detach() if each.layout is torch.strided else each.detach().coalesce().values()
            for each in tensors
        )
        return Readback([torch.linalg.vector_norm(each, dtype=torch.float64) for each in dense])


def gradients_and_values(parameters: Sequence[Any]) -> Readback | None:
    """Return the norms of each parameter's gradient and value alternately, as `norms_of` does."""
    return norms_of([tensor for each in parameters for tensor in (each.grad, each)])


def has_plain_gradient(parameter: Any) -> bool:
    """Return whether a parameter and its gradient are plain."""
    return parameter.grad is not None and is_plain(parameter) and is_plain(parameter.grad)


def largest_magnitudes(tensors: Sequence[Any]) -> Readback | None:
    """Return the largest magnitude in each of some plain, strided, nonempty tensors.

    It is in double precision, and NaN if an element is NaN. None while a graph is captured.
    """
    torch: Any = sys.modules["torch"]
    if not tensors or capturing(torch):
        return None
    kinds: dict[tuple[Any, Any], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    with torch.no_grad():
        found = [
            (indices, torch_private.largest(torch, [tensors[index] for index in indices]))
            for indices in kinds.values()
        ]
        return Readback.gathered(len(tensors), found)
