"""Findings about ranks whose collectives differ (DDP401, DDP803, DDP804), hanging or not."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import ABORT, MISPAIRED
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.collective_mismatch import (
    Blame,
    Group,
    Mismatch,
    alone_by_guard,
    as_nccl_compares,
    comes_after,
    decided_by,
    is_up_to_date,
    mismatch_of_calls,
    mispaired_before,
    rings,
    skipped_by_guard,
    skipped_call,
    way_past,
)
from ddpdoctor.diagnose.collectives.recorded_calls import Call, from_ring
from ddpdoctor.diagnose.crashes.rank_endings import (
    PATIENCE,
    endings,
    first_failure,
    last_phase,
    mispaired,
)
from ddpdoctor.diagnose.hangs.hang_snapshot import Blocked, RankState
from ddpdoctor.diagnose.loops.training_loops import local_decisions
from ddpdoctor.diagnose.source_files import brief, location, quoted, statement
from ddpdoctor.run.names import BEFORE_FORWARD
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase

_error = partial(Finding, severity=Severity.ERROR, subjects=frozenset((MISPAIRED, ABORT)))
_DECIDE = (
    "Reduce the value that decides over the ranks first (dist.all_reduce), so that all of them "
    "make the call, or none does."
)
_LEAVE = {
    "": "Call it on every rank of the group: move it out of the branch.",
    "break": "Broadcast the decision of the rank that makes it, so that all ranks leave the loop "
    "together.",
}
"""Fixes by how a condition decides on a call."""
_SAME_ORDER = "Let every rank call the same collectives in the same order."
_MAX_GROUPS = 4  # Maximum number of groups of ranks in a sentence


def mismatch_finding(found: Mismatch, steps: int = 0) -> Finding:
    """Make the finding (DDP401 or DDP803) about calls that differ, after ``steps`` closed steps."""
    kind, guilty = found.blame.kind, found.guilty
    if kind == "guard":
        return _guarded_finding(found.blame, guilty[0].call, found.evidence, found.others)
    if kind == "ended":
        ended, rest = guilty[0], found.others[0]
        return _different(
            found,
            f"the loop at {quoted(found.blame.location)} ended earlier on {named(ended.ranks)}, "
            f"which called {ended.call.what} at {quoted(ended.call.site)}, than on "
            f"{named(rest.ranks)}, still in {rest.call.what} at {quoted(rest.call.site)}",
            "Give the loop the same number of rounds on every rank (equal shards, drop_last).",
        )
    if kind not in ("passed", "alone", "decided"):
        return different_calls_finding(found)
    usual, odd = found.others[0], guilty[0]
    decider = found.blame.decider
    if kind == "passed":
        by = f", by {quoted(decider)}" if decider is not None else ""
        after = f" after step {steps - 1}" if steps else ""
        message = (
            f"{named(odd.ranks)} skipped {usual.call.what} at {quoted(usual.call.site)}"
            f"{after}{by}: "
            f"{named(usual.ranks)} called it, {named(odd.ranks)} went on to {odd.call.what} at "
            f"{quoted(odd.call.site)}"
        )
    else:
        under = f"under {quoted(decider)}"
        if kind == "decided":
            under = f"where {quoted(decider)} differs between the ranks"
        message = (
            f"{named(odd.ranks)} alone called {odd.call.what} at {quoted(odd.call.site)}, {under}: "
            f"{named(usual.ranks)} called {usual.call.what} at {quoted(usual.call.site)}"
        )
    return _different(found, message, _DECIDE)


def _different(found: Mismatch, message: str, fix: str) -> Finding:
    return _error(
        code="DDP803",
        about=f"{found.blame.location}",
        moment=max(call.began for call in found.calls.values()),
        message=message,
        # A value that differs between ranks may be wrong on either side.
        ranks=tuple(sorted(found.calls if found.blame.kind == "decided" else found.blame.ranks)),
        location=found.blame.location,
        evidence=found.evidence,
        fix=fix,
    )


def _guarded_finding(
    by: Blame, call: Call, evidence: tuple[str, ...], others: Sequence[Group] = ()
) -> Finding:
    """Make the finding about a call under a condition on the rank (DDP401)."""
    guard, at = by.guard, by.location
    assert guard is not None and at is not None
    condition = statement(guard.path, guard.line).partition("  #")[0].rstrip()
    through = f", by {quoted(at)}" if at != call.site else ""
    under = f"after `{condition} {guard.way}`" if guard.way else f"under `{condition}`"
    return _error(
        code="DDP401",
        about=f"{at}",
        moment=call.began,
        message=f"{named(by.ranks)} alone called {call.what} at {quoted(call.site)}{through}, "
        f"{under} (line {guard.line}): {_missing(call, others)}",
        ranks=tuple(sorted(by.ranks)),
        location=at,
        evidence=evidence,
        fix=_LEAVE.get(
            guard.way, f"Call it on every rank of the group: in front of the `{guard.way}`."
        ),
    )


def called_alone(ranks: Sequence[Rank], evidence: tuple[str, ...]) -> Finding | None:
    """Report the newest calls of some ranks if they are under a condition on the rank (DDP401)."""
    newest = {
        rank.rank: from_ring(rank.ring.collectives[-1])
        for rank in ranks
        if rank.ring is not None and rank.ring.collectives
    }
    by = alone_by_guard(newest, ()) if newest and len(newest) == len(ranks) else None
    return _guarded_finding(by, next(iter(newest.values())), evidence) if by is not None else None


def _missing(call: Call, others: Sequence[Group]) -> str:
    """Describe what the other ranks did instead of a call under a condition on the rank."""
    for group in others:
        if group.call.name == call.name and group.call.chain != call.chain:
            # Their next call is of the same kind, so it paired with this one.
            apart = (at for at in group.call.chain if at not in call.chain)
            at = brief(next(apart, group.call.site))
            return f"it met the {call.name} of {named(group.ranks)} at {at}"
    return "the other ranks did not make this call"


def different_calls_finding(found: Mismatch) -> Finding:
    """Make the finding about different calls of groups of ranks (DDP803)."""
    guilty, others = found.guilty, found.others
    call = guilty[-1].call
    # DDP's own collectives may have no line.
    sites = {site for group in found.groups for site in group.sites or (None,)}

    def places(group: Group) -> str:
        shown = " and ".join(map(quoted, group.sites or (None,)))
        return f" at {shown}" if len(sites) > 1 else ""

    def called(groups: Sequence[Group], verb: str = "called ") -> str:
        return _listed(
            f"{named(group.ranks)} {verb}{found.what(group)}{places(group)}" for group in groups
        )

    number = f"#{call.sequence} of the {call.place}"
    guilty = tuple(sorted(guilty, key=lambda group: group.ranks[0]))
    others = tuple(sorted(others, key=lambda group: group.ranks[0]))
    if others:
        message = f"{called(guilty)} as collective {number}, where {called(others)}"
    elif "operation" in found.differences:
        listed = called(guilty, "")
        message = f"{named(found.calls)} called different collectives as {number}: {listed}"
    else:
        listed = _listed(
            f"{found.facts(group)} on {named(group.ranks)}{places(group)}" for group in guilty
        )
        what = " and ".join(f"{each}s" for each in found.differences)
        message = (
            f"{named(found.calls)} called {call.name} {number} with different {what}: {listed}"
        )
    if len(sites) == 1:
        message += f", at {quoted(call.site)}"
    in_order = len(sites) == 1 or "operation" not in found.differences
    same = f"Make the {' and the '.join(found.differences)} the same on every rank of the group."
    return _different(found, message, same if in_order else _SAME_ORDER)


def _listed(parts: Iterable[str]) -> str:
    shown = list(parts)
    if len(shown) > _MAX_GROUPS:
        shown = [*shown[:_MAX_GROUPS], f"{len(shown) - _MAX_GROUPS} more calls on other ranks"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


# -- in a hang: ranks that wait in different collectives


def guarded_call(waits: Sequence[Blocked]) -> Finding | None:
    """Report a call in which ranks wait, and which the others skipped or never reach."""
    same = same_number(waits)
    if same is not None and same.blame.kind in ("guard", "passed", "alone", "decided", "ended"):
        return mismatch_finding(same, _closed(same, waits))
    for one in waits:
        skipped = _skipped(one)
        if skipped is not None:
            return mismatch_finding(skipped, _closed(skipped, waits))
        # If the missing ranks wait as well, they will not make this call.
        late = [rank for rank in one.absent if rank.in_collective]
        if not late or len(late) < len(one.absent):
            continue
        by_site: dict[Location | None, dict[int, Call]] = {}
        for rank in one.waiting:
            if rank.under_way is not None:
                by_site.setdefault(rank.under_way.site, {})[rank.rank] = rank.under_way
        for made in by_site.values():
            lines = {rank.rank: _lines(rank) for rank in late}
            if skipped_by_guard(made, lines) is not None:
                continue
            by_guard = alone_by_guard(made, [*lines.values()])
            if by_guard is not None:
                ranks = [*(rank for rank in one.waiting if rank.rank in made), *late]
                evidence = tuple(waiting_line(rank) for rank in ranks[:6])
                return _guarded_finding(by_guard, next(iter(made.values())), evidence)
    return None


def _closed(found: Mismatch, waits: Sequence[Blocked]) -> int:
    """Return the number of closed steps of blameless ranks, if their call is their newest one."""
    inside = {number for group in found.others for number in group.ranks}
    return min(
        (
            rank.step
            for one in waits
            for rank in one.waiting
            if rank.rank in inside
            and all(each.began <= found.calls[rank.rank].began for each in rank.flight or rank.ring)
        ),
        default=0,
    )


def _skipped(one: Blocked) -> Mismatch | None:
    """Return a Python call in which ranks wait, and which ranks ahead of them never made.

    Those ranks may be so far ahead that the call they made instead is no longer recorded.
    """
    ranks = (*one.waiting, *one.ahead)
    calls = {rank.rank: made for rank in ranks if (made := rank.blocked or rank.under_way)}
    if not one.ahead or one.absent or len(calls) < len(ranks):
        return None
    counts = {
        rank.rank: [each.sequence for each in rank.ring if each.group == calls[rank.rank].group]
        for rank in ranks
    }
    least = min(max(counts[rank.rank], default=0) for rank in one.waiting)
    if any(max(counts[rank.rank], default=least) >= least for rank in one.ahead):
        return None
    waiting, ahead = ([rank.rank for rank in each] for each in (one.waiting, one.ahead))
    return skipped_call(calls, waiting, ahead)


def _lines(rank: RankState) -> Sequence[Location]:
    """Return the user's lines that a rank is at, innermost first."""
    call = rank.under_way or rank.blocked
    if call is None:
        return rank.user_lines
    if call.chain and (call is rank.under_way or rank.waits_for_gpu):
        return call.chain
    return rank.user_lines or call.chain


def same_number(waits: Sequence[Blocked]) -> Mismatch | None:
    """Compare the waiting ranks' calls of the same number, by their Flight Recorders."""
    for one in waits:
        if one.call is None or one.absent:
            continue
        calls = {
            rank.rank: _comparable(_with_lines(call, rank))
            for rank in one.waiting
            if (call := rank.blocked or rank.under_way) is not None
        }
        found = mismatch_of_calls(calls, _before(one, one.call)) or _met(one, one.call)
        if found is not None:
            return _unless_usual(found, one)
    return None


def _unless_usual(found: Mismatch, one: Blocked) -> Mismatch:
    """Blame no rank for a call made alone if the other ranks made that call earlier.

    A Flight Recorder may hold too few calls to contain two of them.
    """
    made = {rank: found.calls[rank].chain for rank in found.blame.ranks}
    before = {each.chain for rank in one.waiting if rank.rank not in made for each in rank.ring}
    if found.blame.kind != "alone" or before.isdisjoint(made.values()):
        return found
    ranks = tuple(sorted(found.calls))
    return replace(found, blame=Blame("none", ranks, found.groups[1].call.site))


def _met(one: Blocked, last: Call) -> Mismatch | None:
    """Return the first mismatch up to the collective in which ranks wait.

    NCCL does not notice it. Such calls may end, and the ranks wait for each other later.
    """
    if last.backend != "nccl":
        return None
    known: dict[int, dict[int, Call]] = {}
    ranks = (*one.waiting, *one.ahead)
    for rank in ranks:
        for call in rank.flight or ():
            if call.numbering == last.numbering and call.sequence <= last.sequence:
                known.setdefault(call.sequence, {})[rank.rank] = _comparable(call)
    for number, calls in sorted(known.items()):
        if len(calls) == len(ranks):
            earlier = [known[each] for each in sorted(known) if each < number]
            before = {rank: [each[rank] for each in earlier if rank in each] for rank in calls}
            found = mismatch_of_calls(calls, before)
            if found is not None:
                return found
    return None


def _comparable(call: Call) -> Call:
    """Drop properties that may differ: a Flight Recorder has each rank's own inputs."""
    if call.name.startswith(("all_to_all", "alltoall", "scatter", "gather")):
        return replace(call, numel=-1, dtype="")
    return as_nccl_compares(call) if call.backend == "nccl" else call


def _with_lines(call: Call, rank: RankState) -> Call:
    """Add the lines that led to a call, which a Flight Recorder may lack."""
    known = len(call.chain)
    if known:
        same = rank.user_lines[:known] == call.chain
        return replace(call, above=rank.user_lines[known:]) if same else call
    lines = _lines(rank)
    return replace(call, site=lines[0] if lines else None, callers=tuple(lines[1:]))


def _before(one: Blocked, call: Call) -> dict[int, list[Call]]:
    """Return the earlier calls of the waiting ranks in that process group, with their lines."""
    recorded = {
        rank.rank: [
            each
            for each in rank.flight or ()
            if each.numbering == call.numbering and each.sequence < call.sequence
        ]
        for rank in one.waiting
    }
    known = all(rank.flight for rank in one.waiting)
    if known and all(each.chain for calls in recorded.values() for each in calls):
        return recorded
    # Not from the ring, which lacks DDP's collectives.
    return {
        rank.rank: [
            each
            for each in rank.ring
            if each.group == call.group
            and (rank.under_way is None or each.order < rank.under_way.order)
        ]
        for rank in one.waiting
    }


def order_finding(waits: Sequence[Blocked]) -> Finding:
    """Report ranks that wait for each other in different collectives (DDP803 or DDP804)."""
    known = {rank.rank: rank for one in waits for rank in one.waiting}
    ranks = [known[number] for number in sorted(known)]
    calls = [call for rank in ranks if (call := rank.blocked or rank.under_way) is not None]
    # A rank with an unknown call may be in another group.
    groups = {call.group for call in calls} | ({""} if len(calls) < len(ranks) else set())
    several = len(groups) > 1
    what = "collectives of different groups" if several else "different collectives"
    return _error(
        code="DDP804" if several else "DDP803",
        about="order",
        moment=max((call.began for call in calls), default=0),
        message=f"ranks wait for each other in {what}: {_listed_waits(waits)}",
        ranks=tuple(rank.rank for rank in ranks),
        location=waits[-1].waiting[-1].waits_at,
        evidence=tuple(waiting_line(rank) for rank in ranks[:6]),
        fix="Call the collectives of all groups in one order on every rank."
        if several
        else _SAME_ORDER,
    )


def _listed_waits(waits: Sequence[Blocked]) -> str:
    """List the calls in which ranks wait, with group names if groups have the same ranks."""
    calls = [one.waiting[0].under_way or one.waiting[0].blocked for one in waits[:4]]
    places = {call.group: call.place for call in calls if call is not None}
    alike = len(set(places.values())) < len(places)
    listed = []
    for one, call in zip(waits, calls, strict=False):
        what = one.what
        if alike and call is not None:
            what = what.replace(call.place, f"{call.place} named {call.group}")
        who = named([rank.rank for rank in one.waiting])
        listed.append(f"{who} in {what} at {quoted(one.waiting[0].waits_at)}")
    return "; ".join(listed)


def point_to_point_finding(ranks: Sequence[RankState]) -> Finding | None:
    """Report ranks that wait in send or recv for each other, or for a rank in a collective."""
    inside = {rank.rank: rank for rank in ranks if rank.in_collective}
    ways = {number: call for number, rank in inside.items() if (call := rank.exchange) is not None}
    for number, call in sorted(ways.items()):
        peer = inside.get(call.root)
        if peer is None:
            continue
        back = ways.get(call.root)
        if back is not None and (back.root != number or back.name != call.name):
            # The peer waits for another rank, or the two calls match.
            continue
        both = back is not None
        where = quoted(back.site if back is not None else peer.waits_at)
        doing = f"{back.name} with rank {number}" if back is not None else peer.waits_in
        found = [inside[number], peer]
        return _error(
            code="DDP803",
            about=f"exchange {call.site}",
            moment=call.began,
            message=f"rank {number} waits in {call.name} with rank {peer.rank} at "
            f"{quoted(call.site)}, and rank {peer.rank} in {doing} at {where}: neither can end",
            ranks=tuple(sorted(each.rank for each in found)),
            location=call.site,
            evidence=tuple(waiting_line(each) for each in found),
            fix=f"Let one of the two {'send' if call.name == 'recv' else 'receive'} first, or "
            "exchange with dist.batch_isend_irecv."
            if both
            else f"Let rank {peer.rank} make the call that belongs to this one before it goes on.",
        )
    return None


def waiting_line(rank: RankState) -> str:
    """Describe the call in which a rank waits, as a line of evidence."""
    here = f"rank {rank.rank} waits in {rank.waits_in} at {brief(rank.waits_at)}"
    host = "" if rank.waits_at == rank.site else f"; its host is at {brief(rank.site)}"
    return f"{here} for {rank.seconds} s{host}"


# -- in a job that failed while its ranks were in different collectives


@dataclass(frozen=True)
class _Failure:
    inside: dict[int, Call]  # The calls of ranks that were in a collective from Python
    elsewhere: tuple[int, ...]
    """Ranks that had not made that call and were in one of DDP's collectives."""
    before: dict[int, list[Call]]  # Each rank's earlier calls in that process group


def failed_in_different_calls(run: Run) -> Finding | None:
    """Report a job that failed while its ranks were in different collectives."""
    found = _failure(run)
    if found is None:
        return None
    early = mispaired_before(found.before)
    if early is not None:
        return mismatch_finding(early)
    lines = {rank.rank: _error_lines(rank) for rank in run.last if rank.rank in found.elsewhere}
    skipped = skipped_by_guard(found.inside, lines)
    guarded = alone_by_guard(found.inside, [*lines.values()]) if skipped is None else None
    evidence = (
        *(
            f"rank {rank} called {made.what} at {brief(made.site)}"
            for rank, made in sorted(found.inside.items())[:6]
        ),
        *(f"rank {rank} was in a collective of DDP's own" for rank in found.elsewhere[:3]),
    )
    if guarded is not None:
        return _guarded_finding(guarded, found.inside[min(found.inside)], evidence)
    decider = skipped.location if skipped is not None else None
    for call in () if skipped is not None else found.inside.values():
        decider = decider or decided_by(call, next(iter(lines.values()), ()))
    return _skipped_backward(run, found, evidence) or _skipped_call(
        found, evidence, decider, skipped is not None
    )


def _failure(run: Run) -> _Failure | None:
    restart = run.restarts[-1]
    ends = endings(run, restart)
    cause = first_failure(run, restart)
    abrupt = cause is not None and (mispaired(run, cause) or cause.status == -signal.SIGABRT)
    if not ends or (cause is not None and not abrupt) or local_decisions(run):
        return None
    calls = {
        rank: [from_ring(each) for each in found if not each.point_to_point]
        for rank, found in rings(run).items()
    }
    # Ranks that failed for another reason may have been in different collectives only briefly.
    until = ends[0].time - PATIENCE if cause is None else math.inf
    last = {rank: found[-1] for rank, found in calls.items() if found}
    inside = {
        rank: call
        for rank, call in last.items()
        if not call.done and call.site is not None and call.began < until
    }
    return _parted(run, calls, inside) if inside else None


def _parted(run: Run, calls: dict[int, list[Call]], inside: dict[int, Call]) -> _Failure | None:
    """Find the ranks that were in one of DDP's collectives instead of the first of these calls."""
    first = min(inside.values(), key=lambda call: call.began)
    group, sequence = first.group, first.sequence
    same = {
        rank: call
        for rank, call in inside.items()
        if (call.group, call.sequence) == (group, sequence)
    }
    earlier = {
        rank: [each for each in found if each.group == group] for rank, found in calls.items()
    }
    elsewhere = tuple(
        rank.rank
        for rank in run.last
        if rank.rank in calls
        and rank.rank not in inside
        and is_up_to_date(run, rank)
        and all(each.sequence < sequence for each in earlier[rank.rank])
        and _was_in(rank) in (Phase.BACKWARD.label, *BEFORE_FORWARD)
    )
    before = {
        rank: [each for each in earlier[rank] if each.sequence < sequence]
        for rank in (*same, *elsewhere)
    }
    return _Failure(same, elsewhere, before) if elsewhere else None


def _was_in(rank: Rank) -> str:
    """Return the collective or the phase that a rank was in when it failed or was ended."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        return error.collective or error.phase
    status, phase = rank.status, last_phase(rank)
    return "" if status is None or phase is None else status.collective or phase.label


def _error_lines(rank: Rank) -> list[Location]:
    """Return the lines that a rank was at when it failed or was ended, innermost first."""
    error = rank.records.first(ErrorRecord)
    if error is not None:
        return [Location(each.path, each.line) for each in reversed(error.user_frames)]
    at = location(rank.status.site) if rank.status is not None else None
    return [at] if at is not None else []


def _skipped_call(
    found: _Failure, evidence: tuple[str, ...], decider: Location | None, by_rank: bool
) -> Finding:
    """Report a call that some ranks made while the others were in DDP's own all-reduce.

    With ``by_rank``, a condition on the rank decided, and made the others skip the call.
    """
    inside, elsewhere = sorted(found.inside), found.elsewhere
    call = found.inside[inside[0]]
    many = len(inside) > len(elsewhere) or by_rank
    few = elsewhere if many else (inside if len(inside) < len(elsewhere) else ())
    who, others = (elsewhere, inside) if many else (inside, elsewhere)
    at = f", by {quoted(decider)}" if decider is not None else ""
    return _error(
        code="DDP803",
        about=f"{call.site}",
        moment=call.began,
        message=f"{named(who)} {'skipped' if many else 'called'} {call.what} at "
        f"{quoted(call.site)}{at}{'; ' if many else ', while '}{_were(others)} in "
        + ("it when the job failed" if many else "DDP's own all-reduce, and the job failed"),
        ranks=tuple(sorted(few or (*inside, *elsewhere))),
        location=decider or call.site,
        evidence=evidence,
        fix=_DECIDE,
    )


def _skipped_backward(run: Run, found: _Failure, evidence: tuple[str, ...]) -> Finding | None:
    """Report a backward that ranks skipped after its forward, which put them ahead."""
    pages = {rank.rank: rank.status for rank in run.last if rank.status is not None}
    lacking = {rank: page.armed - page.reduced for rank, page in pages.items()}
    if any(lacking.get(rank) != 1 for rank in found.inside):
        return None
    if any(lacking.get(rank) != 0 for rank in found.elsewhere):
        return None
    forward, backward = _last_site(run, "forward"), _last_site(run, "backward")
    if forward is None or backward is None:
        return None
    # Between a forward and its backward every rank is one backward behind.
    if not all(comes_after(call.chain, backward) for call in found.inside.values()):
        return None
    follows = forward.path == backward.path and forward.line < backward.line
    decider = way_past(backward, forward.line if follows else 0)
    call = found.inside[min(found.inside)]
    return _error(
        code="DDP803",
        about=f"{decider or backward}",
        message=f"{named(found.inside)} skipped a backward at {quoted(backward)}"
        + (f", by {quoted(decider)}" if decider is not None else "")
        + f", and called {call.what} at {quoted(call.site)} while {_were(found.elsewhere)} in "
        "DDP's own all-reduce: the job failed",
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


def _were(ranks: Collection[int]) -> str:
    return f"{named(ranks)} {'were' if len(ranks) > 1 else 'was'}"


def _last_site(run: Run, phase: str) -> Location | None:
    """Return the newest line at which a phase began on any rank. Some ranks may end earlier."""
    return next((at for rank in reversed(run.last) for at in reversed(rank.sites(phase))), None)
