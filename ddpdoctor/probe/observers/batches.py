"""What a rank does with the batches of its training loops: it trains on them, skips some, leaves.

A loop here is one pass over a loader. It is recorded when it begins to train, when a batch was
passed over without a backward, and when it is over; a rule compares the ranks. Whether a loop
was left before its loader's end shows when the iterator is let go: the frame that does so is at
the very statement that left the loop.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.runtime import shield, torch_loaders, torch_private
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site, sites_of
from ddpdoctor.run.records.training import IdleBatch, LoopRecord

MOST = 2048
"""Loops that one rank records."""

IDLE = 8
"""Batches without a backward that a loop records one by one."""

FRAMES = 6
"""Lines of the user's code that are recorded, outwards: the loop may be that of a caller."""


class _Loop:
    """One pass over a loader."""

    __slots__ = (
        "after", "backwards", "before", "fetched", "forwards", "idle",
        "idled", "joins", "number", "ref", "sites",
    )  # fmt: skip

    def __init__(self, sites: list[Site], reduced: int) -> None:
        self.sites = sites
        self.number = -1
        """The loop's number among those that were recorded, -1 as long as it was not."""
        self.before = self.after = reduced
        """Reduced backwards begun before the loop, and by now, those of other loops left out."""
        self.fetched = 0
        self.forwards = 0
        """Forwards before the last fetch; ``backwards`` likewise."""
        self.backwards = 0
        self.idle: list[IdleBatch] = []
        self.idled = 0
        self.joins = False
        self.ref: weakref.ref[Any] | None = None


class Loops(Observer):
    """The training loops of a rank."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._tracker = state.tracker
        self._reduced = 0
        """Reduced backwards when the current loop was last looked at."""
        self._recorded = 0
        self._current: _Loop | None = None
        self._open: set[_Loop] = set()

    # -- batches

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """A loop begins, or goes on."""
        if not sys.modules["torch"].is_grad_enabled():
            return
        loop: _Loop | None = getattr(iterator, "_ddpdoctor_loop", None)
        if loop is None or torch_loaders.is_first_batch(iterator):
            # Persistent workers go on with the same iterator.
            if loop is not None:
                self._close(loop, "left")
            loop = iterator._ddpdoctor_loop = self._begin(iterator)
        else:
            self._look_back(loop)
        loop.fetched += 1
        loop.forwards, loop.backwards = self._tracker.forwards, self._tracker.backward_count
        self._go_on(loop)
        if loop.number < 0 and self._recorded < MOST:
            # Another loop may have trained since this one began.
            self.wake("forward_begins", "buffers_begin")

    def _begin(self, iterator: Any) -> _Loop:
        loop = _Loop(sites_of(sys._getframe(2), FRAMES), self._tracker.reduced)
        self._open.add(loop)

        @shield.shielded
        def let_go(_: Any) -> None:
            self._close(loop, "left", sites_of(sys._getframe(1), FRAMES))

        loop.ref = weakref.ref(iterator, let_go)
        return loop

    def _go_on(self, loop: _Loop | None) -> None:
        """Backwards belong to this loop from now on."""
        reduced = self._tracker.reduced
        if self._current is not None and reduced != self._reduced:
            self._current.after = reduced
        self._current, self._reduced = loop, reduced

    def _look_back(self, loop: _Loop) -> None:
        """Another batch is taken: was there a backward since the last one?"""
        if loop.backwards != self._tracker.backward_count:
            return
        loop.idled += 1
        if len(loop.idle) >= IDLE:
            return
        forward = loop.forwards != self._tracker.forwards
        loop.idle.append(IdleBatch(loop.fetched - 1, self.state.tracker.steps, forward))
        if loop.number >= 0:
            self._record(loop, "skips")

    def loader_exhausted(self, iterator: Any) -> None:
        """Its loop is over."""
        loop: _Loop | None = getattr(iterator, "_ddpdoctor_loop", None)
        if loop is None or loop not in self._open:
            return
        self._look_back(loop)
        partner = self._current
        self._close(loop, "ended")
        # Of loaders in one zip the first that ends is the end of the loop, known by the last.
        if partner is not None and partner is not loop and loop.sites == partner.sites:
            self._look_back(partner)
            self._close(partner, "ended")

    # -- passes

    def buffers_begin(self, ddp: Any) -> None:
        """DDP's broadcast in front of a forward: ranks that left are missed here already."""
        if sys.modules["torch"].is_grad_enabled():
            self._trains(ddp)

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """A loop trains once one of its forwards is to be reduced."""
        if armed:
            self._trains(ddp)
            self.rest("forward_begins", "buffers_begin")

    def _trains(self, ddp: Any) -> None:
        loop = self._current
        if loop is not None and loop.number < 0:
            loop.joins = torch_private.joins(ddp)
            if self._recorded < MOST:
                loop.number = self._recorded
                self._recorded += 1
                self._record(loop, "trains")

    # -- records

    def _close(self, loop: _Loop, how: str, sites: list[Site] | None = None) -> None:
        """Record a loop for the last time."""
        if loop not in self._open:
            return
        self._open.discard(loop)
        if self._current is loop:
            self._go_on(None)
        if loop.number >= 0:
            self._record(loop, how, sites)

    def _record(self, loop: _Loop, how: str, sites: list[Site] | None = None) -> None:
        if self.state.closed:
            return
        begins, over = how == "trains", how not in ("trains", "skips")
        # The next collective may meet another one, and gloo then aborts the process at once.
        self.state.recorder.add_now(
            LoopRecord(
                time=time.time_ns(),
                loop=loop.number,
                state=how,
                step=self.state.tracker.steps,
                frames=_locations(loop.sites) if begins else (),
                before=loop.before if begins else None,
                joins=begins and loop.joins,
                fetched=loop.fetched if over else None,
                after=loop.after if over else 0,
                idle=tuple(loop.idle),
                idled=loop.idled if over else 0,
                left_at=_locations(sites or []),
            )
        )

    def rank_fails(self, error: BaseException) -> None:
        """All loops are over."""
        for loop in list(self._open):
            self._close(loop, "failed")

    def rank_ends(self) -> None:
        """All loops are over."""
        for loop in list(self._open):
            self._close(loop, "left")


def _locations(sites: list[Site]) -> tuple[Location, ...]:
    return tuple(site.location for site in sites)
