"""Diagnose a job that makes no progress, and collectives that differ between its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.collective_mismatch import ring_mismatch
from ddpdoctor.diagnose.collectives.mismatch_findings import (
    called_alone,
    failed_in_different_calls,
    mismatch_finding,
)
from ddpdoctor.diagnose.crashes.rank_endings import (
    TIMED_OUT,
    Ending,
    endings,
    first_failure,
    last_phase,
)
from ddpdoctor.diagnose.hangs.diagnosis import diagnose
from ddpdoctor.diagnose.hangs.early_leavers import armed, is_explained, leavers, wish
from ddpdoctor.diagnose.hangs.hang_snapshot import hang_snapshot
from ddpdoctor.diagnose.source_files import brief, location, quoted
from ddpdoctor.run.records.process import ErrorRecord, OwnWorkRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase


def stands_still(run: Run) -> Iterator[Finding]:
    """Diagnose a hang, and collectives that differ between ranks even without a hang."""
    if is_explained(run):
        return
    mismatch = ring_mismatch(run)
    hang = hang_snapshot(run)
    hung = diagnose(hang, mismatch is not None) if hang is not None else []
    failure = first_failure(run, run.restarts[-1])
    if failure is not None and failure.kind == "exception":
        # After the exception, the process may take seconds to end, and the others wait meanwhile.
        hung = [
            each
            for each in hung
            if (each.code, each.ranks) != ("DDP802", (failure.rank,)) or each.moment < failure.time
        ]
    late = outlasted(run)
    if late is not None and all(each.severity < Severity.ERROR for each in hung):
        # An earlier examination may only have warned that the rank works.
        hung = [late]
    yield from hung
    known = {each.code for each in hung}
    if mismatch is not None:
        different = mismatch_finding(mismatch)
        if different.code not in known:
            yield different
            known.add(different.code)
    failed = failed_in_different_calls(run)
    alone = (alone_behind(leaver, wanting) for leaver, wanting in leavers(run))
    for each in (failed, *alone):
        if each is not None and each.code not in known:
            known.add(each.code)
            yield each


def alone_behind(leaver: Rank, wanting: list[Rank]) -> Finding | None:
    """Report a collective under a condition on the rank after the same number of steps (DDP401)."""
    count = armed(leaver)
    if any(armed(rank) > count or _phase(rank) != Phase.WAIT.label for rank in wanting):
        return None
    wishes = [f"rank {rank.rank} {wish(rank)}" for rank in wanting[:4]]
    found = called_alone(wanting, (f"rank {leaver.rank} ended regularly", *wishes))
    return replace(found, subjects=found.subjects | {STANDSTILL}) if found is not None else None


def _phase(rank: Rank) -> str:
    """Return the phase that a rank is in, or was in when it failed."""
    error, last = rank.records.first(ErrorRecord), last_phase(rank)
    return error.phase if error is not None else last.label if last is not None else ""


_OWN_WORK = (Phase.OTHER, Phase.STARTING, Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)


MIN_SHARE = 0.5  # Minimum fraction of the timeout that a rank spent on the same work


def outlasted(run: Run) -> Finding | None:
    """Report ranks that were at their own work while a collective of the others timed out (DDP802).

    The status page must show that the rank made no calls: it was in one phase, or outside of all
    phases, from before the timeout began until the other ranks gave up.
    """
    restart = run.restarts[-1]
    # The end of a rank that its launcher stopped may seem too early: it is the last sign of life.
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
    place = _work_place(late[0]) if late else None
    return _outlasted_finding(run, first, late, timeout, place) if place is not None else None


def _worked(rank: Rank, until: int, timeout: int) -> bool:
    """Return whether a rank did its own work for most of a timeout, given in milliseconds."""
    status = rank.status
    if status is None or rank.ended is not None or status.phase not in _OWN_WORK:
        return False
    if status.collective or rank.records.of(ErrorRecord):
        return False
    return until - status.since >= MIN_SHARE * timeout * 1_000_000


def _work_place(rank: Rank) -> Location | None:
    """Return the line of a rank's work: the innermost line in all samples."""
    status = rank.status
    if status is None:
        return None
    if status.phase not in (Phase.OTHER, Phase.STARTING):
        return location(status.site)
    samples = [each.frames[::-1] for each in rank.records.of(OwnWorkRecord)]
    since = [each.since for each in rank.records.of(OwnWorkRecord)]
    samples = [each for each, begun in zip(samples, since, strict=True) if begun >= since[-1]]
    common = [lines[0] for lines in zip(*samples, strict=False) if len(set(lines)) == 1]
    return common[-1] if common else None


def _outlasted_finding(
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
        "do the work before it: the others' timeout starts when they call the collective.",
        subjects=frozenset((STANDSTILL,)),
        moment=first.time,
        traceback="",
    )
