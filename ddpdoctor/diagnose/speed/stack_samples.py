"""Samples of the training threads' stacks: the line where one rank's surplus of time is spent.

A line at which all ranks are seen equally often is no surplus. From the outermost function inwards
the line is followed at which the slow rank is seen more often than the others.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.diagnose.source_files import Source, source_of
from ddpdoctor.run.records.training import ProfileRecord, SampledStack
from ddpdoctor.run.snapshot import Rank
from ddpdoctor.stacks.frames import code_of
from ddpdoctor.stacks.rank_stacks import Frame

# -- profiles


FEWEST = 12
"""Samples that say anything."""

SEEN = 4
"""Samples by which a line must exceed what the others show."""

MOSTLY = 0.6
"""Part of a surplus that must be within one function to look for the line in there."""

_BY_RANK = re.compile(r"rank|main_process|is_main|master|chief", re.IGNORECASE)


@dataclass(frozen=True)
class Stack:
    """A stack that was seen, and how often."""

    count: int
    frames: tuple[Frame, ...]
    """Of the user's code, outermost first."""
    waits: tuple[str, str]
    """File name and function of the innermost frame of all."""
    letter: str
    """The state of the thread: R runs or wants to, S sleeps, D waits for a disk or device."""


@dataclass(frozen=True)
class Profile:
    """The samples of one rank, with what the kernel counted meanwhile."""

    rank: int
    record: ProfileRecord

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks that were seen."""
        return tuple(map(_stack, self.record.stacks))

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(stack.count for stack in self.stacks)

    def a_step(self, name: str) -> float:
        """What was counted, in one step."""
        return float(getattr(self.record, name)) / max(self.record.steps, 1)

    def share(self, name: str) -> float:
        """Nanoseconds that were counted, as a part of the time."""
        return float(getattr(self.record, name)) / max(self.record.wall, 1)

    def calls(self, name: str) -> Frame | None:
        """The one line in the files that were seen at which a function of that name is called."""
        paths = {frame.path for stack in self.stacks for frame in stack.frames}
        found = [
            Frame(path, line, "")
            for path in sorted(paths)
            if (source := _source(path, self.record.time)) is not None
            for line in source.calls(name)
        ]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class Spot:
    """Where a rank's surplus is."""

    chain: tuple[Frame, ...]
    """The calls that lead there, outermost first, the line itself last."""
    at: int
    """Samples of the slow rank at the line."""
    count: int
    """Those in the function, where it is one that only this rank is seen in."""
    of: int
    others: int
    """Samples of the other ranks there."""
    of_others: int
    stacks: tuple[Stack, ...]
    """Those of the slow rank."""
    taken: int
    """When they were, Unix nanoseconds."""

    @property
    def frame(self) -> Frame:
        """The line itself."""
        return self.chain[-1]

    @property
    def function(self) -> str:
        """The name of the function that the line is in, comprehensions left out."""
        names = [each.function for each in self.chain if not each.function.startswith("<")]
        return names[-1] if names and self.frame.function != "<module>" else ""

    @property
    def letters(self) -> Counter[str]:
        """How often the thread was seen in which state."""
        found: Counter[str] = Counter()
        for stack in self.stacks:
            found[stack.letter] += stack.count
        return found

    def blocked(self, letters: str) -> float:
        """In what part of the samples the thread was in one of these states."""
        return sum(self.letters[each] for each in letters) / max(self.count, 1)

    @property
    def by_rank(self) -> Frame | None:
        """The outermost call that stands in a branch which the rank decides on."""
        return next((each for each in self.chain if _decided_by_rank(each, self.taken)), None)


def profiles(ranks: Sequence[Rank], asked: int) -> dict[int, Profile]:
    """The profiles that were asked for at one time, by rank."""
    found: dict[int, Profile] = {}
    for rank in ranks:
        for record in rank.records.of(ProfileRecord):
            if record.asked == asked:
                found[rank.rank] = Profile(rank.rank, record)
    return found


def spot(mine: Profile, others: Sequence[Profile], least: float) -> Spot | None:
    """The line with a rank's surplus.

    Args:
        mine: The slow rank's.
        others: Those of ranks that are not slow.
        least: The part of its time that must be there.
    """
    theirs = [stack for each in others for stack in each.stacks]
    total, rest = mine.samples, sum(each.samples for each in others)
    if total < FEWEST or rest < FEWEST:
        return None

    def excess(here: Sequence[Stack], there: Sequence[Stack]) -> float:
        return _count(here) - _count(there) * total / rest

    here, there = list(mine.stacks), theirs
    chain: list[Frame] = []
    found: Spot | None = None
    needed = max(SEEN, least * total)
    while True:
        depth = len(chain)
        here, there = _deeper_than(depth, here), _deeper_than(depth, there)
        functions = _surpluses(here, there, depth, _function_at, excess)
        function = max(functions, key=lambda each: functions[each], default=None)
        if function is None or functions[function] < (MOSTLY if found else 1) * needed:
            return found
        here, there = (_only(each, _function_at(depth), function) for each in (here, there))
        lines = _surpluses(here, there, depth, _line_at, excess)
        line = max(lines, key=lambda each: lines[each])
        if lines[line] < SEEN / 2:
            return found
        at, at_others = (_only(each, _line_at(depth), line) for each in (here, there))
        chain.append(line)
        # A line that all come through is no surplus, but one of those that it leads to may be.
        if excess(at, at_others) >= MOSTLY * lines[line]:
            whole = bool(depth) and not there
            found = Spot(
                tuple(chain), _count(at), _count(here if whole else at), total,
                _count(at_others), rest, tuple(here if whole else at),
                mine.record.time,
            )  # fmt: skip
            if lines[line] < MOSTLY * needed:
                return found
            needed = lines[line]
        here, there = at, at_others


_Excess = Callable[[Sequence[Stack], Sequence[Stack]], float]


def _function_at(depth: int) -> Callable[[Stack], Any]:
    return lambda stack: (stack.frames[depth].path, stack.frames[depth].function)


def _line_at(depth: int) -> Callable[[Stack], Any]:
    return lambda stack: stack.frames[depth]


def _only(stacks: Sequence[Stack], key: Callable[[Stack], Any], value: Any) -> list[Stack]:
    return [stack for stack in stacks if key(stack) == value]


def _deeper_than(depth: int, stacks: Sequence[Stack]) -> list[Stack]:
    return [stack for stack in stacks if len(stack.frames) > depth]


def _surpluses(
    here: Sequence[Stack],
    there: Sequence[Stack],
    depth: int,
    key_at: Callable[[int], Callable[[Stack], Any]],
    excess: _Excess,
) -> dict[Any, float]:
    """The surplus by what is at a depth, that of the lines which it leads to included."""
    here, there = _deeper_than(depth, here), _deeper_than(depth, there)
    key = key_at(depth)
    found: dict[Any, float] = {}
    for value in dict.fromkeys(key(stack) for stack in here):
        mine, theirs = _only(here, key, value), _only(there, key, value)
        # The lines of a function first, then the functions that a line leads to.
        deeper = (
            _surpluses(mine, theirs, depth, _line_at, excess)
            if key_at is _function_at
            else _surpluses(mine, theirs, depth + 1, _function_at, excess)
        )
        within = sum(each for each in deeper.values() if each >= SEEN / 2)
        found[value] = max(excess(mine, theirs), within)
    return found


def _count(stacks: Sequence[Stack]) -> int:
    return sum(stack.count for stack in stacks)


def _source(path: str, taken: int) -> Source | None:
    """A file as it was when the samples were taken: one that was changed since has other lines."""
    try:
        return source_of(path) if opening.facts(path).st_mtime_ns <= taken else None
    except OSError:
        return None


def _decided_by_rank(frame: Frame, taken: int) -> bool:
    source = _source(frame.path, taken)
    branches = source.branches(frame.line) if source is not None else ()
    return any(
        _BY_RANK.search(name)
        for branch in branches
        for node in ast.walk(branch.test)
        if (name := getattr(node, "id", "") or getattr(node, "attr", ""))
    )


def _stack(seen: SampledStack) -> Stack:
    frames = tuple(Frame(*each) for each in reversed(seen.frames))
    return Stack(seen.times, frames, seen.waits, seen.letter)


# -- what a line that waits waits for: read off its code and the standard library's frames


_FILES = {
    "subprocess.py": "a process that it started",
    "socket.py": "the network",
    "ssl.py": "the network",
    "client.py": "the network",
    "queue.py": "a queue",
    "queues.py": "a queue",
    "connection.py": "a queue",
    "threading.py": "a lock or another thread",
}
"""What a function of these files of the standard library waits for."""

_WORDS = (
    (re.compile(r"\bsleep\("), "sleep"),
    (re.compile(r"lock\b|\.acquire\(|semaphore", re.IGNORECASE), "a lock"),
    (re.compile(r"\.join\("), "a lock or another thread"),
    (re.compile(r"subprocess|\.communicate\(|\bsystem\(|check_(?:call|output)"), "process"),
    (re.compile(r"\bfsync\(|\.flush\("), "the disk"),
    (re.compile(r"queue", re.IGNORECASE), "a queue"),
    (re.compile(r"\.?read(?:line|lines|into)?\(|\bopen\(|\bload\("), "a file"),
)
"""The same, by what stands in the line."""

_SOCKET = re.compile(r"\.(?:recv(?:from|msg)?(?:_into)?|sendall|accept|connect)\(|urlopen\(")
"""Calls that wait in native code, so that no file of the standard library is seen."""

ADVICE = {
    "sleep": "Take the pause out of the training loop: retry in a thread, or before training.",
    "a lock": "Find who holds the lock: another process or thread. Take it less often, or not in "
    "every step.",
    "a lock or another thread": "Let the thread that is waited for work ahead, or do not wait for "
    "it in every step.",
    "a queue": "Let what fills the queue work ahead: more workers, a longer queue.",
    "a process that it started": "Start the process once, or let it run while training goes on.",
    "the network": "Fetch ahead of time, in a thread, or once before training.",
    "a file": "Read ahead: in loader workers or a thread, in larger pieces, from a faster disk.",
    "the disk": "Read and write less in the loop: every hundredth step, in a thread, or on a "
    "faster disk.",
}
"""What to do about such a wait."""


def awaited(place: Spot) -> str:
    """What a line waits for, as it and the function that it is in show; empty if they do not."""
    text = code_of([place.frame], place.taken).get(place.frame, "")
    for pattern, what in _WORDS:
        if pattern.search(text):
            return "a process that it started" if what == "process" else what
    files = [stack.waits[0] for stack in place.stacks]
    known = next((_FILES[each] for each in files if each in _FILES), "")
    return known or ("the network" if _SOCKET.search(text) else "")
