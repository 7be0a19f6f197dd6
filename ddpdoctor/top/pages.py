"""The status pages of a run's newest attempt, read again and again; and the age of their stamps."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Hashable
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.status import PAGE_SIZE, Status, parse_status

MOST_OPEN = 256
"""Pages whose files stay open; the others are opened for each reading."""

MOST_RANKS = 4096
"""Ranks whose pages are read."""

_NAME = re.compile(r"rank-(\d{4,})\.r(\d+)\.status$")


class Pages:
    """The pages of a run directory.

    They are read, not mapped: a file that somebody cuts short under a map is a SIGBUS.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, int] = {}
        self._last: dict[int, Status] = {}
        self._raw: dict[int, bytes] = {}
        self.restart = 0
        """The newest attempt."""
        self.ranks: tuple[int, ...] = ()
        """Its ranks, ascending."""
        self.left_out = 0
        """How many more there are than are read."""
        self.unreadable: dict[int, str] = {}
        """Why a rank's page cannot be read, in words."""

    def look(self) -> bool:
        """List the directory again; False if it cannot be."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return False
        matches = [match for name in names if (match := _NAME.match(name))]
        restart = max((int(match[2]) for match in matches), default=0)
        if restart != self.restart:
            self.close()
            self.restart, self._last, self._raw = restart, {}, {}
        ranks = sorted(int(m[1]) for m in matches if int(m[2]) == restart)
        self.ranks, self.left_out = tuple(ranks[:MOST_RANKS]), len(ranks[MOST_RANKS:])
        for gone in self._open.keys() - set(self.ranks):
            os.close(self._open.pop(gone))
            self._last.pop(gone, None)
            self._raw.pop(gone, None)
        return True

    def path(self, rank: int, suffix: str) -> Path:
        """One of a rank's files."""
        return self._directory / f"{rank_stem(rank, self.restart)}.{suffix}"

    def read(self, but: Collection[int] = ()) -> dict[int, Status]:
        """What the pages say; of one that is unreadable now, or in ``but``, what it said last."""
        self.unreadable = {rank: why for rank, why in self.unreadable.items() if rank in but}
        for rank in self.ranks:
            if rank in but:
                continue
            try:
                self._read(rank)
            except (OSError, UnreadableError) as error:
                self.unreadable[rank] = (
                    str(error) if isinstance(error, UnreadableError) else error.strerror or ""
                )
        return {rank: self._last[rank] for rank in self.ranks if rank in self._last}

    def _read(self, rank: int) -> None:
        descriptor = self._open.get(rank)
        if descriptor is None:
            path = self.path(rank, "status")
            descriptor = opening.opened(path)
            if len(self._open) < MOST_OPEN:
                self._open[rank] = descriptor
        try:
            page = os.pread(descriptor, PAGE_SIZE, 0)
            # The writer takes no lock; two equal readings in a row cannot be a torn one.
            for _ in range(4):
                again = os.pread(descriptor, PAGE_SIZE, 0)
                if again == page:
                    break
                page = again
        finally:
            if rank not in self._open:
                os.close(descriptor)
        if page != self._raw.get(rank):
            self._last[rank] = parse_status(page, f"{rank_stem(rank, self.restart)}.status")
            self._raw[rank] = page

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])


class Ages:
    """How long ago stamps changed, by this process's clock where it can.

    The clocks of ranks jump, and differ by node.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int, float, float]] = {}

    def age(self, key: Hashable, stamp: int, now: int, ticks: float) -> float:
        """Seconds since ``stamp`` was set.

        Args:
            key: Whose stamp.
            stamp: Unix nanoseconds by the clock of who set it.
            now: Unix nanoseconds here.
            ticks: Seconds of a clock here that never jumps.
        """
        known = self._known.get(key)
        elapsed = max(0.0, (now - stamp) / 1e9)
        if known is not None and known[0] == stamp:
            since = known[1]
        elif known is not None:
            # It changed after the last look.
            since = max(known[2], ticks - elapsed)
        else:
            since = ticks - elapsed
        self._known[key] = (stamp, since, ticks)
        return ticks - since
