"""Rules for collectives that do not match (DDP401, DDP803, DDP804), in a hang or without one."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import ABORT, MISPAIRED, brings_about, came_first, ended_by, event
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives import collective_mismatch
from ddpdoctor.diagnose.collectives.collective_mismatch import (
    Blame,
    alone_by_guard,
    comes_after,
    skipped_by_guard,
    way_past,
)
from ddpdoctor.diagnose.collectives.recorded_calls import Call
from ddpdoctor.diagnose.collectives.rules_out_of_step import guarded_finding, mismatch_finding
from ddpdoctor.diagnose.crashes.rank_endings import (
    PATIENCE,
    endings,
    first_failure,
    last_phase,
    mispaired,
)
from ddpdoctor.diagnose.hangs.rules_diagnosis import diagnosed
from ddpdoctor.diagnose.loops.training_loops import local_decisions
from ddpdoctor.diagnose.source_files import brief, location, quoted
from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase


@rule(
    "DDP401",
    "collective-under-rank-guard",
    Severity.ERROR,
    supersedes={"DDP803": came_first, "DDP804": brings_about},
    lapses=event,
)
def collective_under_rank_guard(run: Run) -> Iterator[Finding]:
    """A collective is called by some ranks only, under a condition on the rank.

    What it finds
        A barrier, all-reduce or broadcast under `if rank == 0:` (or after `if rank != 0: return`,
        or under `@rank_zero_only`), directly or in a function that calls it, while the other ranks,
        which skipped it, wait in another collective or failed because theirs met this one.

    Why it is bad
        A collective ends when all ranks of its group have called it. The job hangs until the
        timeout, or the call pairs with a different collective and mixes up their data.

    How to fix it
        Move the call out of the branch, so that every rank makes it.

    Example
        Wrong:
            if rank == 0:
                save(model)
                dist.barrier()  # ranks 1, 2, ... never call it
        Right:
            if rank == 0:
                save(model)
            dist.barrier()

    When it stays silent
        If every branch calls the same collective. For `if rank != 0: barrier()` before and
        `if rank == 0: barrier()` after the work of rank 0, which match. For conditions that hold on
        every rank (`local_rank != -1`), in groups whose ranks all call it, and while the missing
        ranks are busy (DDP802).
    """
    hung = list(diagnosed(run, "DDP401"))
    yield from hung
    if not hung:
        yield from _different(run, "DDP401")
        yield from _failed(run, "DDP401")


@rule("DDP803", "different-collectives", Severity.ERROR, lapses=event)
def different_collectives(run: Run) -> Iterator[Finding]:
    """Ranks call different collectives where they should call the same one.

    What it finds
        The n-th collective of a process group differs between ranks: in operation, tensor size,
        dtype, reduce operation (SUM or MAX) or root. The finding names the ranks that skipped a
        call, made an extra one, or differ from most; otherwise all ranks.

    Why it is bad
        Some of these hang, some fail with a message about sizes, and some go unnoticed: ranks that
        reduce with different operations all get wrong numbers, and nothing else checks that.

    How to fix it
        Make the call the same on all ranks. If the operations differ, one rank usually made one
        call more or less, a few lines earlier.

    Example
        Wrong:
            op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
            dist.all_reduce(x, op)
        Right:
            dist.all_reduce(x, dist.ReduceOp.SUM)  # on every rank

    When it stays silent
        For the same call at different lines. For tensors of the same size and different shape. For
        `all_to_all`, and with NCCL `all_gather` and `reduce_scatter`, whose sizes may differ. If
        some calls are compiled and cannot be seen, and for collectives in other threads. If DDP401
        or DDP109 is the cause.
    """
    hung = list(diagnosed(run, "DDP803"))
    yield from hung
    if not hung:
        found = list(_different(run, "DDP803"))
        yield from found or _failed(run, "DDP803")


@rule(
    "DDP804",
    "groups-in-different-order",
    Severity.ERROR,
    supersedes={"DDP803": ended_by},
    lapses=event,
)
def groups_in_different_order(run: Run) -> Iterator[Finding]:
    """Ranks use two process groups in different order and wait for each other.

    What it finds
        A rank that waits in a collective of one group for a rank that waits for the first one in a
        collective of another group.

    Why it is bad
        Neither call can end: the job hangs until the timeout.

    How to fix it
        Call the collectives of all groups in the same order on every rank.

    Example
        Wrong:
            groups = [a, b] if rank == 0 else [b, a]
            for group in groups:
                dist.all_reduce(x, group=group)
        Right:
            for group in [a, b]:
                dist.all_reduce(x, group=group)

    When it stays silent
        While one of the two ranks is busy and may still arrive.
    """
    yield from diagnosed(run, "DDP804")


def _different(run: Run, code: str) -> Iterator[Finding]:
    """The first collective that is another one on some ranks, by their rings."""
    calls = collective_mismatch.rings(run)
    if len(calls) < 2:
        return
    backends = {rank.opened.backend for rank in run.last}
    found = collective_mismatch.first_mismatch(
        calls, gloo=not any("nccl" in each for each in backends)
    )
    if found is None:
        return
    verdict = mismatch_finding(found)
    if verdict.code == code:
        yield verdict


@dataclass(frozen=True)
class _Failure:
    """A job that failed while its ranks were in different collectives."""

    inside: dict[int, Call]
    """Ranks that had called one from Python, and which."""
    elsewhere: tuple[int, ...]
    """Ranks that had not, and were in one of DDP's own."""
    before: dict[int, list[Call]]
    """What they all had called in that process group before."""


def _failure(run: Run) -> _Failure | None:
    restart = run.restarts[-1]
    ends = endings(run, restart)
    cause = first_failure(run, restart)
    abrupt = cause is not None and (mispaired(run, cause) or cause.status == -signal.SIGABRT)
    if not ends or (cause is not None and not abrupt) or local_decisions(run):
        return None
    calls = {
        rank: [collective_mismatch.call_of(each) for each in found if not each.point_to_point]
        for rank, found in collective_mismatch.rings(run).items()
    }
    # Lost for another reason, ranks may have been in different collectives for a moment.
    inside = _unfinished(calls, ends[0].time - PATIENCE if cause is None else math.inf)
    if not inside:
        return None
    first = min(inside.values(), key=lambda call: call.began)
    same = {rank: call for rank, call in inside.items() if _number(call) == _number(first)}
    elsewhere = tuple(
        rank.rank
        for rank in run.last
        if rank.rank in calls and rank.rank not in inside and _in_ddp(rank, calls[rank.rank], first)
    )
    before = {rank: _preceding(calls[rank], first) for rank in (*same, *elsewhere)}
    return _Failure(same, elsewhere, before) if elsewhere else None


def _unfinished(calls: dict[int, list[Call]], before: float) -> dict[int, Call]:
    """The calls from Python, begun before a moment, in which ranks still were at the end."""
    last = {rank: found[-1] for rank, found in calls.items() if found}
    return {
        rank: call
        for rank, call in last.items()
        if not call.done and call.site is not None and call.began < before
    }


def _in_ddp(rank: Rank, calls: list[Call], call: Call) -> bool:
    """Whether a rank that had not made a call was in a collective of DDP's own instead."""
    behind = _count(calls, call) < call.sequence
    return behind and _was_in(rank) in (Phase.BACKWARD.label, *BEFORE_FORWARD)


def _number(call: Call) -> tuple[object, int]:
    """Which collective of which process group it is."""
    return call.group, call.sequence


def _preceding(calls: list[Call], call: Call) -> list[Call]:
    """The calls of the same process group before a call."""
    return [each for each in calls if each.group == call.group and each.sequence < call.sequence]


def _failed(run: Run, code: str) -> Iterator[Finding]:
    """What the ranks' calls say of a job that failed while they were in different collectives."""
    found = _failure(run)
    if found is None:
        return
    early = collective_mismatch.mispaired_before(found.before)
    if early is not None:
        verdict = mismatch_finding(early)
        if verdict.code == code:
            yield verdict
        return
    lines = {rank.rank: _at(rank) for rank in run.last if rank.rank in found.elsewhere}
    skipped = skipped_by_guard(found.inside, lines)
    guarded = alone_by_guard(found.inside, [*lines.values()]) if skipped is None else None
    evidence = (
        *(
            f"rank {rank} called {made.what} at {brief(made.site)}"
            for rank, made in sorted(found.inside.items())[:6]
        ),
        *(f"rank {rank} was in a collective of DDP's own" for rank in found.elsewhere[:3]),
    )
    if guarded is not None and code == "DDP401":
        yield guarded_finding(guarded, found.inside[min(found.inside)], evidence)
    elif guarded is None and code == "DDP803":
        yield _skipped_backward(run, found, evidence) or _skipped_call(found, evidence, skipped)


def _skipped_call(found: _Failure, evidence: tuple[str, ...], by: Blame | None) -> Finding:
    """A call that some ranks made while the others were in DDP's own all-reduce.

    Args:
        found: The calls.
        evidence: Who was in what.
        by: The condition by which the others skipped it, if that is known.
    """
    inside, elsewhere = sorted(found.inside), found.elsewhere
    call = found.inside[inside[0]]
    many = len(inside) > len(elsewhere) or by is not None
    few = elsewhere if many else (inside if len(inside) < len(elsewhere) else ())
    who, others = (elsewhere, inside) if many else (inside, elsewhere)
    did = "skipped" if many else "called"
    at = f", by {quoted(by.location)}" if by is not None else ""
    then = "in which" if many else "while"
    return Finding(
        code="DDP803",
        about=f"{call.site}",
        subjects=frozenset((MISPAIRED, ABORT)),
        moment=call.began,
        severity=Severity.ERROR,
        message=f"{named(who)} {did} {call.what} at {quoted(call.site)}{at}, {then} "
        f"{named(others)} {'were' if len(others) > 1 else 'was'}"
        + (" when the job failed" if many else " in DDP's own all-reduce, and the job failed"),
        ranks=tuple(sorted(few or (*inside, *elsewhere))),
        location=by.location if by is not None else call.site,
        evidence=evidence,
        fix="Let every rank make the call: what decides on it has to be the same on all ranks.",
    )


def _skipped_backward(run: Run, found: _Failure, evidence: tuple[str, ...]) -> Finding | None:
    """A backward that ranks skipped behind its forward, by which they were ahead."""
    pages = {rank.rank: rank.status for rank in run.last if rank.status is not None}
    lacking = {rank: page.armed - page.reduced for rank, page in pages.items()}
    if any(lacking.get(rank) != 1 for rank in found.inside):
        return None
    if any(lacking.get(rank) != 0 for rank in found.elsewhere):
        return None
    forward, backward = _last_site(run, "forward"), _last_site(run, "backward")
    if forward is None or backward is None:
        return None
    # Between a forward and its backward every rank lacks one.
    if not all(comes_after(call.chain, backward) for call in found.inside.values()):
        return None
    behind = forward.path == backward.path and forward.line < backward.line
    decider = way_past(backward, forward.line if behind else 0)
    call = found.inside[min(found.inside)]
    return Finding(
        code="DDP803",
        about=f"{decider or backward}",
        subjects=frozenset((MISPAIRED, ABORT)),
        severity=Severity.ERROR,
        message=f"{named(found.inside)} skipped a backward at {quoted(backward)}"
        + (f", by {quoted(decider)}" if decider is not None else "")
        + f", and called {call.what} at {quoted(call.site)} while {named(found.elsewhere)} "
        f"{'were' if len(found.elsewhere) > 1 else 'was'} in DDP's own all-reduce: the job failed",
        ranks=tuple(sorted(found.inside)),
        location=decider or backward,
        evidence=(
            *(
                f"rank {rank} began {page.armed} forwards and {page.reduced} backwards"
                for rank, page in sorted(pages.items())[:4]
            ),
            *evidence,
        ),
        fix="Decide on all ranks together: reduce the value over the ranks before it is compared.",
    )


def _last_site(run: Run, phase: str) -> Location | None:
    """Where a phase was last begun; on any rank, since one that native code ended may lose it."""
    return next((at for rank in reversed(run.last) for at in reversed(rank.sites(phase))), None)


def _at(rank: Rank) -> list[Location]:
    """The lines that a rank was at when it failed or was ended, innermost first."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        return [Location(each.path, each.line) for each in reversed(error.user_frames)]
    at = location(rank.status.site) if rank.status is not None else None
    return [at] if at is not None else []


def _count(calls: list[Call], wanted: Call) -> int:
    """How many collectives of a group a rank has called."""
    return max((each.sequence for each in calls if each.group == wanted.group), default=0)


def _was_in(rank: Rank) -> str:
    """What a rank was in when it failed or was ended."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        return error.collective or error.phase
    status, phase = rank.status, last_phase(rank)
    return "" if status is None or phase is None else status.collective or phase.label
