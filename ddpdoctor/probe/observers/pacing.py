"""In which steps the gradients are followed: all, unless that would cost more than its share.

Where steps take a millisecond, to count forwards and backwards is dear. Then it is done in some
windows of steps only: the same ones on all ranks, since they are chosen by the number of the step.
What it costs is clocked with the hooks of the steps (`ddpdoctor.probe.observers.detail`): of a step
whose gradients are followed the hooks do more, beside what is called here.
"""

from __future__ import annotations

import time

from ddpdoctor.probe.observers.detail import BEGINNING, CLOSELY, WINDOW
from ddpdoctor.probe.runtime import events
from ddpdoctor.probe.runtime.budget import RESERVED, UNSEEN
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState

SETTLING = 2
"""Steps at the beginning of a window that are counted, but not judged: a forward may have been
before it."""

RARE, RAREST = 4, 64
"""Of so many windows at least one is followed: at the beginning of a job, and later on."""

SHARE = 2
"""Of what diagnosis may cost, a half at most goes here, and no more than hooks leave."""

LEAST = 16
"""Of that, a sixteenth at least, whatever they leave."""

LOOKS = 4
"""How often it is looked, from one window that is followed to the next, whether more may be."""

CLOCKED = 4
"""Of so many windows that are followed, a step of one is clocked."""

LEFT_OUT = 64
"""Where all windows are followed, one of so many is not: to see what the others cost more."""

_now = time.perf_counter_ns


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
        ahead = WINDOW * (1 if self._detail.pacing else max(1, self._rarity // LOOKS))
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
        rarity, rarest = 1, RAREST if number >= BEGINNING else RARE if number >= CLOSELY else 1
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
            self.settling, self._settled_at = True, number + SETTLING
        if left_out or (awake and not window // rarity % CLOCKED):
            events.before_step(number + SETTLING, self._detail.clock_next, last=True)

    def _may_cost(self, nanoseconds: float) -> float:
        """What following may cost in a window that takes so long.

        The hooks of all steps, and what is kept for diagnoses, leave it.
        """
        budget = self.state.budget
        kept = budget.share / RESERVED + budget.share / UNSEEN + budget.written
        left = (budget.share - kept) * nanoseconds
        left -= WINDOW * self._detail.taken
        share = budget.share * nanoseconds
        return min(share / SHARE, max(left, share / LEAST))
