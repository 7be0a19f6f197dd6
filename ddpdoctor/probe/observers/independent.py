"""Training without DDP: whether the ranks of a group still train one model.

Before some steps of the optimizer the norms of a few gradients and of their parameters are written
down; by comparing the ranks a rule sees whether anything was exchanged. Where DDP was built, others
watch.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from ddpdoctor.probe.observers import norms
from ddpdoctor.probe.runtime import events, rank, shield
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.run.records.base import JsonObject

DENSE = 8
"""Steps at the beginning that are looked at one by one; later the powers of two."""

WITNESSES = 3
"""Parameters that are looked at."""

LARGEST = 1 << 20
"""Elements of a parameter that is looked at, if there are smaller ones than the larger."""

HYPER = ("lr", "momentum", "betas", "weight_decay")
"""What is written of the optimizer's first groups: where it differs, it is meant to."""

GROUPS = 4


class _Training:
    """What one rank trains."""

    __slots__ = ("last", "outside", "state", "versions", "wide")

    def __init__(self, state: rank.RankState) -> None:
        self.state = state
        self.last = -1
        """The last training step that was looked at."""
        self.wide = 0
        """Calls that may have moved parameters before the first step."""
        self.outside = False
        """Whether parameters were changed between steps of the optimizer."""
        self.versions: list[tuple[weakref.ref[Any], int]] = []


_training: _Training | None = None
_wrapped = False


def forget() -> None:
    """In a forked child: the parent's training is the parent's."""
    global _training, _wrapped
    _training, _wrapped = None, False


@shield.shielded
def _built(ddp: Any) -> None:
    global _wrapped
    _wrapped = True


@shield.shielded
def _step_begins(optimizer: Any) -> None:
    global _training
    if _wrapped:
        return
    state = rank.current()
    if state is None or not state.budget.enabled:
        return
    mine = _training
    if mine is None or mine.state is not state:
        mine = _training = _Training(state)
        mine.wide = state.ledger.wide if state.ledger is not None else 0
    for reference, version in mine.versions:
        parameter = reference()
        if parameter is not None and parameter._version != version:
            mine.outside = True
    mine.versions = []
    number = state.tracker.steps
    if number == mine.last or (number >= DENSE and number & (number - 1)):
        return
    if state.budget.left() < 0 or sys.modules["torch"].distributed.get_world_size() < 2:
        return
    mine.last = number
    began = clock()
    _look(mine, optimizer, number)
    state.budget.spend(clock() - began)


def _look(mine: _Training, optimizer: Any, number: int) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    reached = [
        each
        for each in parameters
        if each.grad is not None and norms.plain(each) and norms.plain(each.grad)
    ]
    small = [each for each in reached if 0 < each.numel() <= LARGEST] or reached
    looked = sorted(small, key=lambda each: -each.numel())[:WITNESSES]
    read = norms.norms([tensor for each in looked for tensor in (each.grad, each)])
    if read is None:
        return
    ledger = mine.state.ledger
    record: JsonObject = {
        "kind": "solo",
        "time": time.time_ns(),
        "step": number,
        "optimizer": type(optimizer).__name__,
        "shapes": [list(each.shape) for each in looked],
        "parameters": len(parameters),
        "elements": sum(each.numel() for each in parameters),
        "hyper": [
            [_plain(group.get(name)) for name in HYPER] for group in optimizer.param_groups[:GROUPS]
        ],
        "calls": ledger.count if ledger is not None else None,
        "before": mine.wide,
        "wide": ledger.wide if ledger is not None else None,
        "outside": mine.outside,
    }

    def with_norms(values: list[float]) -> JsonObject:
        return {**record, "gradients": values[::2], "values": values[1::2]}

    mine.state.recorder.add(norms.lazy([read], with_norms))


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if type(value) in (int, float) else None


@shield.shielded
def _step_ended(optimizer: Any, number: int) -> None:
    mine = _training
    if mine is None or mine.outside or _wrapped:
        return
    first = next((each for group in optimizer.param_groups for each in group["params"]), None)
    if first is not None:
        mine.versions.append((weakref.ref(first), first._version))


@shield.shielded
def _rank_ends() -> None:
    """What was exchanged up to the end."""
    mine = _training
    if mine is None or mine.last < 0 or mine.state is not rank.current():
        return
    ledger = mine.state.ledger
    mine.state.recorder.add(
        {
            "kind": "solo_end",
            "time": time.time_ns(),
            "steps": mine.state.tracker.steps,
            "wrapped": _wrapped,
            "calls": ledger.count if ledger is not None else None,
            "wide": ledger.wide if ledger is not None else None,
            "outside": mine.outside,
        }
    )


def install() -> None:
    """Listen to the moments of training."""
    events.ddp_built.append(_built)
    events.step_begins.append(_step_begins)
    events.step_ended.append(_step_ended)
    events.rank_ends.append(_rank_ends)
