"""Ranks that are out of step: their collectives are different ones, as findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ddpdoctor.finding import Finding, Location, Severity
from ddpdoctor.relations import ABORT, MISPAIRED
from ddpdoctor.rules import apart
from ddpdoctor.rules.guards import rank_guard, statement
from ddpdoctor.rules.ranks import named
from ddpdoctor.rules.standing import Call, Standing, brief, quoted
from ddpdoctor.rules.waits import Blocked

_SUBJECTS = frozenset((MISPAIRED, ABORT))


def guarded(waits: Sequence[Blocked]) -> Finding | None:
    """A collective that ranks wait in because a condition on the rank let only them call it."""
    same = same_number(waits)
    if same is not None and (passed := _passed_over(same, waits)) is not None:
        return passed
    if same is not None and same.guard is not None and len(same.guilty) < len(same.calls):
        return guarded_finding(same.guilty, same.odd, same.guard, apart.evidence(same.calls))
    for one in waits:
        others = [rank for each in waits if each is not one for rank in each.waiting]
        for call, ranks in _by_site(one.waiting):
            if call.site is None:
                continue
            guard = rank_guard(call.site.path, call.site.line)
            # Whom they wait for waits, too, so that it will not come.
            late = [rank for rank in one.absent if rank.in_collective]
            if guard is not None and late and len(late) == len(one.absent):
                return guarded_finding(
                    tuple(rank.rank for rank in ranks),
                    call,
                    guard,
                    tuple(waiting_line(rank) for rank in (*ranks, *(late or others))[:6]),
                )
    return None


def _passed_over(same: apart.Apart, waits: Sequence[Blocked]) -> Finding | None:
    """A call that some ranks passed over: what they wait in always came after it before."""
    (other, usual), odd = same.usual, same.odd
    if len(same.guilty) == len(same.calls) or usual.site is None or odd.site is None:
        return None
    if usual.site == odd.site:
        return None
    history = next(rank.flight or () for one in waits for rank in one.waiting if rank.rank == other)
    order = [call.site for call in history if call.numbering == usual.numbering]
    if (usual.site, odd.site) not in pairwise(order):
        return None
    waiting = [rank for rank in same.calls if rank not in same.guilty]
    verb = "wait" if len(waiting) > 1 else "waits"
    return Finding(
        code="DDP803",
        about=f"{usual.site}",
        subjects=_SUBJECTS,
        moment=max(call.began for call in same.calls.values()),
        severity=Severity.ERROR,
        message=f"{named(same.guilty)} passed over {usual.what} at {quoted(usual.site)}, in which "
        f"{named(waiting)} {verb}, and called {odd.what} at {quoted(odd.site)}",
        ranks=tuple(sorted(same.guilty)),
        location=usual.site,
        evidence=apart.evidence(same.calls),
        fix="Let every rank make the call: what decides on it has to be the same on all ranks.",
    )


def guarded_finding(
    ranks: Sequence[int], call: Call, guard: int, evidence: tuple[str, ...]
) -> Finding:
    """DDP401, for a hang or for a job that has failed by it."""
    at = call.site
    assert at is not None
    condition = statement(at.path, guard)
    return Finding(
        code="DDP401",
        about=f"{at}",
        subjects=_SUBJECTS,
        moment=call.began,
        severity=Severity.ERROR,
        message=f"{named(ranks)} alone called {call.what} at {quoted(at)}, under "
        f"`{condition}` (line {guard}): the other ranks never come to it",
        ranks=tuple(sorted(ranks)),
        location=at,
        evidence=evidence,
        fix="Call it on every rank of the group: move it out of the branch.",
    )


def same_number(waits: Sequence[Blocked]) -> apart.Apart | None:
    """What the waiting ranks' calls with one number differ in, by their Flight Recorders."""
    for one in waits:
        if one.call is None or one.absent:
            continue
        calls = {
            rank.rank: call
            for rank in one.waiting
            for call in (rank.blocked or rank.under_way,)
            if call is not None
        }
        found = apart.of_calls(calls)
        if found is not None:
            return found
    return None


def _by_site(ranks: Iterable[Standing]) -> list[tuple[Call, list[Standing]]]:
    found: dict[Location | None, tuple[Call, list[Standing]]] = {}
    for rank in ranks:
        call = rank.under_way
        if call is not None:
            found.setdefault(call.site, (call, []))[1].append(rank)
    return list(found.values())


def order(waits: Sequence[Blocked]) -> Finding:
    """Ranks that wait for each other in different collectives."""
    ranks = sorted({rank.rank: rank for one in waits for rank in one.waiting}.values(), key=_number)
    groups = {(rank.blocked or rank.under_way or _NO_CALL).group for rank in ranks}
    last = waits[-1].waiting[-1]
    code = "DDP804" if len(groups) > 1 else "DDP803"
    told = "; ".join(
        f"{named([rank.rank for rank in one.waiting])} in {one.what} at "
        f"{quoted(one.waiting[0].site)}"
        for one in waits[:3]
    )
    what = "collectives of different groups" if code == "DDP804" else "different collectives"
    return Finding(
        code=code,
        about="order",
        subjects=_SUBJECTS,
        moment=max((rank.blocked or rank.under_way or _NO_CALL).began for rank in ranks),
        severity=Severity.ERROR,
        message=f"ranks wait for each other in {what}: {told}",
        ranks=tuple(rank.rank for rank in ranks),
        location=last.site,
        evidence=tuple(waiting_line(rank) for rank in ranks[:6]),
        fix="Call the collectives of all groups in one order on every rank."
        if code == "DDP804"
        else "Let every rank call the same collectives in the same order.",
    )


def _number(rank: Standing) -> int:
    return rank.rank


_NO_CALL = Call("", "", 0, "", -1, "", "", -1, False, None)


def mismatch(found: apart.Apart) -> Finding:
    """DDP803, for a hang or for a job that goes on."""
    rank, usual = found.usual
    odd, differences = found.odd, found.differences
    others = [each for each in found.calls if each not in found.guilty] or [rank]
    guilty = [each for each in found.guilty if each not in others]
    return Finding(
        code="DDP803",
        about=f"{odd.site}",
        subjects=_SUBJECTS,
        moment=max(call.began for call in found.calls.values()),
        severity=Severity.ERROR,
        message=f"{named(guilty)} called {apart.facts(odd, differences)} at {quoted(odd.site)} as "
        f"collective #{odd.sequence} of the {odd.place}, where {named(others)} called "
        f"{apart.facts(usual, differences)}"
        + (f" at {quoted(usual.site)}" if usual.site != odd.site else ""),
        ranks=tuple(sorted(found.guilty)),
        location=odd.site,
        evidence=apart.evidence(found.calls),
        fix=f"Make the {' and the '.join(differences)} the same on every rank of the group.",
    )


def waiting_line(rank: Standing) -> str:
    """What a rank waits in, as a line of evidence."""
    return f"rank {rank.rank} waits in {rank.waits_in} at {brief(rank.site)} since {rank.seconds} s"
