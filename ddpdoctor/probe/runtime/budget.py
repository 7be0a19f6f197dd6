"""Account for what diagnosis may cost: a share of the time that the rank has trained.

Looks at parameters, gradients and buffers count, and what it takes to follow the steps: the hooks
of each (`ddpdoctor.probe.observers.overhead`) with the thread that writes their records, and its
gradients (`ddpdoctor.probe.observers.overhead`). Either is thinned out to take no more than a half,
and both together to leave a fifth for diagnoses. What cannot be thinned out may take more where
steps are very short; the fifth is left for diagnoses in any case. A quarter is left for what no
clock sees.

It starts with a credit, so that the first steps are looked at closely; afterwards a diagnosis has
to wait until enough has been earned. To follow the first steps, which are not thinned out, costs no
diagnosis its turn: a job of seconds has no others. A suspicion may add to the credit, so often and
so much as its diagnosis says.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from ddpdoctor.run.names import BUDGET

DEFAULT = 0.5
AHEAD = 10_000_000_000
"""Nanoseconds whose earnings may be spent in advance: with the default budget, 50 ms."""

LEAST_AHEAD = 40_000_000
"""Nanoseconds that may be spent in advance, however small the budget: the first steps of a short
job are all that tells of it."""

SETTLED_EVERY = 1_000_000_000
"""Nanoseconds after which what diagnoses have earned is theirs."""

LOADING = 200_000_000
"""Nanoseconds that a GPU may take to load the kernels of a diagnosis, which it does once."""

RESERVED = 5
"""One part in so many is for diagnoses, whatever it takes to follow the steps."""

UNSEEN = 4
"""One part in so many is left for what no clock here sees, as what is pushed out of the caches: a
step behind a fingerprint takes 0.1 ms more."""

_now = time.perf_counter_ns

clock = time.thread_time_ns
"""What diagnoses measure their cost with: on a crowded machine a thread waits for a core, and that
would have to be earned again for minutes. On a GPU it is the time to ask for the work."""


class Budget:
    """The account of one rank."""

    def __init__(self, percent: float) -> None:
        self._share = percent / 100
        self._start = _now()
        self._credit = max(int(self._share * AHEAD), LEAST_AHEAD) if self._share else 0
        self.spent = 0
        """Nanoseconds that diagnoses took, by their clocks."""
        self._behind = 0
        self.followed = 0
        """Nanoseconds that it took to follow the steps, as far as is known."""
        self.writing = 0
        """Nanoseconds that the writing thread has taken so far, which sets it."""
        self.written = 0.0
        """What it takes of the time, as far as is known."""
        self._written_before = 0
        self._settled_at = self._start
        self._settled = 0
        """What was earned until then: whatever following takes later, it stays."""
        self._charged = 0
        """Nanoseconds that following took since, but for what was granted."""

    @property
    def enabled(self) -> bool:
        """Whether anything may be spent at all."""
        return self._share > 0

    @property
    def share(self) -> float:
        """What may be spent, as a part of the time."""
        return self._share

    def left(self) -> int:
        """Nanoseconds that may be spent now; negative after a diagnosis that was too dear."""
        if not self._share:
            return -1
        return self._credit + self.earned() - self.spent - self._behind

    def spend(self, nanoseconds: int) -> None:
        """Note what a diagnosis has cost."""
        self.spent += nanoseconds

    def spend_behind(self, nanoseconds: int) -> None:
        """Note what a diagnosis has cost the step behind it, which no clock shows."""
        self._behind += nanoseconds

    def spend_first(self, nanoseconds: int, usual: int) -> None:
        """Note what the first diagnosis of its kind on a GPU has cost.

        Its kernels were loaded: what that took is counted, but need not be earned again.

        Args:
            nanoseconds: What it took.
            usual: What one takes otherwise.
        """
        self.spend(nanoseconds)
        self.grant(min(max(nanoseconds - usual, 0), LOADING))

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Note what runs within, but for what it notes itself; a diagnosis that raises is over."""
        began, before = clock(), self.spent
        yield
        self.spent = max(self.spent, before + clock() - began)

    def follow(self, nanoseconds: int, granted: bool = False) -> None:
        """Note what the hooks of some steps have cost.

        Args:
            nanoseconds: What they took.
            granted: They cannot be thinned out: what is left for diagnoses stays as it is.
        """
        self.followed += nanoseconds
        if not granted:
            self._charged += nanoseconds
        now = _now()
        if now - self._settled_at >= SETTLED_EVERY:
            written = self.writing - self._written_before
            self._written_before += written
            self.followed += written
            self._charged += written
            self.written = written / (now - self._settled_at)
            self._settled, self._settled_at, self._charged = self._earned(now), now, 0

    def earned(self) -> int:
        """Nanoseconds that the time so far allows, without what may be spent in advance."""
        return self._earned(_now())

    def _earned(self, now: int) -> int:
        allowed = int(self._share * (now - self._settled_at))
        unseen, reserved = allowed // UNSEEN, allowed // RESERVED
        return self._settled + max(allowed - unseen - self._charged, reserved)

    def grant(self, nanoseconds: int) -> None:
        """Let that much more be spent than is earned."""
        self._credit += nanoseconds

    def taken(self) -> float:
        """What all of it took, as a part of the time so far."""
        spent, over = self.account()
        return (spent + self.followed) / max(over, 1)

    def account(self) -> tuple[int, int]:
        """Nanoseconds spent so far, and since when they were counted."""
        return self.spent + self._behind, _now() - self._start


def from_environment() -> Budget:
    """The budget that the supervisor named."""
    try:
        return Budget(float(os.environ[BUDGET]))
    except (KeyError, ValueError):
        return Budget(DEFAULT)
