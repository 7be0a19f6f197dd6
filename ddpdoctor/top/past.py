"""The frames that were seen, to go back to, and the memory of the ranks over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ddpdoctor.top.snapshot import Snapshot

_ROWS = 4000
"""Rows of ranks that are kept over all frames: what bounds the monitor's memory."""
_FRAMES = 300
_POINTS = 120
"""Points of the memory's series."""


class Past:
    """Keeps the last frames."""

    def __init__(self) -> None:
        self.frames: deque[Snapshot] = deque()
        self.memory: dict[int, deque[int]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """One more frame; the oldest ones go."""
        if self.frames and self.frames[-1].path != snapshot.path:
            self.frames.clear()
            self.memory.clear()
        self.frames.append(snapshot)
        most = max(10, min(_FRAMES, _ROWS // max(len(snapshot.ranks), 1)))
        while len(self.frames) > most:
            self.frames.popleft()
        for row in snapshot.ranks:
            if row.memory is not None:
                self.memory.setdefault(row.rank, deque(maxlen=_POINTS)).append(row.memory)

    def memory_of(self, rank: int | None) -> Mapping[int, Sequence[int]]:
        """The memory of one rank."""
        return {} if rank is None else {rank: tuple(self.memory.get(rank, ()))}
