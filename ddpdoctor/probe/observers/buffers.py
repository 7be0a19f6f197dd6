"""Buffers that DDP leaves to each rank, looked at where a broadcast would have made them equal.

Before a forward DDP broadcasts all buffers of rank 0, those that were replaced since included: then
there is nothing to look at. It does not where the user turned that off, and where the module had no
buffers when DDP was built. Running statistics of normalizing layers, integers (counters, positions,
states of generators) and what is no part of the state dict are never looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ddpdoctor.probe.observers import fingerprints, modes, pacing
from ddpdoctor.probe.observers.elements import Elements
from ddpdoctor.probe.observers.hashing import hash_of, hashable
from ddpdoctor.probe.observers.readback import Readback, capturing
from ddpdoctor.probe.runtime import events, rank, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.recorder import NotYet
from ddpdoctor.run.records.base import JsonObject

DENSE = 8
"""Steps at the beginning that are looked at one by one; later the powers of two, with the next."""

EVERY = 1024
"""Once the powers of two are further apart, every so many steps, with the next."""

MOST = 8
"""Buffers that a record tells."""

SAMPLE = 32
"""Elements of a buffer that are written."""

STATISTICS = ("running_", "moving_")
"""Beginnings of the names of statistics, of whatever class the layer is."""


class _Looks:
    """What was looked at on one rank."""

    def __init__(self, state: rank.RankState) -> None:
        self.state = state
        self.last: dict[int, int] = {}
        """The last step that was looked at, by module."""
        self.cost = 0

    def forward(self, ddp: Any, step: int) -> None:
        """Look at a module's buffers, of a step that all ranks look at."""
        module = fingerprints.number_of(ddp)
        budget = self.state.budget
        if (
            module is None
            or modes.uneven_inputs
            or self.last.get(module) == step
            or budget.left() <= self.cost
        ):
            return
        broadcasts = torch_private.broadcasts_buffers(ddp)
        if broadcasts is None or (broadcasts and ddp.modules_buffers):
            return
        torch: Any = sys.modules["torch"]
        if capturing(torch):
            return
        self.last[module] = step
        start = clock()
        with torch.no_grad():
            found = dict(_own(ddp))
            hashes = Readback([hash_of(each) for each in found.values()])
            samples = [Elements(each, SAMPLE) for each in found.values()]
        if found:
            record: JsonObject = {
                "kind": "buffers",
                "step": step,
                "module": module,
                "armed": self.state.tracker.armed,
                "broadcast": broadcasts,
                "names": list(found),
            }
            self.state.recorder.add(_lazily(record, hashes, samples))
        self.cost = clock() - start
        budget.spend(self.cost)


def _lazily(record: JsonObject, hashes: Readback, samples: list[Elements]) -> Any:
    """The record as soon as the device has passed."""

    def make(last: bool) -> bytes | JsonObject:
        if not all(each.ready for each in (hashes, *(each.read for each in samples))):
            if last:
                return b""
            raise NotYet
        told = [f"{each & (1 << 64) - 1:016x}" for each in hashes.numbers()]
        return {**record, "hashes": told, "samples": [each.packed() for each in samples]}

    return make


def _own(ddp: Any) -> Iterator[tuple[str, Any]]:
    """Names and buffers that a checkpoint holds and no layer normalizes with."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", None) or set()
    found = 0
    for prefix, module in ddp.module.named_modules():
        mine = vars(module).get("_buffers")
        if not mine or torch_private.keeps_statistics(module):
            continue
        unsaved = torch_private.unsaved_buffers(module)
        for short, buffer in mine.items():
            name = f"{prefix}.{short}" if prefix else short
            if (
                buffer is not None
                and found < MOST
                and name not in ignored
                and short not in unsaved
                and not short.startswith(STATISTICS)
                and hashable(buffer)
                and buffer.is_floating_point()
                and buffer.element_size() > 1
                and buffer.numel()
            ):
                found += 1
                yield name, buffer


_looks: _Looks | None = None


def _forward_begins(ddp: Any, armed: bool) -> None:
    global _looks
    state = rank.current()
    if state is None or not armed:
        return
    step = state.tracker.steps
    # Of two steps in a row it is seen how fast a buffer changes.
    before = step & ~1
    if step >= DENSE and before & (before - 1) and before % EVERY:
        return
    if not state.budget.enabled:
        return
    if _looks is None or _looks.state is not state:
        _looks = _Looks(state)
    _looks.forward(ddp, step)


def install() -> None:
    """Listen to the moments of training."""
    events.forward_begins.append(pacing.paced(_forward_begins))
