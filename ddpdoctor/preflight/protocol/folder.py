"""Whether the checkpoint folder is the same on all nodes: a file of one is seen by the others."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

PREFIX = ".ddpdoctor-check-"

SEEN_WITHIN = 4.0
"""Seconds. NFS clients may answer from their memory for some (``acdirmin`` is 30, but a lookup of a
name that was never asked for goes to the server)."""

SAMPLE = 200


def write(folder: Path, token: str) -> str:
    """Write the file that the others look for; what went wrong, or empty."""
    try:
        (folder / f"{PREFIX}{token}").write_text(token)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def seen(folder: Path, token: str) -> bool:
    """Whether the file is here, with the right words in it."""
    until = time.monotonic() + SEEN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            # Listing the folder makes an NFS client ask the server anew.
            os.listdir(folder)
            if (folder / f"{PREFIX}{token}").read_text() == token:
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)


def listing(folder: Path) -> str:
    """A hash of names and sizes of a sample of the folder's files; empty if it cannot be read."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith(PREFIX))
    except OSError:
        return ""
    step = max(1, len(names) // SAMPLE)
    digest = hashlib.sha256(str(len(names)).encode())
    for name in names[::step]:
        digest.update(name.encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(str((folder / name).stat().st_size).encode())
    return digest.hexdigest()[:16]


def remove(folder: Path, token: str) -> None:
    """Take the file away again."""
    with contextlib.suppress(OSError):
        (folder / f"{PREFIX}{token}").unlink()
