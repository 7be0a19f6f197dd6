"""Some ranks stand in the debugger, the others wait for them in a collective: who for whom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpdoctor.core.ranks import named
from ddpdoctor.core.units import duration
from ddpdoctor.core.working_directory import relative_place
from ddpdoctor.run.status import Phase, Status

if TYPE_CHECKING:
    from ddpdoctor.debug.slots import Stop
    from ddpdoctor.run.snapshot import Run

PATIENCE = 2.0
"""Seconds in which all ranks may reach the same breakpoint."""

STEPS = 3
"""Steps that a phase has to last before it counts as a wait: backward is long on a slow machine."""

_MAY_WAIT = (Phase.WAIT, Phase.FORWARD, Phase.BACKWARD)
"""Phases with a collective in them: DDP's own run inside forward and backward."""


class PartialStops:
    """Says each partial stop once."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._picture: tuple[frozenset[int], frozenset[int]] | None = None
        self._said: tuple[frozenset[int], frozenset[int]] | None = None

    def look(self, run: Run, stops: Sequence[Stop]) -> str:
        """A sentence if there is something new to say, else an empty string."""
        held = frozenset(stop.rank for stop in stops)
        waiting = [
            rank.status
            for rank in run.last
            if rank.status is not None and rank.rank not in held and _waits(rank.status)
        ]
        if not held:
            self._since = None
            if not waiting:
                # Else it is the same stop still: somebody steps through the lines.
                self._said = None
            return ""
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < PATIENCE:
            return ""
        before, self._picture = self._picture, None
        picture = (held, frozenset(status.rank for status in waiting))
        if not waiting or picture == self._said:
            return ""
        if picture != before:
            # Ranks come one by one; said once no more of them join.
            self._picture = picture
            return ""
        self._said = picture
        return _sentence(stops, waiting) + _timeout(run)


def _sentence(stops: Sequence[Stop], waiting: Sequence[Status]) -> str:
    ranks = {stop.rank for stop in stops}
    places = {relative_place(stop.place) for stop in stops} - {""}
    at = f" at {places.pop()}" if len(places) == 1 else ""
    verb, them = ("is", "it") if len(ranks) == 1 else ("are", "them")
    wait = "waits" if len(waiting) == 1 else "wait"
    return (
        f"{named(ranks)} {verb} held by the debugger{at}; "
        f"{named(status.rank for status in waiting)} {wait} for {them}{_where(waiting)} and will "
        "stop at breakpoints after that"
    )


def _timeout(run: Run) -> str:
    """What lifting timeouts does not reach: gloo of some torch keeps its group's."""
    kept = [rank.opened.kept_timeout for rank in run.last]
    timeouts = [each for each in kept if each is not None]
    if not timeouts:
        return ""
    return (
        f"; this torch's gloo keeps its timeout of {duration(min(timeouts))}, after which they "
        "fail: a job that is started with --wait-for-attach has none"
    )


def _waits(status: Status) -> bool:
    since = (time.time_ns() - status.since) / 1e9
    patience = max(PATIENCE, STEPS * status.last_total / 1e9)
    return status.phase in _MAY_WAIT and since > patience


def _where(waiting: Sequence[Status]) -> str:
    """What they wait in, if that is the same for all."""
    places = {(status.collective or status.phase.label, status.site) for status in waiting}
    if len(places) != 1:
        return ""
    what, site = places.pop()
    return f" in {what} ({relative_place(site)})" if site else f" in {what}"
