"""Findings about ranks that are out of step: their collectives are different ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import ABORT, MISPAIRED
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives import collective_mismatch
from ddpdoctor.diagnose.collectives.collective_mismatch import (
    Blame,
    Group,
    alone_by_guard,
    skipped_by_guard,
)
from ddpdoctor.diagnose.collectives.recorded_calls import Call
from ddpdoctor.diagnose.hangs.hang_snapshot import Blocked, RankState
from ddpdoctor.diagnose.source_files import brief, quoted, statement
from ddpdoctor.stacks.frames import user_frames

_SUBJECTS = frozenset((MISPAIRED, ABORT))


def guarded_call(waits: Sequence[Blocked]) -> Finding | None:
    """A call that ranks wait in and that only they made, or that the others skipped."""
    same = same_number(waits)
    if same is not None and same.blame.kind in ("guard", "passed", "alone"):
        return mismatch_finding(same, _closed(same, waits))
    for one in waits:
        skipped = _skipped(one)
        if skipped is not None:
            return mismatch_finding(skipped, _closed(skipped, waits))
        others = [rank for each in waits if each is not one for rank in each.waiting]
        # Whom they wait for waits, too, so that it will not come.
        late = [rank for rank in one.absent if rank.in_collective]
        if not late or len(late) < len(one.absent):
            continue
        for call, ranks in _by_site(one.waiting):
            made = {rank.rank: made for rank in ranks if (made := rank.under_way) is not None}
            lines = {rank.rank: _lines(rank) for rank in late}
            if skipped_by_guard(made, lines) is not None:
                continue
            by_guard = alone_by_guard(made, [*lines.values()])
            if by_guard is not None:
                evidence = tuple(waiting_line(rank) for rank in (*ranks, *(late or others))[:6])
                return guarded_finding(by_guard, call, evidence)
    return None


def _closed(found: collective_mismatch.Mismatch, waits: Sequence[Blocked]) -> int:
    """Steps that ranks in line had closed when they made their call, if they made none since."""
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


def _skipped(one: Blocked) -> collective_mismatch.Mismatch | None:
    """A call from Python that ranks wait in and that those ahead of them never made.

    Those may be so far ahead that what they called instead is not recorded any more.
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
    return collective_mismatch.skipped_call(calls, waiting, ahead)


def _lines(rank: RankState) -> Sequence[Location]:
    """The user's lines that a rank is at, innermost first."""
    frames = [Location(each.path, each.line) for each in user_frames(rank.frames)]
    call = rank.under_way or rank.blocked
    if call is not None and call.chain and (call is rank.under_way or rank.waits_for_gpu):
        return call.chain
    return frames[::-1] or (call.chain if call is not None else ())


def mismatch_finding(found: collective_mismatch.Mismatch, steps: int = 0) -> Finding:
    """DDP401 or DDP803, for a hang or for a job that goes on.

    Args:
        found: The calls that differ.
        steps: Steps that were closed before them; 0 if that is not known.
    """
    kind, guilty = found.blame.kind, found.guilty
    if kind == "guard":
        return guarded_finding(found.blame, guilty[0].call, found.evidence)
    if kind not in ("passed", "alone"):
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
        message = (
            f"{named(odd.ranks)} alone called {odd.call.what} at {quoted(odd.call.site)}, under "
            f"{quoted(decider)}, where {named(usual.ranks)} called {usual.call.what} at "
            f"{quoted(usual.call.site)}"
        )
    return Finding(
        code="DDP803",
        about=f"{found.blame.location}",
        subjects=_SUBJECTS,
        moment=max(call.began for call in found.calls.values()),
        severity=Severity.ERROR,
        message=message,
        ranks=tuple(sorted(found.blame.ranks)),
        location=found.blame.location,
        evidence=found.evidence,
        fix=_DECIDE,
    )


_DECIDE = "Let every rank make the call: what decides on it has to be the same on all ranks."


def guarded_finding(by: Blame, call: Call, evidence: tuple[str, ...]) -> Finding:
    """DDP401, for a hang or for a job that has failed by it.

    Args:
        by: The condition on the rank, and the ranks under it.
        call: What they called.
        evidence: Who called or waits in what.
    """
    guard, at = by.guard, by.location
    assert guard is not None and at is not None
    condition = statement(guard.path, guard.line).partition("  #")[0].rstrip()
    through = f", by {quoted(at)}" if at != call.site else ""
    under = f"behind `{condition} {guard.way}`" if guard.way else f"under `{condition}`"
    return Finding(
        code="DDP401",
        about=f"{at}",
        subjects=_SUBJECTS,
        moment=call.began,
        severity=Severity.ERROR,
        message=f"{named(by.ranks)} alone called {call.what} at {quoted(call.site)}{through}, "
        f"{under} (line {guard.line}): the other ranks never reach this call",
        ranks=tuple(sorted(by.ranks)),
        location=at,
        evidence=evidence,
        fix="Call it on every rank of the group: "
        + (f"in front of the `{guard.way}`." if guard.way else "move it out of the branch."),
    )


def same_number(waits: Sequence[Blocked]) -> collective_mismatch.Mismatch | None:
    """What the waiting ranks' calls with one number differ in, by their Flight Recorders."""
    for one in waits:
        if one.call is None or one.absent:
            continue
        calls = {
            rank.rank: _comparable(_placed(call, rank))
            for rank in one.waiting
            for call in (rank.blocked or rank.under_way,)
            if call is not None
        }
        found = collective_mismatch.mismatch_of_calls(calls, _before(one, one.call)) or _met(
            one, one.call
        )
        if found is not None:
            return _unless_usual(found, one)
    return None


def _unless_usual(
    found: collective_mismatch.Mismatch, one: Blocked
) -> collective_mismatch.Mismatch:
    """A mismatch without blame for a call made alone that the other ranks made, too, before.

    What a Flight Recorder has of the calls before may be shorter than the time between two of them.
    """
    made = {rank: found.calls[rank].chain for rank in found.blame.ranks}
    before = {each.chain for rank in one.waiting if rank.rank not in made for each in rank.ring}
    if found.blame.kind != "alone" or before.isdisjoint(made.values()):
        return found
    ranks = tuple(sorted(found.calls))
    return replace(found, blame=Blame("none", ranks, found.groups[1].call.site))


def _met(one: Blocked, last: Call) -> collective_mismatch.Mismatch | None:
    """The first number under which ranks called different collectives, up to the one they wait in.

    NCCL does not notice: such calls may well end, and the ranks wait for each other later.
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
            found = collective_mismatch.mismatch_of_calls(calls, before)
            if found is not None:
                return found
    return None


def _comparable(call: Call) -> Call:
    """A call without what may well differ: a Flight Recorder has the inputs of each rank."""
    if call.name.startswith(("all_to_all", "alltoall", "scatter", "gather")):
        return replace(call, numel=-1, dtype="")
    return collective_mismatch.as_nccl_compares(call) if call.backend == "nccl" else call


def _placed(call: Call, rank: RankState) -> Call:
    """A call with the lines that led to it: a Flight Recorder may lack them."""
    if call.chain:
        return call
    site, *callers = _lines(rank) or (None,)
    return replace(call, site=site, callers=tuple(at for at in callers if at is not None))


def _before(one: Blocked, call: Call) -> dict[int, list[Call]]:
    """What the waiting ranks called in that process group before, where it is known by lines."""
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
    # By our own ring, which does not know DDP's collectives.
    return {
        rank.rank: [
            each
            for each in rank.ring
            if each.group == call.group
            and (rank.under_way is None or each.order < rank.under_way.order)
        ]
        for rank in one.waiting
    }


def _by_site(ranks: Iterable[RankState]) -> list[tuple[Call, list[RankState]]]:
    found: dict[Location | None, tuple[Call, list[RankState]]] = {}
    for rank in ranks:
        call = rank.under_way
        if call is not None:
            found.setdefault(call.site, (call, []))[1].append(rank)
    return list(found.values())


def order_finding(waits: Sequence[Blocked]) -> Finding:
    """Ranks that wait for each other in different collectives."""
    ranks = sorted({rank.rank: rank for one in waits for rank in one.waiting}.values(), key=_number)
    groups = {(rank.blocked or rank.under_way or _NO_CALL).group for rank in ranks}
    last = waits[-1].waiting[-1]
    code = "DDP804" if len(groups) > 1 else "DDP803"
    listed = "; ".join(
        f"{named([rank.rank for rank in one.waiting])} in {one.what} at "
        f"{quoted(one.waiting[0].waits_at)}"
        for one in waits[:4]
    )
    what = "collectives of different groups" if code == "DDP804" else "different collectives"
    return Finding(
        code=code,
        about="order",
        subjects=_SUBJECTS,
        moment=max((rank.blocked or rank.under_way or _NO_CALL).began for rank in ranks),
        severity=Severity.ERROR,
        message=f"ranks wait for each other in {what}: {listed}",
        ranks=tuple(rank.rank for rank in ranks),
        location=last.waits_at,
        evidence=tuple(waiting_line(rank) for rank in ranks[:6]),
        fix="Call the collectives of all groups in one order on every rank."
        if code == "DDP804"
        else "Let every rank call the same collectives in the same order.",
    )


def _number(rank: RankState) -> int:
    return rank.rank


_NO_CALL = Call("", "", 0, "", -1, "", "", -1, False, None)


def different_calls_finding(found: collective_mismatch.Mismatch) -> Finding:
    """DDP803, with what each group of ranks called."""
    guilty, others = found.guilty, found.others
    call = guilty[-1].call
    # DDP's own collectives may have none.
    sites = {site for group in found.groups for site in group.sites or (None,)}
    number = f"#{call.sequence} of the {call.place}"
    if others:
        message = (
            f"{_called(found, guilty, len(sites) > 1)} as collective {number}, where "
            f"{_called(found, others, len(sites) > 1)}"
        )
    elif "operation" in found.differences:
        listed = _listed(
            f"{named(group.ranks)} {found.what(group)}{_places(group, len(sites) > 1)}"
            for group in sorted(guilty, key=_first)
        )
        message = f"{named(found.calls)} called different collectives as {number}: {listed}"
    else:
        listed = _listed(
            f"{found.facts(group)} on {named(group.ranks)}{_places(group, len(sites) > 1)}"
            for group in sorted(guilty, key=_first)
        )
        what = " and ".join(f"{each}s" for each in found.differences)
        message = (
            f"{named(found.calls)} called {call.name} {number} with different {what}: {listed}"
        )
    if len(sites) == 1:
        message += f", at {quoted(call.site)}"
    differences = " and the ".join(found.differences)
    return Finding(
        code="DDP803",
        about=f"{found.blame.location}",
        subjects=_SUBJECTS,
        moment=max(call.began for call in found.calls.values()),
        severity=Severity.ERROR,
        message=message,
        ranks=found.blame.ranks,
        location=found.blame.location,
        evidence=found.evidence,
        fix=f"Make the {differences} the same on every rank of the group."
        if len(sites) == 1 or "operation" not in found.differences
        else "Let every rank call the same collectives in the same order.",
    )


_SHOWN = 4
"""Groups of ranks that a sentence names."""


def _called(found: collective_mismatch.Mismatch, groups: Sequence[Group], places: bool) -> str:
    """``rank 1 called all_reduce of 5 floats at train.py:9 and rank 2 called broadcast``."""
    return _listed(
        f"{named(group.ranks)} called {found.what(group)}{_places(group, places)}"
        for group in sorted(groups, key=_first)
    )


def _places(group: Group, shown: bool) -> str:
    return f" at {' and '.join(map(quoted, group.sites or (None,)))}" if shown else ""


def _listed(parts: Iterable[str]) -> str:
    shown = list(parts)
    if len(shown) > _SHOWN:
        shown = [*shown[:_SHOWN], f"{len(shown) - _SHOWN} more calls on other ranks"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _first(group: Group) -> int:
    return group.ranks[0]


def waiting_line(rank: RankState) -> str:
    """What a rank waits in, as a line of evidence."""
    here = f"rank {rank.rank} waits in {rank.waits_in}"
    if rank.waits_at == rank.site:
        return f"{here} at {brief(rank.site)} for {rank.seconds} s"
    return (
        f"{here} at {brief(rank.waits_at)} for {rank.seconds} s; its host is at {brief(rank.site)}"
    )
