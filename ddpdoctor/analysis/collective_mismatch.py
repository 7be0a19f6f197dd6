"""Collectives that ought to be one and the same, and are not: ranks whose calls differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.analysis.blame import Blame, Group, blame, skipped_by_guard
from ddpdoctor.analysis.calls import Call, amount, from_ring
from ddpdoctor.analysis.places import brief
from ddpdoctor.core.finding import Location
from ddpdoctor.core.ranks import named
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Rank, Run

_UNEVEN = ("all_gather", "reduce_scatter")
"""Collectives that NCCL also does with tensors of unequal size."""


@dataclass(frozen=True)
class Mismatch:
    """One collective of a process group that is another one on some ranks."""

    calls: Mapping[int, Call]
    """What each rank called, as far as it is known."""
    groups: tuple[Group, ...]
    """The ranks by what they called, the largest group first."""
    blame: Blame

    @property
    def guilty(self) -> tuple[Group, ...]:
        """The groups that are out of line; all of them where none is more than the others."""
        ranks = self.blame.ranks
        return tuple(each for each in self.groups if each.ranks[0] in ranks)

    @property
    def others(self) -> tuple[Group, ...]:
        """The groups that are not."""
        return tuple(each for each in self.groups if each not in self.guilty)

    @property
    def differences(self) -> list[str]:
        """In what they differ, in words."""
        by_name: dict[str, list[Call]] = defaultdict(list)
        for group in self.groups:
            by_name[group.call.name].append(group.call)
        found = ["operation"] if len(by_name) > 1 else []
        for word, fact in _FACTS.items():
            if any(len({fact(call) for call in calls}) > 1 for calls in by_name.values()):
                found.append(word)
        return found

    def what(self, group: Group) -> str:
        """A group's call with what it differs in: ``all_reduce of 64 floats``."""
        return f"{group.call.name} {self.facts(group)}".rstrip()

    def facts(self, group: Group) -> str:
        """In what a group's call differs from the others of that name: ``of 64 floats``."""
        call = group.call
        alike = [each.call for each in self.groups if each.call.name == call.name]
        differ = [word for word, fact in _FACTS.items() if len({fact(each) for each in alike}) > 1]
        words = []
        if "size" in differ or "dtype" in differ:
            words.append(f"of {amount(call.numel, call.dtype)}")
        if "reduce operation" in differ:
            words.append(f"with {call.reduce or 'no reduce operation'}")
        if "root" in differ:
            words.append(f"with root {call.root}")
        return " ".join(words)

    @property
    def evidence(self) -> tuple[str, ...]:
        """What the ranks called, a line for each group, at most six."""
        same = len({group.call.site for group in self.groups}) == 1
        found = [
            f"{named(group.ranks)} called {group.call.what} at "
            + " and ".join(brief(each) for each in group.sites or (None,))
            + (self._through(group) if same else "")
            for group in self.groups[:6]
        ]
        if len(self.groups) > 6:
            found.append(f"{len(self.groups) - 6} more calls on other ranks")
        return tuple(found)

    def _through(self, group: Group) -> str:
        """By which caller, where that is what the groups differ in."""
        others = {each.call.callers for each in self.groups if each is not group}
        for number, at in enumerate(group.call.callers):
            if any(each[: number + 1] != group.call.callers[: number + 1] for each in others):
                return f", by {brief(at)}"
        return ""


_FACTS: dict[str, Callable[[Call], object]] = {
    "dtype": lambda call: call.dtype.lower(),
    "size": lambda call: call.numel,
    "reduce operation": lambda call: call.reduce,
    "root": lambda call: call.root,
}


def _signature(call: Call) -> tuple[object, ...]:
    return call.name, *(fact(call) for fact in _FACTS.values())


def of_calls(
    calls: Mapping[int, Call], before: Mapping[int, Sequence[Call]] | None = None
) -> Mismatch | None:
    """What the ranks' calls with one number differ in; None if they are the same.

    Args:
        calls: What each rank called.
        before: What they called before in that process group, oldest first.
    """
    kinds: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        kinds[_signature(call)].append(rank)
    if len(kinds) < 2:
        return None
    early = mispaired_before(before or {})
    if early is not None:
        return early
    groups = _groups(kinds.values(), calls)
    return Mismatch(calls, groups, blame(groups, calls, before or {}))


def skipped(calls: Mapping[int, Call], waiting: list[int], ahead: list[int]) -> Mismatch | None:
    """A call that some ranks wait in and that those ahead of them alone may have skipped.

    Args:
        calls: What each of them waits in.
        waiting: The ones.
        ahead: The others.
    """
    found = skipped_by_guard(
        {rank: calls[rank] for rank in waiting}, {rank: calls[rank].chain for rank in ahead}
    )
    return Mismatch(calls, _groups([waiting, ahead], calls), found) if found is not None else None


def mispaired_before(before: Mapping[int, Sequence[Call]]) -> Mismatch | None:
    """An earlier call of some ranks under a condition on the rank, that met another one like it.

    Two calls of one kind at different lines may well be meant: only where the ranks differ
    later is that the reason.

    Args:
        before: What the ranks called in one process group, oldest first.
    """
    numbered: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, earlier in before.items():
        for call in earlier:
            numbered[call.sequence][rank] = call
    for _, calls in sorted(numbered.items()):
        chains: dict[object, list[int]] = defaultdict(list)
        for rank, call in sorted(calls.items()):
            chains[call.chain].append(rank)
        if len(chains) == 2 and len(calls) == len(before):
            groups = _groups(chains.values(), calls)
            until = {
                rank: [each for each in before[rank] if each.sequence < calls[rank].sequence]
                for rank in calls
            }
            found = blame(groups, calls, until)
            if found.kind == "guard":
                return Mismatch(calls, groups, found)
    return None


def _groups(kinds: Iterable[list[int]], calls: Mapping[int, Call]) -> tuple[Group, ...]:
    return tuple(
        Group(tuple(ranks), calls[ranks[0]], _sites(calls[rank] for rank in ranks))
        for ranks in sorted(kinds, key=lambda ranks: (-len(ranks), ranks))
    )


def _sites(calls: Iterable[Call]) -> tuple[Location, ...]:
    return tuple(dict.fromkeys(call.site for call in calls if call.site is not None))


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
    return any(each.hook.startswith("collectives") for each in rank.records.of(FaultRecord))


def first_mismatch(called: Mapping[int, Sequence[Collective]], gloo: bool) -> Mismatch | None:
    """The earliest collective that is another one on some ranks.

    Args:
        called: What each rank called.
        gloo: Whether the groups' backend is gloo, which wants tensors of one size everywhere.
    """
    # By the group and the number in it; nearly always all ranks agree, which has to be quick.
    known: dict[tuple[str, int], tuple[object, ...]] = {}
    differ: dict[tuple[str, int], int] = {}
    for collectives in called.values():
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
    calls: dict[int, Call] = {}
    before: dict[int, list[Call]] = defaultdict(list)
    for rank, collectives in called.items():
        for each in collectives:
            if each.group != first[0] or each.point_to_point or each.sequence > first[1]:
                continue
            call = call_of(each)
            if each.sequence < first[1]:
                before[rank].append(call)
            else:
                calls[rank] = call if gloo else even(call)
    return of_calls(calls, before)


def even(call: Call) -> Call:
    """The call as NCCL compares it, which gathers tensors of unequal size, too."""
    return replace(call, numel=-1) if call.name in _UNEVEN else call
