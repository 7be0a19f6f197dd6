"""Who waits for whom: a collective that some ranks are in and others never reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.analysis.calls import Call
from ddpdoctor.analysis.hang_snapshot import HangSnapshot, RankState
from ddpdoctor.core.opening import whole
from ddpdoctor.run.names import MOST_WORLD
from ddpdoctor.run.status import Phase


@dataclass(frozen=True)
class Blocked:
    """A collective that does not end.

    Attributes:
        call: What it is, if it is known; as one of the waiting ranks sees it.
        waiting: Ranks that are in it.
        absent: Ranks that are not, though they belong to its group.
        unseen: Ranks of its group of which nothing is known here: those of other nodes.
        ahead: Ranks that wait in a later one of its group.
    """

    call: Call | None
    waiting: tuple[RankState, ...]
    absent: tuple[RankState, ...]
    unseen: tuple[int, ...]
    ahead: tuple[RankState, ...] = ()

    @property
    def what(self) -> str:
        """The collective, for a sentence."""
        return self.waiting[0].waits_in

    @property
    def launched_behind(self) -> dict[int, int]:
        """The collectives that waiting ranks have launched behind it, where that is known."""
        call = self.call
        return {
            rank.rank: _last(rank, call.numbering, flight=True) - call.sequence
            for rank in self.waiting
            if call is not None and rank.flight
        }


def blocked(still: HangSnapshot) -> list[Blocked]:
    """The collectives that ranks wait in, that with most of them first."""
    waiting = [rank for rank in still.ranks if rank.in_collective]
    if not waiting:
        return []
    if all(rank.blocked is not None for rank in waiting):
        found = list(_by_calls(still, waiting, {each.rank: each.blocked for each in waiting}, True))
    elif all(rank.under_way is not None for rank in waiting):
        own = {each.rank: each.under_way for each in waiting}
        found = list(_by_calls(still, waiting, own, False))
    else:
        found = list(_by_phase(still, waiting))
    return sorted(found, key=lambda each: -len(each.waiting))


def _by_calls(
    still: HangSnapshot,
    waiting: list[RankState],
    calls: dict[int, Call | None],
    flight: bool,
) -> Iterator[Blocked]:
    numberings = sorted({call.numbering for call in calls.values() if call is not None})
    for numbering in numberings:
        inside = [
            (rank, call)
            for rank in waiting
            if (call := calls[rank.rank]) is not None and call.numbering == numbering
        ]
        least = min(call.sequence for _, call in inside)
        members = _members(still, numbering[0], inside)
        here = [rank for rank, call in inside if call.sequence == least]
        present = {rank.rank for rank, _ in inside}
        seen = _knowing(still, numbering[0])
        absent = [
            rank
            for rank in seen
            if rank.rank in members
            and rank.rank not in present
            and _last(rank, numbering, flight) < least
        ]
        ahead = [rank for rank, call in inside if call.sequence > least]
        known = {rank.rank for rank in seen}
        call = next(call for rank, call in inside if call.sequence == least)
        unseen = sorted(members - known)
        yield Blocked(call, tuple(here), tuple(absent), tuple(unseen), tuple(ahead))


def _knowing(still: HangSnapshot, group: str) -> list[RankState]:
    """The ranks of which it is known what they called in a group, if anything."""
    return [rank for rank in still.ranks if not rank.forgot(group)]


def _members(
    still: HangSnapshot, group: str, inside: list[tuple[RankState, Call]]
) -> frozenset[int]:
    members = next((call.members for _, call in inside if call.members), "")
    for rank in still.ranks:
        members = members or next((call.members for call in rank.ring if call.group == group), "")
    if members:
        return parsed(members)
    if group in ("", "0"):
        return frozenset(range(still.world_size))
    # A group that no rank described: those that ever used it.
    return frozenset(
        rank.rank
        for rank in still.ranks
        if any(call.group == group for call in (*(rank.flight or ()), *rank.ring))
    )


def parsed(text: str) -> frozenset[int]:
    """Ranks from ``0-2,5``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = whole(first, -1), whole(last or first, -1)
        if 0 <= low <= high < MOST_WORLD:
            found.update(range(low, high + 1))
    return frozenset(found)


def _last(rank: RankState, numbering: tuple[str, str], flight: bool) -> int:
    """The number of its newest collective of a group, 0 if there is none or it is not known."""
    calls = (rank.flight or ()) if flight else rank.ring
    return max((call.sequence for call in calls if call.numbering == numbering), default=0)


def _by_phase(still: HangSnapshot, waiting: list[RankState]) -> Iterator[Blocked]:
    """By the status pages alone: all in one phase are taken to be in one collective."""
    kinds = sorted({(rank.phase, str(rank.record.get("collective"))) for rank in waiting})
    known = {rank.rank for rank in still.ranks}
    for kind in kinds:
        here = [r for r in waiting if (r.phase, str(r.record.get("collective"))) == kind]
        if kind[0] == Phase.BACKWARD.label:
            most = max(rank.record.get("reduced") or 0 for rank in here)
            here = [rank for rank in here if (rank.record.get("reduced") or 0) == most] or here
        present = {rank.rank for rank in here}
        absent = [rank for rank in still.ranks if rank.rank not in present]
        unseen = sorted(set(range(still.world_size)) - known)
        yield Blocked(here[0].under_way, tuple(here), tuple(absent), tuple(unseen))
