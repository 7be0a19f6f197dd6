"""Some ranks stand in the debugger, the others wait for them in a collective: who for whom."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from ddpdoctor.core.ranks import named
from ddpdoctor.debug.gateway import Stop
from ddpdoctor.run.record import Phase, Status
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
        standing = frozenset(stop.rank for stop in stops)
        waiting = [
            rank.status
            for rank in run.last
            if rank.status is not None and rank.rank not in standing and _waits(rank.status)
        ]
        kept = [rank.opened.get("kept_timeout") for rank in run.last]
        timeouts = [each for each in kept if isinstance(each, (int, float))]
        now = time.monotonic()
        if not standing:
            self._since = None
            if not waiting:
                # Else it is the same stop still: somebody steps through the lines.
                self._said = None
            return ""
        self._since = self._since or now
        if now - self._since < PATIENCE:
            return ""
        before, self._picture = self._picture, None
        picture = (standing, frozenset(status.rank for status in waiting))
        if not waiting or picture == self._said:
            return ""
        if picture != before:
            # Ranks come one by one; said once nobody joins them any more.
            self._picture = picture
            return ""
        self._said = picture
        places = {_short(stop.place) for stop in stops} - {""}
        at = f" at {places.pop()}" if len(places) == 1 else ""
        verb = "is" if len(standing) == 1 else "are"
        them = "it" if len(standing) == 1 else "them"
        wait = "waits" if len(waiting) == 1 else "wait"
        return (
            f"{named(standing)} {verb} held by the debugger{at}; "
            f"{named(picture[1])} {wait} for {them}{_where(waiting)} and will stop at "
            "breakpoints after that" + _timeout(timeouts)
        )


def _timeout(kept: Sequence[float]) -> str:
    """What lifting timeouts does not reach: gloo of some torch keeps its group's."""
    if not kept:
        return ""
    shortest = min(kept)
    told = f"{shortest / 60:.0f} min" if shortest >= 120 else f"{shortest:.0f} s"
    return (
        f"; this torch's gloo keeps its timeout of {told}, after which they fail: a job that is "
        "started with --wait-for-attach has none"
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
    return f" in {what} ({_short(site)})" if site else f" in {what}"


def _short(place: str) -> str:
    path, colon, line = place.rpartition(":")
    relative = os.path.relpath(path) if path else ""
    return f"{path if relative.startswith('..') else relative}{colon}{line}" if path else ""
