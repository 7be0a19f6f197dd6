"""Which frames are the user's, not torch's, a library's or the probe's; and a stack of them alone.

A folded stack has no libraries between and below the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from ddpdoctor.core.user_code import user_file
from ddpdoctor.stacks.model import CUT, Frame

# By name, too, since the ranks may run another Python than this one.
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages)/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/")
_PROBE = "/ddpdoctor/probe/"


@lru_cache(maxsize=8192)
def is_user_path(path: str) -> bool:
    """Whether a file's code is the user's."""
    if path.startswith(("<", "?", "...")) or is_probe_path(path):
        return False
    return not (_INSTALLED.search(path) or _STANDARD.search(path)) and user_file(path)


def is_probe_path(path: str) -> bool:
    """Whether a file is one of the hooks that stand between the user and torch."""
    return _PROBE in path


def is_ours(frames: Iterable[Frame]) -> bool:
    """Whether a thread with this stack (outermost frame first) is the probe's or the debugger's."""
    start = next((f.path for f in frames if not f.path.endswith("/threading.py")), "")
    return is_probe_path(start) or "pydevd" in start


def user_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """The user's frames among these, in their order."""
    return tuple(frame for frame in frames if is_user_path(frame.path))


def innermost(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's code in a stack (outermost frame first), if it has one."""
    mine = user_frames(frames)
    return mine[-1] if mine else None


@lru_cache(maxsize=8192)
def library(path: str) -> str:
    """The library that a file which is not the user's belongs to: ``torch``, ``Python``."""
    match = _INSTALLED.search(path)
    if match is not None:
        return match[1].removesuffix(".py")
    return "code without a file" if path.startswith("<") and "frozen" not in path else "Python"


FOLDED = "(folded)"
"""The function of a frame that stands for several of libraries, whose names are its path."""


def fold(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """A stack as the user's frames, and one in place of each run of library frames between them.

    What started the script is left out, and so is what the innermost of the user's lines called
    (:func:`tail`). A stack that has no frame of the user's stays as it is.
    """
    mine = [number for number, frame in enumerate(frames) if is_user_path(frame.path)]
    if not mine:
        return tuple(frames)
    found: list[Frame] = [CUT] if frames[0] == CUT else []
    before = mine[0]
    for number in mine:
        if number > before + 1:
            names = libraries(frames[before + 1 : number])
            if names:
                found.append(Frame(names, 0, FOLDED))
        found.append(frames[number])
        before = number
    return tuple(found)


def tail(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The library frames below the innermost of the user's lines, outermost first.

    Without those of our hooks.
    """
    end = len(frames)
    while end > 0 and not is_user_path(frames[end - 1].path):
        end -= 1
    return tuple(frame for frame in frames[end:] if not is_probe_path(frame.path)) if end else ()


def libraries(frames: Iterable[Frame]) -> str:
    """The libraries that frames belong to: ``torch``, or ``torch and Python``."""
    names = list(
        dict.fromkeys(library(frame.path) for frame in frames if not is_probe_path(frame.path))
    )
    return f"{names[0]} and others" if len(names) > 2 else " and ".join(names)
