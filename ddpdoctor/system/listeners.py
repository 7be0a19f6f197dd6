"""Which process listens on which TCP port, read from a process file system."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LISTEN = "0A"
"""The state in /proc/net/tcp."""


def listening(proc: Path) -> dict[int, int]:
    """The ports on which something listens, IPv4 and IPv6, by the inode of the socket."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in (proc / "self" / "net" / table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTEN:
                    found[int(fields[9])] = int(fields[1].rpartition(":")[2], 16)
    return found


def sockets(process: Path) -> set[int]:
    """The inodes of the sockets that a process holds; empty if this user may not see them."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(descriptor.path)
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found
