"""What Linux tells about a process: ``/proc/PID``, read without waiting for anybody."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_COMMAND = 200
ENDED = "ZX"
"""Letters of a process that has ended."""


@dataclass(frozen=True)
class ChildState:
    """A child process of a rank: a DataLoader's worker, say."""

    pid: int
    letter: str
    """As :attr:`ProcessState.letter`."""
    cpu_seconds: float
    command: str
    """The beginning of its command line."""


@dataclass(frozen=True)
class ProcessState:
    """What the kernel tells about the process of a rank."""

    letter: str = ""
    """The main thread's state as in ``/proc/PID/stat``: R runs, S sleeps, D waits for a device or
    disk, T is stopped, t is held by a tracer, Z has ended; empty if there is no such process."""
    cpu_seconds: float = 0.0
    """CPU time of the process so far, user and system."""
    wchan: str = ""
    """The function of the kernel that the main thread sleeps in; empty if that is not told."""
    children: tuple[ChildState, ...] = ()
    """Its child processes, ascending by pid."""


class Stat(NamedTuple):
    """What is used of ``/proc/PID/stat``."""

    letter: str
    start: int
    """Ticks since boot at which the process started; tells it from a later one with its pid."""
    cpu_seconds: float


def read_stat(pid: int) -> Stat | None:
    """A process's ``stat``, None if there is no such process."""
    return _stat(f"/proc/{pid}/stat")


class Wait(NamedTuple):
    """What a thread does, as the kernel sees it."""

    letter: str
    wchan: str
    """The function of the kernel that it sleeps in: ``futex`` for any of the several that wait for
    a lock; empty if that is not told."""


def read_wait(pid: int, thread: int) -> Wait | None:
    """What one thread of a process does, None if there is no such thread."""
    stat = _stat(f"/proc/{pid}/task/{thread}/stat")
    if stat is None:
        return None
    wchan = _wchan(f"/proc/{pid}/task/{thread}/wchan")
    return Wait(stat.letter, "futex" if "futex" in wchan else wchan)


def _stat(path: str) -> Stat | None:
    try:
        with open(path, "rb") as file:
            # The command comes second, in brackets, and may itself have some.
            fields = file.read().rpartition(b")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        return Stat(fields[0].decode(), int(fields[19]), ticks / _TICKS)
    except (OSError, ValueError, IndexError):
        return None


def read_state(pid: int) -> ProcessState:
    """The state of a process; :class:`ProcessState`'s defaults if there is none."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState()
    return ProcessState(stat.letter, stat.cpu_seconds, _wchan(f"/proc/{pid}/wchan"), _children(pid))


def _wchan(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            name = file.read().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def _children(pid: int) -> tuple[ChildState, ...]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
    return tuple(
        ChildState(child, stat.letter, stat.cpu_seconds, _command(child))
        for child in sorted(found)
        if (stat := read_stat(child)) is not None
    )


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode("utf-8", "replace") for word in words if word)[:_MOST_COMMAND]


class Turn(NamedTuple):
    """What one thread has had of the cores so far."""

    letter: str
    ran: float
    """Seconds on a core."""
    waited: float
    """Seconds ready to run, without a core; the kernel adds them once the wait is over."""
    sleeps: int
    """How often it went to sleep by itself."""


Turns = Mapping[int, Turn]
"""The threads of a process, by their native ids."""


def read_turns(pid: int) -> dict[int, Turn]:
    """What each thread of a process has had of the cores; empty if there is no such process."""
    found: dict[int, Turn] = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            turn = read_turn(pid, int(thread))
            if turn is not None:
                found[int(thread)] = turn
    return found


def read_turn(pid: int, thread: int) -> Turn | None:
    """What one thread has had of the cores, None if there is no such thread."""
    letter, sleeps, ran, waited = "", 0, 0.0, 0.0
    try:
        with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"State:"):
                    letter = line.split()[1].decode()
                elif line.startswith(b"voluntary_ctxt_switches:"):
                    sleeps = int(line.split()[1])
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
            ran, waited = (int(word) / 1e9 for word in file.read().split()[:2])
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended; or this kernel does not count.
        return Turn(letter, 0.0, 0.0, sleeps) if letter else None
    except (OSError, ValueError, IndexError):
        return None
    return Turn(letter, ran, waited, sleeps)


def share(before: Turn, after: Turn, seconds: float) -> float:
    """For which part of the time that a thread had a core, or needed none, it used one.

    A thread that gets 3 % of a core and would take all of it counts as busy; one that waits long
    for a core, whenever it wakes up to see that there is nothing to do, does not.
    """
    if before.letter == after.letter == "R" and before.sleeps == after.sleeps:
        # It has not slept in between.
        return 1.0
    ran = max(0.0, after.ran - before.ran)
    waited = max(0.0, after.waited - before.waited)
    return min(1.0, ran / max(seconds - waited, ran)) if ran > 0 else 0.0


def lacked(before: Turn, after: Turn, seconds: float) -> float:
    """For how many seconds a thread was ready to run and had no core."""
    ran = max(0.0, after.ran - before.ran)
    if before.letter == after.letter == "R" and before.sleeps == after.sleeps:
        # The kernel has not counted the wait that is under way.
        return max(0.0, seconds - ran)
    return min(max(0.0, after.waited - before.waited), seconds)


def busy(before: Turns, after: Turns, seconds: float) -> float:
    """The shares of all threads of a process together."""
    new = Turn("", 0.0, 0.0, 0)
    return sum(share(before.get(thread, new), turn, seconds) for thread, turn in after.items())


def is_foreign(pid: int) -> bool:
    """Whether a process belongs to another user."""
    try:
        return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
    except OSError:
        return False


class Signals(NamedTuple):
    """The signals of a thread, as bit masks: signal N is bit N - 1."""

    pending: int
    blocked: int
    caught: int
    """By the whole process."""


def read_signals(pid: int, thread: int) -> Signals | None:
    """What a thread does with signals, None if there is no such thread or one may not know."""
    masks = {"SigPnd": 0, "ShdPnd": 0, "SigBlk": 0, "SigCgt": 0}
    try:
        with open(f"/proc/{pid}/task/{thread}/status", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in masks:
                    masks[name] = int(value, 16)
    except (OSError, ValueError):
        return None
    return Signals(masks["SigPnd"], masks["SigBlk"], masks["SigCgt"])


def is_open(pid: int, descriptor: int, path: str) -> bool:
    """Whether a process has the file at ``path`` open under that number."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{descriptor}"), os.stat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
