"""Read what tensors, graphs and torch's CUDA allocator hold, without touching a device.

Private APIs of torch are used only if they exist. Without them the value is unknown.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ddpdoctor.core.user_code import Location, user_file
from ddpdoctor.probe.runtime import torch_devices
from ddpdoctor.run.records.memory import AllocatorFacts, Block

MAX_LINKS = 512  # maximum length of a chain that is counted
_NEAR = 12  # maximum number of operations searched for the next link of a chain
_PLAIN = ("torch", "torch.nn.parameter")


# -- tensors


def is_plain(kind: type) -> bool:
    """Return whether a class is one of torch's own tensor classes, which run no code of the job."""
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(kind, tensor) and kind.__module__ in _PLAIN


def storage_bytes(value: Any) -> int | None:
    """Return the bytes of a plain tensor's storage. None for other objects or without storage."""
    if not is_plain(type(value)):
        return None
    try:
        return int(value.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return None


def is_array(kind: type) -> bool:
    """Return whether a class is NumPy's array class."""
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


def has_graph(value: Any) -> bool:
    """Return whether a tensor has an autograd graph."""
    return is_plain(type(value)) and value.grad_fn is not None


def hooks_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dictionaries of a tensor's hooks, such as ``_backward_hooks`` (0.1 to 2.15)."""
    if is_plain(type(value)):
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(value, name, None)
            if hooks is not None:
                yield name, hooks


def links_of(value: Any) -> int:
    """Return the length of a tensor's chain of equal operations, such as ``total + loss``.

    A chain that grows in each step keeps the graphs of all steps alive.
    """
    node, name, count = value.grad_fn, value.grad_fn.name(), 0
    while node is not None and count < MAX_LINKS:
        count += 1
        node = _next_link(node, name)
    return count


def _next_link(node: Any, name: str) -> Any:
    """Return the nearest operation of that name among those that computed ``node``'s inputs."""
    near = [node]
    for each in near:
        for before, _ in each.next_functions:
            if before is None:
                continue
            if before.name() == name:
                return before
            if len(near) < _NEAR:
                near.append(before)
    return None


# -- the memory of a GPU when it ran out

MAX_BLOCKS = 8
MAX_SNAPSHOT = 64 << 20  # maximum size of a stored snapshot in bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that the memory of a GPU ran out."""
    kind: Any = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return kind is not None and isinstance(error, kind)


def allocator_facts(device: Any) -> AllocatorFacts | None:
    """Describe the allocator. Return None if it has no counters."""
    try:
        allocated, reserved, peak = torch_devices.allocated_memory(device)
    except Exception:
        return None
    return AllocatorFacts(
        allocated=allocated,
        reserved=reserved,
        peak=peak,
        total=torch_devices.total_memory(device),
    )


def snapshot(device: Any) -> Any:
    """Return ``torch.cuda.memory._snapshot()`` (2.1 to 2.15) for memory_viz. None without it."""
    take = getattr(sys.modules["torch"].cuda.memory, "_snapshot", None)
    try:
        return None if take is None else take(device)
    except Exception:
        return None


def keep(found: Any, path: str) -> bool:
    """Write a snapshot to a new file. Return whether it was written."""
    data = pickle.dumps(found)
    if len(data) > MAX_SNAPSHOT:
        return False
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    return True


def with_snapshot(facts: AllocatorFacts, found: Any) -> AllocatorFacts:
    """Add the largest used blocks, the largest free one, and whether segments expand."""
    sizes: Counter[tuple[int, Location | None]] = Counter(_active(found))
    most = sorted(sizes.items(), key=lambda each: each[0][0] * each[1], reverse=True)[:MAX_BLOCKS]
    segments = found.get("segments", ())
    free = (
        int(block.get("size", 0))
        for segment in segments
        for block in segment.get("blocks", ())
        if not str(block.get("state", "")).startswith("active")
    )
    return replace(
        facts,
        blocks=tuple(Block(size, count, line) for (size, line), count in most),
        largest_free=max(free, default=0),
        expandable=any(segment.get("is_expandable") for segment in segments),
    )


# -- the lines whose allocations are not freed


class AllocationSites:
    """Find lines whose GPU allocations are not freed, by torch's memory history (2.1 to 2.15).

    While torch records, it stores the Python stack of each allocation, which takes 10 to 20 us.
    No lines are found if the job records allocations itself, or if torch cannot.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._before: Counter[Location] | None = None
        self._recording = record_history("state")

    def look(self) -> Counter[Location]:
        """Return the bytes by line that were allocated since the last look and not freed."""
        if not self._recording:
            return Counter()
        found = snapshot(self._device) or {}
        # A history that we have just started has at most one event.
        if any(len(each) > 1 for each in found.get("device_traces") or ()):
            self._recording = False  # the job records its own history, which must continue
        now: Counter[Location] = Counter()
        for size, line in _active(found):
            if line is not None:
                now[line] += size
        before, self._before = self._before, now
        return now - before if before is not None else Counter()

    def end(self) -> None:
        """Stop recording. Blocks keep their stacks."""
        if self._recording:
            self._recording = False
            record_history(None)


def record_history(enabled: str | None) -> bool:
    """Start or stop recording the stacks of allocations. Return False if that is impossible."""
    torch: Any = sys.modules["torch"]
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    records = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if record is None or records is None or (enabled is not None and records()):
        return False
    try:
        record(enabled=enabled, context=enabled, stacks="python")
    except Exception:
        return False
    return True


def _active(found: Any) -> Iterator[tuple[int, Location | None]]:
    """Yield the size of each block in use and the line that allocated it, if torch recorded it."""
    for segment in (found or {}).get("segments", ()):
        for block in segment.get("blocks", ()):
            if str(block.get("state", "")).startswith("active"):
                yield int(block.get("size", 0)), _line_of(block.get("frames") or ())


def _line_of(frames: Any) -> Location | None:
    """Return the user's line among the frames that torch recorded, innermost first."""
    for each in frames:
        path, line = str(each.get("filename", "")), each.get("line")
        if path.endswith(".py") and user_file(path) and isinstance(line, int):
            return Location(path, line)
    return None
