"""Find an exception that is delayed by a collective in a ``finally`` or ``__exit__``."""

from __future__ import annotations

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import ABORT, MISPAIRED, STANDSTILL
from ddpdoctor.diagnose.crashes.rank_endings import (
    endings,
    first_failure,
    in_short,
    is_consequence,
    mispaired,
)
from ddpdoctor.diagnose.hangs.diagnosis import guilty
from ddpdoctor.diagnose.source_files import brief, quoted
from ddpdoctor.run.records.process import ErrorRecord, PendingErrorRecord
from ddpdoctor.run.snapshot import Rank, Run


def raised_before_a_wait(run: Run) -> Finding | None:
    """Report such an exception (DDP901) if the job certainly hangs or has failed."""
    found = _alone(run)
    if not found or len(run.last) < 2:
        return None
    rank, error = min(found, key=lambda each: each[1].time)
    restart = run.restarts[-1]
    cause = first_failure(run, restart)
    ends = endings(run, restart)
    if cause is not None and cause.time < error.time:
        return None
    own = cause is None or cause.rank == rank.rank or mispaired(run, cause)
    failed = bool(ends) and own and all(each.time >= error.time for each in ends)
    if not failed and not guilty(run):
        return None
    where = f" in step {error.step}" if error.step is not None else ""
    return Finding(
        code="DDP901",
        about=f"pending {rank.rank}",
        severity=Severity.ERROR,
        subjects=frozenset((STANDSTILL, MISPAIRED, ABORT)),
        message=f"{named([rank.rank])} raised {in_short(error)[:200]}{where}, and called "
        f"{error.collective} at {quoted(error.called_at)} while that was being handled: the other "
        "ranks do not come to this call",
        ranks=(rank.rank,),
        location=error.location,
        evidence=(f"the exception waits for {error.collective} at {brief(error.called_at)}",),
        fix="Fix this exception first. Call no collective in a `finally`, `except` or `__exit__` "
        "that an exception of one rank leads to.",
        traceback=error.traceback,
        moment=error.time,
    )


def _alone(run: Run) -> list[tuple[Rank, PendingErrorRecord]]:
    """Return the ranks that alone call a collective, while an exception is being handled."""
    found = [
        (rank, error)
        for rank in run.last
        if (error := _pending(rank)) is not None and not is_consequence(error)
    ]
    # Ranks that all handle the same exception call their collective together.
    places = {(error.exception, error.location) for _, error in found}
    if len(found) == len(run.last) and len(places) == 1:
        return []
    handling = {rank.rank for rank, _ in found}
    return [each for each in found if not _others_came(run, each[0], handling)]


def _pending(rank: Rank) -> PendingErrorRecord | None:
    """Return the exception that a rank was handling when it called its last collective."""
    pending, status = rank.records.of(PendingErrorRecord), rank.status
    if not pending or status is None or rank.ended is not None or rank.records.of(ErrorRecord):
        return None
    last = pending[-1]
    there = status.collective == last.collective and status.site == str(last.called_at)
    return last if there and status.step == last.step else None


def _others_came(run: Run, rank: Rank, handling: set[int]) -> bool:
    """Return whether ranks without an exception called this rank's collective as well."""
    calls = rank.ring.collectives if rank.ring is not None else ()
    if not calls:
        return False
    mine = calls[-1]
    return any(
        (each.group, each.sequence, each.site) == (mine.group, mine.sequence, mine.site)
        for other in run.last
        if other.rank not in handling and other.ring is not None
        for each in other.ring.collectives
    )
