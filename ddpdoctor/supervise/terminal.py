"""The terminal that a job is started from, and its job control."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from ddpdoctor.supervise import processes
from ddpdoctor.system import proc

_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "fish", "tcsh", "csh"})


def lives() -> bool:
    """Whether this process still has the terminal it was started from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def is_typed_into(argv: Sequence[str]) -> bool:
    """Whether a command is a shell for a person, whose job control needs the terminal as stderr."""
    if os.path.basename(argv[0]).lstrip("-") not in _SHELLS:
        return False
    for word in argv[1:]:
        if not word.startswith("-") or word == "--":
            return False
        if not word.startswith("--") and "i" in word:
            return True
        if not word.startswith("--") and "c" in word:
            return False
    return os.isatty(0)


def is_orphaned(group: int, without: Collection[int]) -> bool:
    """Whether no process of this session would continue a process group that was stopped.

    That is: no member's parent is outside of the group and in its session, as a shell is. The
    kernel does not let a terminal stop such a group.

    Args:
        group: A process group of this session.
        without: Parents that do not count.
    """
    every = {process.pid: process for process in processes.listed()}
    parents = {each.parent for each in every.values() if each.group == group} - set(without)
    session = os.getsid(0)
    return not any(
        pid in every and every[pid].group != group and proc.session_of(pid) == session
        for pid in parents
    )
