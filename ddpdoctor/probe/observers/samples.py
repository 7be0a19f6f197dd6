"""Record the samples that each rank draws: indices of map-style data sets, content of others.

A pass over a loader is recorded when it begins to train, when it has drawn more than its share, and
when it is over. When the budget is spent, the rest of the pass is not followed. In a first pass the
content of a few samples is still hashed, since only that shows whether ranks have the same data.
The first few passes of a loader are followed, later ones at intervals. Indices are hashed and
counted in the writing thread. All ranks follow the same small pseudo-random part of every index
space, so the draws of two ranks from this part show exactly whether they overlap.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from zlib import crc32

from ddpdoctor.probe.observers import loaders, sample_contents
from ddpdoctor.probe.observers.loaders import runs_to_end
from ddpdoctor.probe.observers.sample_contents import Hashes, Rows, Sketch
from ddpdoctor.probe.runtime import torch_private
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.recorder import Lazy
from ddpdoctor.probe.runtime.sites import Site, caller
from ddpdoctor.run.records.training import FedRecord, Head, PassRecord

# -- one pass over a data loader: which samples it drew, and the content of some of them

FOLLOWED_INDICES = 128  # number of individually followed indices of an index space
COMPARED_INDICES = 1 << 14  # the same for a job that is compared with another number of ranks
HASHED_CONTENTS = 64  # number of these whose content is also hashed
CLOSED = ("ended", "left")  # states of a finished pass
HEAD_DRAWS = 64  # number of first draws, whose order has a separate hash
EVALUATED_ROWS = 16  # maximum number of samples of an evaluation that are recorded by content
FIRST_CONTENTS = 16  # number of samples of the first batch whose content is always hashed

_UINT64 = (1 << 64) - 1
_JSON_BITS = (1 << 53) - 1

Draw = tuple[Any, ...]


@functools.lru_cache(maxsize=16)
def sample_of(length: int, most: int = FOLLOWED_INDICES) -> tuple[int, ...]:
    """Return the indices below ``length`` that every rank follows, in pseudo-random order."""
    if length <= most:
        return tuple(range(length))
    found: dict[int, None] = {}
    number = 0
    while len(found) < most:
        number += 1
        mixed = number * 0x9E3779B97F4A7C15 & _UINT64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _UINT64
        found[(mixed ^ (mixed >> 31)) % length] = None
    return tuple(found)


def digest_of(numbers: Iterable[Any]) -> int:
    """Return a hash of a sequence of integers, equal in every process."""
    return hash(tuple(map(operator.index, numbers))) & _JSON_BITS


def _whole_numbers(indices: Draw) -> tuple[int, ...]:
    """Return indices of any type as integers."""
    try:
        return tuple(map(operator.index, indices))
    except Exception:
        # Strings, tuples with a size, tensors of several elements.
        return tuple(crc32(repr(index).encode()) for index in indices)


class Pass:
    """The draws of one pass over a loader.

    The training thread calls :meth:`draw` and :meth:`see`. The function that :meth:`as_it_is`
    returns does the rest in the writing thread.

    Args:
        record: The facts known when the pass begins.
        followed: By drawn index, the index in the space that all ranks share.
        share_at: Number of draws that exceeds the pass's share.
        lookup: By drawn index, the index in that space. None if they are equal.
        most: Maximum number of followed indices of that space.
    """

    def __init__(
        self,
        record: PassRecord,
        followed: dict[int, int] | None = None,
        share_at: int = 0,
        lookup: list[int] | None = None,
        most: int = FOLLOWED_INDICES,
    ) -> None:
        self.record = record
        self.followed = followed or {}
        self.share_at = share_at
        self.lookup = lookup
        self.collectives = 0, 0, 0
        """Number of the rank's collectives when the pass began, and of reductions and gathers among
        them."""
        self.batches = 0  # number of batches of indices drawn so far
        self.draws = 0  # number of samples drawn so far, including prefetched ones
        self.fetched = 0  # number of batches that the training loop received
        self.marks = 0  # number of batches with a backward
        self.joins = False
        self.over = False
        self.ahead = False  # whether it is followed regardless of the budget
        self.collates = False  # whether the loader fetches whole batches
        self.rows_later = 0  # number of batches with hashed samples that are not recorded yet
        self.gone = False  # whether the pass is no longer followed
        self._keys = frozenset(self.followed)
        sample = sample_of(record.length or 0, most)
        every = 1 if len(sample) <= HASHED_CONTENTS else max(len(sample) // HASHED_CONTENTS, 2)
        inside = frozenset(sample[::every])
        self._contents = frozenset(index for index, name in self.followed.items() if name in inside)
        self._awaited: deque[list[tuple[int, int, int]]] = deque(maxlen=4096)
        self._pending: deque[Draw | Rows | list[tuple[Any, Hashes]]] = deque()
        self._digested = self._seen = self._drawn = 0
        self._head: list[int] = []
        self._order = 0
        self._hits: dict[int, None] = {}
        self._repeats = 0
        self._falls = 0
        self._opaque = False
        self._rows: list[tuple[int | None, ...]] = []
        self._sketch = Sketch()

    # -- in the training thread

    def draw(self, batch: Any) -> bool:
        """Add a batch of indices. Return whether the pass now exceeds its share."""
        indices = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        if self.over:
            self._await(indices)
            return False
        self._pending.append(indices)
        self._drawn += 1
        before = self.draws
        self.draws += len(indices)
        if before < HEAD_DRAWS:
            self._begin(indices[: HEAD_DRAWS - before])
        self._await(indices, first=before == 0)
        return before < self.share_at <= self.draws

    def _await(self, indices: Draw, first: bool = False) -> None:
        """Note the samples of a batch to hash by content when it arrives."""
        wanted = self._keys if self.over else self._contents
        chosen: list[tuple[int, int, int]] = []
        try:
            some = first or not wanted.isdisjoint(indices)
        except TypeError:
            # Indices of another type, such as lists.
            some = False
        if some:
            size, lookup = len(indices), self.lookup
            chosen = [
                (place, index if lookup is None else lookup[index], size)
                for place, index in enumerate(indices)
                if type(index) is int and (index in wanted or (first and place < FIRST_CONTENTS))
            ]
        self._awaited.append(chosen)

    def _begin(self, indices: Draw) -> None:
        """Keep the shared indices of the first draws."""
        lookup = self.lookup
        if lookup is not None:
            with contextlib.suppress(TypeError, IndexError):
                indices = tuple(lookup[index] for index in indices)
        self._head.extend(indices)

    def arrived(self) -> list[tuple[int, int, int]]:
        """Return position, index and batch size of the samples to hash in the next batch."""
        return self._awaited.popleft() if self._awaited else []

    def see(self, names: list[int | None], contents: Hashes) -> None:
        """Keep the content of samples. ``contents`` hashes it later, and holds copies only."""
        self._pending.append([(names, contents)])
        self._drawn += 1

    def gave(self, rows: Rows) -> None:
        """Keep a batch. ``rows`` hashes its samples later, and holds copies only."""
        self._pending.append(rows)
        self._drawn += 1

    def as_it_is(self, state: str) -> Lazy:
        """Return a function that makes the record of the pass in its current state."""
        upto = self._drawn
        head = tuple(self._head)
        record = replace(
            self.record, state=state, fetched=self.fetched, marks=self.marks, joins=self.joins
        )

        def made(last: bool) -> PassRecord:
            self._digest(upto)
            return self._summary(record, head)

        return made

    def digested(self) -> Lazy:
        """Return a function that hashes and frees the draws so far without making a record."""
        upto = self._drawn

        def nothing(last: bool) -> bytes:
            self._digest(upto)
            return b""

        return nothing

    # -- in the writing thread

    def _digest(self, upto: int) -> None:
        while self._digested < upto:
            item = self._pending.popleft()
            self._digested += 1
            if isinstance(item, tuple):
                self._count(item)
                continue
            try:
                if callable(item):
                    self._sketch.add(item())
                    continue
                for names, contents in item:
                    rows = zip(names, contents(), strict=False)
                    self._rows += [(name, *row) for name, row in rows]
            except Exception:
                # A tensor of a type without plain bits.
                continue

    def _count(self, indices: Draw) -> None:
        if set(map(type, indices)) != {int}:
            try:
                indices = tuple(map(operator.index, indices))
            except Exception:
                self._opaque = True
                indices = _whole_numbers(indices)
        self._seen += len(indices)
        self._order = hash((self._order, indices))
        self._falls += sum(map(operator.gt, indices, indices[1:]))
        hits = self._keys.intersection(indices)
        if hits:
            known = self._hits
            for index in indices:
                if index in hits:
                    name = self.followed[index]
                    self._repeats += name in known
                    known[name] = None

    def _summary(self, record: PassRecord, head: Draw) -> PassRecord:
        trained = record.marks > 0
        sketched = record.state in CLOSED and self._sketch.count and trained
        return replace(
            record,
            draws=self._seen,
            order=self._order & _JSON_BITS,
            falls=self._falls,
            repeats=self._repeats,
            opaque=self._opaque,
            hits=tuple(self._hits) if not self._opaque else (),
            rows=tuple(self._rows if trained else self._rows[:EVALUATED_ROWS]),
            head=Head(len(head), digest_of(_whole_numbers(head))),
            sketch=self._sketch.summary() if sketched else None,
            to_end=(
                record.state == "trains"
                and record.batches is not None
                and runs_to_end(record.path, record.line)
            ),
        )


# -- all passes of a rank

MAX_PASSES = 32  # maximum number of followed passes of all loaders
MAX_BATCHES = 24  # maximum number of hashed batches of a pass over an iterable-style data set
MAX_ROWS = 8  # maximum number of hashed samples of such a batch
CHUNK_BATCHES = 32  # maximum number of batches of indices that wait for the writing thread
UNBUDGETED_PASSES = 2  # number of a loader's first evaluations followed regardless of the budget
SKETCHED_PASSES = 2  # number of first passes over a loader whose samples are all sketched
IDLE_FORWARDS = 16  # number of forwards without a batch after which we stop following forwards
CONTENT_RESERVE_NS, NEXT_PASS_RESERVE_NS = 8_000_000, 3_000_000
"""Nanoseconds of the budget that the first pass reserves for the content of its later samples, and
that these reserve for the next pass."""

CONTENT_COST = 6_000  # nanoseconds to search the indices of a batch for samples to hash

MAX_EXCESS_NS = 10_000_000  # nanoseconds by which a stream's second pass may exceed the budget
SKETCH_CREDIT_NS = 10_000_000  # nanoseconds for sketches in addition to an eighth of the budget


class Samples(Observer):
    """The passes of a rank over its loaders."""

    def __init__(self, state: RankState, most: int = FOLLOWED_INDICES) -> None:
        super().__init__(state)
        self._most = most
        self._passes: dict[tuple[Site, Site | None], int] = {}
        self._open: dict[tuple[Site, Site | None], Pass] = {}
        self._waiting: list[Pass] = []  # passes whose batch had no backward so far
        self._idle = 0  # consecutive forwards without a fetched batch
        self._evaluated: list[Pass] = []
        self._followed = 0
        self._sketched = 0  # nanoseconds spent on sketches

    def indices_drawn(self, index: Any, iterator: Any) -> None:
        """Follow the indices that the sampler returns. A pass begins with the first ones."""
        begun = torch_private.pass_of(iterator)
        known = getattr(iterator, "_ddpdoctor_pass", None)
        if known is None or known[0] is not begun:
            with self.state.budget.spending(samples=True):
                known = iterator._ddpdoctor_pass = (begun, self._begin(iterator))
        drawn: Pass | None = known[1]
        if drawn is None or drawn.record.iterable:
            return
        if drawn.over:
            self._follow_content(drawn, index, iterator)
            return
        began = clock()
        exceeds = drawn.draw(index)
        drawn.batches += 1
        recorder, budget = self.state.recorder, self.state.budget
        if exceeds:
            recorder.add(drawn.as_it_is("share"))
        elif drawn.batches % CHUNK_BATCHES == 0:
            recorder.add(drawn.digested())
        budget.spend(clock() - began, samples=True)
        first = drawn.record.number == 0
        if budget.left(samples=True) < (CONTENT_RESERVE_NS if first else 0) and not drawn.ahead:
            # Keep the records of the pass, and stop following it.
            drawn.over = True
            recorder.add(drawn.as_it_is("unfollowed"))
            if not first:
                self._give_up(drawn, iterator)

    def _follow_content(self, drawn: Pass, index: Any, iterator: Any) -> None:
        """Note the samples to hash by content in a pass that is no longer followed."""
        drawn.draw(index)
        drawn.batches += 1
        if drawn.batches % CHUNK_BATCHES == 0:
            budget = self.state.budget
            budget.spend(CHUNK_BATCHES * CONTENT_COST, samples=True)
            if budget.left(samples=True) < NEXT_PASS_RESERVE_NS:
                self._give_up(drawn, iterator)

    def _give_up(self, drawn: Pass, iterator: Any = None) -> None:
        """Stop hashing the content of a pass. Record the hashes that are not recorded yet."""
        drawn.gone = True
        if iterator is not None:
            iterator._ddpdoctor_pass = (torch_private.pass_of(iterator), None)
        if drawn.rows_later:
            drawn.rows_later = 0
            self.state.recorder.add(drawn.as_it_is("unfollowed"))

    def _begin(self, iterator: Any) -> Pass | None:
        """Begin a pass. Return None if it is not followed."""
        if self.state.closed:
            return None
        site = caller()
        dataset = torch_private.dataset_of(iterator)
        built = loaders.loader_of(dataset, torch_private.index_sampler_of(iterator))
        key = (site, built.site if built is not None else None)
        number = self._passes[key] = self._passes.get(key, -1) + 1
        before = self._open.pop(key, None)
        if before is not None:
            self._close(before, "left")
        iterable = torch_private.is_iterable_style(iterator)
        often = number < (2 if iterable else 4) or number & (number - 1) == 0
        left = self.state.budget.left(samples=True)
        too_many = self._followed >= MAX_PASSES or len(self._passes) > MAX_PASSES
        ahead = self._evaluates(number)
        # The second pass over a stream shows whether its order changes.
        least = -MAX_EXCESS_NS if iterable and number == 1 else 0
        if not often or too_many or (left <= least and not ahead):
            loaders.use_sampler(torch_private.samplers_of(iterator))
            return None
        record = PassRecord(
            time=time.time_ns(),
            pass_=self._followed,
            number=number,
            state="",
            made=(built.site if built is not None else site).location,
            armed=self.state.tracker.armed,
            workers=torch_private.workers_of(iterator),
            dataset=type(dataset).__name__,
            iterable=iterable,
            in_order=not iterable or torch_private.keeps_order(iterator),
            persistent=torch_private.keeps_workers(iterator),
            **site.place,
        )
        drawn = _opened(iterator, dataset, record, left, self._most)
        drawn.ahead = ahead
        drawn.collates = torch_private.batches_at_once(iterator)
        tracker = self.state.tracker
        drawn.collectives = tracker.collectives, tracker.reductions, tracker.gathers
        self._followed += 1
        self._open[key] = drawn
        self.wake("batch_fetched")
        return drawn

    def _evaluates(self, number: int) -> bool:
        """Return whether a pass appears to be one of a loader's first evaluations.

        Short jobs have spent their budget when they evaluate. Counting the draws of two passes
        takes a few microseconds per batch.
        """
        later = self.state.tracker.armed > 0 and self.state.budget.enabled
        return later and number < UNBUDGETED_PASSES and not sys.modules["torch"].is_grad_enabled()

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """Hash some samples of a fetched batch."""
        known = getattr(iterator, "_ddpdoctor_pass", None)
        drawn: Pass | None = known[1] if known is not None else None
        if drawn is None:
            self._waiting.clear()
            if all(each.gone for each in self._open.values()):
                self.rest("batch_fetched")
            return
        first = drawn.fetched == 0
        drawn.fetched += not drawn.over
        record = drawn.record
        if not drawn.over and sys.modules["torch"].is_grad_enabled():
            # A new pass replaces passes that were left early.
            if first:
                self._waiting.clear()
            elif drawn in self._waiting:
                self._waiting.remove(drawn)
            self._waiting.append(drawn)
            if self._idle > IDLE_FORWARDS:
                self.wake("forward_begins", "backward_ended")
            self._idle = 0
            if record.number < SKETCHED_PASSES and drawn.collates:
                self._sketch(drawn, data)
        if record.iterable:
            if drawn.fetched <= MAX_BATCHES:
                self._look(drawn, data)
                if drawn.fetched == MAX_BATCHES:
                    self.state.recorder.add(drawn.as_it_is("seen"))
            return
        places = drawn.arrived()
        if places and torch_private.keeps_order(iterator):
            with self.state.budget.spending(samples=True):
                wanted = [place for place, _, _ in places]
                hashes = sample_contents.sample_hashes(data, wanted, places[0][2])
                if hashes is not None:
                    drawn.see([index for _, index, _ in places], hashes)
                    drawn.rows_later += drawn.over

    def _look(self, drawn: Pass, data: Any) -> None:
        """Hash samples of a batch without indices."""
        with self.state.budget.spending(samples=True):
            leaves = sample_contents.leaves(data)
            if leaves:
                size = len(leaves[0]) if drawn.collates else None
                places = [0] if size is None else list(range(min(size, MAX_ROWS)))
                hashes = sample_contents.sample_hashes(data, places, size)
                if hashes is not None:
                    drawn.see([drawn.fetched - 1] * len(places), hashes)

    def _sketch(self, drawn: Pass, data: Any) -> None:
        """Hash all samples of a batch."""
        budget = self.state.budget
        if self._sketched > SKETCH_CREDIT_NS + budget.earned() // 8:
            return
        began = clock()
        rows = sample_contents.sketch_rows(data)
        if rows is not None:
            drawn.gave(rows)
            if drawn.record.iterable and drawn.fetched % CHUNK_BATCHES == 0:
                self.state.recorder.add(drawn.digested())
        spent = clock() - began
        self._sketched += spent
        budget.spend(spent)

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Note whether uneven inputs are intended."""
        if not self._waiting:
            self._idle += 1
            if self._idle > IDLE_FORWARDS:
                self.rest("forward_begins", "backward_ended")
        for drawn in self._waiting:
            if not drawn.marks:
                drawn.joins = torch_private.joins(ddp)

    def backward_ended(self) -> None:
        """Count the pending batches as trained on."""
        if not self._waiting:
            return
        last = self._waiting[-1]
        for drawn in self._waiting:
            # Loaders that train together are read alternately. A loader of an evaluation is not.
            if drawn.fetched == last.fetched:
                drawn.marks += 1
                if drawn.marks == 2:
                    self.state.recorder.add(drawn.as_it_is("trains"))
        self._waiting.clear()
        self._judge_evaluations()

    def _judge_evaluations(self) -> None:
        """Record evaluations at the next step, when ranks have combined their results."""
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
        """Record the pass."""
        known = getattr(iterator, "_ddpdoctor_pass", None)
        if known is not None and known[1] is not None:
            self._close(known[1], "ended")

    def _close(self, drawn: Pass, how: str) -> None:
        """Record a pass for the last time."""
        if drawn.over:
            self._give_up(drawn)
            return
        drawn.over = drawn.gone = True
        drawn.lookup = None
        if drawn in self._waiting:
            self._waiting.remove(drawn)
        armed, now = self.state.tracker.armed, time.time_ns()
        drawn.record = replace(drawn.record, armed_after=armed, closed=now)
        self.state.recorder.add(drawn.as_it_is(how))
        if how == "ended" and drawn.record.armed and not drawn.marks:
            self._evaluated.append(drawn)

    def rank_ends(self) -> None:
        """Record all passes that are open."""
        for drawn in list(self._open.values()):
            self._close(drawn, "left")
        self._open.clear()
        self._judge_evaluations()


def _opened(iterator: Any, dataset: Any, record: PassRecord, left: int, most: int) -> Pass:
    """Begin the pass of an iterator, with the facts about its samplers and data set.

    Take at most ``left`` nanoseconds. Follow at most ``most`` indices.
    """
    if record.iterable:
        epoch, shuffles = sample_contents.order_of(dataset)
        return Pass(replace(record, data_epoch=epoch, shuffles=shuffles))
    mine = torch_private.samplers_of(iterator)
    record = replace(
        record, sampler=loaders.sampler_facts(mine), idle=loaders.idle_samplers(dataset)
    )
    try:
        found = sample_contents.bottom_of(dataset, left)
        length = len(dataset) if found is None else found.length
    except Exception:
        # Lengths and indices come from the job's own code and may be anything.
        return Pass(record)
    lookup = None if found is None else found.lookup
    if found is not None:
        split = loaders.built_subsets.find(found.subset)
        if split is not None and split.site.path:
            record = replace(record, split=split.site.location)
        if lookup is None:
            return Pass(record)
        record = replace(record, subset=digest_of(lookup), subset_length=len(lookup))
    wanted = sample_of(length, most)
    followed = dict(zip(wanted, wanted, strict=True))
    if lookup is not None:
        inside = frozenset(wanted)
        followed = {place: name for place, name in enumerate(lookup) if name in inside}
    record = replace(
        record, length=length, batches=loaders.batch_count(mine), followed=len(followed)
    )
    world = sys.modules["torch"].distributed.get_world_size()
    whole = length if lookup is None else len(lookup)
    return Pass(record, followed, -(-3 * whole // (2 * world)), lookup, most)


# -- batches that no loader gives

MAX_FED_BATCHES = 64
MAX_FED_SAMPLES = 1024


class Fed(Observer):
    """The samples of a rank that cuts its batches by hand."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._batches: list[Rows] = []
        self._samples = 0
        self._at: Site | None = None

    def inputs_given(self, inputs: Any) -> None:
        """Copy a few elements of each sample of the batch."""
        budget = self.state.budget
        with budget.spending():
            rows = sample_contents.sketch_rows(inputs) if budget.left() > 0 else None
            if rows is None:
                # Later batches without this one may look like another epoch.
                self._end()
                return
            self._at = self._at or caller()
            self._batches.append(rows)
            self._samples += sample_contents.batch_size(inputs)
            if len(self._batches) >= MAX_FED_BATCHES or self._samples >= MAX_FED_SAMPLES:
                self._end()

    def rank_ends(self) -> None:
        """Record the batches of a short job."""
        self._end()

    def _end(self) -> None:
        self.rest("inputs_given")
        batches, self._batches = self._batches, []
        if batches and self._at is not None:
            record = FedRecord(**self._at.place)
            self.state.recorder.add(
                lambda _: replace(record, batches=tuple(tuple(rows()) for rows in batches))
            )
