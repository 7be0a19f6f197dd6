"""What each rank did in its training loop, and the decisions that some ranks took alone.

A step skipped, a loop left, an epoch not begun: judged by how many batches of one loop each rank
took and how many reduced backwards it began there. The source only names the statement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import (
    PATIENCE,
    Ending,
    endings,
    first_failure,
    mispaired,
)
from ddpdoctor.diagnose.hangs.hang_snapshot import seen_waiting
from ddpdoctor.diagnose.source_files import Loop, Source, endless, holds, location, source_of
from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.records.training import IdleBatch, LoopRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase

# -- what each rank did in a training loop, and where in the source that loop stands


@dataclass(frozen=True)
class Trace:
    """What one rank did in one training loop, as far as it was recorded."""

    rank: Rank
    first: LoopRecord
    """Of its begin."""
    last: LoopRecord
    """The newest, which is of its end once that was recorded."""
    stuck: bool
    """The rank is, or was when it died, in a collective that does not end."""

    @cached_property
    def state(self) -> str:
        """``ended``, ``left`` or ``failed``; else the loop goes on."""
        state = self.last.state
        if not self.recorded_end:
            if self._behind:
                return "left"
            return "failed" if self.died else state
        error = self.rank.records.first(ErrorRecord)
        if error is None and state == "left" and self._was_raised:
            return "failed"
        if error is None or state not in ("left", "failed"):
            return state
        lines = [Location(each.path, each.line) for each in error.user_frames]
        left_at = self.last.left_at
        if left_at:
            # An exception releases the iterator, too, and is recorded when it reaches the top.
            return "failed" if _contains(lines, list(left_at[::-1])) else "left"
        place = place_of(self.frames)
        # The iterator may have outlived its loop, as that of persistent workers does.
        inside = place is None or any(
            each.path == place.path and place.runs_at(each.line) for each in lines
        )
        return "failed" if state == "failed" and inside else "left"

    @property
    def _was_raised(self) -> bool:
        """Whether an exception released the iterator, of a rank that was ended before it wrote it.

        It flew out of the call that the rank had made last: no other statement was come to.
        """
        status, left_at = self.rank.status, self.last.left_at
        unsaid = self.rank.exit is not None and self.rank.ended is None
        return unsaid and status is not None and bool(left_at) and str(left_at[0]) == status.site

    @property
    def recorded_end(self) -> bool:
        """Whether the rank recorded how the loop ended."""
        return self.last.fetched is not None

    @property
    def died(self) -> bool:
        """Whether native code or a signal ended the process: nothing more was recorded."""
        status = self.rank.status
        if self.recorded_end or self.rank.exit is None or status is None or status.unwritten:
            return False
        return self.rank.ended is None and not self.rank.records.of(ErrorRecord)

    @property
    def _behind(self) -> bool:
        """Whether it was left, though its iterator lives on: the rank is in a call behind it.

        With NCCL that call may have returned: its host goes on while the GPU waits. It is there
        still if it has come to no other line since that is known.
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
        """Reduced backwards that the rank had begun before the loop."""
        return self.first.before or 0

    @property
    def fetched(self) -> int | None:
        """Batches that it took, once the loop is over; a lower bound if that was not recorded."""
        if not self.closed:
            return None
        if self.last.fetched is None:
            return (self.reached or 0) + len(self.idle)
        return self.last.fetched

    @property
    def reached(self) -> int | None:
        """Reduced backwards begun in the loop, or on their way; None if not known for sure."""
        status = self.rank.status
        if self.recorded_end:
            error = self.rank.records.first(ErrorRecord)
            # One that failed did so in a broadcast of DDP's in front of a forward, perhaps.
            failed = error is not None and self.state not in ("ended", "left")
            more = failed and error is not None and error.collective in BEFORE_FORWARD
            return self.last.after - self.before + more
        if status is None or not (self.stuck or self.died):
            return None
        return status.reduced - self.before + (status.collective in BEFORE_FORWARD)

    @property
    def step(self) -> int:
        """The step in which the loop was over, or under way."""
        status = self.rank.status
        return self.last.step if self.recorded_end or status is None else status.step

    @property
    def idle(self) -> dict[int, IdleBatch]:
        """Batches without a backward, by their number."""
        return {each.batch: each for each in self.last.idle}

    @property
    def time(self) -> int:
        """Unix nanoseconds of the newest record."""
        return self.last.time

    @property
    def frames(self) -> tuple[Location, ...]:
        """The lines that led to the first batch, innermost first."""
        return self.first.frames


@dataclass(frozen=True)
class LoopPlace:
    """The ``for`` that took the batches, and the loops around it, in its function or a caller's."""

    path: str
    source: Source
    loop: ast.For
    outer: tuple[tuple[str, Source, Loop], ...]

    @property
    def location(self) -> Location:
        """The line of the loop."""
        return Location(self.path, self.loop.lineno)

    def runs_at(self, line: int) -> bool:
        """Whether a line is in the loop, or takes its next batch."""
        return self.loop.lineno <= line <= (self.loop.end_lineno or 0)

    def counts_on(self, location: Location) -> bool:
        """Whether nothing but a statement, and the ends of loops, says how many steps there are."""
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
    """The loops of a rank, in the order in which they began."""
    found: dict[int, list[LoopRecord]] = {}
    for record in rank.records.of(LoopRecord):
        found.setdefault(record.loop, []).append(record)
    for records in found.values():
        first = next((each for each in records if each.before is not None and each.frames), None)
        if first is not None:
            yield Trace(rank, first, records[-1], _stuck(rank, run))


def place_of(frames: Sequence[Location]) -> LoopPlace | None:
    """The loop that took the batches: that of the innermost line which drives one."""
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


def same_loop(one: Trace, other: Trace) -> bool:
    """Whether two ranks came to a loop after as many steps."""
    return one.frames == other.frames and one.before == other.before


def trained_on(batch: int, others: Sequence[Trace]) -> bool:
    """Whether some rank trained on the batch, as far as that is known."""
    return any(
        batch not in each.idle
        and (each.fetched is None or each.fetched > batch)
        and (each.state == "ended" or (each.reached or 0) > 0)
        for each in others
    )


def _contains(lines: Sequence[Location], part: Sequence[Location]) -> bool:
    """Whether some lines follow each other in a traceback."""
    return any(lines[at : at + len(part)] == part for at in range(len(lines)))


def _stuck(rank: Rank, run: Run) -> bool:
    """Whether a rank is in one collective for long, or was when it died."""
    status = rank.status
    if status is None:
        return False
    if status.phase not in (Phase.BACKWARD, Phase.WAIT):
        return seen_waiting(run, rank.rank)
    until = run.taken if run.exit_status is None else status.since
    if rank.exit is not None:
        until = rank.exit.time
    return run.waits_for(rank, until) > PATIENCE


# -- the statement by which a rank skipped a batch, left a loop, or began no further epoch


LAST_LINE = 1 << 63


def exit_location(trace: Trace, place: LoopPlace) -> Location | None:
    """The statement by which a rank left a loop; None if that was none of the loop's own."""
    left_at = trace.last.left_at
    if left_at:
        own = (at for at in left_at if at.path == place.path)
        return next((at for at in own if place.source.leaves(at.line, place.loop)), None)
    # The iterator outlived the loop.
    exits = place.source.exits(place.loop)
    only = place.source.only(exits)
    if only is not None:
        return Location(place.path, only.lineno)
    return place.location if exits else None


def skip_location(rank: Rank, place: LoopPlace, forward: bool) -> Location:
    """The statement that passes a batch over, behind the ``forward`` or in front of it."""
    forwards = _lines(rank, "forward", place)
    backwards = _lines(rank, "backward", place)
    after = min(forwards, default=0) if forward else 0
    until = min(backwards if forward else forwards or backwards, default=LAST_LINE)
    skips = place.source.skips(place.loop)
    only = place.source.only([each for each in skips if after < each.lineno < until])
    if only is None and not forward and len(skips) == 1:
        # It stands behind a forward that failed: in an `except`.
        only = skips[0]
    if only is not None:
        return Location(place.path, only.lineno)
    if backwards and not skips:
        for condition in place.source.conditions(max(backwards), place.loop):
            if not forward or not condition.lineno < after <= (condition.end_lineno or 0):
                return Location(place.path, condition.lineno)
    return _return_location(rank, place, forward) or place.location


def _return_location(rank: Rank, place: LoopPlace, forward: bool) -> Location | None:
    """The ``return`` in front of the backward of a function that the loop calls."""
    if _lines(rank, "backward", place) or place.source.skips(place.loop):
        return None
    at = {each: rank.sites(each) for each in ("forward", "backward")}
    for backward in at["backward"]:
        source = source_of(backward.path)
        if source is None:
            continue
        lines = [each.line for each in at["forward"] if each.path == backward.path]
        after = max((each for each in lines if each < backward.line), default=0)
        stop = backward.line if forward or not after else after
        returns = source.returns_before(stop, after if forward else 0)
        only = source.only(returns)
        if only is not None:
            return Location(backward.path, only.lineno)
    return None


def stop_location(rank: Rank, place: LoopPlace) -> Location | None:
    """The statement by which the loop around the training loop was left, if there may be one."""
    if not place.outer:
        return None
    path, source, outer = place.outer[0]
    call = call_to_exit(rank)
    if call is not None and call.path == path and holds(outer, call.line):
        return None
    ways: list[ast.stmt] = source.exits(outer)
    if isinstance(outer, ast.While) and not endless(outer):
        ways.append(outer)
    # A `for` ends by itself, too: after another number of epochs, say.
    conditional = [each for each in ways if not source.counts(each)]
    if isinstance(outer, ast.While):
        conditional = conditional or ways
    if not conditional:
        return None
    return Location(path, conditional[0].lineno if len(conditional) == 1 else outer.lineno)


def call_to_exit(rank: Rank) -> ExitRecord | None:
    """The call by which a rank ended itself."""
    return next((call for call in rank.records.of(ExitRecord) if call.path), None)


def _lines(rank: Rank, phase: str, place: LoopPlace) -> list[int]:
    """Those of them that are in the training loop."""
    return [
        at.line for at in rank.sites(phase) if at.path == place.path and holds(place.loop, at.line)
    ]


# -- decisions that some ranks took alone: a step skipped, a loop left, an epoch not begun


SOON = 3
"""Batches after a skipped one within which ranks fail whose collectives no more fit."""

FOREVER = 1 << 63


@dataclass(frozen=True)
class Departure:
    """What some ranks did alone."""

    kind: Literal["skipped", "left", "stopped"]
    traces: tuple[Trace, ...]
    """Their loop."""
    others: tuple[Trace, ...]
    place: LoopPlace
    location: Location
    step: int
    batch: int | None
    """The batch that was skipped; else how many were taken, if that is known."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that decided."""
        return tuple(each.rank.rank for each in self.traces)


def departures(run: Run, *, suspected: bool = False) -> list[Departure]:
    """The first such decision in each DDP group; what came after it is a consequence.

    Those that may do no harm yet only if they are to be ``suspected``.
    """
    restart = run.restarts[-1]
    ends = {each.rank: each for each in endings(run, restart)}
    cause = first_failure(run, restart)
    limit = FOREVER if cause is None or mispaired(run, cause) else cause.time
    limit = min(limit, run.stopped_at or FOREVER)
    found: list[Departure] = []
    for group in _groups(run):
        case = _Case(run, group, ends, limit, suspected)
        first = next(case.skipped_or_left(), None) or case.stopped()
        if first is not None:
            found.append(first)
    return found


def _groups(run: Run) -> list[tuple[Rank, ...]]:
    """The ranks seen here of each DDP group."""
    ranks = {rank.rank: rank for rank in run.last}
    found: dict[tuple[int, ...], None] = {}
    for rank in run.last:
        for record in rank.records.of(DdpRecord):
            found[tuple(sorted(each for each in record.group_ranks if each in ranks))] = None
    return [tuple(ranks[each] for each in group) for group in found if len(group) > 1]


class _Case:
    """The ranks of one DDP group.

    Args:
        run: The run.
        group: The ranks.
        ends: The failed ranks.
        limit: Unix nanoseconds; what happened later has another cause.
        suspected: Whether harm need not be shown.
    """

    def __init__(
        self,
        run: Run,
        group: tuple[Rank, ...],
        ends: dict[int | None, Ending],
        limit: int,
        suspected: bool,
    ) -> None:
        self._run = run
        self._ends = ends
        self._limit = limit
        self._suspected = suspected
        self._group = group
        self._traces = {rank.rank: list(traces_of(rank, run)) for rank in group}

    # -- within a loop

    def skipped_or_left(self) -> Iterator[Departure]:
        """Decisions within a loop that ranks of the group began after as many steps."""
        shared: dict[tuple[object, ...], list[Trace]] = {}
        for traces in self._traces.values():
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
                departure = self._skipped(members, place) or self._left(members, place)
                if departure is not None:
                    yield departure

    def _skipped(self, members: list[Trace], place: LoopPlace) -> Departure | None:
        for trace in members:
            others = [each for each in members if each is not trace]
            alone = [batch for batch in trace.idle if trained_on(batch, others)]
            if not alone or not self._lacks(trace, alone, members):
                continue
            wanting = self._ahead(trace, others)
            skipped = trace.idle[alone[0]]
            location = skip_location(trace.rank, place, skipped.forward)
            if not wanting or not self._harms([trace], wanting, place, location):
                continue
            return Departure(
                "skipped",
                tuple(each for each in members if skipped.batch in each.idle),
                tuple(each for each in members if skipped.batch not in each.idle),
                place,
                location,
                skipped.step,
                skipped.batch,
            )
        return None

    @staticmethod
    def _ahead(trace: Trace, others: list[Trace]) -> list[Trace]:
        """The ranks that made more steps than one, or failed as it did."""
        if trace.state == "failed":
            return [each for each in others if each.state == "failed"]
        return [each for each in others if (each.reached or 0) > (trace.reached or 0)]

    def _lacks(self, trace: Trace, skipped: list[int], members: list[Trace]) -> bool:
        """Whether the batches that a rank skipped are all that it lacks, or made it fail soon."""
        if not trace.closed or trace.time > self._limit:
            return False
        top = max(each.reached or 0 for each in members)
        reached, fetched = trace.reached or 0, trace.fetched or 0
        if reached < top <= reached + len(skipped) and 4 * len(skipped) <= fetched + 3:
            return True
        return trace.state == "failed" and fetched - skipped[0] <= SOON

    def _left(self, members: list[Trace], place: LoopPlace) -> Departure | None:
        top = max(each.reached or 0 for each in members)
        leavers = [
            each
            for each in members
            if each.state == "left"
            and each.time <= self._limit
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
        return Departure(
            "left",
            tuple(leavers),
            tuple(each for each in members if each not in leavers),
            place,
            location,
            first.step,
            (first.fetched or 0) if first.recorded_end else None,
        )

    # -- between two of them

    def stopped(self) -> Departure | None:
        """Ranks that came to no further loop at a place where others began one."""
        over = [
            traces[-1]
            for traces in self._traces.values()
            if traces and self._is_last(traces[-1]) and not self._ended_itself(traces[-1])
        ]
        for last in over:
            alone = [each for each in over if self._reached_alike(each, last)]
            wanting = self._next_loops(last, {each.rank.rank for each in alone})
            if not wanting or any(each.first.joins for each in (*alone, *wanting)):
                continue
            place = place_of(last.frames)
            location = stop_location(last.rank, place) if place is not None else None
            if place is None or location is None or not self._collapsed(alone, wanting):
                continue
            return Departure(
                "stopped",
                tuple(alone),
                tuple(wanting),
                place,
                location,
                last.last.step,
                last.fetched or 0,
            )
        return None

    @staticmethod
    def _reached_alike(one: Trace, other: Trace) -> bool:
        """Whether two ranks made as many steps in the same loop."""
        return same_loop(one, other) and one.reached == other.reached

    def _next_loops(self, last: Trace, stopped: set[int]) -> list[Trace]:
        """The loops that other ranks began at the same place, right after the same loop."""
        return [
            each
            for rank, traces in self._traces.items()
            if rank not in stopped and any(self._reached_alike(each, last) for each in traces)
            for each in traces
            if each.before == last.last.after
            and each.frames == last.frames
            and (each.reached or 0) > 0
        ]

    def _is_last(self, trace: Trace) -> bool:
        """Whether a rank made no further step after a loop."""
        status, total = trace.rank.status, trace.last.after
        return (
            trace.state in ("ended", "left")
            and status is not None
            and status.reduced == total
            and trace.time <= self._limit
        )

    # -- what it did

    def _ended_itself(self, trace: Trace) -> bool:
        """Whether the rank left the loop by the end of its process, or by its own error."""
        ending = self._ends.get(trace.rank.rank)
        if ending is not None and not ending.victim and ending.kind != "abort-at-exit":
            return not mispaired(self._run, ending)
        call = call_to_exit(trace.rank)
        return call is not None and trace.state == "left" and call.time <= trace.time

    def _harms(
        self, alone: Sequence[Trace], wanting: Sequence[Trace], place: LoopPlace, location: Location
    ) -> bool:
        """Whether the ranks' steps are bound to differ, or do so already."""
        # A loop that counts its steps may make up for one that was skipped.
        bound = place.counts_on(location) and all(each.state == "ended" for each in wanting)
        return self._suspected or bound or self._collapsed(alone, wanting)

    def _collapsed(self, alone: Sequence[Trace], wanting: Sequence[Trace]) -> bool:
        """Whether the ones wait, or failed waiting, for the others, who do something else."""
        return any(map(self._waits, wanting)) and all(
            self._waits(each) or self._gone(each) for each in alone
        )

    def _waits(self, trace: Trace) -> bool:
        ending = self._ends.get(trace.rank.rank)
        if ending is not None and (ending.victim or mispaired(self._run, ending)):
            # Who was ended from outside may have been anywhere.
            known = not ending.stopped or trace.stuck or self._met
            # After a failure with another cause every rank is a victim of that.
            return known and ending.time <= self._limit
        return ending is None and trace.rank.ended is None and trace.stuck

    @cached_property
    def _met(self) -> bool:
        """Whether a collective of one of the ranks met another one."""
        return any(
            mispaired(self._run, ending)
            for rank in self._group
            if (ending := self._ends.get(rank.rank)) is not None
        )

    def _gone(self, trace: Trace) -> bool:
        """Whether a rank came to its regular end."""
        ending, ended = self._ends.get(trace.rank.rank), trace.rank.ended
        regular = ending is None or ending.kind == "abort-at-exit"
        return ended is not None and regular and ended.time <= self._limit
