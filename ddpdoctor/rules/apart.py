"""Collectives that ought to be one and the same, and are not: ranks whose calls have come apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.finding import Location
from ddpdoctor.probe.ring import Collective
from ddpdoctor.rules.guards import rank_guard
from ddpdoctor.rules.standing import Call, amount, brief, from_ring
from ddpdoctor.run import Rank, Run

_UNEVEN = ("all_gather", "reduce_scatter")
"""Collectives that NCCL also does with tensors of unequal size."""


@dataclass(frozen=True)
class Apart:
    """One collective of a group that is another one on some ranks."""

    calls: Mapping[int, Call]
    """What each rank called, as far as it is known."""
    guilty: tuple[int, ...]
    """The ranks that differ from most; all of them where none are most."""
    location: Location | None
    guard: int | None
    """The line of the condition on the rank by which the guilty call was made, if it was."""

    @property
    def odd(self) -> Call:
        """The call of a guilty rank."""
        return self.calls[self.guilty[-1]]

    @property
    def usual(self) -> tuple[int, Call]:
        """A rank with another call than that, and its call."""
        odd = _signature(self.odd)
        return next(
            (rank, call) for rank, call in sorted(self.calls.items()) if _signature(call) != odd
        )

    @property
    def differences(self) -> list[str]:
        """In what they differ, in words."""
        (_, usual), odd = self.usual, self.odd
        if usual.name != odd.name:
            return ["operation"]
        pairs = (
            ("dtype", usual.dtype, odd.dtype),
            ("size", usual.numel, odd.numel),
            ("reduce operation", usual.reduce, odd.reduce),
            ("root", usual.root, odd.root),
        )
        return [name for name, one, other in pairs if one != other]


def _signature(call: Call) -> tuple[str, int, str, str, int]:
    return call.name, call.numel, call.dtype.lower(), call.reduce, call.root


def of_calls(calls: Mapping[int, Call]) -> Apart | None:
    """What the ranks' calls with one number differ in; None if they are the same."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        kinds[_signature(call)].append(rank)
    if len(kinds) < 2:
        return None
    by_size = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
    if len(by_size[0]) > len(by_size[1]):
        odd = [rank for ranks in by_size[1:] for rank in ranks]
        return _apart(calls, odd, odd[0])
    guarded = [ranks for ranks in by_size if _guard(calls[ranks[0]]) is not None]
    if len(guarded) == 1 and len(by_size) == 2:
        return _apart(calls, guarded[0], guarded[0][0])
    return _apart(calls, sorted(calls), by_size[1][0])


def _apart(calls: Mapping[int, Call], guilty: list[int], first: int) -> Apart:
    # The last of them is the one that is shown.
    ordered = (*sorted(rank for rank in guilty if rank != first), first)
    return Apart(calls, ordered, calls[first].site, _guard(calls[first]))


def _guard(call: Call) -> int | None:
    return rank_guard(call.site.path, call.site.line) if call.site is not None else None


def rings(run: Run) -> dict[int, tuple[Collective, ...]]:
    """The newest collectives that each rank of the last attempt called from Python.

    Ranks that may not have written down all of theirs are left out.
    """
    return {
        rank.rank: rank.ring.collectives
        for rank in run.last
        if rank.ring is not None and not rank.ring.partial and not _fault(rank)
    }


def call_of(collective: Collective) -> Call:
    """A collective of a ring, as rules see it."""
    return from_ring(collective._asdict())


def _fault(rank: Rank) -> bool:
    return any(str(each.get("hook")).startswith("collectives") for each in rank.of_kind("fault"))


def first_apart(told: Mapping[int, Sequence[Collective]], gloo: bool) -> Apart | None:
    """The earliest collective that is another one on some ranks.

    Args:
        told: What each rank called.
        gloo: Whether the groups' backend is gloo, which wants tensors of one size everywhere.
    """
    # By the group and the number in it; nearly always all ranks agree, which has to be quick.
    known: dict[tuple[str, int], tuple[object, ...]] = {}
    differ: dict[tuple[str, int], int] = {}
    for collectives in told.values():
        for each in collectives:
            if each.point_to_point:
                continue
            key = each.group, each.sequence
            numel = -1 if not gloo and each.name in _UNEVEN else each.numel
            what = (each.name, numel, each.dtype, each.reduce, each.root)
            if known.setdefault(key, what) != what:
                differ.setdefault(key, each.began)
    if not differ:
        return None
    first = min(differ, key=lambda key: differ[key])
    return of_calls(
        {
            rank: replace(call_of(each), numel=-1)
            if not gloo and each.name in _UNEVEN
            else call_of(each)
            for rank, collectives in told.items()
            for each in collectives
            if (each.group, each.sequence) == first and not each.point_to_point
        }
    )


def facts(call: Call, differences: list[str]) -> str:
    """A call with what it differs in: ``all_reduce of 64 floats``."""
    if "operation" in differences:
        return call.name
    told = []
    if "size" in differences or "dtype" in differences:
        told.append(f"of {amount(call.numel, call.dtype)}")
    if "reduce operation" in differences:
        told.append(f"with {call.reduce or 'no reduce operation'}")
    if "root" in differences:
        told.append(f"with root {call.root}")
    return " ".join([call.name, *told])


def evidence(calls: Mapping[int, Call]) -> tuple[str, ...]:
    """What the ranks called, a line each, at most six."""
    return tuple(
        f"rank {rank} called {call.what} at {brief(call.site)}"
        for rank, call in sorted(calls.items())[:6]
    )
