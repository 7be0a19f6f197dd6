"""The few system calls Python has no name for. Linux only; elsewhere they do nothing."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def become_subreaper() -> None:
    """From now on, orphans below this process become its children rather than init's."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """How this process is called in lists, and by `killall`: at most 15 letters."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def children(pid: int) -> set[int]:
    """The child processes of ``pid`` now; empty if it has ended or the kernel does not tell."""
    found: set[int] = set()
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found.update(map(int, file.read().split()))
        except OSError:
            continue
    return found


def zombie_status(pid: int) -> int | None:
    """The exit status of a process that has ended and whose parent has not asked yet.

    Returns:
        0 to 255, a negative signal number, or None if there is no such zombie to be seen.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return None
        return os.waitstatus_to_exitcode(int(fields[-1]))
    except (OSError, ValueError, IndexError):
        return None


def pending(pid: int) -> set[int]:
    """The signals that were sent to a process, which blocks them; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            masks = [line.split()[1] for line in file if line.startswith(("SigPnd", "ShdPnd"))]
    except (OSError, IndexError):
        return set()
    bits = int(masks[0], 16) | int(masks[1], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1}


def session_of(pid: int) -> int | None:
    """The session id of a process, None if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return None
