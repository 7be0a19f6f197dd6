"""Bitwise hashes of tensors: sums of their bits, weighted by position, modulo 2**64.

``torch.hash_tensor`` (2.9 and later) is an exclusive or, which neither order nor an even number of
changed signs changes; this one shows both, on every version of torch, at the same price.
Integer sums are exact: no order of summation and no device gives another result. Nothing is drawn
from a random number generator, and nothing is read back: a hash is a tensor on its device.
"""

from __future__ import annotations

import sys
from typing import Any

PIECE = 1 << 20
"""Elements hashed at once: what a hash needs in memory stays below 17 MiB."""

GPU_PIECE = 1 << 18
"""The same on a GPU, whose memory may be all but full: below 5 MiB."""

MANY = 64
"""Pieces of a tensor from which on larger ones are taken on a GPU, too: their kernels cost."""

_SMALL = 1 << 12
_weights: dict[Any, Any] = {}


def hashable(tensor: Any) -> bool:
    """Whether the tensor's bits lie in one plain block of memory; a subclass may hold anything."""
    torch: Any = sys.modules["torch"]
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_quantized
    )


def hash_of(tensor: Any) -> Any:
    """The hash of a tensor's bits, a 0-dimensional int64 tensor on its device; without gradients.

    To be called with gradients off.
    """
    torch: Any = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = flattened(tensor)
    size = flat.element_size()
    parts = flat.view(torch.int32 if size >= 4 else torch.int16 if size == 2 else torch.int8)
    count = parts.numel()
    on_cpu = flat.device.type == "cpu"
    most = _piece(count, on_cpu)
    weights = _weights_for(torch, min(count, most), flat.device)
    if count <= _SMALL:
        return _dot(torch, parts.to(torch.int64), weights[:count])
    total = None
    for index, start in enumerate(range(0, count, most)):
        piece = parts[start : start + most]
        found = (_words if on_cpu else _elements)(torch, piece, weights)
        # Each piece has the same weights; another odd factor for each makes them differ.
        found = found * (2 * index + 1)
        total = found if total is None else total + found
    return total


def pieces(tensor: Any) -> int:
    """In how many pieces a tensor on a GPU is hashed."""
    count = tensor.numel()
    return -(-count // _piece(count, False)) or 1


def _piece(count: int, on_cpu: bool) -> int:
    return PIECE if on_cpu or count > MANY * GPU_PIECE else GPU_PIECE


def flattened(tensor: Any) -> Any:
    """All elements in one dimension, in the order of memory where that needs no copy."""
    torch: Any = sys.modules["torch"]
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).reshape(-1)
    return tensor.reshape(-1)


def _dot(torch: Any, numbers: Any, weights: Any) -> Any:
    # Of integers, torch.dot is there for the CPU only.
    if numbers.device.type == "cpu":
        return torch.dot(numbers, weights)
    return (numbers * weights).sum()


def _elements(torch: Any, piece: Any, weights: Any) -> Any:
    return (piece * weights[: piece.numel()]).sum()


def _words(torch: Any, piece: Any, weights: Any) -> Any:
    """On the CPU: eight bytes at a time, and what the weights do not see of them."""
    each = 8 // piece.element_size()
    if piece.storage_offset() % each:
        piece = piece.clone()
    whole = piece.numel() // each * each
    words = piece[:whole].view(torch.int64)
    count = words.numel()
    found = torch.dot(words, weights[:count])
    # A word's first bit, a sign, counts the same under each odd weight: hash these bits separately.
    signs = words < 0
    eighths = count // 8
    if eighths:
        packed = signs[: eighths * 8].view(torch.int64)
        found = found + 3 * torch.dot(packed, weights[:eighths])
    rest = signs[eighths * 8 :].to(torch.int64)
    found = found + 5 * torch.dot(rest, weights[: rest.numel()])
    tail = piece[whole:].to(torch.int64)
    return found + 7 * torch.dot(tail, weights[: tail.numel()])


def weights(count: int) -> Any:
    """A few of the weights, on the CPU: for sums of the caller's own."""
    torch: Any = sys.modules["torch"]
    return _weights_for(torch, count, torch.device("cpu"))[:count]


def _weights_for(torch: Any, count: int, device: Any) -> Any:
    """At least that many weights, up to a piece's, kept for the next time."""
    weights = _weights.get(device)
    if weights is None or len(weights) < count:
        size = next((each for each in (_SMALL, GPU_PIECE) if count <= each), PIECE)
        weights = _made(torch, size)
        if device.type == "cuda":
            # Made there they would take half a dozen kernels, each of which is loaded first.
            weights = weights.pin_memory().to(device, non_blocking=True)
        elif device.type != "cpu":
            weights = weights.to(device)
        _weights[device] = weights
    return weights


def _made(torch: Any, count: int) -> Any:
    """Odd weights without a pattern, the same on every version (splitmix64)."""
    weights = torch.arange(1, count + 1, dtype=torch.int64, device="cpu")
    weights.mul_(0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        high = weights.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
        weights.bitwise_xor_(high).mul_(factor - (1 << 64) if factor >> 63 else factor)
    return weights.bitwise_or_(1)
