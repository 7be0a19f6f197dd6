"""The working directory of a command, which may have been removed since the shell entered it.

A shell stays in a directory that was removed and re-created, by ``git clone`` for example. torch
does not start there: "Intel oneMKL FATAL ERROR: Cannot load libtorch_cpu.so".
"""

from __future__ import annotations

import os

GONE = "the working directory was removed"
GO_THERE = 'cd "$PWD"   # into the one that has its name now'


def path() -> str:
    """Return the working directory, or its former name if it was removed."""
    return os.environ.get("PWD", "") if is_gone() else os.getcwd()


def relative(path: str) -> str:
    """Shorten a path below the working directory to a relative one."""
    short = os.path.relpath(path) if path else ""
    return path if short.startswith("..") else short


def relative_place(place: str) -> str:
    """Shorten the path of ``path:line`` as :func:`relative` does."""
    path, colon, line = place.rpartition(":")
    return f"{relative(path)}{colon}{line}"


def is_gone() -> bool:
    """Return whether the working directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
