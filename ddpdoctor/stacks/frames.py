"""Find the user's frames in the stacks of ranks, and merge equal stacks."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import user_file
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject, document
from ddpdoctor.run.records.supervisor import Frame, RankStacks
from ddpdoctor.run.records.typed_json import decoder

# -- separate the user's frames from others, and merge the stacks of ranks into a tree


# By name, because the ranks may run a different Python.
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages)/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/")


@lru_cache(maxsize=8192)
def is_user_path(path: str) -> bool:
    """Return whether a file's code is the user's."""
    if path.startswith(("<", "?", "...")) or is_probe_path(path):
        return False
    return not (_INSTALLED.search(path) or _STANDARD.search(path)) and user_file(path)


def is_probe_path(path: str) -> bool:
    """Return whether a file belongs to ddpdoctor's hooks between the user and torch."""
    return "/ddpdoctor/probe/" in path


def is_ours(frames: Iterable[Frame]) -> bool:
    """Return whether a stack (outermost frame first) belongs to a thread of probe or debugger."""
    start = next((f.path for f in frames if not f.path.endswith("/threading.py")), "")
    return is_probe_path(start) or "pydevd" in start


def user_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the user's frames, in order."""
    return tuple(frame for frame in frames if is_user_path(frame.path))


def innermost(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code in a stack (outermost frame first)."""
    mine = user_frames(frames)
    return mine[-1] if mine else None


@lru_cache(maxsize=8192)
def library(path: str) -> str:
    """Return the library of a file outside the user's code: ``torch``, ``Python``."""
    match = _INSTALLED.search(path)
    if match is not None:
        return match[1].removesuffix(".py")
    return "code without a file" if path.startswith("<") and "frozen" not in path else "Python"


FOLDED = "(folded)"
"""Function name of a frame that stands for several library frames. Its path names them."""


def fold(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Replace each sequence of library frames between the user's frames by a single frame.

    Leave out the frames that started the script, and those below the user's innermost frame
    (:func:`tail`). Return a stack without user frames unchanged.
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
    """Return the library frames below the user's innermost frame, without those of our hooks."""
    end = len(frames)
    while end > 0 and not is_user_path(frames[end - 1].path):
        end -= 1
    return tuple(frame for frame in frames[end:] if not is_probe_path(frame.path)) if end else ()


def libraries(frames: Iterable[Frame]) -> str:
    """Name the libraries of frames: ``torch``, or ``torch and Python``."""
    names = list(
        dict.fromkeys(library(frame.path) for frame in frames if not is_probe_path(frame.path))
    )
    return f"{names[0]} and others" if len(names) > 2 else " and ".join(names)


# -- Source lines of frames


Code = Mapping[Frame, str]  # The source line of each frame, if known


def code_of(frames: Iterable[Frame], before: int) -> dict[Frame, str]:
    """Return the source lines of the user's frames.

    Skip files changed after ``before`` (Unix nanoseconds), because the running code differs.
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


def code_of_stacks(stacks: Iterable[RankStacks], before: int) -> dict[Frame, str]:
    """Return the source lines of all frames of some ranks. See :func:`code_of`."""
    threads = (thread for each in stacks for thread in each.threads)
    return code_of((frame for thread in threads for frame in thread.frames), before)


def _lines(path: Path, before: int) -> list[str]:
    try:
        if opening.facts(path).st_mtime_ns > before:
            return []
        source = opening.contents(path, opening.MOST_SOURCE, links=True)
        return source.decode("utf-8", "replace").splitlines()
    except OSError:
        return []


# -- Merged stacks


Keep = Callable[[Sequence[Frame]], Sequence[Frame]]


@dataclass(frozen=True)
class Node:
    """A chain of frames that the same ranks share, and the frames at which they separate."""

    ranks: tuple[int, ...]  # Ascending
    frames: tuple[Frame, ...]  # Outermost first. All of these ranks are in all of them.
    children: tuple[Node, ...]
    """Deeper frames: odd nodes first, then those with the fewest ranks. Ranks in none of them are
    at the last frame.
    """
    odd: bool  # Whether most ranks are elsewhere in the user's code


@dataclass(frozen=True)
class Merged:
    """The main threads of several ranks, merged."""

    roots: tuple[Node, ...]
    odd: frozenset[int]
    """The ranks that are elsewhere in the user's code than the majority of all ranks."""
    places: int  # Number of different places of the user's code
    missing: tuple[RankStacks, ...]  # The ranks without a stack


def merge(stacks: Iterable[RankStacks], keep: Keep = tuple) -> Merged:
    """Merge the main threads of ranks. ``keep`` selects the frames of a stack, by default all."""
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
    """Return the ranks that are elsewhere than the majority, and the number of different places.

    Two ranks are in the same place if their user frames are equal. The library frames below may
    differ. No rank is odd if no place has more than half of the ranks.
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
    """Group ranks by their frame at ``depth``. Their frames above are equal."""
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


# -- stacks of ranks with the states of their processes


ENDING = "its interpreter is shutting down"
"""The `trouble` of a rank that cannot respond because its interpreter is shutting down."""

CUT = Frame("...", 0, "...")
"""Stands for the outer frames of a stack if only the innermost 100 are known."""


def stacks_from_record(record: JsonObject) -> RankStacks:
    """Return the stacks of a JSON object. Skip missing or damaged parts."""
    return decoder(RankStacks)({"rank": -1, **record})


# -- The last captured stacks of a run, kept in its directory


STACKS_FILE = "stacks.json"


@dataclass(frozen=True)
class Saved:
    """Stacks, and the time at which they were captured."""

    time: int  # Unix nanoseconds
    stacks: tuple[RankStacks, ...]


def stacks_record(stacks: Iterable[RankStacks], time: int) -> JsonObject:
    """Return stacks as JSON, which ``ddpdoctor stacks --json`` also prints."""
    return {"format": FORMAT, "time": time, "ranks": [document(each) for each in stacks]}


def save_stacks(directory: Path, stacks: Iterable[RankStacks], time: int) -> None:
    """Save these stacks, replacing earlier ones.

    Raises:
        OSError: If the run directory cannot be written.
    """
    rundir.put(directory / STACKS_FILE, json.dumps(stacks_record(stacks, time)).encode())


def load_stacks(directory: Path) -> Saved | None:
    """Return the saved stacks, or None if they cannot be read."""
    try:
        record = opening.json_object(directory / STACKS_FILE, opening.MOST_RECORD)
        if integer(record, "format") > FORMAT:
            return None
        return Saved(
            integer(record, "time"), tuple(stacks_from_record(each) for each in record["ranks"])
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
