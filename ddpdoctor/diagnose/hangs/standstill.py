"""Diagnose a job that makes no progress, and collectives that differ between its ranks.

One cause are ranks that finished while others needed them for another step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

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
from ddpdoctor.diagnose.crashes.attempts import raised_before_a_wait
from ddpdoctor.diagnose.crashes.rank_endings import (
    PATIENCE,
    TIMED_OUT,
    Ending,
    endings,
    first_failure,
    last_phase,
)
from ddpdoctor.diagnose.data.draws import averages_by_hand
from ddpdoctor.diagnose.gradients.reducer import constant_losses
from ddpdoctor.diagnose.hangs.diagnosis import diagnose
from ddpdoctor.diagnose.hangs.hang_snapshot import hang_snapshot, seen_waiting
from ddpdoctor.diagnose.loops.training_loops import alone_evaluating
from ddpdoctor.diagnose.source_files import brief, location, quoted
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord, OwnWorkRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase

# -- ranks that finished while others needed them


def leavers(run: Run) -> Iterator[tuple[Rank, list[Rank]]]:
    """Yield each rank that finished while others need it, with the others."""
    ranks = run.last
    if is_explained(run):
        return
    failures = {each.rank: each for each in endings(run, run.restarts[-1])}
    if any(not each.victim and each.kind != "abort-at-exit" for each in failures.values()):
        return
    left = [r for r in ranks if r.ended is not None and r.rank not in failures]
    left += [r for r in ranks if r.rank in failures and not failures[r.rank].victim]
    for leaver in filter(partial(_ended_well, run), left):
        count = armed(leaver)
        wanting = [
            rank
            for rank in ranks
            if _shares(leaver, rank) and _wants_more(rank, count, run, rank.rank in failures)
        ]
        wanting = _without_evaluations(run, wanting)
        if wanting:
            yield leaver, wanting


def is_explained(run: Run) -> bool:
    """Return whether an earlier exception (DDP901) or missing reduction (DDP305) is the cause.

    Relations between the rules cannot express this: findings about the end of a job have these
    codes as well, and follow from standstills.
    """
    return raised_before_a_wait(run) is not None or any(constant_losses(run))


def _without_evaluations(run: Run, wanting: list[Rank]) -> list[Rank]:
    """Drop ranks whose evaluation waits for ranks that never evaluate, which DDP402 reports.

    Relations between the rules cannot express this: perhaps only some ranks are in an evaluation.
    """
    alone = {each for group in alone_evaluating(run) for each in group} if wanting else set()
    return [rank for rank in wanting if rank.rank not in alone]


def _ended_well(run: Run, rank: Rank) -> bool:
    """Return whether the rank reported no failure. Its exit status may still be unknown."""
    if any(call.status for call in rank.records.of(ExitRecord)) or rank.records.of(ErrorRecord):
        return False
    stopped = run.stopped_at
    return stopped is None or rank.ended is None or rank.ended.time < stopped


def armed(rank: Rank) -> int:
    """Return the number of synchronized forwards that the rank has begun."""
    if rank.ended is not None:
        return rank.ended.armed
    return rank.status.armed if rank.status is not None else 0


def _wants_more(rank: Rank, count: int, run: Run, failed: bool) -> bool:
    """Return whether the rank needs a peer that left after ``count``, or did when it failed."""
    status, last = rank.status, last_phase(rank)
    if status is None or last is None:
        return False
    phase, armed = last.label, status.armed
    error = rank.records.first(ErrorRecord)
    if error is not None:
        # The status page was updated until the process ended.
        phase, armed = error.phase, error.armed
    elif not failed and (run.exit_status is not None or run.waits_for(rank) < PATIENCE):
        return False
    if failed and error is not None and phase == Phase.FORWARD.label:
        # A forward needs the peer as well: DDP broadcasts buffers, and once the order of buckets.
        return armed >= count
    behind = phase == Phase.BACKWARD.label or seen_waiting(run, rank.rank)
    return (armed > count and behind) or (armed >= count and phase == Phase.WAIT.label)


def _shares(one: Rank, other: Rank) -> bool:
    """Return whether a DDP module is replicated on both ranks, or they average by hand."""
    groups = [record.group_ranks for record in one.records.of(DdpRecord)]
    if not groups:
        return one is not other and averages_by_hand(one) and averages_by_hand(other)
    return one is not other and any({one.rank, other.rank} <= set(group) for group in groups)


def wish(rank: Rank) -> str:
    """Describe the rank's wait: ``waits in backward of step 25 (train.py:28)``."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        place = f" ({error.location})" if error.location is not None else ""
        return f"failed in {error.collective or error.phase} of step {error.step}{place}"
    status = rank.status
    if status is None:
        return "waits"
    place = f" ({status.site})" if status.site else ""
    return f"waits in {status.collective or status.phase.label} of step {status.step}{place}"


# -- findings


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
