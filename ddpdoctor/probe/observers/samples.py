"""What each rank draws from its data: the indices of map-style data sets, the content of others.

A pass over a loader is recorded when it has begun to train, when it has drawn more than its share,
and when it is over, or when the budget is spent and the rest of it is not followed; the first few
passes of a loader are followed, later ones now and then.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from ddpdoctor.probe.observers import contents, datasets, samplers, sketches
from ddpdoctor.probe.observers.passes import Pass, digest_of, sample_of
from ddpdoctor.probe.runtime import torch_loaders, torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.run.records.data import PassRecord

MOST = 32
"""Passes that are followed, of all loaders together."""

BATCHES = 24
"""Batches of a pass over an iterable-style data set that are looked at."""

ROWS = 8
"""Samples of a batch that are looked at."""

CHUNK = 32
"""Batches of indices that wait for the writing thread at most."""

SKETCHED = 2
"""Passes over a loader whose samples are all looked at, the first ones."""

IDLE = 16
"""Forwards without a batch after which forwards are not looked at, until a batch comes."""

SKETCH_AHEAD = 10_000_000
"""Nanoseconds that this may take in advance of the eighth of the budget that it has."""


class Samples(Observer):
    """The passes of a rank over its loaders."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._passes: dict[tuple[Site, Site | None], int] = {}
        self._open: dict[tuple[Site, Site | None], Pass] = {}
        self._waiting: list[Pass] = []
        """Those that gave a batch for which there was no backward yet."""
        self._idle = 0
        """Forwards in a row before which no batch was fetched."""
        self._evaluated: list[Pass] = []
        self._followed = 0
        self._sketched = 0
        """Nanoseconds that it took to look at all samples."""

    # -- passes

    def indices_drawn(self, index: Any, iterator: Any) -> None:
        """Follow what the sampler gives; a pass begins with it."""
        begun = torch_loaders.pass_of(iterator)
        known = getattr(iterator, "_ddpdoctor_pass", None)
        if known is None or known[0] is not begun:
            known = iterator._ddpdoctor_pass = (begun, self._begin(iterator))
        drawn: Pass | None = known[1]
        if drawn is None or drawn.record.iterable:
            return
        began = clock()
        exceeds = drawn.draw(index)
        drawn.batches += 1
        recorder, budget = self.state.recorder, self.state.budget
        if exceeds:
            recorder.add(drawn.as_it_is("share"))
        elif drawn.batches % CHUNK == 0:
            recorder.add(drawn.digested())
        budget.spend(clock() - began)
        if budget.left() < 0:
            # What was recorded of the pass stays; the rest of it is not followed.
            drawn.over = True
            recorder.add(drawn.as_it_is("unfollowed"))
            iterator._ddpdoctor_pass = (begun, None)

    def _begin(self, iterator: Any) -> Pass | None:
        """A pass begins; None if it is not to be followed."""
        if self.state.closed:
            return None
        site = caller()
        dataset = torch_loaders.dataset_of(iterator)
        built = samplers.loader_of(dataset, torch_loaders.index_sampler_of(iterator))
        key = (site, built.site if built is not None else None)
        number = self._passes[key] = self._passes.get(key, -1) + 1
        before = self._open.pop(key, None)
        if before is not None:
            self._close(before, "left")
        iterable = torch_loaders.is_iterable_style(iterator)
        often = number < (2 if iterable else 4)
        often = often or number & (number - 1) == 0
        left = self.state.budget.left()
        if not often or self._followed >= MOST or len(self._passes) > MOST or left <= 0:
            return None
        with self.state.budget.spending():
            record = PassRecord(
                time=time.time_ns(),
                pass_=self._followed,
                number=number,
                state="",
                made=(built.site if built is not None else site).location,
                armed=self.state.tracker.armed,
                workers=torch_loaders.workers_of(iterator),
                collates=torch_loaders.batches_at_once(iterator),
                dataset=type(dataset).__name__,
                iterable=iterable,
                in_order=not iterable or torch_loaders.keeps_order(iterator),
                **site.place,
            )
            drawn = _opened(iterator, dataset, record, left)
        tracker = self.state.tracker
        drawn.collectives = tracker.collectives, tracker.reductions, tracker.gathers
        self._followed += 1
        self._open[key] = drawn
        return drawn

    # -- what becomes of a pass

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """Look at some samples of the batch."""
        known = getattr(iterator, "_ddpdoctor_pass", None)
        drawn: Pass | None = known[1] if known is not None else None
        if drawn is None:
            if self._waiting:
                self._waiting.clear()
            return
        first = drawn.fetched == 0
        drawn.fetched += 1
        record = drawn.record
        if not drawn.over and sys.modules["torch"].is_grad_enabled():
            # A pass that begins takes the place of those that were left before their end.
            if first:
                self._waiting.clear()
            elif drawn in self._waiting:
                self._waiting.remove(drawn)
            self._waiting.append(drawn)
            if self._idle > IDLE:
                self.wake("forward_begins", "backward_ended")
            self._idle = 0
            if record.number < SKETCHED and record.collates:
                self._sketch(drawn, data)
        if record.iterable:
            if drawn.fetched <= BATCHES:
                self._look(drawn, data)
                if drawn.fetched == BATCHES:
                    self.state.recorder.add(drawn.as_it_is("seen"))
            return
        places = drawn.arrived()
        if places and torch_loaders.keeps_order(iterator):
            with self.state.budget.spending():
                wanted = [place for place, _, _ in places]
                hashes = contents.hashes(data, wanted, places[0][2])
                if hashes is not None:
                    drawn.see([index for _, index, _ in places], hashes)

    def _look(self, drawn: Pass, data: Any) -> None:
        """Look at the samples of a batch that has no indices."""
        with self.state.budget.spending():
            leaves = contents.leaves(data)
            if leaves:
                size = len(leaves[0]) if drawn.record.collates else None
                places = [0] if size is None else list(range(min(size, ROWS)))
                hashes = contents.hashes(data, places, size)
                if hashes is not None:
                    drawn.see([drawn.fetched - 1] * len(places), hashes)

    def _sketch(self, drawn: Pass, data: Any) -> None:
        """Look at all samples of a batch, whatever they are called."""
        budget = self.state.budget
        if self._sketched > SKETCH_AHEAD + budget.earned() // 8:
            return
        began = clock()
        rows = sketches.rows(data)
        if rows is not None:
            drawn.gave(rows)
            if drawn.record.iterable and drawn.fetched % CHUNK == 0:
                self.state.recorder.add(drawn.digested())
        spent = clock() - began
        self._sketched += spent
        budget.spend(spent)

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """See whether uneven inputs are meant."""
        if not self._waiting:
            self._idle += 1
            if self._idle > IDLE:
                self.rest("forward_begins", "backward_ended")
        for drawn in self._waiting:
            if not drawn.marks:
                drawn.joins = torch_private.joins(ddp)

    def backward_ended(self) -> None:
        """The batches that wait were trained on."""
        if not self._waiting:
            return
        last = self._waiting[-1]
        for drawn in self._waiting:
            # Loaders that train together are read in step; one that evaluates in between is not.
            if drawn.fetched == last.fetched:
                drawn.marks += 1
                if drawn.marks == 2:
                    self.state.recorder.add(drawn.as_it_is("trains"))
        self._waiting.clear()
        self._judge_evaluations()

    def _judge_evaluations(self) -> None:
        """By the next step, ranks have exchanged what they had to of an evaluation."""
        tracker = self.state.tracker
        for drawn in self._evaluated:
            every, reductions, gathers = drawn.collectives
            drawn.record = replace(
                drawn.record,
                collectives=tracker.collectives - every,
                reductions=tracker.reductions - reductions,
                gathers=tracker.gathers - gathers,
            )
            self.state.recorder.add(drawn.as_it_is("ended"))
        self._evaluated.clear()

    def loader_exhausted(self, iterator: Any) -> None:
        """The pass is over."""
        known = getattr(iterator, "_ddpdoctor_pass", None)
        if known is not None and known[1] is not None:
            self._close(known[1], "ended")

    def _close(self, drawn: Pass, how: str) -> None:
        """Record a pass for the last time."""
        if drawn.over:
            return
        drawn.over = True
        drawn.lookup = None
        if drawn in self._waiting:
            self._waiting.remove(drawn)
        armed, now = self.state.tracker.armed, time.time_ns()
        drawn.record = replace(drawn.record, armed_after=armed, closed=now)
        self.state.recorder.add(drawn.as_it_is(how))
        if how == "ended" and drawn.record.armed and not drawn.marks:
            self._evaluated.append(drawn)

    def rank_ends(self) -> None:
        """All passes are over."""
        for drawn in list(self._open.values()):
            self._close(drawn, "left")
        self._open.clear()
        self._judge_evaluations()


def _opened(iterator: Any, dataset: Any, record: PassRecord, left: int) -> Pass:
    """The pass of an iterator, with the facts about its samplers and data set.

    Args:
        iterator: The loader's iterator.
        dataset: Its data set.
        record: What is known of the pass.
        left: Nanoseconds that this may take.
    """
    if record.iterable:
        return Pass(record)
    mine = torch_loaders.samplers_of(iterator)
    record = replace(record, sampler=samplers.facts_of(mine), idle=samplers.idle_of(dataset))
    try:
        found = datasets.bottom(dataset, left)
        length = len(dataset) if found is None else found.length
    except Exception:
        # Lengths and indices are the job's own code, and may be anything.
        return Pass(record)
    lookup = None if found is None else found.lookup
    if found is not None:
        split = samplers.subsets.find(found.subset)
        if split is not None and split.site.path:
            record = replace(record, split=split.site.location)
        if lookup is None:
            return Pass(record)
        record = replace(record, subset=digest_of(lookup), subset_length=len(lookup))
    wanted = sample_of(length)
    followed = dict(zip(wanted, wanted, strict=True))
    if lookup is not None:
        inside = frozenset(wanted)
        followed = {place: name for place, name in enumerate(lookup) if name in inside}
    record = replace(
        record, length=length, batches=samplers.batches_of(mine), followed=len(followed)
    )
    world = sys.modules["torch"].distributed.get_world_size()
    whole = length if lookup is None else len(lookup)
    return Pass(record, followed, -(-3 * whole // (2 * world)), lookup)
