"""For how long quiet ranks had no core: the part of their silence that is not theirs.

Patience with a rank counts the time that it could have used, by the kernel's count for its main
thread and for those of its children, of which a DataLoader's worker is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.system import kernel
from ddpdoctor.system.process_state import Turn, lacked, read_turn

MOST = 10.0
"""Times as long as a patience is at most, however little a process gets."""

WORTH = 0.5
"""Seconds without a core from which on a rank's wait is written down."""


@dataclass
class _Followed:
    since: int
    """The beginning of its phase (Unix nanoseconds), which tells one silence from the next."""
    when: float
    turns: dict[int, Turn]
    lost: float = 0.0
    written: float = 0.0


class Cores:
    """Follows processes by their pids for as long as they are quiet."""

    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}

    def lost(self, pid: int, since: int, now: float) -> float:
        """Seconds without a core since it was first asked in this silence.

        Args:
            pid: The process.
            since: What its silence began with; it starts again when this changes.
            now: Monotonic seconds.
        """
        turns = _turns(pid)
        known = self._followed.get(pid)
        if known is None or known.since != since:
            self._followed[pid] = _Followed(since, now, turns)
            return 0.0
        seconds = now - known.when
        if seconds > 0:
            known.lost += max(
                (
                    lacked(known.turns[each], turn, seconds)
                    for each, turn in turns.items()
                    if each in known.turns
                ),
                default=0.0,
            )
            known.when, known.turns = now, turns
        return known.lost

    def news(self, pid: int) -> float | None:
        """What it has lost, if that is enough more than the last time to be written down."""
        known = self._followed.get(pid)
        if known is None or known.lost < WORTH + 1.25 * known.written:
            return None
        known.written = known.lost
        return known.lost

    def forget(self, pid: int) -> None:
        """It is not quiet any more."""
        self._followed.pop(pid, None)


def _turns(pid: int) -> dict[int, Turn]:
    """The main threads of a process and of its children, by pid."""
    found = {each: read_turn(each, each) for each in (pid, *kernel.children(pid))}
    return {each: turn for each, turn in found.items() if turn is not None}
