"""Locations in the user's code, and which files belong to it rather than to a library."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_COMPILED = (".pyx", ".pxi", ".pxd")
"""Sources of Cython modules. Tracebacks name them by paths of the machine that compiled them."""

_GENERATED = re.compile(r"[/\\]torchinductor_[^/\\]*[/\\]|[/\\](\w\w)[/\\]c\1[a-z2-7]{40,}\.py$")
"""Files that Inductor writes: in its usual directory, or known by their names elsewhere."""


class Location(NamedTuple):
    """A line of the user's code. In JSON a list of both."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def user_file(filename: str) -> bool:
    """Return whether a code object's file is the user's, not a library's, ours or generated."""
    if filename.startswith(("<", _PACKAGE)) or _GENERATED.search(filename):
        return False
    if filename.endswith(_COMPILED) or any(part in filename for part in _INSTALLED):
        return False
    return not filename.startswith(_STDLIB)
