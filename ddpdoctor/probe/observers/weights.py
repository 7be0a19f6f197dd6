"""What changes a model or its training from outside a step: weights loaded, learning rates cut.

``load_state_dict(strict=False)`` passes over names that do not fit. Where most of a checkpoint was
passed over, that is recorded, before the process is a rank, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddpdoctor.probe.observers.replicas import Replicas
from ddpdoctor.probe.runtime import rank, sites
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.run.records.data import AppliedRecord, NotAppliedRecord
from ddpdoctor.run.records.replicas import CutRecord, LoadRecord, ResumeRecord

MOST = 64
"""Records of each kind that one rank writes."""

SHARE = 0.5
"""More of the names than this match where a head alone is new."""

_SHOWN = 3

_numbers = itertools.count()
_partial: dict[int, int] = {}
"""By ``id``, modules whose last load applied little, with the number of its record."""


def loaded(module: Any, given: Any, result: Any) -> None:
    """A module's ``load_state_dict`` returned: see what it has applied."""
    missing = getattr(result, "missing_keys", None)
    unexpected = getattr(result, "unexpected_keys", None)
    if not isinstance(given, Mapping) or missing is None or unexpected is None:
        return
    before = _partial.pop(id(module), None)
    record = not_applied(given, list(missing), list(unexpected))
    if record is not None and len(_partial) < MOST:
        _partial[id(module)] = record.number
        rank.add(record, MOST)
    elif before is not None:
        rank.add(AppliedRecord(number=before), MOST)


def not_applied(
    given: Mapping[Any, Any], missing: list[str], unexpected: list[str]
) -> NotAppliedRecord | None:
    """What was passed over, if it was most; None where names are left over on one side only.

    A part of a checkpoint for a part of a model leaves none over on the side of the smaller one.
    """
    if not missing or not unexpected:
        return None
    matched = len(given) - len(unexpected)
    fits = min(len(given), matched + len(missing))
    if matched > SHARE * fits:
        return None
    prefix, of = _prefix(missing, unexpected)
    return NotAppliedRecord(
        number=next(_numbers),
        matched=matched,
        given=len(given),
        wanted=matched + len(missing),
        missing=tuple(missing[:_SHOWN]),
        unexpected=tuple(unexpected[:_SHOWN]),
        prefix=prefix,
        of=of,
        **sites.caller().place,
    )


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str]:
    """The prefix that most names have on one side only, and the side: checkpoint or model."""
    for of, short, long in (
        ("checkpoint", missing, unexpected),
        ("model", unexpected, missing),
    ):
        first = next((name for name in long if name.endswith("." + short[0])), "")
        prefix = first[: len(first) - len(short[0])]
        known = set(long)
        if prefix and sum(prefix + name in known for name in short) > SHARE * len(short):
            return prefix, of
    return "", ""


class _Change(sites.Place):
    """What the records of all changes have."""

    time: int
    step: int
    what: str


class Changes(Observer):
    """What changes the replicas of a rank from outside a step."""

    def __init__(self, state: rank.RankState, replicas: Replicas) -> None:
        super().__init__(state)
        self._replicas = replicas

    def weights_loaded(self, module: Any) -> None:
        """Record the DDP modules that the module is, or is a part of."""
        for each in self._replicas.alive:
            ddp = each.ddp()
            if ddp is not None and any(part is module for part in ddp.modules()):
                change = self._change(type(module).__name__)
                self.state.add(LoadRecord(module=each.number, **change), MOST)

    def optimizer_loaded(self, optimizer: Any) -> None:
        """Training is resumed."""
        self.state.add(ResumeRecord(**self._change(type(optimizer).__name__)), MOST)

    def rate_cut(self) -> None:
        """Ranks may do so at different steps."""
        self.state.add(CutRecord(**self._change("ReduceLROnPlateau")), MOST)

    def _change(self, what: str) -> _Change:
        now, step = time.time_ns(), self.state.tracker.steps
        return {"time": now, "step": step, "what": what, **sites.caller().place}


def forget() -> None:
    """In a forked child: the parent's loads are the parent's."""
    _partial.clear()
