"""Which ranks are out of line, where some made another call: by their course, not by their number.

Two ranks have no majority. What is left then is the source (a condition on the rank that only some
have passed) and the order in which all ranks made their calls up to there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ddpdoctor.analysis.calls import Call
from ddpdoctor.analysis.guards import Guard, guards_of, outcomes
from ddpdoctor.analysis.sources import holds, source_of
from ddpdoctor.core.finding import Location

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
