"""Find ranks whose own work outlasted the timeout of a collective in which other ranks waited."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.crashes.rank_endings import TIMED_OUT, Ending, endings, first_failure
from ddpdoctor.diagnose.source_files import brief, location, quoted
from ddpdoctor.run.records.process import ErrorRecord, OwnWorkRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase

_OWN_WORK = (Phase.OTHER, Phase.STARTING, Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)

MIN_SHARE = 0.5
"""Part of the timeout for which a rank was at one thing when the others gave up."""


def outlasted(run: Run) -> Finding | None:
    """Report ranks that were at their own work while a collective of the others timed out (DDP802).

    Only ranks count whose status page shows that they called nothing since: they were in one phase,
    or outside of all, from before the timeout ran until the other ranks gave up.
    """
    restart = run.restarts[-1]
    # A rank that its launcher stopped may be dated too early, by its last sign of life.
    victims = (each for each in endings(run, restart) if each.victim and not each.stopped)
    first = next(victims, None)
    if first is None or first.kind != "exception" or first_failure(run, restart) is not None:
        return None
    found = TIMED_OUT.search(first.message)
    if found is None:
        return None
    timeout = int(next(filter(None, found.groups())))
    late = [
        rank
        for rank in run.last
        if rank.rank != first.rank and not rank.lost and _worked(rank, first.time, timeout)
    ]
    place = _place(late[0]) if late else None
    return _finding(run, first, late, timeout, place) if place is not None else None


def _worked(rank: Rank, until: int, timeout: int) -> bool:
    """Return whether a rank did its own work for most of a timeout, in milliseconds."""
    status = rank.status
    if status is None or rank.ended is not None or status.phase not in _OWN_WORK:
        return False
    if status.collective or rank.records.of(ErrorRecord):
        return False
    return until - status.since >= MIN_SHARE * timeout * 1_000_000


def _place(rank: Rank) -> Location | None:
    """Return the line of a rank's work: the innermost one that all looks at it have in common."""
    status = rank.status
    if status is None:
        return None
    if status.phase not in (Phase.OTHER, Phase.STARTING):
        return location(status.site)
    looks = [each.frames[::-1] for each in rank.records.of(OwnWorkRecord)]
    since = [each.since for each in rank.records.of(OwnWorkRecord)]
    looks = [each for each, begun in zip(looks, since, strict=True) if begun >= since[-1]]
    common = [lines[0] for lines in zip(*looks, strict=False) if len(set(lines)) == 1]
    return common[-1] if common else None


def _finding(
    run: Run, first: Ending, late: Sequence[Rank], timeout: int, place: Location
) -> Finding:
    ranks = [each.rank for each in late]
    who, plural = named(ranks), len(ranks) > 1
    since = min(each.status.since for each in late if each.status is not None)
    seconds, limit = (first.time - since) / 1e9, f"{timeout / 1000:g} s"
    opened = run.rank(first.rank).opened if first.rank is not None else None
    set_at = ""
    if opened is not None and opened.timeout == timeout / 1000 and opened.joined is not None:
        set_at = f" at {brief(opened.joined)}"
    where = first.where.rpartition(", ")[2] or "a collective"
    return Finding(
        code="DDP802",
        about="timeout",
        severity=Severity.ERROR,
        message=f"{who} {'were' if plural else 'was'} at {quoted(place)} for {seconds:.0f} s and "
        f"never joined {where}, where {first.name} waited at {quoted(first.location)} until the "
        f"timeout of {limit}",
        ranks=tuple(ranks),
        location=place,
        evidence=(
            f"{first.name}: {first.text[:160]}",
            *((f"the process group was created with this timeout{set_at}",) if set_at else ()),
        ),
        fix=f"Give the group more time (`init_process_group(timeout=timedelta(...))`{set_at}), or "
        "do the work before it: the others wait from the moment at which they call the collective.",
        subjects=frozenset((STANDSTILL,)),
        moment=first.time,
        traceback="",
    )
