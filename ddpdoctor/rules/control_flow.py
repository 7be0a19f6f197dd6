"""Decisions (DDP403) that some ranks took alone: a step skipped, a loop left, an epoch not begun.

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
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import (
    MISPAIRED,
    STANDSTILL,
    STANDSTILLS,
    Lapsed,
    always,
    brings_about,
    fact,
    same_subject,
)
from ddpdoctor.rules import updates
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


def _lapses(finding: Finding, run: Run) -> Lapsed | None:
    """Of a step that was left out only the newest steps tell."""
    return fact(finding, run) if STANDSTILL in finding.subjects else None


@rule(
    "DDP403",
    "rank-local-decision",
    Severity.ERROR,
    supersedes={
        "DDP701": always,
        "DDP801": same_subject,
        **dict.fromkeys(STANDSTILLS, brings_about),
    },
    lapses=_lapses,
)
def rank_local_decision(run: Run) -> Iterator[Finding]:
    """One rank alone skipped a step or left the training loop.

    What it finds
        A batch without a backward on some ranks of a DDP group, a training loop that some ranks
        left before its loader's end, or epochs that some ranks did not start, while the other ranks
        continued. Also an `optimizer.step()` that some ranks skipped. The finding names the
        statement: `break`, `return`, `continue` or `if`.

    Why it is bad
        Every backward is a collective. The rank's next backward pairs with another step of the
        others, and at the end the job hangs or fails with "Connection closed by peer", far from the
        cause. A skipped optimizer step makes the rank's parameters different, and nothing fails.

    How to fix it
        Decide on all ranks together: reduce the value over the ranks before you compare it.

    Example
        Wrong:
            if loss.isnan():
                continue
        Right:
            bad = loss.isnan().float()
            dist.all_reduce(bad)  # the same value on every rank
            if bad > 0:
                continue

    When it stays silent
        If all ranks leave after the same step or skip the same batch, inside `join()`, for a loader
        that simply ended (DDP109), for loops that call `next()`, for a rank that failed or was
        stopped, and where a loop that counts its steps makes up for a skipped batch.
    """
    made = departures(run)
    for decision in made:
        yield _finding(decision)
    if not made:
        yield from map(updates.finding, updates.left_out(run))


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
                decision = self._skipped(members, place) or self._left(members, place)
                if decision is not None:
                    yield decision

    def _skipped(self, members: list[Trace], place: Place) -> Departure | None:
        top = max((each.reached or 0 for each in members), default=0)
        for trace in members:
            others = [each for each in members if each is not trace]
            alone = [batch for batch in trace.idle if trained_on(batch, others)]
            if not trace.closed or not alone:
                continue
            reached, fetched = trace.reached or 0, trace.fetched or 0
            _, step, forward = trace.idle[alone[0]]
            # The batches it passed over are all that it lacks.
            lacks = reached < top <= reached + len(alone) and 4 * len(alone) <= fetched + 3
            if trace.state == "failed":
                lacks = lacks or fetched - alone[0] <= SOON
            if not lacks or trace.time > self._limit:
                continue
            wanting = [each for each in others if (each.reached or 0) > reached]
            if trace.state == "failed":
                wanting = [each for each in others if each.state == "failed"]
            location = skip_location(trace.rank, place, forward)
            if not wanting or not self._harms([trace], wanting, place, location):
                continue
            sick = [each for each in members if alone[0] in each.idle]
            return Departure(
                "skipped",
                tuple(sick),
                tuple(each for each in members if each not in sick),
                place,
                location,
                step,
                alone[0],
            )
        return None

    def _left(self, members: list[Trace], place: Place) -> Departure | None:
        top = max((each.reached or 0 for each in members), default=0)
        leavers = [
            each
            for each in members
            if each.state == "left" and each.time <= self._limit and (each.reached or 0) < top
        ]
        leavers = [each for each in leavers if not self._ended_itself(each)]
        wanting = [each for each in members if (each.reached or 0) == top]
        if not leavers:
            return None
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
            total = last.last.after
            alone = [
                each for each in over if same_loop(each, last) and each.reached == last.reached
            ]
            ranks = {each.rank.rank for each in alone}
            wanting = [
                each
                for number, traces in self._traces.items()
                if number not in ranks
                and any(same_loop(each, last) and each.reached == last.reached for each in traces)
                for each in traces
                if each.before == total and each.frames == last.frames and (each.reached or 0) > 0
            ]
            if not wanting or any(each.first.joins for each in (*alone, *wanting)):
                continue
            place = place_of(last.frames)
            location = stop_location(last.rank, place) if place is not None else None
            if place is None or location is None or not self._collapsed(alone, wanting):
                continue
            step, batches = last.last.step, last.fetched or 0
            return Departure(
                "stopped", tuple(alone), tuple(wanting), place, location, step, batches
            )
        return None

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
        """Whether the rank left the loop by the end of its process, or by an error of its own."""
        ending = self._ends.get(trace.rank.rank)
        if ending is not None and not ending.victim and ending.kind != "abort-at-exit":
            return not mispaired(self._run, ending)
        call = call_to_exit(trace.rank)
        return call is not None and trace.state == "left" and call.time <= trace.time

    def _harms(
        self, alone: Sequence[Trace], wanting: Sequence[Trace], place: Place, location: Location
    ) -> bool:
        """Whether the ranks' steps are bound to come apart, or have done so."""
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
            # After a failure with a cause of its own everybody is a victim of that.
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


def _finding(decision: Departure) -> Finding:
    who, others = named(decision.ranks), named(each.rank.rank for each in decision.others)
    loop = decision.place.location
    if decision.kind == "skipped":
        what = f"skipped batch {decision.batch} of the training loop (step {decision.step})"
        went = f"{others} trained on it"
    elif decision.kind == "left":
        after = "" if decision.batch is None else f", after {_batches(decision.batch)}"
        what = f"left the training loop in step {decision.step}{after}"
        went = f"{others} went on"
    else:
        what = f"began no further epoch after {decision.step} steps"
        went = f"{others} did"
    return Finding(
        code="DDP403",
        about=f"{decision.kind} {decision.location}",
        subjects=frozenset((MISPAIRED, STANDSTILL)),
        severity=Severity.ERROR,
        message=f"{who} alone {what} while {went}: the value that decided was not reduced",
        ranks=decision.ranks,
        location=decision.location,
        evidence=(
            *(_did(each, loop) for each in (*decision.traces, *decision.others)[:6]),
            *(
                [f"the training loop is at {_beside(loop, decision.location)}"]
                if loop != decision.location
                else []
            ),
        ),
        fix="Reduce the value over the ranks before the comparison (dist.all_reduce, with MAX for "
        "a flag), so that every rank takes the same branch in the same step.",
    )


def _beside(loop: Location, at: Location) -> str:
    """A loop's place, for who has just read another one."""
    return f"line {loop.line}" if loop.path == at.path else str(loop)


def _did(trace: Trace, loop: Location) -> str:
    reached = trace.reached
    steps = "" if reached is None else f" and began {reached} reduced backwards in it"
    if trace.fetched is None:
        took = "is still in the loop"
    elif trace.recorded_end or trace.state != "left":
        took = f"took {_batches(trace.fetched)}"
    else:
        took = "left the loop"
    return f"rank {trace.rank.rank} {took}{steps}"


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"
