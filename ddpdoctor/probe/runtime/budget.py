"""Account for the cost of diagnoses, which is limited to a share of the rank's training time.

Diagnoses (hashes of parameters, gradients and buffers) count, and so does following the steps:
their hooks with the thread that writes their records, and gradients
(`ddpdoctor.probe.observers.overhead`). Each of the last two is sampled to take at most half of the
budget. Together they leave a fifth for diagnoses, even if steps are so short that following takes
more. A quarter is left for costs that no clock shows.

A credit pays for the dense samples of the first steps. A part of it is kept for the samples that
ranks draw, since fingerprints would use all of it before the first pass ends. Later a diagnosis
waits until enough is earned. Following the first steps, which are not sampled, delays no diagnosis:
a job of a few seconds has no others. A suspicion may add to the credit.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from ddpdoctor.run.names import BUDGET

DEFAULT_PERCENT = 0.5
CREDIT_NS = 8_000_000_000
"""Nanoseconds of training whose budget may be spent in advance: 40 ms with the default budget."""

MIN_CREDIT_NS = 40_000_000  # minimum nanoseconds that may be spent in advance
SAMPLES_RESERVE_NS = 20_000_000  # nanoseconds of these that are reserved for samples
SETTLED_EVERY = 1_000_000_000  # nanoseconds after which the budget earned by diagnoses is fixed
MAX_LOADING_NS = 200_000_000  # nanoseconds that loading the kernels of a diagnosis may take once
DIAGNOSES_DIVISOR = 5  # divisor: this part is for diagnoses
UNMEASURED_DIVISOR = 4
"""Divisor: this part is reserved for costs that cannot be measured here, such as evicted caches: a
step after a fingerprint takes 0.1 ms more. The reported costs include them."""

_now = time.perf_counter_ns

clock = time.thread_time_ns
"""Measures diagnoses by CPU time. On a crowded machine a thread waits for a core, which would cost
minutes of budget. On a GPU it is the time to launch the work."""


class Budget:
    """The account of one rank, in nanoseconds."""

    def __init__(self, percent: float) -> None:
        self._share = percent / 100
        self._start = _now()
        self._credit = max(int(self._share * CREDIT_NS), MIN_CREDIT_NS) if self._share else 0
        self._kept = min(SAMPLES_RESERVE_NS, self._credit)
        self.spent = 0  # nanoseconds spent on diagnoses
        self._behind = 0
        self.followed = 0  # known cost of following the steps
        self.writing = 0  # CPU time of the writing thread, set by that thread
        self.written = 0.0  # the part of all time that the writing thread takes
        self._written_before = 0
        self._settled_at = self._start
        self._settled = 0  # nanoseconds earned until `_settled_at`, whatever following costs later
        self._charged = 0  # nanoseconds charged for following since then, except granted ones

    @property
    def enabled(self) -> bool:
        """Return whether there is a budget."""
        return self._share > 0

    @property
    def share(self) -> float:
        """Return the budget as a ratio of the time."""
        return self._share

    def left(self, samples: bool = False) -> int:
        """Return the available nanoseconds, for ``samples`` including their reserve.

        It is negative after a diagnosis that cost too much.
        """
        if not self._share:
            return -1
        kept = 0 if samples else self._kept
        return self._credit + self.earned() - self.spent - self._behind - kept

    def spend(self, nanoseconds: int, samples: bool = False) -> None:
        """Charge for a diagnosis."""
        self.spent += nanoseconds
        if samples:
            self._kept = max(self._kept - nanoseconds, 0)

    def spend_behind(self, nanoseconds: int) -> None:
        """Charge for the unmeasured cost of a diagnosis in the next step."""
        self._behind += nanoseconds

    def spend_first(self, nanoseconds: int, usual: int) -> None:
        """Charge for the first diagnosis of its kind on a GPU, which loaded its kernels.

        The cost beyond the usual one is counted but does not reduce the budget.
        """
        self.spend(nanoseconds)
        self.grant(min(max(nanoseconds - usual, 0), MAX_LOADING_NS))

    @contextlib.contextmanager
    def spending(self, samples: bool = False) -> Iterator[None]:
        """Charge for the block, except for its own charges. Do not catch errors."""
        began, before = clock(), self.spent
        yield
        self.spend(max(before + clock() - began - self.spent, 0), samples)

    def follow(self, nanoseconds: int, granted: bool = False) -> None:
        """Charge for following some steps. If ``granted``, the budget of diagnoses stays."""
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
        """Return the nanoseconds earned so far by diagnoses, without the credit."""
        return self._earned(_now())

    def _earned(self, now: int) -> int:
        allowed = int(self._share * (now - self._settled_at))
        unseen, reserved = allowed // UNMEASURED_DIVISOR, allowed // DIAGNOSES_DIVISOR
        return self._settled + max(allowed - unseen - self._charged, reserved)

    def grant(self, nanoseconds: int) -> None:
        """Add to the credit."""
        self._credit += nanoseconds

    def account(self) -> tuple[int, int, int]:
        """Return the cost of diagnoses, the cost of following, and the time so far.

        Both costs include estimates of unmeasured costs.
        """
        spent, followed = (
            each * UNMEASURED_DIVISOR // (UNMEASURED_DIVISOR - 1)
            for each in (self.spent + self._behind, self.followed)
        )
        return spent, followed, _now() - self._start


def from_environment() -> Budget:
    """Return the budget that the supervisor set."""
    try:
        return Budget(float(os.environ[BUDGET]))
    except (KeyError, ValueError):
        return Budget(DEFAULT_PERCENT)
