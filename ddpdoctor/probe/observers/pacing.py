"""In which steps the gradients are followed: all, unless that would cost more than its share.

Where steps take a millisecond, to count forwards and backwards is dear. Then it is done in some
windows of steps only: the same ones on all ranks, since they are chosen by the number of the step.
What it costs is measured now and then, and counted as all diagnosis is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import events, rank, shield
from ddpdoctor.probe.runtime.budget import clock

DENSE = 1024
"""Steps at the beginning that are all followed."""

WINDOW = 16
"""Steps that are followed, or not, together."""

SETTLING = 2
"""Steps at the beginning of a window that are counted, but not judged: a forward may have been
before it."""

RAREST = 64
"""Of so many windows at least one is followed."""

SHARE = 2
"""Of what diagnosis may cost, a half at most goes here."""

MEASURED = 4
"""Of so many windows that are followed, a step of one is measured."""

awake = True
settling = False

_now = time.perf_counter_ns
_measuring = False
_measured_at = WINDOW + SETTLING
_cost = 0
"""Nanoseconds of the step that is being measured, so far."""
_estimate = 0
"""Nanoseconds of the last one that was."""
_settled_at = 0
_turned: int | None = None
"""When the window under way began."""


def paced(function: Callable[..., object]) -> Callable[..., None]:
    """A subscriber that sleeps where it would cost too much, without its exceptions."""
    name = f"{function.__module__}.{function.__qualname__}"

    def call(*args: Any) -> None:
        global _cost
        if not awake or name in shield.off:
            return
        try:
            if _measuring:
                began = clock()
                function(*args)
                _cost += clock() - began
            else:
                function(*args)
        except Exception as error:
            shield.fault(name, error)

    return call


@shield.shielded
def _step_ended(optimizer: Any, number: int) -> None:
    global _measuring, _cost, _estimate, settling
    state = rank.current()
    if state is None or state.tracker.steps == number:
        return
    if _measuring:
        _measuring, _estimate, _cost = False, _cost, 0
    number += 1
    if number == _measured_at and awake:
        _measuring = True
    if settling and number >= _settled_at:
        settling = False
    if not number % WINDOW:
        _turn(state, number)


def _turn(state: rank.RankState, number: int) -> None:
    """A window ended: pay for it, and see whether the next one is followed."""
    global awake, settling, _settled_at, _measured_at, _turned
    now = _now()
    began, _turned = _turned, now
    budget = state.budget
    if awake:
        budget.spend(WINDOW * _estimate)
    if began is None or not budget.enabled:
        return
    rarity = 1
    may_cost = budget.share * (now - began) / SHARE
    while number >= DENSE and rarity < RAREST and WINDOW * _estimate > rarity * may_cost:
        rarity *= 2
    window = number // WINDOW
    before, awake = awake, not window % rarity
    if awake and not before:
        settling, _settled_at = True, number + SETTLING
    if awake and not window // rarity % MEASURED:
        _measured_at = number + SETTLING


def forget() -> None:
    """In a forked child, which may become a rank of its own."""
    global awake, settling, _measuring, _measured_at, _turned
    awake, settling, _measuring = True, False, False
    _measured_at, _turned = WINDOW + SETTLING, None


def install() -> None:
    """Listen to the ends of steps, after those who are paced."""
    events.step_ended.append(_step_ended)
