"""What a process and its threads do, as the kernel sees it, and what they have had of the cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ddpdoctor.system import proc
from ddpdoctor.system.proc import ENDED, read_stat

__all__ = ["ENDED", "read_stat"]

_MOST_COMMAND = 200


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
    """The process of a rank, as the kernel sees it."""

    letter: str = ""
    """The main thread's state as in ``/proc/PID/stat``: R runs, S sleeps, D waits for a device or
    disk, T is stopped, t is held by a tracer, Z has ended; empty if there is no such process."""
    cpu_seconds: float = 0.0
    """CPU time of the process so far, user and system."""
    wchan: str = ""
    """The function of the kernel that the main thread sleeps in; empty if that is unknown."""
    children: tuple[ChildState, ...] = ()
    """Its child processes, ascending by pid."""


class Wait(NamedTuple):
    """What a thread does, as the kernel sees it."""

    letter: str
    wchan: str
    """The function of the kernel that it sleeps in: ``futex`` for any of the several that wait for
    a lock; empty if that is unknown."""


def read_wait(pid: int, thread: int) -> Wait | None:
    """What one thread of a process does, None if there is no such thread."""
    stat = read_stat(pid, thread)
    if stat is None:
        return None
    wchan = _wchan(f"/proc/{pid}/task/{thread}/wchan")
    return Wait(stat.letter, "futex" if "futex" in wchan else wchan)


def read_state(pid: int) -> ProcessState:
    """The state of a process; :class:`ProcessState`'s defaults if there is none."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState()
    children = tuple(
        ChildState(
            child, each.letter, each.cpu_seconds, " ".join(proc.words(child))[:_MOST_COMMAND]
        )
        for child in sorted(proc.children(pid))
        if (each := read_stat(child)) is not None
    )
    return ProcessState(stat.letter, stat.cpu_seconds, _wchan(f"/proc/{pid}/wchan"), children)


def _wchan(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            name = file.read().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


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
    status = proc.read_status(pid, thread)
    try:
        letter, sleeps = status["State"][:1], int(status["voluntary_ctxt_switches"])
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
            ran, waited = (int(word) / 1e9 for word in file.read().split()[:2])
    except (FileNotFoundError, ProcessLookupError):
        # The thread has ended; or this kernel does not count.
        return Turn(letter, 0.0, 0.0, sleeps)
    except (OSError, ValueError, KeyError):
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
    status = proc.read_status(pid, thread)
    try:
        pending, blocked, caught = (int(status[f"Sig{each}"], 16) for each in ("Pnd", "Blk", "Cgt"))
    except (KeyError, ValueError):
        return None
    return Signals(pending, blocked, caught)


def is_open(pid: int, descriptor: int, path: str) -> bool:
    """Whether a process has the file at ``path`` open under that number."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{descriptor}"), os.stat(path)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
