"""In which steps the gradients are followed: all, unless that would cost more than its share.

Where steps take a millisecond, to count forwards and backwards is dear. Then it is done in some
windows of steps only: the same ones on all ranks, since they are chosen by the number of the step.
What it costs is measured now and then, and counted as the hooks of the steps are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.runtime import events, shield
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState

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

_now = time.perf_counter_ns


class Pacing(Observer):
    """Which steps of a rank are followed."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self.awake = True
        self.settling = False
        self.cost = 0
        """Nanoseconds of the step that is being measured, so far."""
        self.measuring = False
        self._measured_at = WINDOW + SETTLING
        self._estimate = 0
        """Nanoseconds of the last step that was measured."""
        self._settled_at = 0
        self._turned: int | None = None
        """When the window under way began."""
        self._paced: list[Observer] = []
        events.before_step(1, self._go_on)

    def follow(self, observer: Observer) -> None:
        """Call an observer at the moments of those steps alone that are followed."""
        self._paced.append(observer)
        events.subscribe(observer, self.paced)

    def paced(self, function: Callable[..., None]) -> Callable[..., None]:
        """A subscriber that sleeps where it would cost too much, without its exceptions."""
        name = shield.name_of(function)

        def call(*args: Any) -> None:
            if not self.awake or name in shield.off:
                return
            try:
                if self.measuring:
                    began = clock()
                    function(*args)
                    self.cost += clock() - began
                elif self.state.tracker.clocked:
                    # What this takes is counted here, not among the hooks that are clocked.
                    began = clock()
                    function(*args)
                    self.state.tracker.spent -= clock() - began
                else:
                    function(*args)
            except Exception as error:
                shield.fault(name, error)

        return call

    def _go_on(self) -> None:
        """Between two training steps: measure the next one, or turn to the next window."""
        number = self.state.tracker.steps
        if self.measuring:
            self.measuring, self._estimate, self.cost = False, self.cost, 0
        if number == self._measured_at and self.awake:
            self.measuring = True
        if self.settling and number >= self._settled_at:
            self.settling = False
        if not number % WINDOW:
            self._turn(number)
        # In between nothing changes, and nothing is called.
        following = [number + WINDOW - number % WINDOW]
        if self.awake:
            following += [each for each in (self._measured_at, self._settled_at) if each > number]
        if self.measuring:
            following.append(number + 1)
        events.before_step(min(following), self._go_on)

    def _turn(self, number: int) -> None:
        """A window ended: pay for it, and see whether the next one is followed."""
        now = _now()
        began, self._turned = self._turned, now
        budget = self.state.budget
        if self.awake:
            budget.follow(WINDOW * self._estimate, granted=number <= DENSE)
        if began is None or not budget.enabled:
            return
        rarity = 1
        may_cost = budget.share * (now - began) / SHARE
        while number >= DENSE and rarity < RAREST and WINDOW * self._estimate > rarity * may_cost:
            rarity *= 2
        window = number // WINDOW
        before, self.awake = self.awake, not window % rarity
        if before is not self.awake:
            for each in self._paced:
                events.pause(each, not self.awake)
        if self.awake and not before:
            self.settling, self._settled_at = True, number + SETTLING
        if self.awake and not window // rarity % MEASURED:
            self._measured_at = number + SETTLING
