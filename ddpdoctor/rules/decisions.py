"""Decisions (DDP403) that some ranks took alone: a step skipped, a loop left, an epoch not begun.

Judged by what the ranks did: how many batches of one loop each took and how many reduced backwards
it began there. The source is read only to name the statement.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ddpdoctor.finding import Finding, Location, Severity, rule
from ddpdoctor.probe.hooks.ddp import BUFFERS
from ddpdoctor.record import Phase, Record, integer
from ddpdoctor.rules import updates
from ddpdoctor.rules.endings import PATIENCE, Ending, endings, first_failure, mispaired
from ddpdoctor.rules.ranks import named
from ddpdoctor.rules.sources import Loop, Source, endless, holds, source_of
from ddpdoctor.run import Rank, Run

SOON = 3
"""Batches after a skipped one within which ranks fail whose collectives no more fit."""

FOREVER = 1 << 63


@dataclass(frozen=True)
class Trace:
    """What one rank did in one training loop, as far as it told."""

    rank: Rank
    record: Record
    stuck: bool
    """The rank is, or was when it died, in a collective that does not end."""

    @cached_property
    def state(self) -> str:
        """``ended``, ``left`` or ``failed``; else the loop goes on."""
        told = str(self.record.get("state"))
        error = next(self.rank.of_kind("error"), None)
        if error is None or told not in ("left", "failed"):
            return told
        lines = [Location(str(each[0]), each[1]) for each in error.get("user_frames") or ()]
        left_at = _places(self.record.get("left_at"))
        if left_at:
            # An exception lets go of the iterator, too, and is told when it has come to the top.
            return "failed" if _contains(lines, left_at[::-1]) else "left"
        place = _place(self.frames)
        # The iterator may have outlived its loop, as that of persistent workers does.
        inside = place is None or any(
            each.path == place.path and place.runs_at(each.line) for each in lines
        )
        return "failed" if told == "failed" and inside else "left"

    @property
    def closed(self) -> bool:
        """Whether the loop is over."""
        return self.state in ("ended", "left", "failed")

    @property
    def before(self) -> int:
        """Reduced backwards that the rank had begun before the loop."""
        return integer(self.record, "before")

    @property
    def fetched(self) -> int | None:
        """Batches that it took, once the loop is over."""
        return integer(self.record, "fetched") if self.closed else None

    @property
    def reached(self) -> int | None:
        """Reduced backwards begun in the loop, or on their way; None if not known for sure."""
        status = self.rank.status
        if self.state in ("ended", "left"):
            return integer(self.record, "after") - self.before
        if self.closed:
            error = next(self.rank.of_kind("error"), {})
            return integer(self.record, "after") - self.before + _in_broadcast(error)
        if not self.stuck or status is None:
            return None
        return status.reduced - self.before + (status.collective == BUFFERS)

    @property
    def idle(self) -> dict[int, tuple[int, bool]]:
        """Batches without a backward: in which step, and whether there was a forward."""
        told = self.record.get("idle")
        return {each[0]: (each[1], each[2]) for each in told} if isinstance(told, list) else {}

    @property
    def time(self) -> int:
        """Unix nanoseconds of what was told last."""
        return integer(self.record, "time")

    @property
    def frames(self) -> list[Location]:
        """The lines that led to the first batch, innermost first."""
        return _places(self.record.get("frames"))


@dataclass(frozen=True)
class Place:
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


@dataclass(frozen=True)
class Decision:
    """What some ranks did alone."""

    kind: Literal["skipped", "left", "stopped"]
    traces: tuple[Trace, ...]
    """Their loop."""
    others: tuple[Trace, ...]
    place: Place
    location: Location
    step: int
    batch: int
    """The batch that was skipped; else how many were taken."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that decided."""
        return tuple(each.rank.rank for each in self.traces)


@rule("DDP403", "rank-local-decision", Severity.ERROR)
def rank_local_decision(run: Run) -> Iterator[Finding]:
    """A rank alone skipped a step or left the training loop.

    What it finds
        A batch without a backward on some ranks of a DDP group, a training loop that some ranks
        left before its loader's end, or epochs that some ranks no more began, where the others
        went on and needed them; and an `optimizer.step()` that some ranks left out after a backward
        that all had. The statement is named: the `break`, `return`, `continue` or `if`.

    Why it is bad
        Every backward pass is a collective. What the rank does next pairs with another step of the
        others, and in the end one of them waits for a partner that never comes: the job hangs, or
        fails with "Connection closed by peer", far from the line that is to blame. Without its step
        a rank has other parameters from then on, and nothing fails at all.

    How to fix it
        Decide on all ranks together: reduce the value over the ranks before it is compared.

    Example
        Wrong: `if loss.isnan(): continue`.
        Right: `bad = loss.isnan().float(); dist.all_reduce(bad)`, then `if bad > 0: continue`.

    When it stays silent
        Where all ranks leave after the same step or skip the same batch, within `join()`, for a
        loader that just ended (DDP109), for loops driven by `next()`, for a rank that failed or was
        stopped, and where a loop that counts its steps makes up for a batch that was skipped.

    Since
        0.1.0
    """
    made = decisions(run)
    for decision in made:
        yield _finding(decision)
    if not made:
        yield from map(updates.finding, updates.left_out(run))


def decisions(run: Run, *, suspected: bool = False) -> list[Decision]:
    """The first such decision in each DDP group; what came after it is a consequence.

    Those that may do no harm yet only if they are to be ``suspected``.
    """
    restart = run.restarts[-1]
    ends = {each.rank: each for each in endings(run, restart)}
    cause = first_failure(run, restart)
    limit = FOREVER if cause is None or mispaired(run, cause) else cause.time
    limit = min(limit, run.stopped_at or FOREVER)
    found: list[Decision] = []
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
        for record in rank.of_kind("ddp"):
            group = record.get("group_ranks")
            if isinstance(group, list):
                found[tuple(sorted(each for each in group if each in ranks))] = None
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
        self._traces = {rank.rank: list(_traces(rank, run)) for rank in group}

    # -- within a loop

    def skipped_or_left(self) -> Iterator[Decision]:
        """Decisions within a loop that ranks of the group began after as many steps."""
        shared: dict[tuple[object, ...], list[Trace]] = {}
        for traces in self._traces.values():
            for each in traces:
                shared.setdefault((each.before, *each.frames[:1]), []).append(each)
        for key in sorted(shared, key=lambda key: int(str(key[0]))):
            members = shared[key]
            if len(members) < 2 or any(each.record.get("joins") for each in members):
                continue
            if len({(each.reached, tuple(each.idle)) for each in members}) == 1:
                continue
            place = _place(members[0].frames)
            if place is not None:
                decision = self._skipped(members, place) or self._left(members, place)
                if decision is not None:
                    yield decision

    def _skipped(self, members: list[Trace], place: Place) -> Decision | None:
        top = max((each.reached or 0 for each in members), default=0)
        for trace in members:
            others = [each for each in members if each is not trace]
            alone = [batch for batch in trace.idle if _trained_on(batch, others)]
            if not trace.closed or not alone:
                continue
            reached, fetched = trace.reached or 0, trace.fetched or 0
            step, forward = trace.idle[alone[0]]
            # The batches it passed over are all that it lacks.
            lacks = reached < top <= reached + len(alone) and 4 * len(alone) <= fetched + 3
            if trace.state == "failed":
                lacks = fetched - alone[0] <= SOON
            if not lacks or trace.time > self._limit:
                continue
            wanting = [each for each in others if (each.reached or 0) > reached]
            if trace.state == "failed":
                wanting = [each for each in others if each.state == "failed"]
            location = _skip_location(trace.rank, place, forward)
            if not wanting or not self._harms([trace], wanting, place, location):
                continue
            sick = [each for each in members if alone[0] in each.idle]
            return Decision(
                "skipped",
                tuple(sick),
                tuple(each for each in members if each not in sick),
                place,
                location,
                step,
                alone[0],
            )
        return None

    def _left(self, members: list[Trace], place: Place) -> Decision | None:
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
        location = _exit_location(first, place)
        if location is None or not self._harms(leavers, wanting, place, location):
            return None
        return Decision(
            "left",
            tuple(leavers),
            tuple(each for each in members if each not in leavers),
            place,
            location,
            integer(first.record, "step"),
            first.fetched or 0,
        )

    # -- between two of them

    def stopped(self) -> Decision | None:
        """Ranks that came to no further loop at a place where others began one."""
        over = [
            traces[-1]
            for traces in self._traces.values()
            if traces and self._is_last(traces[-1]) and not self._ended_itself(traces[-1])
        ]
        for last in over:
            total = integer(last.record, "after")
            alone = [
                each for each in over if _same_loop(each, last) and each.reached == last.reached
            ]
            ranks = {each.rank.rank for each in alone}
            wanting = [
                each
                for number, traces in self._traces.items()
                if number not in ranks
                and any(_same_loop(each, last) and each.reached == last.reached for each in traces)
                for each in traces
                if each.before == total and each.frames == last.frames and (each.reached or 0) > 0
            ]
            if not wanting or any(each.record.get("joins") for each in (*alone, *wanting)):
                continue
            place = _place(last.frames)
            location = _stop_location(last.rank, place) if place is not None else None
            if place is None or location is None or not self._collapsed(alone, wanting):
                continue
            step, batches = integer(last.record, "step"), last.fetched or 0
            return Decision("stopped", tuple(alone), tuple(wanting), place, location, step, batches)
        return None

    def _is_last(self, trace: Trace) -> bool:
        """Whether a rank made no further step after a loop."""
        status, total = trace.rank.status, integer(trace.record, "after")
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
        call = _call_to_exit(trace.rank)
        return call is not None and trace.state == "left" and integer(call, "time") <= trace.time

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
            # After a failure with a cause of its own everybody is a victim of that.
            return ending.time <= self._limit
        return ending is None and trace.rank.ended is None and trace.stuck

    def _gone(self, trace: Trace) -> bool:
        """Whether a rank came to its regular end."""
        ending, ended = self._ends.get(trace.rank.rank), trace.rank.ended
        regular = ending is None or ending.kind == "abort-at-exit"
        return ended is not None and regular and integer(ended, "time") <= self._limit


def _traces(rank: Rank, run: Run) -> Iterator[Trace]:
    told: dict[int, Record] = {}
    for record in rank.of_kind("loop"):
        number = integer(record, "loop", -1)
        told[number] = {**told.get(number, {}), **record}
    for record in told.values():
        if isinstance(record.get("before"), int) and record.get("frames"):
            yield Trace(rank, record, _stuck(rank, run))


def _contains(lines: Sequence[Location], part: Sequence[Location]) -> bool:
    """Whether some lines follow each other in a traceback."""
    return any(lines[at : at + len(part)] == part for at in range(len(lines)))


def _in_broadcast(error: Record) -> bool:
    """Whether a rank failed in DDP's broadcast in front of a forward."""
    return error.get("collective") == BUFFERS


def _stuck(rank: Rank, run: Run) -> bool:
    """Whether a rank is in one collective for long, or was when it died."""
    status = rank.status
    if status is None or status.phase not in (Phase.BACKWARD, Phase.WAIT):
        return False
    until = run.taken if run.exit_status is None else status.since
    if rank.exit is not None:
        until = integer(rank.exit, "time")
    return until - status.since > PATIENCE


def _trained_on(batch: int, others: Sequence[Trace]) -> bool:
    """Whether some rank trained on the batch, as far as that is known."""
    return any(
        batch not in each.idle
        and (each.fetched is None or each.fetched > batch)
        and (each.state == "ended" or (each.reached or 0) > 0)
        for each in others
    )


def _same_loop(one: Trace, other: Trace) -> bool:
    """Whether two ranks came to a loop after as many steps."""
    return one.frames == other.frames and one.before == other.before


def _call_to_exit(rank: Rank) -> Record | None:
    return next((call for call in rank.of_kind("exit") if call.get("path")), None)


def _line(record: Record) -> int:
    return integer(record, "line")


def _places(told: object) -> list[Location]:
    """Lines of code from a record."""
    if not isinstance(told, list):
        return []
    return [Location(str(path), int(line)) for path, line in told]


# -- which statement


def _place(frames: Sequence[Location]) -> Place | None:
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
        return Place(at.path, source, loop, tuple(outer))
    return None


def _exit_location(trace: Trace, place: Place) -> Location | None:
    """The statement by which a rank left a loop; None if that was none of the loop's own."""
    told = trace.record.get("left_at")
    if told is not None:
        for at in _places(told):
            if at.path == place.path and place.source.leaves(at.line, place.loop):
                return at
        return None
    # The iterator outlived the loop.
    exits = place.source.exits(place.loop)
    only = place.source.only(exits)
    if only is not None:
        return Location(place.path, only.lineno)
    return place.location if exits else None


def _skip_location(rank: Rank, place: Place, forward: bool) -> Location:
    """The statement that passes a batch over, behind the ``forward`` or in front of it."""
    forwards = _lines(rank, "forward", place)
    backwards = _lines(rank, "backward", place)
    after = min(forwards, default=0) if forward else 0
    until = min(backwards if forward else forwards or backwards, default=FOREVER)
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


def _return_location(rank: Rank, place: Place, forward: bool) -> Location | None:
    """The ``return`` in front of the backward of a function that the loop calls."""
    if _lines(rank, "backward", place) or place.source.skips(place.loop):
        return None
    at = {each: _sites(rank, each) for each in ("forward", "backward")}
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


def _stop_location(rank: Rank, place: Place) -> Location | None:
    """The statement by which the loop around the training loop was left, if there may be one."""
    if not place.outer:
        return None
    path, source, outer = place.outer[0]
    call = _call_to_exit(rank)
    if call is not None and call.get("path") == path and holds(outer, _line(call)):
        return None
    ways: list[ast.stmt] = source.exits(outer)
    if isinstance(outer, ast.While) and not endless(outer):
        ways.append(outer)
    # A `for` ends by itself, too: after another number of epochs, say.
    deciding = [each for each in ways if not source.counts(each)]
    if isinstance(outer, ast.While):
        deciding = deciding or ways
    if not deciding:
        return None
    return Location(path, deciding[0].lineno if len(deciding) == 1 else outer.lineno)


def _sites(rank: Rank, phase: str) -> list[Location]:
    """The lines at which a rank entered a phase."""
    return [
        Location(str(record["path"]), _line(record))
        for record in rank.of_kind("site")
        if record.get("phase") == phase and record.get("path")
    ]


def _lines(rank: Rank, phase: str, place: Place) -> list[int]:
    """Those of them that are in the training loop."""
    return [
        at.line
        for at in _sites(rank, phase)
        if at.path == place.path and holds(place.loop, at.line)
    ]


# -- in words


def _finding(decision: Decision) -> Finding:
    who, others = named(decision.ranks), named(each.rank.rank for each in decision.others)
    loop = decision.place.location
    if decision.kind == "skipped":
        what = f"skipped batch {decision.batch} of the training loop (step {decision.step})"
        went = f"{others} trained on it"
    elif decision.kind == "left":
        what = f"left the training loop in step {decision.step}, after {_batches(decision.batch)}"
        went = f"{others} went on"
    else:
        what = f"began no further epoch after {decision.step} steps"
        went = f"{others} did"
    return Finding(
        code="DDP403",
        about=f"{decision.kind} {decision.location}",
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
    took = "is still in the loop" if trace.fetched is None else f"took {_batches(trace.fetched)}"
    return f"rank {trace.rank.rank} {took}{steps}"


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"
