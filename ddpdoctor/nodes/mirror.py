"""Write the files of other nodes into the run directory of the head.

A node may send anything. So names are checked, sizes are bounded, and a node can only write its own
files. Their content is checked when it is read, by the decoder of the records.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.nodes.messages import Piece
from ddpdoctor.nodes.shipment import GPUS, NODE, PROCESS, RANK
from ddpdoctor.run import rundir
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import CODE, of_node
from ddpdoctor.run.reader import MAX_RANKS
from ddpdoctor.run.ring import SIZE as RING_SIZE
from ddpdoctor.run.rundir import STDERR
from ddpdoctor.run.status import PAGE_SIZE

MAX_PROCESSES = 128  # Maximum number of journals of a node's failed processes and loader workers
MAX_NODE_FILES = 16  # Maximum number of other files of a node

_SIZES = {"status": PAGE_SIZE, "collectives": RING_SIZE, "fault": opening.MOST_TEXT}


class RefusedError(Exception):
    """A node sent an invalid message."""


class Mirror:
    """The files of all other nodes, in the head's run directory."""

    def __init__(self, directory: Path, journal_bytes: int) -> None:
        self._directory = directory
        self._journal_bytes = journal_bytes
        self._owners: dict[str, int] = {}
        self._journals: dict[str, Journal] = {}

    def take(self, node: int, pieces: Sequence[Piece], contents: bytes) -> None:
        """Write the parts of files that a node sent one after the other.

        Raises:
            RefusedError: If a name, a size or an owner is wrong. All other pieces are written.
            OSError: If a file cannot be written.
        """
        at = 0
        refused: RefusedError | None = None
        for piece in pieces:
            data = contents[at : at + piece.size]
            if piece.size < 0 or len(data) < piece.size:
                raise RefusedError("a piece is longer than the message")
            at += piece.size
            try:
                self._write(node, piece, data)
            except RefusedError as error:
                refused = refused or error
        if refused is not None:
            raise refused

    def _write(self, node: int, piece: Piece, data: bytes) -> None:
        if GPUS.fullmatch(piece.name) and self._is_of_this_host(piece.name):
            return
        name, limit = self._checked(node, piece.name)
        path = self._directory / name
        if self._owners.setdefault(name, node) != node:
            raise RefusedError(f"{name} belongs to another node")
        if piece.append:
            journal = self._journals.get(name)
            if journal is None:
                journal = self._journals[name] = Journal(str(path), self._journal_bytes)
            journal.write(data.splitlines(keepends=True))
        elif len(data) > limit:
            raise RefusedError(f"{name} is too large")
        elif limit in (PAGE_SIZE, RING_SIZE):
            self._overwrite(path, data, limit)
        else:
            rundir.put(path, data)

    def _checked(self, node: int, name: str) -> tuple[str, int]:
        """Return the name of a file here, and its maximum size.

        Raises:
            RefusedError: If no node has such a file, or the node has too many or does not own it.
        """
        match = RANK.fullmatch(name)
        if match is not None:
            found, limit, most = name, _SIZES.get(match[2], 0), 4 * MAX_RANKS
        elif process := PROCESS.fullmatch(name):
            found, limit, most = f"process-n{node}-{process[1]}", 0, MAX_PROCESSES
        elif name == NODE:
            found, limit, most = f"node-{node}.jsonl", 0, 1
        elif name in (CODE, STDERR):
            found, limit, most = of_node(name, node), opening.MOST_TEXT, 1
        elif GPUS.fullmatch(name):
            found, limit, most = name, opening.MOST_TEXT, MAX_NODE_FILES
        else:
            raise RefusedError("a file that no node has")
        if found not in self._owners:
            kind = found.partition("-")[0]
            owned = sum(
                owner == node and known.startswith(kind) for known, owner in self._owners.items()
            )
            if owned >= most:
                raise RefusedError("too many files")
            if (self._directory / found).exists():
                # It belongs to the head's own rank, or to a node before this process restarted.
                raise RefusedError(f"{found} exists")
        return found, limit

    def _is_of_this_host(self, name: str) -> bool:
        """Return whether the supervisor here writes the file, because both are on one machine."""
        return name not in self._owners and (self._directory / name).exists()

    def _overwrite(self, path: Path, data: bytes, size: int) -> None:
        """Replace the content of a mapped file in place, because readers may have it open."""
        if len(data) != size:
            raise RefusedError(f"{path.name} is cut short")
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close all journals."""
        for journal in self._journals.values():
            with contextlib.suppress(OSError):
                journal.close()
