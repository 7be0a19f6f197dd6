"""What Linux tells about a process: ``/proc/PID``, read without waiting for anybody."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from ddpdoctor.stacks.model import ChildState, ProcessState

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_COMMAND = 200
ENDED = "ZX"
"""Letters of a process that has ended."""


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
        with open(path) as file:
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
        with open(f"/proc/{pid}/task/{thread}/status") as file:
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
