"""Keep the probe's overhead within its budget: choose which steps to follow, and how closely.

For every step we record that it happened, its phases, the number of reductions and the collectives.
Diagnoses of hangs and divergence need that, and it is cheap. The rest is sampled if steps are
short:

- `Detail`: losses, batch sizes and DDP's timers are read only in some steps ("full" steps, the
  others are "light"), and one line of the journal covers several steps.
- `Pacing`: gradients are followed in all steps, or in windows of steps if that exceeds its share.
- `Pace`: fingerprints are taken at the multiples of an interval, and at each suspected step
  (`Suspected`), which a separate credit pays for.

Ranks do not communicate. All these numbers are powers of two and count from step 0, so two ranks
always share the steps of the rank that samples less.

The cost is measured in single steps, alternately full and light ones, and separately in steps whose
gradients are followed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.probe.runtime import events, rank
from ddpdoctor.probe.runtime.budget import DIAGNOSES_DIVISOR, UNMEASURED_DIVISOR, clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.mapped import SUSPICION, Suspicion, SuspicionReader, UnreadableError

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.budget import Budget

DENSE_STEPS = 256  # number of first steps, all full, each with its own line
MIN_DENSE_STEPS, DENSE_COST = 128, 16_000_000
"""Minimum number of dense steps, and nanoseconds that following them takes before they end."""

EARLY_STEPS = 1024  # number of first steps, with more lines, full steps and windows than later

# -- how closely a step is followed

EARLY_LINE, LATE_LINE, LONGEST_LINE = 8_000_000, 300_000_000, 600_000_000
"""Minimum nanoseconds per line of the journal: at the beginning, later (50 KB a minute), and if
steps are so short that no more of them can be light."""

MAX_STEPS = 1024  # maximum number of steps per line
EARLY_FULL, LATE_FULL = 64, 128
"""Maximum interval of full steps: at the beginning or if steps take 9 ms or more, and otherwise."""

STEPS_SHARE, MIN_STEPS_SHARE = 2, 4
"""Divisors: a quarter to a half of the budget is for following steps, including writing records."""

WINDOW = 16  # number of steps in a window
CLOCKED_EVERY, CLOCKED_AT_FIRST = 500_000_000, 10_000_000
"""Nanoseconds between two measured steps: later, and at the beginning."""

_SMOOTH = 8
_now = time.perf_counter_ns


class Clocked(Protocol):
    """The measured hooks (`ddpdoctor.probe.runtime.phases.Phases`)."""

    clocked: bool
    spent: int


class Detail:
    """Choose how closely the steps of one rank are followed. ``hooks`` measures its hooks."""

    def __init__(self, hooks: Clocked) -> None:
        self._hooks = hooks
        self.line = 0  # a journal line ends before a step whose number has none of these bits
        self.sparse = 0  # a step is full if the number of the next one has none of these bits
        self.most = MAX_STEPS
        self.full = self.light = 0.0  # nanoseconds of the hooks in a full and in a light step
        self.paced = 0.0  # the same in a light step with followed gradients
        self.pacing = False  # whether the gradients of the current step are followed
        self.dense = True  # whether all steps are full
        self._budget: Budget | None = None
        self._step = 0.0
        self._clock_at = 0
        self._clocks_light = False
        self._before = 0
        self._charged = 0

    def follow(self, budget: Budget) -> None:
        """Respect a budget from now on."""
        self._budget = budget

    def _usual(self, number: int) -> int:
        """Return the next step of the kind to measure.

        Skip the first light step: diagnoses choose multiples of powers of two, where windows begin.
        """
        if not self._clocks_light:
            return number | self.sparse
        number += WINDOW + 2
        return number if (number + 1) & self.sparse else number + 1

    def clock_next(self) -> None:
        """Measure the hooks of the step that begins."""
        if self._hooks.clocked:
            # The hook that ends the last measured step is still running.
            return
        self._hooks.clocked, self._hooks.spent = True, 0
        self._before = self._diagnosed

    def charge(self, began: int) -> None:
        """Charge for work since ``began`` that not every step does, such as starting a pass.

        It would distort the cost of the measured step.
        """
        took = clock() - began
        if self._hooks.clocked:
            self._hooks.spent -= took
        if self._budget is not None:
            self._budget.follow(took, granted=self.dense)

    def clock(self, was_light: bool) -> None:
        """Note the cost of the measured step at its end."""
        # Diagnoses charge their cost themselves.
        diagnosed = self._diagnosed - self._before
        spent = self._hooks.spent - diagnosed
        self._hooks.clocked = False
        if spent <= 0:
            # Diagnoses ran elsewhere: in the loader's hooks, or in autograd's thread.
            return
        name = "full" if not was_light else "paced" if self.pacing else "light"
        before = getattr(self, name)
        # A high cost may be an outlier. A low cost rarely is.
        less = spent < before / 2 and not diagnosed
        setattr(self, name, spent if less else _mean(before, spent))

    @property
    def surplus(self) -> float:
        """The extra nanoseconds of a light step with followed gradients."""
        return max(self.paced - self.light, 0.0) if self.sparse else 0.0

    @property
    def taken(self) -> float:
        """The average nanoseconds of a step's hooks, without following gradients."""
        light = min(self.light, self.full)
        return light + (self.full - light) / (self.sparse + 1)

    @property
    def _diagnosed(self) -> int:
        return self._budget.spent if self._budget is not None else 0

    def choose(self, number: int, total: int) -> None:
        """Choose how closely to follow the steps of the next line, given its first step.

        ``total`` is the duration of the last step in nanoseconds.
        """
        now = _now()
        if now >= self._clock_at:
            self._clock_at = now + (CLOCKED_EVERY if number >= EARLY_STEPS else CLOCKED_AT_FIRST)
            self._clocks_light = not self._clocks_light
            events.before_step(self._usual(number), self.clock_next, last=True)
        self._step = _mean(self._step, total)
        budget = self._budget
        # If all gradients are followed, `surplus` accounts for the light steps.
        light = self.light or (0.0 if self.paced else self.full)
        share = written = 0.0
        if budget is not None:
            steps, self._charged = number - self._charged, number
            seen = -(-steps // (self.sparse + 1))
            took = int(seen * self.full + (steps - seen) * light)
            budget.follow(took, granted=self.dense)
            share, written = budget.share, budget.written
        if self.dense and number < DENSE_STEPS:
            took = budget.followed if budget is not None else 0
            if number < MIN_DENSE_STEPS or took < DENSE_COST:
                return
        self.dense = False
        allowed = max(share / STEPS_SHARE - written, share / MIN_STEPS_SHARE) * self._step
        every, most, period = 1, EARLY_FULL, EARLY_LINE if number < EARLY_STEPS else LATE_LINE
        # Keep this density for long steps even with a small budget.
        if number >= EARLY_STEPS and EARLY_FULL * self._step < LONGEST_LINE:
            most = LATE_FULL
        light = min(light, self.full)
        while every < most and light + (self.full - light) / every > allowed:
            every *= 2
        if every == LATE_FULL:
            period = LONGEST_LINE
        count = every
        while count < self.most and count * self._step < period:
            count *= 2
        self.sparse, self.line = every - 1, count - 1


def _mean(before: float, value: float) -> float:
    """Return a running mean that starts with the first value."""
    return value if not before else before + (value - before) / _SMOOTH


# -- in which steps gradients are followed

SETTLING_STEPS = 2
"""First steps of a window that count but are not judged, because their forward may precede it."""

EARLY_WINDOW, LATE_WINDOW = 4, 64
"""Maximum interval of followed windows: at the beginning, and later."""

GRADIENTS_SHARE, MIN_GRADIENTS_SHARE = 2, 16
"""Divisors: at most half of the budget is for gradients, limited to the rest that the hooks leave,
and at least a sixteenth."""

RECHECKS = 4  # number of checks between two followed windows for whether to follow more
CLOCKED_WINDOWS = 4  # interval of followed windows with a measured step
UNFOLLOWED_EVERY = 64
"""If all windows are followed, the interval of unfollowed ones that measure the difference."""


class Pacing(Observer):
    """Choose the windows of steps in which costly observers are called."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self.settling = False
        self._detail = state.tracker.detail
        self._detail.pacing = True
        self._settled_at = 0
        self._turned: tuple[int, int] | None = None  # time and step of the last choice
        self._rarity = 1
        self._paced: list[Observer] = []
        events.before_step(1, self._go_on)

    def follow(self, observer: Observer) -> None:
        """Call an observer only for the events of the chosen steps."""
        self._paced.append(observer)
        events.subscribe(observer)

    def _go_on(self) -> None:
        """Start the next window, or start judging. Called between two training steps."""
        number = self.state.tracker.steps
        if self.settling and number >= self._settled_at:
            self.settling = False
        if not number % WINDOW:
            self._turn(number)
        ahead = WINDOW * (1 if self._detail.pacing else max(1, self._rarity // RECHECKS))
        following = number + ahead - number % ahead
        events.before_step(self._settled_at if self.settling else following, self._go_on)

    def _turn(self, number: int) -> None:
        """Charge for the windows that ended, and decide whether to follow the next one."""
        now = _now()
        last, self._turned = self._turned, (now, number)
        budget, detail, before = self.state.budget, self._detail, self._detail.pacing
        cost = WINDOW * detail.surplus
        if before:
            budget.follow(int(cost), granted=number <= EARLY_STEPS)
        if last is None:
            return
        # The budget of a window, after the hooks of all steps and the reserve.
        elapsed = (now - last[0]) * WINDOW / max(number - last[1], 1)
        share = budget.share * elapsed
        reserved = (
            budget.share / DIAGNOSES_DIVISOR + budget.share / UNMEASURED_DIVISOR + budget.written
        )
        left = (budget.share - reserved) * elapsed - WINDOW * detail.taken
        may_cost = min(share / GRADIENTS_SHARE, max(left, share / MIN_GRADIENTS_SHARE))
        rarity, most = 1, 1
        if number >= DENSE_STEPS or not detail.dense:
            most = LATE_WINDOW if number >= EARLY_STEPS else EARLY_WINDOW
        while rarity < most and (cost > rarity * may_cost or not budget.enabled):
            rarity *= 2
        self._rarity = rarity
        window = number // WINDOW
        left_out = rarity == 1 and detail.sparse and not (window + 1) % UNFOLLOWED_EVERY
        awake = detail.pacing = not window % rarity and not left_out
        if before is not awake:
            for each in self._paced:
                events.pause(each, not awake)
        if awake and not before:
            self.settling, self._settled_at = True, number + SETTLING_STEPS
        if left_out or (awake and not window // rarity % CLOCKED_WINDOWS):
            events.before_step(number + SETTLING_STEPS, detail.clock_next, last=True)


# -- at which steps fingerprints are taken

DENSE_SAMPLES = 64  # number of fingerprints per doubling, at first one in each step
MAX_SUSPICIONS = 2  # maximum number of paid suspicions: the first may not name the tensors to write
MIN_GRANT = 50_000_000  # nanoseconds per suspicion, unless two rich fingerprints cost more
MAX_GRANTED = 1_000_000_000  # maximum nanoseconds granted for a suspicion
LONGEST_INTERVAL = 1 << 20


class Pace:
    """Choose the steps whose fingerprint a rank takes. The interval doubles after ``dense``."""

    def __init__(self, dense: int = DENSE_SAMPLES) -> None:
        self.interval = 1
        self._dense = dense
        self._floor = 1
        self._taken = 0

    def due(self, step: int) -> bool:
        """Return whether the fingerprint of a step is due."""
        return not step & (self.interval - 1)

    def spare(self) -> None:
        """Double the interval, because the due fingerprint was too expensive."""
        self.interval = min(self.interval * 2, LONGEST_INTERVAL)

    def took(self, surplus: bool) -> None:
        """Note that a fingerprint was taken. ``surplus``: whether the budget suffices for more."""
        self._taken += 1
        if self._taken >= self._dense:
            self._taken = 0
            self._floor = min(self._floor * 2, LONGEST_INTERVAL)
            self.interval = max(self.interval, self._floor)
        elif surplus and self.interval > self._floor:
            self.interval //= 2


class Suspected:
    """The steps whose fingerprints the supervisor requests."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._suspicion: Suspicion | None = None
        self._count = 0
        self._reader: SuspicionReader | None = None
        # There may be no supervisor, or one of another version.
        with contextlib.suppress(KeyError, OSError, ValueError, UnreadableError):
            self._reader = SuspicionReader(os.path.join(rank.run_directory(), SUSPICION))

    @property
    def active(self) -> bool:
        """Return whether a suspicion is unfinished."""
        return self._suspicion is not None

    def watch(self, noticing: Callable[[], None]) -> None:
        """Have the step tracker check at each step for a new suspicion."""
        if self._reader is not None:
            self._state.tracker.watch(*self._reader.sequence)
            self._state.tracker.noticing = noticing

    def at(self, step: int, cost: int) -> Suspicion | None:
        """Return the suspicion that requests the fingerprint of an ended step.

        ``cost`` is the cost of a rich fingerprint in nanoseconds.
        """
        news = self._reader.news() if self._reader is not None else None
        if (
            news is not None
            and news.restart == self._state.restart
            and self._count < MAX_SUSPICIONS
            # Otherwise it is too late for the step that all ranks share.
            and step <= news.step
        ):
            self._count += 1
            self._suspicion = news
            budget = self._state.budget
            needed = max(MIN_GRANT, 2 * cost) - budget.left()
            budget.grant(max(0, min(needed, MAX_GRANTED)))
        suspicion = self._suspicion
        if suspicion is None or step < suspicion.step:
            return None
        if step >= suspicion.step + suspicion.steps:
            self._suspicion = None
            return None
        return suspicion
