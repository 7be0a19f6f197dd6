"""Which frames are the user's: not torch's, not the library's, not the probe's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ddpdoctor.core.user_code import user_file
from ddpdoctor.stacks.model import Frame

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
