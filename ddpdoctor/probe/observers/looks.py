"""At which steps the fingerprints of a rank are taken.

Ranks compare nothing among themselves, so all of them have to look at the same steps although each
has its own budget. A rank looks at the multiples of its interval, which is a power of two: two
ranks always share the multiples of the larger one.

Where the supervisor suspects that ranks differ it names a step a little ahead (see
`ddpdoctor.run.requests.Suspicion`): from there on each is looked at. A separate credit pays for
that, at most twice in the life of a rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from ddpdoctor.probe.runtime import rank
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.requests import SUSPICION, Suspicion, SuspicionReader

DENSE = 64
"""Steps at the beginning that are looked at one by one; later this many per doubling."""

SUSPICIONS = 2
"""Suspicions that this rank pays for: the first may not know yet which tensors to write."""

GRANT = 50_000_000
"""Nanoseconds that a suspicion may cost, unless two rich fingerprints cost more."""

MOST_GRANTED = 1_000_000_000
"""Nanoseconds that a suspicion may cost at most."""

LONGEST = 1 << 20


class Pace:
    """Which steps this rank looks at.

    Args:
        dense: Looks per doubling of the interval.
    """

    def __init__(self, dense: int = DENSE) -> None:
        self.interval = 1
        self._dense = dense
        self._floor = 1
        self._taken = 0

    def due(self, step: int) -> bool:
        """Whether the step is one of this rank's."""
        return not step & (self.interval - 1)

    def spare(self) -> None:
        """What was due could not be paid for."""
        self.interval = min(self.interval * 2, LONGEST)

    def took(self, surplus: bool) -> None:
        """What was due was done; ``surplus`` if several more could be paid for."""
        self._taken += 1
        if self._taken >= self._dense:
            self._taken = 0
            self._floor = min(self._floor * 2, LONGEST)
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
            and self._count < SUSPICIONS
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
