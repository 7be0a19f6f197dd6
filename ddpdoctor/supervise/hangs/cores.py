"""For how long quiet ranks had no core: the part of their silence that is not theirs.

Patience with a rank counts the time that it could have used, by the kernel's count for its main
thread and for those of its children, of which a DataLoader's worker is one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.run.environment import namespace
from ddpdoctor.run.records.supervisor import NoCoreRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.system import proc
from ddpdoctor.system.process_state import Turn, lacked, read_turn

MOST = 10.0
"""Times as long as a patience is at most, however little a process gets."""

WORTH = 0.5
"""Seconds without a core from which on a rank's wait is written down."""

PRESSURE = 10.0
"""Percent of the last seconds in which some process of the machine had no core: it is loaded."""


@dataclass
class _Followed:
    since: int
    """The beginning of its phase (Unix nanoseconds), by which silences differ."""
    when: float
    turns: dict[int, Turn]
    lost: float = 0.0
    written: float = 0.0


class Cores:
    """Follows the ranks of this host for as long as they are quiet."""

    def __init__(self) -> None:
        self._here = namespace()
        self._followed: dict[int, _Followed] = {}

    def lost_by(self, rank: Rank, now: float) -> float:
        """As :meth:`lost`, of the silence that a rank is in; of another host's nothing is known."""
        status = rank.status
        if status is None or rank.opened.namespace not in (None, self._here):
            return 0.0
        return self.lost(status.pid, status.since, now)

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
            lost = (
                lacked(known.turns[each], turn, seconds)
                for each, turn in turns.items()
                if each in known.turns
            )
            known.lost += max(lost, default=0.0)
            known.when, known.turns = now, turns
        return known.lost

    def news(self, pid: int) -> float | None:
        """What a process has lost, if that is enough more than the last time to be written down."""
        known = self._followed.get(pid)
        if known is None or known.lost < WORTH + 1.25 * known.written:
            return None
        known.written = known.lost
        return known.lost

    def records(self, run: Run) -> Iterator[NoCoreRecord]:
        """What ranks have lost, as far as it is news."""
        for rank in run.last:
            lost = self.news(rank.status.pid) if rank.status is not None else None
            if rank.status is not None and lost is not None:
                yield NoCoreRecord(
                    time=time.time_ns(),
                    rank=rank.rank,
                    restart=rank.restart,
                    since=rank.status.since,
                    lost=round(lost * 1e9),
                )


def is_loaded() -> bool:
    """Whether processes of this machine lack cores now."""
    try:
        with open("/proc/pressure/cpu") as file:
            return float(file.readline().split("avg10=")[1].split()[0]) >= PRESSURE
    except (OSError, ValueError, IndexError):
        return False


def _turns(pid: int) -> dict[int, Turn]:
    """The main threads of a process and of its children, by pid."""
    found = {each: read_turn(each, each) for each in (pid, *proc.children(pid))}
    return {each: turn for each, turn in found.items() if turn is not None}
