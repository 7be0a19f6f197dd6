"""Where the supervisor and its ranks meet: a socket in the run directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NAME = "control"
"""The socket's file name in the run directory."""


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """``path`` as the address of a socket, which has room for 107 bytes only (103 on macOS)."""
    if len(os.fsencode(path)) < 100:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)
