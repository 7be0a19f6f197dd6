"""The few system calls Python has no name for. Linux only; elsewhere they do nothing."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def become_subreaper() -> None:
    """From now on, orphans below this process become its children rather than init's."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signal_number: int) -> Callable[[], None] | None:
    """A ``preexec_fn`` that makes the kernel signal the child when the calling thread ends.

    Call it, and start the child, on the main thread: the kernel means the thread, not the process.
    """
    libc = _libc
    if libc is None:
        return None
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


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
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return None
        return os.waitstatus_to_exitcode(int(fields[-1]))
    except (OSError, ValueError, IndexError):
        return None


def session_of(pid: int) -> int | None:
    """The session id of a process, None if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return None
