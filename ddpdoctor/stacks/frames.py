"""Tell the user's frames from others, and merge stacks that are alike into a tree."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.user_code import user_file
from ddpdoctor.stacks.rank_stacks import CUT, Frame, RankStacks

# -- user frames


# By name, too, since the ranks may run another Python than this one.
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages)/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/")
_PROBE = "/ddpdoctor/probe/"


@lru_cache(maxsize=8192)
def is_user_path(path: str) -> bool:
    """Whether a file's code is the user's."""
    if path.startswith(("<", "?", "...")) or is_probe_path(path):
        return False
    return not (_INSTALLED.search(path) or _STANDARD.search(path)) and user_file(path)


def is_probe_path(path: str) -> bool:
    """Whether a file is one of the hooks that stand between the user and torch."""
    return _PROBE in path


def is_ours(frames: Iterable[Frame]) -> bool:
    """Whether a thread with this stack (outermost frame first) is the probe's or the debugger's."""
    start = next((f.path for f in frames if not f.path.endswith("/threading.py")), "")
    return is_probe_path(start) or "pydevd" in start


def user_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """The user's frames among these, in their order."""
    return tuple(frame for frame in frames if is_user_path(frame.path))


def innermost(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code in a stack (outermost frame first), if it has one."""
    mine = user_frames(frames)
    return mine[-1] if mine else None


@lru_cache(maxsize=8192)
def library(path: str) -> str:
    """The library that a file which is not the user's belongs to: ``torch``, ``Python``."""
    match = _INSTALLED.search(path)
    if match is not None:
        return match[1].removesuffix(".py")
    return "code without a file" if path.startswith("<") and "frozen" not in path else "Python"


FOLDED = "(folded)"
"""The function of a frame that stands for several of libraries, whose names are its path."""


def fold(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """A stack as the user's frames, and one in place of each run of library frames between them.

    What started the script is left out, and so is what the innermost of the user's lines called
    (:func:`tail`). A stack that has no frame of the user's stays as it is.
    """
    mine = [number for number, frame in enumerate(frames) if is_user_path(frame.path)]
    if not mine:
        return tuple(frames)
    found: list[Frame] = [CUT] if frames[0] == CUT else []
    before = mine[0]
    for number in mine:
        if number > before + 1:
            names = libraries(frames[before + 1 : number])
            if names:
                found.append(Frame(names, 0, FOLDED))
        found.append(frames[number])
        before = number
    return tuple(found)


def tail(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The library frames below the innermost of the user's lines, outermost first.

    Without those of our hooks.
    """
    end = len(frames)
    while end > 0 and not is_user_path(frames[end - 1].path):
        end -= 1
    return tuple(frame for frame in frames[end:] if not is_probe_path(frame.path)) if end else ()


def libraries(frames: Iterable[Frame]) -> str:
    """The libraries that frames belong to: ``torch``, or ``torch and Python``."""
    names = list(
        dict.fromkeys(library(frame.path) for frame in frames if not is_probe_path(frame.path))
    )
    return f"{names[0]} and others" if len(names) > 2 else " and ".join(names)


# -- the source text of frames, where the file is still what the job runs


Code = Mapping[Frame, str]
"""A line of source for each frame of which it is known."""


def code_of(frames: Iterable[Frame], before: int) -> dict[Frame, str]:
    """The lines of the user's frames.

    Args:
        frames: Any frames.
        before: Unix nanoseconds. A file that was changed since is left out: its lines are not
            those that run.
    """
    found: dict[Frame, str] = {}
    files: dict[str, list[str]] = {}
    for frame in set(frames):
        if frame.line < 1 or not is_user_path(frame.path):
            continue
        if frame.path not in files:
            files[frame.path] = _lines(Path(frame.path), before)
        lines = files[frame.path]
        if frame.line <= len(lines):
            found[frame] = lines[frame.line - 1].strip()
    return found


def _lines(path: Path, before: int) -> list[str]:
    try:
        if opening.facts(path).st_mtime_ns > before:
            return []
        source = opening.contents(path, opening.MOST_SOURCE, links=True)
        return source.decode("utf-8", "replace").splitlines()
    except OSError:
        return []


# -- the stacks of all ranks as one tree: equal frames once, each with the ranks that are in it


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
