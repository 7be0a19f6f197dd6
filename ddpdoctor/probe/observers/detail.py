"""How closely the steps of a rank are followed, so that following them stays within the budget.

Of every step it is known that it was, where it is, how often gradients were reduced and which
collectives were called: hangs and divergence need that, and it is the cheap part. The rest is
thinned out where steps are short: losses, batch sizes and DDP's timers are read in every so many
steps, and one line of the journal stands for several. Both numbers are powers of two and count from
step 0, so ranks that thin differently still share every step of the one that thins more.

What a rank spends is clocked in a step now and then, full ones and light ones in turn. Of these the
ones whose gradients are followed (`ddpdoctor.probe.observers.pacing`) are clocked for themselves.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.probe.runtime import events

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.budget import Budget

CLOSELY = 256
"""Steps at the beginning of which everything is seen, each with its own line."""

BEGINNING = 1024
"""Steps at the beginning in which a line stands for `SHORT` nanoseconds, not `LONG`, and more steps
are seen in full, and more gradients followed, than later on."""

SHORT, LONG, LONGEST = 8_000_000, 300_000_000, 600_000_000
"""Nanoseconds that a line of the journal stands for at least: 50 KB a minute later on, and half of
that where steps are so short that they cannot be thinned out any more."""

MOST_STEPS = 1024
"""Steps that a line stands for at most."""

RARE, RAREST = 64, 128
"""Of so many steps at least one is seen in full: at the beginning of a job, or where steps are
longer than 9 ms, and otherwise."""

SHARE = 2
"""Of what may be spent, a half at most goes here; what is left is for diagnoses."""

LEAST = 4
"""Of what may be spent, a quarter at least goes here, whatever the writing thread takes."""

WINDOW = 16
"""Steps whose gradients are followed, or not, together."""

CLOCKED_EVERY = 500_000_000
"""Nanoseconds between two steps that are clocked."""

CLOCKED_AT_FIRST = 10_000_000
"""The same at the beginning."""

_SMOOTH = 8

_now = time.perf_counter_ns


class Clocked(Protocol):
    """Whose hooks are clocked (`ddpdoctor.probe.runtime.phases.Phases`)."""

    clocked: bool
    spent: int


class Detail:
    """How closely the steps of one rank are followed.

    Args:
        hooks: What counts the time that hooks take.
    """

    def __init__(self, hooks: Clocked) -> None:
        self._hooks = hooks
        self.line = 0
        """A line of the journal ends before a step whose number has none of these bits."""
        self.sparse = 0
        """A step is seen in full if the number of the next one has none of these bits."""
        self.most = MOST_STEPS
        self.full = self.light = 0.0
        """Nanoseconds that a step takes which is seen in full, and one that is not."""
        self.paced = 0.0
        """Nanoseconds that a light step takes whose gradients are followed."""
        self.pacing = False
        """Whether those of the step under way are."""
        self._budget: Budget | None = None
        self._step = 0.0
        self._clock_at = 0
        self._clocks_light = False
        self._before = 0
        self._charged = 0

    def follow(self, budget: Budget) -> None:
        """Keep to a budget from now on."""
        self._budget = budget

    def _usual(self, number: int) -> int:
        """The next step of the kind whose turn it is.

        Of light ones not the first: diagnoses choose the multiples of powers of two, and windows of
        steps whose gradients are followed begin there.
        """
        if not self._clocks_light:
            return number | self.sparse
        number += WINDOW + 2
        return number if (number + 1) & self.sparse else number + 1

    def clock_next(self) -> None:
        """Clock the hooks of the step that begins, unless the one that ends is clocked."""
        if self._hooks.clocked:
            # The hook that ends it is still under way.
            return
        self._hooks.clocked, self._hooks.spent = True, 0
        self._before = self._diagnosed

    def clock(self, was_light: bool) -> None:
        """The step that was clocked has ended."""
        # What diagnoses took they have counted themselves.
        diagnosed = self._diagnosed - self._before
        spent = self._hooks.spent - diagnosed
        self._hooks.clocked = False
        if spent <= 0:
            # They were elsewhere: in the loader's hooks, in autograd's thread.
            return
        follow = _mean if diagnosed else _cost
        if not was_light:
            self.full = follow(self.full, spent)
        elif self.pacing:
            self.paced = follow(self.paced, spent)
        else:
            self.light = follow(self.light, spent)

    @property
    def surplus(self) -> float:
        """Nanoseconds that it takes to follow the gradients of a light step."""
        return max(self.paced - self.light, 0.0) if self.sparse else 0.0

    @property
    def taken(self) -> float:
        """Nanoseconds that the hooks of a step take on average, without following gradients."""
        light = min(self.light, self.full)
        return light + (self.full - light) / (self.sparse + 1)

    @property
    def _diagnosed(self) -> int:
        return self._budget.spent if self._budget is not None else 0

    def choose(self, number: int, total: int) -> None:
        """A line has ended: how closely to follow the steps of the next one.

        Args:
            number: Of the step that begins.
            total: Nanoseconds of the last one.
        """
        now = _now()
        if now >= self._clock_at:
            self._clock_at = now + (CLOCKED_EVERY if number >= BEGINNING else CLOCKED_AT_FIRST)
            self._clocks_light = not self._clocks_light
            events.before_step(self._usual(number), self.clock_next, last=True)
        self._step = _mean(self._step, total)
        budget = self._budget
        # Where the gradients of all are followed, what they take is all surplus.
        light = self.light or (0.0 if self.paced else self.full)
        if budget is not None:
            steps, self._charged = number - self._charged, number
            seen = -(-steps // (self.sparse + 1))
            took = int(seen * self.full + (steps - seen) * light)
            budget.follow(took, granted=number <= CLOSELY)
        if number < CLOSELY:
            return
        share = budget.share if budget is not None else 0.0
        written = budget.written if budget is not None else 0.0
        allowed = max(share / SHARE - written, share / LEAST) * self._step
        every, rarest, period = 1, RARE, SHORT if number < BEGINNING else LONG
        # Long steps that a small budget thins out are seen in full no more rarely for it.
        if number >= BEGINNING and RARE * self._step < LONGEST:
            rarest = RAREST
        light = min(light, self.full)
        while every < rarest and light + (self.full - light) / every > allowed:
            every *= 2
        if every == RAREST:
            period = LONGEST
        count = every
        while count < self.most and count * self._step < period:
            count *= 2
        self.sparse, self.line = every - 1, count - 1


def _cost(before: float, value: float) -> float:
    """A mean of what is clocked, where a step may seem dear by accident, but hardly cheap."""
    return value if value < before / 2 else _mean(before, value)


def _mean(before: float, value: float) -> float:
    """A mean that follows what is measured; the first value begins it."""
    return value if not before else before + (value - before) / _SMOOTH
