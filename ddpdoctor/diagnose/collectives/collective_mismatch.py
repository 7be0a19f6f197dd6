"""Collectives of ranks that ought to be the same and are not, and which ranks are out of line.

Two ranks have no majority. What is left then is the source (a condition on the rank that only some
have passed) and the order in which all ranks made their calls up to there.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ddpdoctor.core.formatting import named
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.recorded_calls import Call, amount, from_ring
from ddpdoctor.diagnose.source_files import Guard, brief, guards_of, holds, outcomes, source_of
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Rank, Run

# -- blame


_COUNTED = re.compile(r"(?:.*_)?(step|epoch|iter|count|batch|every|interval|freq|world|i|n|idx)")
"""Names of what all ranks count alike."""

_OFTEN = 2
"""Times that one call followed another for it to be the rule."""


@dataclass(frozen=True)
class Group:
    """Ranks that made the same call."""

    ranks: tuple[int, ...]
    call: Call
    """The call of the first of them."""
    sites: tuple[Location, ...]
    """Where they made it."""


@dataclass(frozen=True)
class Blame:
    """Ranks that are out of line.

    Attributes:
        kind: How it is known: by a ``guard`` that they alone have passed, by a call that they
            ``passed`` over or made ``alone``, or because ``most`` made another one; ``none`` is to
            blame more than the others where nothing is known.
        ranks: Their numbers.
        location: The line to look at.
        guard: The condition on the rank.
        decider: The statement that passed over the call, or the condition of the one made alone.
    """

    kind: Literal["guard", "passed", "alone", "most", "none"]
    ranks: tuple[int, ...]
    location: Location | None
    guard: Guard | None = None
    decider: Location | None = None


def blame(
    groups: Sequence[Group], calls: Mapping[int, Call], before: Mapping[int, Sequence[Call]]
) -> Blame:
    """Who is out of line.

    Args:
        groups: The ranks by what they called, the largest group first.
        calls: What each of them called.
        before: The ranks' calls in that process group before, which fit together, oldest first.
    """
    for group in groups if len(groups) == 2 else ():
        made = {rank: calls[rank] for rank in group.ranks}
        lines = {rank: call.chain for rank, call in calls.items() if rank not in made}
        skipped = skipped_by_guard(made, lines)
        if skipped is not None:
            return skipped
    orders = {rank: [each.chain for each in before.get(rank, ())] for rank in calls}
    by_guard = _by_guard(groups, calls, orders)
    if by_guard is not None:
        return by_guard
    total = sum(len(each.ranks) for each in groups)
    most = 2 * len(groups[0].ranks) > total
    if len(groups) == 2:
        one, other = groups
        claims = [*_by_course(one, other, orders[other.ranks[0]], most)]
        if not most:
            claims += _by_course(other, one, orders[one.ranks[0]], most)
        if len(claims) == 1:
            return claims[0]
    if most:
        odd = tuple(sorted(rank for each in groups[1:] for rank in each.ranks))
        return Blame("most", odd, groups[1].call.site)
    return Blame("none", tuple(sorted(calls)), groups[1].call.site)


def alone_by_guard(calls: Mapping[int, Call], others: Sequence[Sequence[Location]]) -> Blame | None:
    """A condition on the rank under which all of some ranks made their calls, and no other is.

    Args:
        calls: The ranks' calls.
        others: The lines that each of the other ranks is at, innermost first.
    """
    found: list[tuple[Guard, Location]] = []
    # Whoever is in another branch of the same condition may have a call there that fits.
    there = {guard.location for lines in others for guard, _ in guards_of(lines)}
    for call in calls.values():
        passed = [(guard, at) for guard, at in guards_of(call.chain) if guard.location not in there]
        if not passed:
            return None
        found.append(passed[0])
    guard, at = found[0]
    return Blame("guard", tuple(sorted(calls)), at, guard)


def skipped_by_guard(
    calls: Mapping[int, Call], others: Mapping[int, Sequence[Location]]
) -> Blame | None:
    """A condition that is always true on the ranks that made a call, and not on the others.

    As ``if not (rank == 1 and step == 60)``: those others skipped the call. What ranks that never
    come there miss is `alone_by_guard`'s.

    Args:
        calls: The ranks' calls.
        others: The lines that each of the other ranks is at, innermost first.
    """
    elsewhere = {guard.location for lines in others.values() for guard, _ in guards_of(lines)}
    for guard, at in guards_of(next(iter(calls.values())).chain):
        comes = outcomes(guard, at, (*calls, *others))
        if (
            guard.location not in elsewhere
            and all(comes.get(rank) == {True} for rank in calls)
            and all(comes.get(rank) == {True, False} for rank in others)
        ):
            ranks = tuple(sorted(others))
            return Blame("passed", ranks, guard.location, decider=guard.location)
    return None


_Order = Sequence[Sequence[Location]]


def _by_guard(
    groups: Sequence[Group], calls: Mapping[int, Call], orders: Mapping[int, _Order]
) -> Blame | None:
    found = []
    for group in groups:
        if group.call.chain in orders[group.ranks[0]]:
            # Before, the others had a call that fits this one.
            continue
        others = [call.chain for rank, call in calls.items() if rank not in group.ranks]
        each = alone_by_guard({rank: calls[rank] for rank in group.ranks}, others)
        if each is not None:
            found.append(each)
    # Where all stand under conditions, one branch is as good as another.
    return found[0] if len(found) == 1 and len(groups) == 2 else None


def _by_course(usual: Group, odd: Group, order: _Order, most: bool) -> Iterator[Blame]:
    """That the one group passed over what the other called, or called what it had no reason to."""
    wanted, made = usual.call.chain, odd.call.chain
    if not order or not wanted or not made or wanted == made:
        return
    follows = list(pairwise(order))
    to_wanted = follows.count((order[-1], wanted))
    if (order[-1], made) in follows:
        return
    if (to_wanted >= _OFTEN and made in order) or (most and (wanted, made) in follows):
        decider = _decider(order[-1], wanted, made)
        yield Blame("passed", odd.ranks, decider or usual.call.site, decider=decider)
    elif to_wanted >= _OFTEN:
        condition = _condition(made, wanted)
        if condition is not None:
            yield Blame("alone", odd.ranks, odd.call.site, decider=condition)


def _parting(
    one: Sequence[Location], other: Sequence[Location]
) -> tuple[Location, Location] | None:
    """Where two courses part: their lines in the same function."""
    for here, there in zip(reversed(one), reversed(other), strict=False):
        if here != there:
            source = source_of(here.path) if here.path == there.path else None
            same = source is not None and source.scope(here.line) is source.scope(there.line)
            return (here, there) if same else None
    return None


def _condition(made: Sequence[Location], other: Sequence[Location]) -> Location | None:
    """The ``if`` by which a call was made and the other not, unless it is about a shared count."""
    parting = _parting(made, other)
    source = source_of(parting[0].path) if parting is not None else None
    if parting is None or source is None:
        return None
    at, there = parting
    found = [
        each
        for each in source.ifs(at.line)
        if not each.lineno <= there.line <= (each.end_lineno or 0) and not _shared(each.test)
    ]
    return Location(at.path, found[0].lineno) if found else None


def _decider(
    last: Sequence[Location], wanted: Sequence[Location], made: Sequence[Location]
) -> Location | None:
    """The statement by which a call was passed over."""
    condition = _condition(wanted, made)
    if condition is not None:
        return condition
    parting = _parting(wanted, last)
    source = source_of(parting[0].path) if parting is not None else None
    if parting is None or source is None:
        return None
    at, before = parting
    return way_past(at, before.line if before.line < at.line else 0)


def way_past(at: Location, after: int) -> Location | None:
    """The one statement behind a line by which a rank alone may have passed over another line."""
    source = source_of(at.path)
    if source is None:
        return None
    loops = source.around(at.line)
    ways = [
        *(each for loop in loops[:1] for each in (*source.skips(loop), *source.exits(loop))),
        *([] if loops else source.returns_before(at.line, 0)),
    ]
    only = source.only([each for each in ways if after < each.lineno < at.line])
    return Location(at.path, only.lineno) if only is not None else None


def comes_after(chain: Sequence[Location], line: Location) -> bool:
    """Whether a call was made behind a line, in the same round of the loop around that line."""
    source = source_of(line.path)
    loops = source.around(line.line) if source is not None else []
    return bool(loops) and any(
        at.path == line.path and line.line < at.line and holds(loops[0], at.line) for at in chain
    )


def _shared(test: ast.expr) -> bool:
    """Whether a condition looks to be about a count that all ranks share."""
    nodes = list(ast.walk(test))
    if any(isinstance(each, ast.Mod) for each in nodes):
        return True
    called = {id(each.func) for each in nodes if isinstance(each, ast.Call)}
    names = [
        each.id if isinstance(each, ast.Name) else each.attr
        for each in nodes
        if isinstance(each, (ast.Name, ast.Attribute)) and id(each) not in called
    ]
    names = [name for name in names if name not in ("self", "args", "cfg", "config")]
    return all(_COUNTED.fullmatch(name.lower().rstrip("s")) for name in names)


# -- collectives that ought to be one and the same, and are not: ranks whose calls differ


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


def mismatch_of_calls(
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


def skipped_call(
    calls: Mapping[int, Call], waiting: list[int], ahead: list[int]
) -> Mismatch | None:
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
                calls[rank] = call if gloo else as_nccl_compares(call)
    return mismatch_of_calls(calls, before)


def as_nccl_compares(call: Call) -> Call:
    """The call as NCCL compares it, which gathers tensors of unequal size, too."""
    return replace(call, numel=-1) if call.name in _UNEVEN else call
