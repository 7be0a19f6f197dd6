"""Running statistics that an evaluation normalizes with, where each rank keeps its own.

DDP broadcasts them before a forward; where the user turned that off, each rank has those of its own
batches. They are looked at once in each evaluation: at a forward through the DDP object without
gradients, or as a loader gives a batch without them while the model is in evaluation mode.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ddpdoctor.probe.observers import fingerprints
from ddpdoctor.probe.observers.elements import Elements
from ddpdoctor.probe.observers.hashing import hash_of, hashable
from ddpdoctor.probe.observers.readback import Readback, capturing
from ddpdoctor.probe.runtime import events, rank, shield, sites, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.recorder import NotYet
from ddpdoctor.run.records.base import JsonObject

MOST = 64
"""Evaluations that one rank tells of."""

TRIES = 2
"""Batches of an evaluation at which a model is looked for in evaluation mode."""

LAYERS = 64
"""Layers whose statistics are hashed."""

NAMED = 4
"""Layers of which elements are written."""

SAMPLE = 32
"""Elements of a tensor that are written."""


class _Looks:
    """What was looked at on one rank."""

    def __init__(self, state: rank.RankState) -> None:
        self.state = state
        self.told: dict[int, int] = {}
        """By module, the synchronized forwards before its last evaluation that was looked at."""
        self.tried = (-1, 0)
        """Synchronized forwards before the evaluation under way, and its batches looked at."""
        self.count = 0


_looks: _Looks | None = None


def _mine() -> _Looks | None:
    global _looks
    state = rank.current()
    if state is None or not state.budget.enabled:
        return None
    if _looks is None or _looks.state is not state:
        _looks = _Looks(state)
    return _looks


@shield.shielded
def _evaluates(ddp: Any) -> None:
    mine = _mine()
    number = fingerprints.number_of(ddp) if mine is not None else None
    if mine is not None and number is not None:
        _look(mine, number, ddp)


@shield.shielded
def _fetched(iterator: Any, data: Any) -> None:
    if sys.modules["torch"].is_grad_enabled():
        return
    mine = _mine()
    if mine is None:
        return
    armed = mine.state.tracker.armed
    before, tries = mine.tried
    if before != armed:
        tries = 0
    elif tries >= TRIES:
        return
    mine.tried = armed, tries + 1
    for each in fingerprints.modules():
        ddp = each.ref()
        if ddp is not None:
            _look(mine, each.number, ddp)


def _look(mine: _Looks, number: int, ddp: Any) -> None:
    state = mine.state
    armed = state.tracker.armed
    if (
        not armed
        or mine.told.get(number) == armed
        or mine.count >= MOST
        or torch_private.broadcasts_buffers(ddp) is not False
        or state.budget.left() < 0
    ):
        return
    torch: Any = sys.modules["torch"]
    if capturing(torch):
        return
    began = clock()
    layers = [
        (name, module)
        for name, module in ddp.module.named_modules()
        if torch_private.keeps_statistics(module)
        and not module.training
        and module.running_mean is not None
        and hashable(module.running_mean)
        and hashable(module.running_var)
    ]
    if layers:
        mine.told[number] = armed
        mine.count += 1
        site = sites.caller()
        record: JsonObject = {
            "kind": "statistics",
            "time": time.time_ns(),
            "module": number,
            "group": torch_private.group_ranks(ddp),
            "armed": armed,
            "layers": len(layers),
            "names": [name for name, _ in layers[:NAMED]],
            "path": site.path,
            "line": site.line,
        }
        _write(state, record, [module for _, module in layers])
    state.budget.spend(clock() - began)


def _write(state: rank.RankState, record: JsonObject, layers: list[Any]) -> None:
    """The record, as soon as the device has passed."""
    with sys.modules["torch"].no_grad():
        kept = [
            tensor for each in layers[:LAYERS] for tensor in (each.running_mean, each.running_var)
        ]
        hashes = Readback([hash_of(each) for each in kept])
        samples = [Elements(each, SAMPLE) for each in kept[: 2 * NAMED]]

    def make(last: bool) -> bytes | JsonObject:
        if not all(each.ready for each in (hashes, *(each.read for each in samples))):
            if last:
                return b""
            raise NotYet
        told = [f"{each & (1 << 64) - 1:016x}" for each in hashes.numbers()]
        return {**record, "hashes": told, "samples": [each.packed() for each in samples]}

    state.recorder.add(make)


def install() -> None:
    """Listen to the moments of training."""
    events.evaluation_begins.append(_evaluates)
    events.batch_fetched.append(_fetched)
