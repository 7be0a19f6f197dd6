"""The working directory of a command, which may have been removed since.

A shell stays in a directory that was removed and re-created (by ``git clone``, say). torch does
not start there: "Intel oneMKL FATAL ERROR: Cannot load libtorch_cpu.so".
"""

from __future__ import annotations

import os

GONE = "the working directory was removed"
GO_THERE = 'cd "$PWD"   # into the one that has its name now'


def path() -> str:
    """The working directory; the name that it had if it was removed."""
    return os.environ.get("PWD", "") if is_gone() else os.getcwd()


def relative(path: str) -> str:
    """A path, relative to the working directory where it lies below it."""
    short = os.path.relpath(path) if path else ""
    return path if short.startswith("..") else short


def relative_place(place: str) -> str:
    """The same of ``path:line``."""
    path, colon, line = place.rpartition(":")
    return f"{relative(path)}{colon}{line}"


def is_gone() -> bool:
    """Whether it was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
