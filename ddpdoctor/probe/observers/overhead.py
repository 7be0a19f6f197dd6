"""Keep the probe's overhead within its budget: which steps are followed, and how closely.

Of every step it is known that it was, where it is, how often gradients were reduced and which
collectives were called: hangs and divergence need that, and it is the cheap part. The rest is
thinned out where steps are short (`Detail`): losses, batch sizes and DDP's timers are read in every
so many steps, and one line of the journal stands for several. Gradients are followed in all steps
unless that costs more than its share, then in some windows of steps (`Pacing`). Fingerprints are
taken at the multiples of an interval (`Pace`), and at each step that the supervisor suspects
(`Suspected`, see `ddpdoctor.run.mapped.Suspicion`), which a separate credit pays for.

Ranks compare nothing among themselves. All these numbers are powers of two and count from step 0,
so two ranks always share the steps of the one that thins out more.

What a rank spends is clocked in a step now and then, full ones and light ones in turn, and those
whose gradients are followed for themselves.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.probe.runtime import events, rank
from ddpdoctor.probe.runtime.budget import RESERVED, UNSEEN
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.mapped import SUSPICION, Suspicion, SuspicionReader, UnreadableError

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.budget import Budget


# -- detail


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

RARE_FULL, RAREST_FULL = 64, 128
"""Of so many steps at least one is seen in full: at the beginning of a job, or where steps are
longer than 9 ms, and otherwise."""

STEPS_SHARE = 2
"""Of what may be spent, a half at most goes here; what is left is for diagnoses."""

LEAST_STEPS_SHARE = 4
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
        allowed = max(share / STEPS_SHARE - written, share / LEAST_STEPS_SHARE) * self._step
        every, rarest, period = 1, RARE_FULL, SHORT if number < BEGINNING else LONG
        # Long steps that a small budget thins out are seen in full no more rarely for it.
        if number >= BEGINNING and RARE_FULL * self._step < LONGEST:
            rarest = RAREST_FULL
        light = min(light, self.full)
        while every < rarest and light + (self.full - light) / every > allowed:
            every *= 2
        if every == RAREST_FULL:
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


# -- in which steps the gradients are followed: all, unless that would cost more than its share


SETTLING_STEPS = 2
"""Steps at the beginning of a window that are counted, but not judged: a forward may have been
before it."""

RARE_WINDOW, RAREST_WINDOW = 4, 64
"""Of so many windows at least one is followed: at the beginning of a job, and later on."""

GRADIENTS_SHARE = 2
"""Of what diagnosis may cost, a half at most goes here, and no more than hooks leave."""

LEAST_GRADIENTS_SHARE = 16
"""Of that, a sixteenth at least, whatever they leave."""

RECHECKS = 4
"""How often it is looked, from one window that is followed to the next, whether more may be."""

CLOCKED_WINDOWS = 4
"""Of so many windows that are followed, a step of one is clocked."""

LEFT_OUT = 64
"""Where all windows are followed, one of so many is not: to see what the others cost more."""


class Pacing(Observer):
    """Which steps of a rank are followed."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self.settling = False
        self._detail = state.tracker.detail
        self._detail.pacing = True
        self._settled_at = 0
        self._turned: tuple[int, int] | None = None
        """When it was last looked at which windows to follow, and before which step."""
        self._rarity = 1
        self._paced: list[Observer] = []
        events.before_step(1, self._go_on)

    def follow(self, observer: Observer) -> None:
        """Call an observer at the moments of those steps alone that are followed."""
        self._paced.append(observer)
        events.subscribe(observer)

    def _go_on(self) -> None:
        """Between two training steps: turn to the next window, or judge from now on."""
        number = self.state.tracker.steps
        if self.settling and number >= self._settled_at:
            self.settling = False
        if not number % WINDOW:
            self._turn(number)
        # In between nothing changes, and nothing is called.
        ahead = WINDOW * (1 if self._detail.pacing else max(1, self._rarity // RECHECKS))
        following = number + ahead - number % ahead
        events.before_step(self._settled_at if self.settling else following, self._go_on)

    def _turn(self, number: int) -> None:
        """Windows ended: pay for one that was followed, and see whether the next one is."""
        now = _now()
        last, self._turned = self._turned, (now, number)
        budget, before = self.state.budget, self._detail.pacing
        cost = WINDOW * self._detail.surplus
        if before:
            budget.follow(int(cost), granted=number <= BEGINNING)
        if last is None:
            return
        rarity, rarest = (
            1,
            RAREST_WINDOW if number >= BEGINNING else RARE_WINDOW if number >= CLOSELY else 1,
        )
        may_cost = self._may_cost((now - last[0]) * WINDOW / max(number - last[1], 1))
        while rarity < rarest and (cost > rarity * may_cost or not budget.enabled):
            rarity *= 2
        self._rarity = rarity
        window = number // WINDOW
        left_out = rarity == 1 and self._detail.sparse and not (window + 1) % LEFT_OUT
        awake = self._detail.pacing = not window % rarity and not left_out
        if before is not awake:
            for each in self._paced:
                events.pause(each, not awake)
        if awake and not before:
            self.settling, self._settled_at = True, number + SETTLING_STEPS
        if left_out or (awake and not window // rarity % CLOCKED_WINDOWS):
            events.before_step(number + SETTLING_STEPS, self._detail.clock_next, last=True)

    def _may_cost(self, nanoseconds: float) -> float:
        """What following may cost in a window that takes so long.

        The hooks of all steps, and what is kept for diagnoses, leave it.
        """
        budget = self.state.budget
        kept = budget.share / RESERVED + budget.share / UNSEEN + budget.written
        left = (budget.share - kept) * nanoseconds
        left -= WINDOW * self._detail.taken
        share = budget.share * nanoseconds
        return min(share / GRADIENTS_SHARE, max(left, share / LEAST_GRADIENTS_SHARE))


# -- at which steps the fingerprints of a rank are taken


DENSE_SAMPLES = 64
"""Steps at the beginning that are looked at one by one; later this many per doubling."""

MOST_SUSPICIONS = 2
"""Suspicions that this rank pays for: the first may not know yet which tensors to write."""

GRANT = 50_000_000
"""Nanoseconds that a suspicion may cost, unless two rich fingerprints cost more."""

MOST_GRANTED = 1_000_000_000
"""Nanoseconds that a suspicion may cost at most."""

LONGEST_INTERVAL = 1 << 20


class Pace:
    """Which steps this rank looks at.

    Args:
        dense: Looks per doubling of the interval.
    """

    def __init__(self, dense: int = DENSE_SAMPLES) -> None:
        self.interval = 1
        self._dense = dense
        self._floor = 1
        self._taken = 0

    def due(self, step: int) -> bool:
        """Whether the step is one of this rank's."""
        return not step & (self.interval - 1)

    def spare(self) -> None:
        """What was due could not be paid for."""
        self.interval = min(self.interval * 2, LONGEST_INTERVAL)

    def took(self, surplus: bool) -> None:
        """What was due was done; ``surplus`` if several more could be paid for."""
        self._taken += 1
        if self._taken >= self._dense:
            self._taken = 0
            self._floor = min(self._floor * 2, LONGEST_INTERVAL)
            self.interval = max(self.interval, self._floor)
        elif surplus and self.interval > self._floor:
            self.interval //= 2


class Suspected:
    """The steps that the supervisor wants to be looked at closely.

    Args:
        state: The rank.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._suspicion: Suspicion | None = None
        self._count = 0
        self._reader: SuspicionReader | None = None
        # There may be no supervisor, or one that is too new.
        with contextlib.suppress(KeyError, OSError, ValueError, UnreadableError):
            self._reader = SuspicionReader(os.path.join(rank.run_directory(), SUSPICION))

    @property
    def active(self) -> bool:
        """Whether steps are looked at closely, or are to be."""
        return self._suspicion is not None

    def watch(self, noticing: Callable[[], None]) -> None:
        """Have the step tracker look, at each step, whether anything is suspected."""
        if self._reader is not None:
            self._state.tracker.watch(*self._reader.sequence)
            self._state.tracker.noticing = noticing

    def at(self, step: int, cost: int) -> Suspicion | None:
        """The suspicion for which a step is looked at, whatever the pace says.

        Args:
            step: The step that has ended.
            cost: Nanoseconds that a rich fingerprint takes.
        """
        news = self._reader.news() if self._reader is not None else None
        if (
            news is not None
            and news.restart == self._state.restart
            and self._count < MOST_SUSPICIONS
            # Else it is too late for the step that all ranks share.
            and step <= news.step
        ):
            self._count += 1
            self._suspicion = news
            budget = self._state.budget
            needed = max(GRANT, 2 * cost) - budget.left()
            budget.grant(max(0, min(needed, MOST_GRANTED)))
        suspicion = self._suspicion
        if suspicion is None or step < suspicion.step:
            return None
        if step >= suspicion.step + suspicion.steps:
            self._suspicion = None
            return None
        return suspicion
