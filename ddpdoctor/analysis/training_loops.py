"""What each rank did in a training loop, and where in the source that loop stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpdoctor.analysis.endings import PATIENCE
from ddpdoctor.analysis.hang_snapshot import seen_waiting
from ddpdoctor.analysis.places import location
from ddpdoctor.analysis.sources import Loop, Source, source_of
from ddpdoctor.core.finding import Location
from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.records.training import IdleBatch, LoopRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase


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


def traces_of(rank: Rank, run: Run) -> Iterator[Trace]:
    """The loops of a rank, in the order in which they began."""
    found: dict[int, list[LoopRecord]] = {}
    for record in rank.records.of(LoopRecord):
        found.setdefault(record.loop, []).append(record)
    for records in found.values():
        first = next((each for each in records if each.before is not None and each.frames), None)
        if first is not None:
            yield Trace(rank, first, records[-1], _stuck(rank, run))


def place_of(frames: Sequence[Location]) -> Place | None:
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
