"""Find jobs that make no progress, by signs of life of their ranks.

A rank's silence counts only the time in which it had a core, by the kernel's count for its main
thread and for those of its children, such as a DataLoader's workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.records.supervisor import NoCoreRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.system import proc, process_activity
from ddpdoctor.system.process_activity import Turn, Turns, lacked, read_turn

# -- how long silent ranks had no core

MAX_CORE_FACTOR = 10.0  # The factor by which a time without a core lengthens a silence at most

MIN_LOST = 0.5  # Seconds without a core after which they are recorded

MIN_PRESSURE = 10.0
"""Percent of time in which some process had no core, from which on a machine is loaded."""


@dataclass
class _Followed:
    since: int  # The beginning of its phase (Unix nanoseconds). Each silence has another one.
    when: float
    turns: dict[int, Turn]
    lost: float = 0.0
    written: float = 0.0


class Cores:
    """Measures how long silent ranks of this host had no core."""

    def __init__(self) -> None:
        self._here = namespace()
        self._followed: dict[int, _Followed] = {}

    def lost_by(self, rank: Rank, now: float) -> float:
        """Return :meth:`lost` for the silence that a rank is in; 0 for a rank of another host."""
        status = rank.status
        if status is None or rank.opened.namespace not in (None, self._here):
            return 0.0
        return self.lost(status.pid, status.since, now)

    def lost(self, pid: int, since: int, now: float) -> float:
        """Return the seconds without a core since the first call in this silence.

        Args:
            pid: The process.
            since: The beginning of its silence. The count starts again when this changes.
            now: Monotonic seconds.
        """
        read = {each: read_turn(each, each) for each in (pid, *proc.children(pid))}
        turns = {each: turn for each, turn in read.items() if turn is not None}
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

    def records(self, run: Run) -> Iterator[NoCoreRecord]:
        """Yield a record for each rank that lost clearly more time than was recorded."""
        for rank in run.last:
            known = self._followed.get(rank.status.pid) if rank.status is not None else None
            if rank.status is None or known is None:
                continue
            if known.lost >= MIN_LOST + 1.25 * known.written:
                known.written = known.lost
                yield NoCoreRecord(
                    time=time.time_ns(),
                    rank=rank.rank,
                    restart=rank.restart,
                    since=rank.status.since,
                    lost=round(known.lost * 1e9),
                )


def is_loaded() -> bool:
    """Return whether processes of this machine lack cores now."""
    try:
        with open("/proc/pressure/cpu") as file:
            return float(file.readline().split("avg10=")[1].split()[0]) >= MIN_PRESSURE
    except (OSError, ValueError, IndexError):
        return False


# -- signs of life on the ranks' status pages

MIN_SILENCE = 30.0
"""Seconds without a sign of life before a job is examined, unless a person says otherwise."""

SILENT_STEPS = 20  # The same limit in median steps of the job; the longer one counts

WAIT_FACTOR = 4  # The factor by which ranks may wait longer for others that do give signs

FIRST_STEP_FACTOR = 10
"""The factor by which the first step may take longer: data are loaded, kernels compiled."""

SHORT = 1.0  # Seconds of silence up to which it is not measured how long a rank had no core

START_SAMPLE = 3.0  # Seconds over which the CPU time of a starting job is measured

RECENT_STEPS = 64  # Steps of a rank that the median is taken of

_Sign = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Still:
    """Ranks that give no sign of life."""

    seconds: float  # How long they have been silent, without the time in which they had no core
    limit: float  # Seconds of silence after which they are examined
    ranks: tuple[int, ...]  # All ranks that live, or those that wait while others move
    everybody: bool  # Whether no rank moves
    fresh: bool  # Whether one of them is still in its first step
    lost: Mapping[int, float] = field(default_factory=dict)
    """For how many seconds of its silence each living rank had no core."""


class Signs:
    """Follows the signs of life of the ranks of the last attempt.

    Args:
        hang_after: Seconds, if a person named them.
        lost: Returns for how many seconds of its silence a rank had no core.
    """

    def __init__(
        self, hang_after: float | None, lost: Callable[[Rank, float], float] = lambda *_: 0.0
    ) -> None:
        self._asked = hang_after
        self._lost = lost
        self._restart = -1
        self._seen: dict[int, _Sign] = {}
        self._when: dict[int, float] = {}  # When each rank gave its last sign (monotonic seconds)

    def slept(self, seconds: float) -> None:
        """Ignore a time in which no rank could give a sign."""
        self._when = {rank: when + seconds for rank, when in self._when.items()}

    def look(self, run: Run, now: float) -> Still | None:
        """Take in a snapshot at ``now`` (monotonic seconds). Returns the silent ranks, if any."""
        if run.restarts[-1] != self._restart:
            self._restart, self._seen, self._when = run.restarts[-1], {}, {}
        # A rank whose script is over still has a process to end.
        alive = [rank for rank in run.last if rank.status is not None and rank.exit is None]
        for rank in alive:
            sign = _sign(rank)
            if self._seen.get(rank.rank) != sign:
                self._seen[rank.rank], self._when[rank.rank] = sign, now
        if not alive:
            return None
        quiet, lost = self._silence(alive, now)
        least = min(quiet.values())
        base = self._asked if self._asked is not None else MIN_SILENCE
        if max(quiet.values()) < base:
            # The usual case, which has to be cheap.
            return None
        limit = self._limit(alive, base)
        fresh = any(rank.status is not None and rank.status.step == 0 for rank in alive)
        if least >= limit:
            return Still(least, limit, tuple(quiet), True, fresh, lost)
        waiting = [
            rank.rank for rank in alive if quiet[rank.rank] >= WAIT_FACTOR * limit and waits(rank)
        ]
        if waiting:
            shortest = min(quiet[rank] for rank in waiting)
            return Still(shortest, WAIT_FACTOR * limit, tuple(waiting), False, fresh, lost)
        return None

    def _silence(self, alive: list[Rank], now: float) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds for which each rank was silent with a core, and without one."""
        quiet, lost = {}, {}
        for rank in alive:
            seconds = now - self._when[rank.rank]
            without = self._lost(rank, now) if seconds >= SHORT else 0.0
            lost[rank.rank] = min(without, seconds)
            quiet[rank.rank] = max(seconds - without, seconds / MAX_CORE_FACTOR)
        return quiet, lost

    def _limit(self, alive: list[Rank], base: float) -> float:
        if self._asked is not None:
            return base
        steps = [
            median(step.total for step in rank.steps[-RECENT_STEPS:]) / 1e9
            for rank in alive[:8]
            if rank.steps
        ]
        return max(base, SILENT_STEPS * median(steps)) if steps else base

    def marks(self, ranks: tuple[int, ...]) -> dict[int, float]:
        """Return when each of the ranks gave its last sign (monotonic seconds)."""
        return {rank: self._when[rank] for rank in ranks if rank in self._when}


class Start:
    """Follows a job before its first step.

    Args:
        base: Seconds without a rank after which it is examined.
    """

    def __init__(self, base: float) -> None:
        self._base = base
        self.began = time.monotonic()
        self.pid: int | None = None  # The job's command
        self._cores: tuple[float, dict[int, Turns]] | None = None
        """When the CPU time of the job was read last, and what it was."""

    def begin(self, pid: int) -> None:
        """Note that the job's command has started."""
        self.pid, self.began = pid, time.monotonic()

    def slept(self, seconds: float) -> None:
        """Ignore a time in which the job was stopped."""
        self.began += seconds

    def silence(self, run: Run, now: float) -> Still | None:
        """Return the silence of a job that has no rank yet, if it is too long."""
        quiet = now - self.began
        ended = any(isinstance(each, (ErrorRecord, ExitRecord)) for each in run.strays)
        if ended or quiet < self._base:
            return None
        return Still(quiet, self._base, (), True, True)

    def works(self, now: float) -> bool:
        """Return whether processes of the job use the CPU."""
        if self.pid is None:
            return False
        turns = process_activity.turns_of_tree(self.pid)
        if self._cores is None:
            self._cores = (now, turns)
            return True
        since, before = self._cores
        if now - since < START_SAMPLE:
            return True
        self._cores = (now, turns)
        return process_activity.cores_of_tree(before, turns, now - since) >= process_activity.BUSY


def waits(rank: Rank) -> bool:
    """Return whether a rank may be in a collective."""
    return rank.status is not None and rank.status.phase in (Phase.WAIT, Phase.BACKWARD)


def _sign(rank: Rank) -> _Sign:
    status = rank.status
    assert status is not None
    return (int(status.phase), status.since, status.step, status.armed, status.reduced)
