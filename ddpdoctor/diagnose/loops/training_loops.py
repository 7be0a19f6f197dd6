"""Find decisions in training loops that only some ranks took.

The number of batches that each rank took in a loop, and of reduced backwards that it began there,
show skipped steps, left loops and missing epochs. The source only shows the statement.

The iterations of a loop without a loader are not recorded. We only know how many reduced backwards
each rank began, and its position: in a backward of the loop, in a collective after it, or at its
end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ddpdoctor.core.syntax import Loop
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import (
    PATIENCE,
    Ending,
    endings,
    first_failure,
    last_phase,
    mispaired,
)
from ddpdoctor.diagnose.data.draws import groups_of
from ddpdoctor.diagnose.hangs.hang_snapshot import seen_waiting
from ddpdoctor.diagnose.source_files import Source, endless, holds, location, source_of
from ddpdoctor.diagnose.source_operations import callers, loop_around
from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.records.model import DdpRecord, FingerprintRecord
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.records.training import EvaluationRecord, IdleBatch, LoopRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import FOREVER, Rank, Run
from ddpdoctor.run.status import Phase


@dataclass(frozen=True)
class Trace:
    """One training loop of one rank."""

    rank: Rank
    first: LoopRecord  # The record of the loop's start
    last: LoopRecord  # The newest record: that of the loop's end, if it has ended
    stuck: bool  # Whether the rank is in a collective that does not end, or was when it died

    @cached_property
    def state(self) -> str:
        """``ended``, ``left`` or ``failed``. Any other value means that the loop continues."""
        state = self.last.state
        if not self.recorded_end:
            if self._was_left:
                return "left"
            return "failed" if self.died else state
        error = self.rank.records.first(ErrorRecord)
        left_at = self.last.left_at
        if error is None:
            return "failed" if state == "left" and self._was_raised else state
        if state not in ("left", "failed"):
            return state
        lines = [Location(each.path, each.line) for each in error.user_frames]
        if left_at:
            # An uncaught exception also releases the iterator.
            inner = list(left_at[::-1])
            within = any(lines[at : at + len(inner)] == inner for at in range(len(lines)))
            return "failed" if within else "left"
        place = place_of(self.frames)
        # The iterator may outlive its loop, for example with persistent workers.
        inside = place is None or any(
            each.path == place.path and place.runs_at(each.line) for each in lines
        )
        return "failed" if state == "failed" and inside else "left"

    @property
    def _was_raised(self) -> bool:
        """Whether an exception released the iterator of a rank that was stopped before its record.

        The rank reached no other statement after the call that raised.
        """
        status, left_at = self.rank.status, self.last.left_at
        unrecorded = self.rank.exit is not None and self.rank.ended is None
        return (
            unrecorded and status is not None and bool(left_at) and str(left_at[0]) == status.site
        )

    @property
    def recorded_end(self) -> bool:
        """Whether the rank recorded how the loop ended."""
        return self.last.fetched is not None

    @property
    def died(self) -> bool:
        """Whether native code or a signal ended the process without further records."""
        status = self.rank.status
        if self.recorded_end or self.rank.exit is None or status is None or status.unwritten:
            return False
        return self.rank.ended is None and not self.rank.records.of(ErrorRecord)

    @property
    def _was_left(self) -> bool:
        """Whether the rank is in a call after the loop, although its iterator still lives.

        With NCCL that call may have returned, because the host continues while the GPU waits. The
        rank is still there if it has reached no other line since.
        """
        place = place_of(self.frames) if self.died or self.stuck else None
        calls = self.rank.ring.collectives if place is not None and self.rank.ring else ()
        if place is None or not calls or calls[-1].asynchronous:
            return False
        status = self.rank.status
        if calls[-1].ended and (status is None or status.site != calls[-1].site):
            return False
        function = place.source.scope(place.loop.lineno)
        chain = (location(each) for each in (calls[-1].site, *calls[-1].callers))
        here = [
            at.line
            for at in chain
            if at is not None and at.path == place.path and place.source.scope(at.line) is function
        ]
        return bool(here) and not any(map(place.runs_at, here))

    @property
    def closed(self) -> bool:
        """Whether the loop is over."""
        return self.state in ("ended", "left", "failed")

    @property
    def before(self) -> int:
        """Number of reduced backwards that the rank began before the loop."""
        return self.first.before or 0

    @property
    def fetched(self) -> int | None:
        """Number of batches taken, once the loop is over. A lower bound if not recorded."""
        if not self.closed:
            return None
        if self.last.fetched is None:
            return (self.reached or 0) + len(self.idle)
        return self.last.fetched

    @property
    def reached(self) -> int | None:
        """Number of reduced backwards begun in the loop. None if uncertain."""
        status = self.rank.status
        if self.recorded_end:
            error = self.rank.records.first(ErrorRecord)
            # A failed rank may have failed in DDP's broadcast before a forward.
            failed = error is not None and self.state not in ("ended", "left")
            more = failed and error is not None and error.collective in BEFORE_FORWARD
            return self.last.after - self.before + more
        if status is None or not (self.stuck or self.died):
            return None
        return status.reduced - self.before + (status.collective in BEFORE_FORWARD)

    @property
    def step(self) -> int:
        """The step in which the loop ended, or the current one."""
        status = self.rank.status
        return self.last.step if self.recorded_end or status is None else status.step

    @property
    def idle(self) -> dict[int, IdleBatch]:
        """Batches without a backward, by number."""
        return {each.batch: each for each in self.last.idle}

    @property
    def time(self) -> int:
        """When the newest record was written, in Unix nanoseconds."""
        return self.last.time

    @property
    def frames(self) -> tuple[Location, ...]:
        """The lines that led to the first batch, innermost first."""
        return self.first.frames


@dataclass(frozen=True)
class LoopPlace:
    """The ``for`` that takes the batches, and the loops around it in its function and callers."""

    path: str
    source: Source
    loop: ast.For
    outer: tuple[tuple[str, Source, Loop], ...]

    @property
    def location(self) -> Location:
        """The line of the loop."""
        return Location(self.path, self.loop.lineno)

    def runs_at(self, line: int) -> bool:
        """Return whether a line is in the loop or takes its next batch."""
        return self.loop.lineno <= line <= (self.loop.end_lineno or 0)

    def counts_on(self, location: Location) -> bool:
        """Return whether only a statement and the loops' lengths decide the number of steps."""
        loops = [(self.path, self.source, self.loop), *self.outer]
        exits = [
            Location(path, each.lineno)
            for path, source, loop in loops
            for each in source.exits(loop)
        ]
        return all(each == location for each in exits) and not any(
            isinstance(loop, ast.While) for _, _, loop in loops
        )


def traces_of(rank: Rank, run: Run) -> Iterator[Trace]:
    """Yield the loops of a rank in the order in which they began."""
    found: dict[int, list[LoopRecord]] = {}
    for record in rank.records.of(LoopRecord):
        found.setdefault(record.loop, []).append(record)
    for records in found.values():
        first = next((each for each in records if each.before is not None and each.frames), None)
        if first is not None:
            yield Trace(rank, first, records[-1], _stuck(rank, run))


def place_of(frames: Sequence[Location]) -> LoopPlace | None:
    """Return the loop that took the batches: that of the innermost line that drives a loop."""
    for depth, at in enumerate(frames):
        source = source_of(at.path)
        loop = source.driven_at(at.line) if source is not None else None
        if source is None or loop is None:
            continue
        outer = [(at.path, source, each) for each in source.around(at.line)]
        for caller in frames[depth + 1 :]:
            above = source_of(caller.path)
            if above is not None:
                outer += [(caller.path, above, each) for each in above.around(caller.line)]
        return LoopPlace(at.path, source, loop, tuple(outer))
    return None


def trained_on(batch: int, others: Sequence[Trace]) -> bool:
    """Return whether any of the ranks has certainly trained on the batch."""
    return any(
        batch not in each.idle
        and (each.fetched is None or each.fetched > batch)
        and (each.state == "ended" or (each.reached or 0) > 0)
        for each in others
    )


def _stuck(rank: Rank, run: Run) -> bool:
    """Return whether a rank has been in one collective for a long time, or was when it died."""
    status = rank.status
    if status is None:
        return False
    if status.phase not in (Phase.BACKWARD, Phase.WAIT):
        return seen_waiting(run, rank.rank)
    until = run.taken if run.exit_status is None else status.since
    if rank.exit is not None:
        until = rank.exit.time
    return run.waits_for(rank, until) > PATIENCE


# -- the statement that decided


def exit_location(trace: Trace, place: LoopPlace) -> Location | None:
    """Return the statement in the loop by which a rank left it, if any."""
    left_at = trace.last.left_at
    if left_at:
        own = (at for at in left_at if at.path == place.path)
        return next((at for at in own if place.source.leaves(at.line, place.loop)), None)
    # Otherwise the iterator outlived the loop.
    exits = place.source.exits(place.loop)
    only = place.source.only(exits)
    if only is not None:
        return Location(place.path, only.lineno)
    return place.location if exits else None


def skip_location(rank: Rank, place: LoopPlace, forward: bool) -> Location:
    """Return the statement that skips a batch, after its ``forward`` or before it."""
    forwards = _lines(rank, "forward", place)
    backwards = _lines(rank, "backward", place)
    after = min(forwards, default=0) if forward else 0
    until = min(backwards if forward else forwards or backwards, default=FOREVER)
    skips = place.source.skips(place.loop)
    only = place.source.only([each for each in skips if after < each.lineno < until])
    if only is None and not forward and len(skips) == 1:
        # It runs after a failed forward, in an `except`.
        only = skips[0]
    if only is not None:
        return Location(place.path, only.lineno)
    if backwards and not skips:
        for condition in place.source.conditions(max(backwards), place.loop):
            if not forward or not condition.lineno < after <= (condition.end_lineno or 0):
                return Location(place.path, condition.lineno)
    if backwards or skips:
        return place.location
    return _return_location(rank, forward) or place.location


def _return_location(rank: Rank, forward: bool) -> Location | None:
    """Return the ``return`` before the backward in a function that the loop calls."""
    for backward in rank.sites("backward"):
        source = source_of(backward.path)
        if source is None:
            continue
        forwards = [at.line for at in rank.sites("forward") if at.path == backward.path]
        after = max((each for each in forwards if each < backward.line), default=0)
        stop = backward.line if forward or not after else after
        only = source.only(source.returns_before(stop, after if forward else 0))
        if only is not None:
            return Location(backward.path, only.lineno)
    return None


def stop_location(rank: Rank, place: LoopPlace) -> Location | None:
    """Return the statement that may have left the loop around the training loop."""
    if not place.outer:
        return None
    path, source, outer = place.outer[0]
    call = call_to_exit(rank)
    if call is not None and call.path == path and holds(outer, call.line):
        return None
    ways: list[ast.stmt] = source.exits(outer)
    if isinstance(outer, ast.While) and not endless(outer):
        ways.append(outer)
    # A `for` may also end by itself after a different number of epochs.
    conditional = [each for each in ways if not source.counts(each)]
    if isinstance(outer, ast.While):
        conditional = conditional or ways
    if not conditional:
        return None
    return Location(path, conditional[0].lineno if len(conditional) == 1 else outer.lineno)


def call_to_exit(rank: Rank) -> ExitRecord | None:
    """Return the record of the call by which a rank ended its process."""
    return next((call for call in rank.records.of(ExitRecord) if call.path), None)


def _lines(rank: Rank, phase: str, place: LoopPlace) -> list[int]:
    """Return the lines of a phase within the training loop."""
    return [
        at.line for at in rank.sites(phase) if at.path == place.path and holds(place.loop, at.line)
    ]


# -- decisions

MAX_LATER_BATCHES = 3
"""Maximum number of batches between a skipped one and the failure of mispaired collectives."""


@dataclass(frozen=True)
class LocalDecision:
    """A decision that only some ranks made."""

    kind: Literal["skipped", "left", "stopped", "ended"]
    traces: tuple[Trace, ...]  # Their traces of the loop
    others: tuple[Trace, ...]
    place: LoopPlace
    location: Location
    step: int
    batch: int | None  # The skipped batch, or the number of batches taken, if known

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that decided."""
        return tuple(each.rank.rank for each in self.traces)


def local_decisions(run: Run, *, suspected: bool = False) -> list[LocalDecision]:
    """Return the first local decision in each DDP group.

    Later ones are consequences. Include decisions that may be harmless so far only if
    ``suspected``.
    """
    found = (
        next(case.skipped_or_left(), None) or case.stopped() for case in _cases(run, suspected)
    )
    return [each for each in found if each is not None]


def loops_ended_early(run: Run) -> list[LocalDecision]:
    """Return the first loop in each DDP group whose loader had fewer batches on some ranks.

    The others still train in it or failed there without another reason.
    """
    found = (next(case.ended(), None) for case in _cases(run, False))
    return [each for each in found if each is not None]


def _cases(run: Run, suspected: bool) -> Iterator[_Case]:
    restart = run.restarts[-1]
    ends = {each.rank: each for each in endings(run, restart)}
    cause = first_failure(run, restart)
    limit = FOREVER if cause is None or mispaired(run, cause) else cause.time
    limit = min(limit, run.stopped_at or FOREVER)
    ranks = {rank.rank: rank for rank in run.last}
    groups = dict.fromkeys(
        tuple(sorted(each for each in record.group_ranks if each in ranks))
        for rank in run.last
        for record in rank.records.of(DdpRecord)
    )
    for group in groups:
        if len(group) > 1:
            yield _Case(run, tuple(ranks[each] for each in group), ends, limit, suspected)


@dataclass
class _Case:
    """The ranks of one DDP group."""

    run: Run
    group: tuple[Rank, ...]
    ends: dict[int | None, Ending]  # The failed ranks
    limit: int  # Unix nanoseconds. Later events have another cause.
    suspected: bool  # Whether a decision counts without proven harm

    @cached_property
    def traces(self) -> dict[int, list[Trace]]:
        """The loops of each rank."""
        return {rank.rank: list(traces_of(rank, self.run)) for rank in self.group}

    def skipped_or_left(self) -> Iterator[LocalDecision]:
        """Yield decisions within a loop that ranks of the group began after the same step."""
        for members, place in self._loops():
            decision = self._skipped(members, place) or self._left(members, place)
            if decision is not None:
                yield decision

    def ended(self) -> Iterator[LocalDecision]:
        """Yield loops that ended normally after fewer batches than other ranks trained on."""
        for members, place in self._loops():
            top = max(each.reached or 0 for each in members)
            few = [
                each
                for each in members
                if each.state == "ended"
                and each.recorded_end
                and (each.fetched or 0) < top
                and each.time <= self.limit
            ]
            more = [each for each in members if each not in few]
            if few and more and self._collapsed(few, more):
                first = min(few, key=lambda each: each.fetched or 0)
                ranks, step = tuple(few), first.step
                at = place.location
                yield LocalDecision("ended", ranks, tuple(more), place, at, step, first.fetched)

    def _loops(self) -> Iterator[tuple[list[Trace], LoopPlace]]:
        """Yield loops that differ between ranks, although these began them after the same step."""
        shared: dict[tuple[object, ...], list[Trace]] = {}
        for traces in self.traces.values():
            for each in traces:
                shared.setdefault((each.before, *each.frames[:1]), []).append(each)
        for key in sorted(shared, key=lambda key: int(str(key[0]))):
            members = shared[key]
            if len(members) < 2 or any(each.first.joins for each in members):
                continue
            if len({(each.reached, tuple(each.idle)) for each in members}) == 1:
                continue
            place = place_of(members[0].frames)
            if place is not None:
                yield members, place

    def _skipped(self, members: list[Trace], place: LoopPlace) -> LocalDecision | None:
        for trace in members:
            others = [each for each in members if each is not trace]
            alone = [batch for batch in trace.idle if trained_on(batch, others)]
            if not alone or not self._lacks(trace, alone, members):
                continue
            # The ranks that took more steps than this one, or failed as well.
            wanting = [
                each
                for each in others
                if (
                    each.state == "failed"
                    if trace.state == "failed"
                    else (each.reached or 0) > (trace.reached or 0)
                )
            ]
            skipped = trace.idle[alone[0]]
            location = skip_location(trace.rank, place, skipped.forward)
            if not wanting or not self._harms([trace], wanting, place, location):
                continue
            return LocalDecision(
                "skipped",
                tuple(each for each in members if skipped.batch in each.idle),
                tuple(each for each in members if skipped.batch not in each.idle),
                place,
                location,
                skipped.step,
                skipped.batch,
            )
        return None

    def _lacks(self, trace: Trace, skipped: list[int], members: list[Trace]) -> bool:
        """Return whether the skipped batches explain all missing steps, or an early failure."""
        if not trace.closed or trace.time > self.limit:
            return False
        top = max(each.reached or 0 for each in members)
        reached, fetched = trace.reached or 0, trace.fetched or 0
        if reached < top <= reached + len(skipped) and 4 * len(skipped) <= fetched + 3:
            return True
        return trace.state == "failed" and fetched - skipped[0] <= MAX_LATER_BATCHES

    def _left(self, members: list[Trace], place: LoopPlace) -> LocalDecision | None:
        top = max(each.reached or 0 for each in members)
        leavers = [
            each
            for each in members
            if each.state == "left"
            and each.time <= self.limit
            and (each.reached or 0) < top
            and not self._ended_itself(each)
        ]
        if not leavers:
            return None
        wanting = [each for each in members if (each.reached or 0) == top]
        first = min(leavers, key=lambda each: each.reached or 0)
        location = exit_location(first, place)
        if location is None or not self._harms(leavers, wanting, place, location):
            return None
        return LocalDecision(
            "left",
            tuple(leavers),
            tuple(each for each in members if each not in leavers),
            place,
            location,
            first.step,
            (first.fetched or 0) if first.recorded_end else None,
        )

    def stopped(self) -> LocalDecision | None:
        """Return ranks that began no further loop although others did."""
        over = [
            traces[-1]
            for traces in self.traces.values()
            if traces and self._is_last(traces[-1]) and not self._ended_itself(traces[-1])
        ]
        for last in over:
            alone = [each for each in over if _same_loop(each, last)]
            wanting = self._next_loops(last, {each.rank.rank for each in alone})
            if not wanting or any(each.first.joins for each in (*alone, *wanting)):
                continue
            place = place_of(last.frames)
            location = stop_location(last.rank, place) if place is not None else None
            if place is None or location is None or not self._collapsed(alone, wanting):
                continue
            return LocalDecision(
                "stopped",
                tuple(alone),
                tuple(wanting),
                place,
                location,
                last.last.step,
                last.fetched or 0,
            )
        return None

    def _next_loops(self, last: Trace, stopped: set[int]) -> list[Trace]:
        """Return the loops that other ranks began at the same line, right after the same loop."""
        return [
            each
            for rank, traces in self.traces.items()
            if rank not in stopped and any(_same_loop(each, last) for each in traces)
            for each in traces
            if each.before == last.last.after
            and each.frames == last.frames
            and (each.reached or 0) > 0
        ]

    def _is_last(self, trace: Trace) -> bool:
        """Return whether a rank took no further step after a loop."""
        status, total = trace.rank.status, trace.last.after
        return (
            trace.state in ("ended", "left")
            and status is not None
            and status.reduced == total
            and trace.time <= self.limit
        )

    def _ended_itself(self, trace: Trace) -> bool:
        """Return whether the rank left the loop by ending its process or by an error."""
        ending = self.ends.get(trace.rank.rank)
        if ending is not None and not ending.victim and ending.kind != "abort-at-exit":
            return not mispaired(self.run, ending)
        call = call_to_exit(trace.rank)
        return call is not None and trace.state == "left" and call.time <= trace.time

    def _harms(
        self, alone: Sequence[Trace], wanting: Sequence[Trace], place: LoopPlace, location: Location
    ) -> bool:
        """Return whether the ranks' steps certainly differ, now or later."""
        # A loop that counts its steps may make up for a skipped one.
        bound = place.counts_on(location) and all(each.state == "ended" for each in wanting)
        return self.suspected or bound or self._collapsed(alone, wanting)

    def _collapsed(self, alone: Sequence[Trace], wanting: Sequence[Trace]) -> bool:
        """Return whether some ranks wait, or failed waiting, while these do something else."""
        return any(map(self._waits, wanting)) and all(
            self._waits(each) or self._ended_regularly(each) for each in alone
        )

    def _waits(self, trace: Trace) -> bool:
        ending = self.ends.get(trace.rank.rank)
        if ending is not None and (ending.victim or mispaired(self.run, ending)):
            # A rank that was stopped from outside may have been at any line.
            known = not ending.stopped or trace.stuck or self._any_mispaired
            # After a failure with another cause, every rank is its victim.
            return known and ending.time <= self.limit
        return ending is None and trace.rank.ended is None and trace.stuck

    @cached_property
    def _any_mispaired(self) -> bool:
        """Return whether a collective of one of the ranks met a different one."""
        return any(
            mispaired(self.run, ending)
            for rank in self.group
            if (ending := self.ends.get(rank.rank)) is not None
        )

    def _ended_regularly(self, trace: Trace) -> bool:
        ending, ended = self.ends.get(trace.rank.rank), trace.rank.ended
        regular = ending is None or ending.kind == "abort-at-exit"
        return ended is not None and regular and ended.time <= self.limit


def _same_loop(one: Trace, other: Trace) -> bool:
    """Return whether two ranks have the same number of steps before and in a loop."""
    return (one.frames, one.before, one.reached) == (other.frames, other.before, other.reached)


# -- evaluations through DDP that only some ranks run


Alone = list[tuple[int, EvaluationRecord, tuple[int, ...]]]
"""For each evaluation the number of synchronized forwards before it, its record, and the absent
ranks."""


def alone_evaluating(run: Run) -> dict[tuple[int, ...], Alone]:
    """Return the evaluations that only some ranks run, by these ranks."""
    members = {rank.rank: rank for rank in run.last}
    evaluations = {rank.rank: _evaluations_of_rank(rank) for rank in run.last}
    alone: dict[tuple[int, ...], Alone] = {}
    for number, mine in evaluations.items():
        for point, record in mine.items():
            group = [each for each in record.group if each in members]
            present = tuple(each for each in group if point in evaluations[each])
            absent = tuple(each for each in group if each not in present)
            # An evaluation of several ranks counts once, for the first of them.
            if number != present[0] or not absent:
                continue
            if all(_passed(members[each], point, run) for each in absent):
                alone.setdefault(present, []).append((point, record, absent))
    # Relations between rules cannot express this, because the decision is only suspected.
    return {} if alone and local_decisions(run, suspected=True) else alone


def _evaluations_of_rank(rank: Rank) -> dict[int, EvaluationRecord]:
    """Return a rank's evaluations by the number of synchronized forwards before them."""
    return {
        record.armed: record
        for record in rank.records.of(EvaluationRecord)
        if rank.rank in record.group
    }


def _passed(rank: Rank, point: int, run: Run) -> bool:
    """Return whether a rank continued without the evaluation, or has ended."""
    if not rank.watched(EvaluationRecord):
        return False
    if rank.ended is not None or run.exit_status is not None:
        return True
    # Two forwards later, all earlier records have arrived.
    fingerprints = [record.armed for record in rank.records.of(FingerprintRecord)]
    return max(fingerprints, default=0) > point + 1


# -- loops without a loader


@dataclass(frozen=True)
class LeftByHand:
    """Ranks that are past a loop while others wait for them in it."""

    kind: Literal["ended", "left", "skipped"]
    """``ended`` if the source leaves the loop only at the end of its iterable."""
    steps: dict[int, int]  # Number of reduced backwards that each of them began
    others: dict[int, int]
    location: Location  # The statement that decided, or the loop
    loop: Location
    moment: int
    """When the first of them called a collective after the loop or ended, in Unix nanoseconds."""


def left_by_hand(run: Run) -> Iterator[LeftByHand]:
    """Yield the ranks that left a loop alone while others wait or failed waiting."""
    restart = run.restarts[-1]
    cause = first_failure(run, restart)
    if run.stopped_at is not None or (cause is not None and not mispaired(run, cause)):
        return
    ends = {each.rank: each for each in endings(run, restart)}
    for group in groups_of(run):
        found = _left(run, group, ends)
        if found is not None:
            yield found


def _left(run: Run, group: Sequence[Rank], ends: dict[int | None, Ending]) -> LeftByHand | None:
    counts = {rank.rank: rank.status.reduced for rank in group if rank.status is not None}
    if len(counts) < len(group) or not all(map(_loops_by_hand, group)):
        return None
    top = max(counts.values())
    inside = [rank for rank in group if counts[rank.rank] == top]
    outside = [rank for rank in group if counts[rank.rank] < top]
    found = _loop_apart(run, inside[0])
    if found is None or not all(_in_backward(run, rank, ends) for rank in inside):
        return None
    path, source, loop, line = found
    since = [_behind(run, rank, path, loop, ends) for rank in outside]
    missing = top - max((counts[rank.rank] for rank in outside), default=top)
    if not (since and all(since)) or _came_out(inside, path, loop, missing):
        return None
    kind, at = _decided(source, loop, line)
    return LeftByHand(
        kind,
        {rank.rank: counts[rank.rank] for rank in outside},
        {rank.rank: top for rank in inside},
        Location(path, at),
        Location(path, loop.lineno),
        min(since),
    )


def _loops_by_hand(rank: Rank) -> bool:
    """Return whether a rank has trained without a data loader.

    A rank without a backward may not have entered the loop yet.
    """
    trained = rank.status is not None and rank.status.reduced > 0
    return trained and rank.watched(LoopRecord) and not rank.records.of(LoopRecord)


def _in_backward(run: Run, rank: Rank, ends: dict[int | None, Ending]) -> bool:
    error = rank.records.first(ErrorRecord)
    phase = last_phase(rank) if error is None else error.phase
    return phase in (Phase.BACKWARD, Phase.BACKWARD.label) and _waits(run, rank, ends)


def _waits(run: Run, rank: Rank, ends: dict[int | None, Ending]) -> bool:
    ending = ends.get(rank.rank)
    if ending is not None:
        return ending.victim or mispaired(run, ending)
    return rank.ended is None and run.waits_for(rank) > PATIENCE


def _loop_apart(run: Run, rank: Rank) -> tuple[str, Source, Loop, int] | None:
    """Return a loop around a rank's backward that ranks may leave alone, and the line in it."""
    error = rank.records.first(ErrorRecord)
    frames = [Location(each.path, each.line) for each in error.user_frames] if error else []
    lines = list(reversed(frames)) or list(rank.sites("backward"))[:2]
    if not frames:
        if len(lines) != 1:
            return None
        # Calls outside of loops, such as for warm-up, do not count.
        calls = [each for each in callers(run, lines[0]) if loop_around(run, each) is not None]
        lines += calls if len(calls) == 1 else []
    for at in lines:
        source = source_of(at.path)
        loops = source.around(at.line) if source is not None else []
        if source is not None and loops:
            # A loop of fixed length has as many iterations on every rank: take one around it.
            loop = next((each for each in loops if not source.has_fixed_length(each)), loops[0])
            return at.path, source, loop, at.line
    return None


def _behind(run: Run, rank: Rank, path: str, loop: Loop, ends: dict[int | None, Ending]) -> int:
    """Return when a rank ended, or called the collective after the loop that it is in. Or 0."""
    if rank.ended is not None and rank.rank not in ends and not rank.records.of(ExitRecord):
        return rank.ended.time
    calls = rank.ring.collectives if rank.ring is not None else ()
    known = rank.counted_collectives and calls and not calls[-1].ended
    if not known or not _waits(run, rank, ends):
        return 0
    return calls[-1].began if _is_behind(calls[-1], path, loop) else 0


def _is_behind(call: Collective, path: str, loop: Loop) -> bool:
    """Return whether a collective was called from outside a loop."""
    lines = [location(text) for text in (call.site, *call.callers)]
    here = [at.line for at in lines if at is not None and at.path == path]
    return bool(here) and not any(holds(loop, line) for line in here)


def _came_out(inside: Sequence[Rank], path: str, loop: Loop, steps: int) -> bool:
    """Return whether a rank left the loop and began it again within the last ``steps`` steps."""
    return any(
        call.began >= (rank.steps[-steps].start if len(rank.steps) >= steps else 0)
        and _is_behind(call, path, loop)
        for rank in inside
        for call in (rank.ring.collectives if rank.ring is not None else ())
    )


def _decided(
    source: Source, loop: Loop, backward: int
) -> tuple[Literal["ended", "left", "skipped"], int]:
    """Return how ranks may have left a loop at different steps, and at which line."""
    ways = [*source.exits(loop), *source.raises(loop)]
    exits = [each for each in ways if not source.counts(each) and not source.is_exhausted(each)]
    ends = isinstance(loop, ast.While) and not any(map(source.is_exhausted, (loop, *ways)))
    skips = [each for each in source.skips(loop) if each.lineno < backward]
    guards = [each.lineno for each in source.conditions(backward, loop)]
    if exits or ends:
        return "left", exits[0].lineno if len(exits) == 1 and not skips else loop.lineno
    if skips or guards:
        lines = [*(each.lineno for each in skips), *guards]
        return "skipped", lines[0] if len(lines) == 1 else loop.lineno
    return "ended", loop.lineno
