"""Find ranks that left a loop without a loader before the others.

The iterations of such a loop are not recorded. We only know how many reduced backwards each rank
began, and its position: in a backward of the loop, in a collective after it, or at its own end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from ddpdoctor.diagnose.data.equal_losses import groups_of
from ddpdoctor.diagnose.source_files import Source, holds, location, source_of
from ddpdoctor.diagnose.source_operations import callers, loop_around
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.records.training import LoopRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase


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
