"""Record the line of a rank that has long been outside of the training loop.

No hook observes work between two phases, such as the preparation of data, so a rank that is killed
there leaves no line. The writing thread records one at doubling intervals.
"""

from __future__ import annotations

import sys
import time

from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import CHAIN, sites_of
from ddpdoctor.run.records.process import OwnWorkRecord
from ddpdoctor.run.status import Phase

MIN_PHASE_NS = 2_000_000_000  # nanoseconds in one phase after which its line is recorded first
MAX_RECORDS = 64
_OUTSIDE = (int(Phase.STARTING), int(Phase.OTHER))


class OwnWork:
    """The lines of one rank outside of all phases."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._since = 0
        self._due = MIN_PHASE_NS

    def look(self) -> None:
        """Record the line if it is due. The writing thread calls this once a second."""
        tracker = self._state.tracker
        if tracker.phase not in _OUTSIDE or not self._state.recorder.is_writing:
            return
        now, since = time.time_ns(), tracker.last_change
        if since != self._since:
            self._since, self._due = since, MIN_PHASE_NS
        if now - since < self._due:
            return
        self._due = 2 * (now - since)
        sites = sites_of(sys._current_frames().get(tracker.thread), CHAIN)
        if sites:
            lines = tuple(site.location for site in sites)
            self._state.add(OwnWorkRecord(time=now, since=since, frames=lines), MAX_RECORDS)
