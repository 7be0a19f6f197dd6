"""Find the line on which a rank spends its surplus of time, from samples of the ranks' stacks.

A line at which all ranks are sampled equally often is not a surplus. From the outermost function
inwards, the search follows the line at which the slow rank is sampled more often than the others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.syntax import last_name
from ddpdoctor.diagnose.source_files import Source, source_of
from ddpdoctor.run.records.supervisor import Frame
from ddpdoctor.run.records.training import ProfileRecord
from ddpdoctor.run.snapshot import Rank
from ddpdoctor.stacks.frames import code_of

MIN_SAMPLES = 12  # Minimum number of samples
MIN_EXCESS = 4  # Minimum number of samples at a line beyond those of the others
MOSTLY = 0.6  # Minimum fraction of a surplus in one function to search for the line there

_BY_RANK = re.compile(r"rank|main_process|is_main|master|chief", re.IGNORECASE)


@dataclass(frozen=True)
class Stack:
    """A sampled stack, and its count."""

    count: int
    frames: tuple[Frame, ...]  # Frames of the user's code, outermost first
    waits: tuple[str, str]  # File name and function of the innermost frame, the user's or not
    letter: str
    """The state of the thread: R runs or is ready to, S sleeps, D waits for a disk or device."""


@dataclass(frozen=True)
class Profile:
    """The samples of one rank, with the kernel's counters."""

    rank: int
    record: ProfileRecord

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """The sampled stacks."""
        return tuple(
            Stack(
                seen.times,
                tuple(Frame(*each) for each in reversed(seen.frames)),
                seen.waits,
                seen.letter,
            )
            for seen in self.record.stacks
        )

    @property
    def working(self) -> list[Stack]:
        """The stacks outside of collectives, which wait for other ranks."""
        return [stack for stack in self.stacks if stack.waits[0] != "distributed_c10d.py"]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return _count(self.stacks)

    def a_step(self, name: str) -> float:
        """Return a counter's mean over steps."""
        return float(getattr(self.record, name)) / max(self.record.steps, 1)

    def share(self, name: str) -> float:
        """Return counted nanoseconds as a fraction of the time."""
        return float(getattr(self.record, name)) / max(self.record.wall, 1)

    def calls(self, name: str) -> Frame | None:
        """Return the only line in the sampled files that calls a function of that name."""
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
    """The line with a rank's surplus."""

    chain: tuple[Frame, ...]  # The calls that lead there, outermost first, and the line itself
    at: int  # Number of samples of the slow rank at the line
    count: int
    """Number of samples of the slow rank in the function if only this rank was sampled there,
    otherwise at the line."""
    of: int
    others: int  # Number of samples of the other ranks there
    of_others: int
    stacks: tuple[Stack, ...]  # Stacks of the slow rank there
    taken: int  # Time of the samples in Unix nanoseconds

    @property
    def frame(self) -> Frame:
        """The line itself."""
        return self.chain[-1]

    @property
    def function(self) -> str:
        """The name of the function around the line, ignoring comprehensions."""
        names = [each.function for each in self.chain if not each.function.startswith("<")]
        return names[-1] if names and self.frame.function != "<module>" else ""

    def blocked(self, letters: str) -> float:
        """Return the fraction of samples in which the thread was in one of these states."""
        seen = sum(stack.count for stack in self.stacks if stack.letter in letters)
        return seen / max(self.count, 1)

    @property
    def by_rank(self) -> Frame | None:
        """The outermost call in a branch of a condition on the rank."""
        for frame in self.chain:
            source = _source(frame.path, self.taken)
            branches = source.branches(frame.line) if source is not None else ()
            names = (last_name(node) for branch in branches for node in ast.walk(branch.test))
            if any(map(_BY_RANK.search, names)):
                return frame
        return None


def profiles(ranks: Sequence[Rank], asked: int) -> dict[int, Profile]:
    """Return the profiles that one request asked for, by rank."""
    return {
        rank.rank: Profile(rank.rank, record)
        for rank in ranks
        for record in rank.records.of(ProfileRecord)
        if record.asked == asked
    }


def spot(mine: Profile, others: Sequence[Profile], least: float) -> Spot | None:
    """Find the line with a slow rank's surplus: at least ``least`` times the others' time there."""
    theirs = [stack for each in others for stack in each.working]
    total, rest = mine.samples, sum(each.samples for each in others)
    if total < MIN_SAMPLES or rest < MIN_SAMPLES:
        return None

    def excess(here: Sequence[Stack], there: Sequence[Stack]) -> float:
        return _count(here) - _count(there) * total / rest

    here, there = mine.working, theirs
    chain: list[Frame] = []
    found: Spot | None = None
    needed = max(MIN_EXCESS, least * total)
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
        if lines[line] < MIN_EXCESS / 2:
            return found
        at, at_others = (_only(each, _line_at(depth), line) for each in (here, there))
        chain.append(line)
        # A line that all ranks reach is not a surplus, but a line that it leads to may be one.
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
    """Return the surplus of each function or line at a depth, including its callees."""
    here, there = _deeper_than(depth, here), _deeper_than(depth, there)
    key = key_at(depth)
    found: dict[Any, float] = {}
    for value in dict.fromkeys(key(stack) for stack in here):
        mine, theirs = _only(here, key, value), _only(there, key, value)
        # Compare the lines of a function first, then the functions that each line calls.
        if key_at is _function_at:
            deeper = _surpluses(mine, theirs, depth, _line_at, excess)
        else:
            deeper = _surpluses(mine, theirs, depth + 1, _function_at, excess)
        within = sum(each for each in deeper.values() if each >= MIN_EXCESS / 2)
        found[value] = max(excess(mine, theirs), within)
    return found


def _count(stacks: Sequence[Stack]) -> int:
    return sum(stack.count for stack in stacks)


def _source(path: str, taken: int) -> Source | None:
    """Return a file unless it was changed after the samples were taken."""
    try:
        return source_of(path) if opening.facts(path).st_mtime_ns <= taken else None
    except OSError:
        return None


# -- the object of a wait

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
"""The waits of functions in these files of the standard library."""

_CODE = (
    (re.compile(r"\bsleep\("), "sleep"),
    (re.compile(r"lock\b|\.acquire\(|semaphore", re.IGNORECASE), "a lock"),
    (re.compile(r"\.join\("), "a lock or another thread"),
    (
        re.compile(r"subprocess|\.communicate\(|\bsystem\(|check_(?:call|output)"),
        "a process that it started",
    ),
    (re.compile(r"\bfsync\(|\.flush\("), "the disk"),
    (re.compile(r"queue", re.IGNORECASE), "a queue"),
    (re.compile(r"\.?read(?:line|lines|into)?\(|\bopen\(|\bload\("), "a file"),
)
"""The waits of lines with such code."""

_SOCKET = re.compile(r"\.(?:recv(?:from|msg)?(?:_into)?|sendall|accept|connect)\(|urlopen\(")
"""Calls that wait in native code, which show no file of the standard library."""

ADVICE = {
    "sleep": "Take the pause out of the training loop: retry in a thread, or before training.",
    "a lock": "Find the process or thread that holds the lock. Take it less often, or not in "
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
"""The fixes for such waits."""


def awaited(place: Spot) -> str:
    """Return the object of a line's wait, from its code and the innermost frames, or ``""``."""
    text = code_of([place.frame], place.taken).get(place.frame, "")
    for pattern, what in _CODE:
        if pattern.search(text):
            return what
    files = [stack.waits[0] for stack in place.stacks]
    known = next((_FILES[each] for each in files if each in _FILES), "")
    return known or ("the network" if _SOCKET.search(text) else "")
