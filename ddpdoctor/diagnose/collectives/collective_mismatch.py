"""Find collectives that differ between ranks, and the ranks to blame.

With two ranks there is no majority. Then the source (a condition on the rank that only some have
passed) and the order of earlier calls show which rank is to blame.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from ddpdoctor.core.formatting import named, rank_set
from ddpdoctor.core.syntax import last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.recorded_calls import Call, amount, from_ring
from ddpdoctor.diagnose.rank_conditions import Guard, guards_of, outcomes
from ddpdoctor.diagnose.source_files import brief, holds, source_of
from ddpdoctor.run.records.process import ErrorRecord, FaultRecord
from ddpdoctor.run.ring import Collective
from ddpdoctor.run.snapshot import Rank, Run

_COUNTED = re.compile(r"(?:.*_)?(step|epoch|iter|count|batch|every|interval|freq|world|i|n|idx)")
"""Names of counters that are equal on all ranks."""

_WORLD_SIZE = re.compile(r"(\w*_)?(world_size|n_?gpus?|nprocs|num_(gpus|processes|replicas))")
"""Names of the world size and similar values, which are equal on all ranks of a job."""

_OPTIONS = re.compile(r"args|cfg|config|conf|opts?|options|hparams|flags|FLAGS|settings")
"""Names of objects that hold a job's options."""

_MIN_REPEATS = 2  # Number of times that one call must follow another to form a regular sequence


@dataclass(frozen=True)
class Group:
    """Ranks that made the same call."""

    ranks: tuple[int, ...]
    call: Call  # The call of the first of them
    sites: tuple[Location, ...]  # The lines at which they made it


@dataclass(frozen=True)
class Blame:
    """The ranks to blame."""

    kind: Literal["guard", "passed", "alone", "decided", "ended", "most", "none"]
    """The evidence. ``guard``: only they passed a condition on the rank. ``passed``: they skipped a
    call. ``alone``: only they made a call. ``most``: most ranks made a different call.
    ``decided``: a condition on values led to their call. ``ended``: their loop ended first.
    ``none``: all ranks may be to blame."""
    ranks: tuple[int, ...]
    location: Location | None  # The line to report
    guard: Guard | None = None  # The condition on the rank
    decider: Location | None = None
    """The statement that skipped the call, or the condition of the one made alone."""


def blame(
    groups: Sequence[Group], calls: Mapping[int, Call], before: Mapping[int, Sequence[Call]]
) -> Blame:
    """Find the ranks to blame. ``groups`` holds the ranks by call, the largest group first.

    ``before`` holds the earlier matching calls of the process group, oldest first.
    """
    for group in groups if len(groups) == 2 else ():
        made = {rank: calls[rank] for rank in group.ranks}
        lines = {rank: call.chain for rank, call in calls.items() if rank not in made}
        skipped = skipped_by_guard(made, lines)
        if skipped is not None:
            return skipped
    orders = {rank: [each.chain for each in before.get(rank, ())] for rank in calls}
    by_guard = _by_guard(groups, calls, orders) if len(groups) == 2 else None
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
        decided = _by_value(one, other, most)
        if decided is not None:
            return decided
    if most:
        odd = tuple(sorted(rank for each in groups[1:] for rank in each.ranks))
        return Blame("most", odd, groups[1].call.site)
    return Blame("none", tuple(sorted(calls)), groups[1].call.site)


def alone_by_guard(calls: Mapping[int, Call], others: Sequence[Sequence[Location]]) -> Blame | None:
    """Find a condition on the rank under which these ranks, and no other rank, made their calls.

    ``others`` holds the lines that each other rank is at, innermost first.
    """
    found: list[tuple[Guard, Location]] = []
    # A rank in another branch of the condition may make a matching call there.
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
    """Find a condition that is always true on the ranks that made a call, but not on the others.

    With ``if not (rank == 1 and step == 60)`` the other ranks skipped the call. `alone_by_guard`
    finds calls that the others never reach.
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


def _by_guard(
    groups: Sequence[Group],
    calls: Mapping[int, Call],
    orders: Mapping[int, Sequence[Sequence[Location]]],
) -> Blame | None:
    """Blame the one group whose call is under a condition on the rank."""
    found = []
    for group in groups:
        if group.call.chain not in orders[group.ranks[0]]:
            # Otherwise the other ranks made a matching call earlier.
            others = [call.chain for rank, call in calls.items() if rank not in group.ranks]
            found.append(alone_by_guard({rank: calls[rank] for rank in group.ranks}, others))
    known = [each for each in found if each is not None]
    # If each group's call is under a condition, none is to blame.
    return known[0] if len(known) == 1 else None


def _by_course(
    usual: Group, odd: Group, order: Sequence[Sequence[Location]], most: bool
) -> Iterator[Blame]:
    """Blame a group that skipped a call of the other group, or that made an extra one."""
    wanted, made = usual.call.chain, odd.call.chain
    if not order or not wanted or not made or wanted == made:
        return
    follows = list(pairwise(order))
    to_wanted = follows.count((order[-1], wanted))
    if (order[-1], made) in follows:
        return
    if (to_wanted >= _MIN_REPEATS and made in order) or (most and (wanted, made) in follows):
        decider = _decider(order[-1], wanted, made)
        yield Blame("passed", odd.ranks, decider or usual.call.site, decider=decider)
    elif to_wanted >= _MIN_REPEATS:
        condition = _condition(made, wanted)
        if condition is not None:
            yield Blame("alone", odd.ranks, odd.call.site, decider=condition)


def _by_value(one: Group, other: Group, most: bool) -> Blame | None:
    """Find the condition on the ranks' values that led to only one group's call."""
    deciders = {
        made: found
        for made, there in ((one, other), (other, one))
        if (found := decided_by(made.call, there.call.lines)) is not None
    }
    if not deciders:
        return _by_loop(one, other) or _by_loop(other, one)
    if len(deciders) != 1:
        return None
    (made,), (decider,) = deciders, deciders.values()
    if not most:
        return Blame("decided", made.ranks, decider, decider=decider)
    return Blame("alone" if made is other else "passed", other.ranks, decider, decider=decider)


def _by_loop(made: Group, other: Group) -> Blame | None:
    """Blame a group whose ``for`` loop ended first, so that it reached a call after the loop."""
    at, there = _parting_of(made.call.lines, other.call.lines)
    source = source_of(at.path) if at is not None else None
    if at is None or there is None or source is None:
        return None
    ended = [each for each in source.around(there.line) if not holds(each, at.line)]
    # If both are in an outer loop, the other ranks may be in its next iteration.
    if not ended or not isinstance(ended[-1], ast.For) or at.line < ended[-1].lineno:
        return None
    loop = ended[-1]
    if source.exits(loop) or source.skips(loop) or source.counts_alike(loop):
        return None
    return Blame("ended", made.ranks, Location(at.path, ended[-1].lineno))


def decided_by(call: Call, lines: Sequence[Location]) -> Location | None:
    """Return the outermost varying condition that led to a call and not to another rank's lines.

    It is in the function in which they diverge, or in one that only the call went through.
    """
    chain = call.lines
    at, there = _parting_of(chain, lines)
    # A condition on the rank either explains the calls, or has a matching call elsewhere.
    guards = {guard.location for guard, _ in guards_of(chain)}
    found: list[tuple[bool, Location]] = []
    for frame in reversed(chain[: chain.index(at) + 1] if at is not None else chain):
        source = source_of(frame.path)
        if source is None:
            continue
        for each, first, last in source.deciding(frame.line):
            passed = frame == at and there is not None and first <= there.line <= last
            decider = Location(frame.path, each.lineno)
            if passed or decider in guards or _shared(each.test) or _configured(each.test):
                continue
            found.append((source.varies(each), decider))
    varying = [at for varies, at in found if varies]
    return next(iter(varying or (at for _, at in found)), None)


def _parting_of(
    chain: Sequence[Location], lines: Sequence[Location]
) -> tuple[Location | None, Location | None]:
    """Return the lines at which two calls left the outermost function that they share."""
    for at in reversed(chain):
        source = source_of(at.path)
        if source is None or at in lines:
            continue
        for there in lines:
            if at.path == there.path and source.scope(at.line) is source.scope(there.line):
                return at, there
    return None, None


def _configured(test: ast.expr) -> bool:
    """Return whether a condition only tests an option or the existence of an object."""
    if isinstance(test, ast.BoolOp):
        return all(map(_configured, test.values))
    if isinstance(test, ast.UnaryOp):
        return _configured(test.operand)
    if isinstance(test, ast.Compare):
        if last_name(test.left) == "__name__":
            return True
        compared = [each for each in (test.left, *test.comparators) if last_name(each)]
        sizes = [each for each in compared if _WORLD_SIZE.fullmatch(last_name(each))]
        return sizes == compared != [] or all(
            isinstance(each, (ast.Is, ast.IsNot)) for each in test.ops
        )
    roots = [each.id for each in ast.walk(test) if isinstance(each, ast.Name)]
    return bool(roots) and all(_OPTIONS.fullmatch(each) for each in roots)


def _parting(
    one: Sequence[Location], other: Sequence[Location]
) -> tuple[Location, Location] | None:
    """Return the lines of one function at which two call chains diverge."""
    for here, there in zip(reversed(one), reversed(other), strict=False):
        if here != there:
            source = source_of(here.path) if here.path == there.path else None
            same = source is not None and source.scope(here.line) is source.scope(there.line)
            return (here, there) if same else None
    return None


def _condition(made: Sequence[Location], other: Sequence[Location]) -> Location | None:
    """Return the ``if`` that led to one call only, unless it tests a count that all ranks share."""
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
    """Return the statement that skipped a call."""
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
    """Return the only statement after a line by which a rank may have skipped a later one."""
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
    """Return whether a call was made after a line, in the same iteration of the loop around it."""
    source = source_of(line.path)
    loops = source.around(line.line) if source is not None else []
    return bool(loops) and any(
        at.path == line.path and line.line < at.line and holds(loops[0], at.line) for at in chain
    )


def _shared(test: ast.expr) -> bool:
    """Return whether a condition seems to test a count that all ranks share."""
    if isinstance(test, ast.BoolOp):
        return all(map(_shared, test.values))
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


# -- ranks whose calls differ

_UNEVEN = ("all_gather", "reduce_scatter")
"""Collectives that NCCL also runs with tensors of unequal size."""


@dataclass(frozen=True)
class Mismatch:
    """One collective of a process group that differs between ranks."""

    calls: Mapping[int, Call]  # The known calls by rank
    groups: tuple[Group, ...]  # The ranks by call, the largest group first
    blame: Blame

    @property
    def guilty(self) -> tuple[Group, ...]:
        """The groups to blame. All groups if no single one is to blame."""
        ranks = self.blame.ranks
        return tuple(each for each in self.groups if each.ranks[0] in ranks)

    @property
    def others(self) -> tuple[Group, ...]:
        """The groups that are not to blame."""
        return tuple(each for each in self.groups if each not in self.guilty)

    @property
    def differences(self) -> list[str]:
        """The properties that differ, in words."""
        by_name: dict[str, list[Call]] = defaultdict(list)
        for group in self.groups:
            by_name[group.call.name].append(group.call)
        found = ["operation"] if len(by_name) > 1 else []
        for word, fact in _FACTS.items():
            if any(len({fact(call) for call in calls}) > 1 for calls in by_name.values()):
                found.append(word)
        return found

    def what(self, group: Group) -> str:
        """Return a group's call with the properties that differ: ``all_reduce of 64 floats``."""
        return f"{group.call.name} {self.facts(group)}".rstrip()

    def facts(self, group: Group) -> str:
        """Return how a group's call differs from others of that name: ``of 64 floats``."""
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
        """The calls of the ranks, a line for each group, at most six."""
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
        """Return the caller if it differs between the groups."""
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


def mismatch_of_calls(
    calls: Mapping[int, Call], before: Mapping[int, Sequence[Call]] | None = None
) -> Mismatch | None:
    """Compare the ranks' calls of one number, given earlier ones. None if they are the same."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        signature = call.name, *(fact(call) for fact in _FACTS.values())
        kinds[signature].append(rank)
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
    """Return a call in which ranks wait, and which ranks ahead of them may have skipped."""
    found = skipped_by_guard(
        {rank: calls[rank] for rank in waiting}, {rank: calls[rank].chain for rank in ahead}
    )
    return Mismatch(calls, _groups([waiting, ahead], calls), found) if found is not None else None


def mispaired_before(before: Mapping[int, Sequence[Call]]) -> Mismatch | None:
    """Return an earlier call under a condition on the rank that paired with another line's call.

    Two calls of the same kind at different lines may be intended. They are the cause only if the
    ranks differ later.
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
    def sites(ranks: list[int]) -> tuple[Location, ...]:
        found = (calls[rank].site for rank in ranks)
        return tuple(dict.fromkeys(site for site in found if site is not None))

    ordered = sorted(kinds, key=lambda ranks: (-len(ranks), ranks))
    return tuple(Group(tuple(ranks), calls[ranks[0]], sites(ranks)) for ranks in ordered)


def rings(run: Run) -> dict[int, tuple[Collective, ...]]:
    """Return the newest Python collectives of the last attempt's ranks that recorded all."""
    return {
        rank.rank: rank.ring.collectives
        for rank in run.last
        if rank.ring is not None
        and not rank.ring.partial
        and not any(each.hook.startswith("collectives") for each in rank.records.of(FaultRecord))
    }


def ring_mismatch(run: Run) -> Mismatch | None:
    """Return the earliest collective that differs between ranks, by their rings.

    None while another node may still send a rank's call, which shows the ranks that differ.
    """
    nccl = any("nccl" in rank.opened.backend for rank in run.last)
    called = rings(run)
    found = first_mismatch(called, gloo=not nccl)
    if found is None:
        return None
    try:
        members = rank_set(next(iter(found.calls.values())).members)
    except ValueError:
        members = frozenset()
    awaited = (rank for rank in run.last if rank.rank in members - found.calls.keys())
    waits = any(rank.rank in called and not is_up_to_date(run, rank) for rank in awaited)
    return None if waits else found


def is_up_to_date(run: Run, rank: Rank) -> bool:
    """Return whether a rank's ring has all calls so far. Other nodes send theirs later."""
    ended = rank.exit is not None or rank.records.first(ErrorRecord) is not None
    return not rank.elsewhere or ended or run.exit_status is not None or run.hang is not None


def first_mismatch(called: Mapping[int, Sequence[Collective]], gloo: bool) -> Mismatch | None:
    """Return the earliest collective that differs between ranks. gloo needs equal sizes."""
    # By group and number. Almost always all ranks agree, so this has to be fast.
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
            call = from_ring(each)
            if each.sequence < first[1]:
                before[rank].append(call)
            else:
                calls[rank] = call if gloo else as_nccl_compares(call)
    return mismatch_of_calls(calls, before)


def as_nccl_compares(call: Call) -> Call:
    """Return the call as NCCL compares it. NCCL can gather tensors of unequal size."""
    return replace(call, numel=-1) if call.name in _UNEVEN else call
