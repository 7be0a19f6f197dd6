"""What diagnosis may cost: a share of the time that the rank has trained.

It starts with a credit, so that the first steps are looked at closely; afterwards a diagnosis has
to wait until enough has been earned.
"""

from __future__ import annotations

import os
import time

PERCENT = "DDPDOCTOR_OVERHEAD_BUDGET"
"""Environment variable: per cent of the step time; 0 turns diagnosis that costs off."""

DEFAULT = 0.5
CREDIT = 300_000_000
"""Nanoseconds that may be spent before anything was earned."""

_now = time.perf_counter_ns


class Budget:
    """The account of one rank."""

    def __init__(self, percent: float) -> None:
        self._share = percent / 100
        self._start = _now()
        self._spent = 0

    @property
    def enabled(self) -> bool:
        """Whether anything may be spent at all."""
        return self._share > 0

    def left(self) -> int:
        """Nanoseconds that may be spent now; negative after a diagnosis that was too dear."""
        if not self._share:
            return -1
        return CREDIT + int(self._share * (_now() - self._start)) - self._spent

    def spend(self, nanoseconds: int) -> None:
        """Note what a diagnosis has cost."""
        self._spent += nanoseconds


def from_environment() -> Budget:
    """The budget that the supervisor named."""
    try:
        return Budget(float(os.environ[PERCENT]))
    except (KeyError, ValueError):
        return Budget(DEFAULT)
