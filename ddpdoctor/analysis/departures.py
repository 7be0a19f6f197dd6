"""Decisions that some ranks took alone: a step skipped, a loop left, an epoch not begun.

Judged by what the ranks did: how many batches of one loop each took and how many reduced backwards
it began there. The source is read only to name the statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ddpdoctor.analysis.branches import call_to_exit, exit_location, skip_location, stop_location
from ddpdoctor.analysis.endings import Ending, endings, first_failure, mispaired
from ddpdoctor.analysis.training_loops import (
    Place,
    Trace,
    place_of,
    same_loop,
    traces_of,
    trained_on,
)
from ddpdoctor.core.finding import Location
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.snapshot import Rank, Run

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
    place: Place
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

    def _skipped(self, members: list[Trace], place: Place) -> Departure | None:
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

    def _left(self, members: list[Trace], place: Place) -> Departure | None:
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
        self, alone: Sequence[Trace], wanting: Sequence[Trace], place: Place, location: Location
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
