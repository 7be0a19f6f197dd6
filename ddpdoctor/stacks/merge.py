"""The stacks of all ranks as one tree: equal frames once, each with the ranks that are in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ddpdoctor.stacks.model import Frame, RankStacks
from ddpdoctor.stacks.user_frames import user_frames

Keep = Callable[[Sequence[Frame]], Sequence[Frame]]


@dataclass(frozen=True)
class Node:
    """A chain of frames that the same ranks are in, and where they part."""

    ranks: tuple[int, ...]
    """Ascending."""
    frames: tuple[Frame, ...]
    """Outermost first; all of these ranks are in all of them."""
    children: tuple[Node, ...]
    """Where they are further in; odd ones first, then the fewest. The ranks that are in none of
    them stand at the last of the frames."""
    odd: bool
    """Whether most ranks are elsewhere in the user's code."""


@dataclass(frozen=True)
class Merged:
    """The main threads of several ranks, merged."""

    roots: tuple[Node, ...]
    odd: frozenset[int]
    """The ranks that are elsewhere in the user's code than more than half of all are."""
    places: int
    """In how many different places of the user's code the ranks are."""
    missing: tuple[RankStacks, ...]
    """The ranks without a stack, each with its trouble."""


def merge(stacks: Iterable[RankStacks], keep: Keep = tuple) -> Merged:
    """Merge the main threads of ranks.

    Args:
        stacks: Of any ranks, each rank once.
        keep: Which frames of a stack to take; all of them unless said.
    """
    found = sorted(stacks, key=lambda each: each.rank)
    mains = {each.rank: main.frames for each in found if (main := each.main) is not None}
    odd, places = odd_ones(mains)
    kept = {rank: tuple(keep(frames)) for rank, frames in mains.items()}
    return Merged(
        roots=_nodes(sorted(mains), kept, 0, odd),
        odd=odd,
        places=places,
        missing=tuple(each for each in found if each.rank not in mains),
    )


def odd_ones(mains: dict[int, tuple[Frame, ...]]) -> tuple[frozenset[int], int]:
    """The ranks that are elsewhere than most, and the number of different places.

    Two ranks are in the same place if the user's frames of their stacks are equal; what libraries
    do below them may differ. No rank is odd where no place has more than half of the ranks.
    """
    places: dict[tuple[Frame, ...], list[int]] = defaultdict(list)
    for rank, frames in mains.items():
        places[user_frames(frames) or frames].append(rank)
    most = max(places.values(), key=len, default=[])
    if 2 * len(most) <= len(mains):
        return frozenset(), len(places)
    return frozenset(mains) - frozenset(most), len(places)


def _nodes(
    ranks: Sequence[int], stacks: dict[int, tuple[Frame, ...]], depth: int, odd: frozenset[int]
) -> tuple[Node, ...]:
    """The ranks by their frame at ``depth``, which all of them reach by the same way."""
    groups: dict[Frame, list[int]] = defaultdict(list)
    for rank in ranks:
        if depth < len(stacks[rank]):
            groups[stacks[rank][depth]].append(rank)
    nodes = [_node(members, stacks, depth, odd) for members in groups.values()]
    return tuple(sorted(nodes, key=lambda node: (not node.odd, len(node.ranks), node.ranks)))


def _node(
    ranks: list[int], stacks: dict[int, tuple[Frame, ...]], depth: int, odd: frozenset[int]
) -> Node:
    first = stacks[ranks[0]]
    end = depth + 1
    while end < len(first) and all(
        end < len(stacks[rank]) and stacks[rank][end] == first[end] for rank in ranks
    ):
        end += 1
    children = _nodes(ranks, stacks, end, odd)
    return Node(tuple(ranks), first[depth:end], children, odd.issuperset(ranks))
