"""Since when a job makes no progress: signs of life of its ranks, and how long they had no core.

Patience with a rank counts the time that it could have used, by the kernel's count for its main
thread and for those of its children, of which a DataLoader's worker is one.
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

# -- for how long quiet ranks had no core: the part of their silence that is not theirs


MOST_WITHOUT_CORE = 10.0
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


# -- since when there is no progress: the signs of life on the ranks' status pages


LEAST = 30.0
"""Seconds without a sign of life before a job is looked at, unless a person says otherwise."""

STEPS = 20
"""Or so many of its median steps, if that is longer."""

PATIENCE = 4
"""Times as long some ranks may wait for others that do give signs."""

FIRST = 10
"""Times as long the first step may take: data are loaded, kernels compiled."""

SHORT = 1.0
"""Seconds without a sign that are too few to ask what a rank had of the cores."""

IDLE = 3.0
"""Seconds without CPU time after which a job is not starting any more, but waits."""

RECENT = 64
"""Steps of a rank that the median is taken of."""

_Sign = tuple[int, int, int, int, int]


@dataclass
class _Seen:
    sign: _Sign
    when: float


@dataclass(frozen=True)
class Still:
    """A job, or ranks of it, that give no sign of life."""

    seconds: float
    """For how long, without the time in which they had no core."""
    limit: float
    """After how many seconds it is worth a look."""
    ranks: tuple[int, ...]
    """Which; all that live, or those that wait while others move."""
    everybody: bool
    """Whether no rank moves."""
    fresh: bool
    """Whether one of them is still in its first step."""
    lost: Mapping[int, float] = field(default_factory=dict)
    """For how many seconds of its silence each living rank had no core."""


class Signs:
    """Follows the ranks of the last attempt.

    Args:
        hang_after: Seconds, if a person named them.
        lost: For how many seconds of its silence a rank had no core, at a moment.
    """

    def __init__(
        self, hang_after: float | None, lost: Callable[[Rank, float], float] = lambda *_: 0.0
    ) -> None:
        self._asked = hang_after
        self._lost = lost
        self._restart = -1
        self._seen: dict[int, _Seen] = {}

    def slept(self, seconds: float) -> None:
        """No rank could give a sign for so long."""
        for seen in self._seen.values():
            seen.when += seconds

    def look(self, run: Run, now: float) -> Still | None:
        """Take in a snapshot at ``now`` (monotonic seconds); who is still, if anybody is."""
        if run.restarts[-1] != self._restart:
            self._restart, self._seen = run.restarts[-1], {}
        alive = [rank for rank in run.last if _lives(rank)]
        for rank in alive:
            sign = _sign(rank)
            seen = self._seen.get(rank.rank)
            if seen is None or seen.sign != sign:
                self._seen[rank.rank] = _Seen(sign, now)
        if not alive:
            return None
        quiet, lost = self._silence(alive, now)
        least = min(quiet.values())
        base = self._asked if self._asked is not None else LEAST
        if max(quiet.values()) < base:
            # The usual case, which has to be cheap.
            return None
        limit = self._limit(alive, base)
        fresh = any(rank.status is not None and rank.status.step == 0 for rank in alive)
        if least >= limit:
            return Still(least, limit, tuple(quiet), True, fresh, lost)
        waiting = [
            rank.rank for rank in alive if quiet[rank.rank] >= PATIENCE * limit and waits(rank)
        ]
        if waiting:
            shortest = min(quiet[rank] for rank in waiting)
            return Still(shortest, PATIENCE * limit, tuple(waiting), False, fresh, lost)
        return None

    def _silence(self, alive: list[Rank], now: float) -> tuple[dict[int, float], dict[int, float]]:
        """For how many seconds each rank was quiet with a core to run on, and had none, by rank."""
        quiet, lost = {}, {}
        for rank in alive:
            seconds = now - self._seen[rank.rank].when
            without = self._lost(rank, now) if seconds >= SHORT else 0.0
            lost[rank.rank] = min(without, seconds)
            quiet[rank.rank] = max(seconds - without, seconds / MOST_WITHOUT_CORE)
        return quiet, lost

    def _limit(self, alive: list[Rank], base: float) -> float:
        if self._asked is not None:
            return base
        steps = [
            median(step.total for step in rank.steps[-RECENT:]) / 1e9
            for rank in alive[:8]
            if rank.steps
        ]
        return max(base, STEPS * median(steps)) if steps else base

    def marks(self, ranks: tuple[int, ...]) -> dict[int, float]:
        """When each of the ranks gave its last sign (monotonic seconds)."""
        return {rank: self._seen[rank].when for rank in ranks if rank in self._seen}


class Start:
    """The time before the first step: whether the job still works towards it.

    Args:
        base: Seconds without a rank that are worth a look.
    """

    def __init__(self, base: float) -> None:
        self._base = base
        self.began = time.monotonic()
        self.pid: int | None = None
        """The job's command."""
        self._cores: tuple[float, dict[int, Turns]] | None = None
        """Since when the job's use of the cores is watched, and what it was."""

    def begin(self, pid: int) -> None:
        """The job's command has started."""
        self.pid, self.began = pid, time.monotonic()

    def slept(self, seconds: float) -> None:
        """The job was stopped for so long."""
        self.began += seconds

    def silence(self, run: Run, now: float) -> Still | None:
        """What is still of a job that has no rank yet."""
        quiet = now - self.began
        ended = any(isinstance(each, (ErrorRecord, ExitRecord)) for each in run.strays)
        if ended or quiet < self._base:
            return None
        return Still(quiet, self._base, (), True, True)

    def works(self, now: float) -> bool:
        """Whether processes of the job use the CPU."""
        if self.pid is None:
            return False
        turns = process_activity.turns_of_tree(self.pid)
        if self._cores is None:
            self._cores = (now, turns)
            return True
        since, before = self._cores
        if now - since < IDLE:
            return True
        self._cores = (now, turns)
        return process_activity.cores_of_tree(before, turns, now - since) >= process_activity.BUSY


def waits(rank: Rank) -> bool:
    """Whether a rank may be in a collective, and waits for others."""
    return rank.status is not None and rank.status.phase in (Phase.WAIT, Phase.BACKWARD)


def _lives(rank: Rank) -> bool:
    # Also one whose script is over: it has a process to end yet.
    return rank.status is not None and rank.exit is None


def _sign(rank: Rank) -> _Sign:
    status = rank.status
    assert status is not None
    return (int(status.phase), status.since, status.step, status.armed, status.reduced)
