"""Notice that ranks make no progress, examine them, and end the job if asked to.

A rank's silence counts only the time in which it had a core, as the kernel reports it for its main
thread and for those of its children, such as a DataLoader's workers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.nodes import hang_examination
from ddpdoctor.run import rundir
from ddpdoctor.run.mapped import RequestWriter
from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.base import Record, as_json, json_line
from ddpdoctor.run.records.process import EndRecord, ErrorRecord, ExitRecord
from ddpdoctor.run.records.supervisor import (
    HangOverRecord,
    HangRecord,
    NoCoreRecord,
    RankEvidence,
    RankExitRecord,
    RankStacks,
)
from ddpdoctor.run.snapshot import FOREVER, HANG, Rank, Records, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.supervise import nccl_ras
from ddpdoctor.system import proc, process_activity
from ddpdoctor.system.network import dead_links
from ddpdoctor.system.proc import pause
from ddpdoctor.system.process_activity import BUSY, CpuTime, CpuTimes, most_lacked, read_cpu_time

# -- the time for which silent ranks had no core

MAX_CORE_FACTOR = 10.0  # Maximum factor by which time without a core may extend a silence

MIN_LOST = 0.5  # Minimum time without a core to record, in seconds

MIN_PRESSURE = 10.0
"""Minimum percentage of time in which a process had no core, for a machine to count as loaded."""


@dataclass
class _Followed:
    since: int  # Start of its phase (Unix nanoseconds), which differs between silences
    when: float
    turns: dict[int, CpuTime]
    lost: float = 0.0
    written: float = 0.0


class CoreWaits:
    """Measures the time for which silent ranks of this host had no core."""

    def __init__(self) -> None:
        self._here = namespace()
        self._followed: dict[int, _Followed] = {}

    def lost_by(self, rank: Rank, now: float) -> float:
        """Return :meth:`lost` for a rank's current silence. 0 for a rank of another host."""
        status = rank.status
        if status is None or rank.opened.namespace not in (None, self._here):
            return 0.0
        return self.lost(status.pid, status.since, now)

    def lost(self, pid: int, since: int, now: float) -> float:
        """Return the seconds without a core since the first call in this silence.

        The count restarts when ``since``, the start of the silence, changes.
        """
        read = {each: read_cpu_time(each, each) for each in (pid, *proc.children(pid))}
        turns = {each: turn for each, turn in read.items() if turn is not None}
        known = self._followed.get(pid)
        if known is None or known.since != since:
            self._followed[pid] = _Followed(since, now, turns)
            return 0.0
        seconds = now - known.when
        if seconds > 0:
            known.lost += most_lacked(known.turns, turns, seconds)
            known.when, known.turns = now, turns
        return known.lost

    def records(self, run: Run) -> Iterator[NoCoreRecord]:
        """Yield a record for each rank that has lost clearly more time than recorded."""
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
"""Seconds without a sign of life before a job is examined, unless the user chose a limit."""

SILENT_STEPS = 20  # The same in median steps of the job. The longer limit applies.

WAIT_FACTOR = 4  # Factor by which ranks may wait longer for others that give signs of life

FIRST_STEP_FACTOR = 10
"""Factor by which the first step may take longer: data is loaded and kernels are compiled."""

MIN_MEASURED_SILENCE = 1.0  # Seconds of silence before time without a core is measured

START_SAMPLE = 3.0  # Seconds for which the CPU time of a starting job is measured

RECENT_STEPS = 64  # Number of steps for the median of a rank

_Sign = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class SilentRanks:
    """Ranks that give no sign of life."""

    seconds: float  # Duration of their silence, except time without a core
    limit: float  # Seconds of silence after which they are examined
    ranks: tuple[int, ...]  # All live ranks, or those that wait while others move
    everybody: bool  # Whether no rank moves
    fresh: bool  # Whether one of them is still in its first step
    lost: Mapping[int, float] = field(default_factory=dict)
    """Seconds of its silence in which each live rank had no core."""


class SignsOfLife:
    """Follows the signs of life of the ranks of the last attempt.

    ``hang_after`` are the seconds that the user chose. ``lost`` returns the seconds of a rank's
    silence in which it had no core.
    """

    def __init__(
        self, hang_after: float | None, lost: Callable[[Rank, float], float] = lambda *_: 0.0
    ) -> None:
        self._asked = hang_after
        self._lost = lost
        self._restart = -1
        self._seen: dict[int, _Sign] = {}
        self._when: dict[int, float] = {}  # Each rank's last sign of life (monotonic seconds)

    def slept(self, seconds: float) -> None:
        """Ignore a period in which no rank could give a sign."""
        self._when = {rank: when + seconds for rank, when in self._when.items()}

    def look(self, run: Run, now: float) -> SilentRanks | None:
        """Process a snapshot taken at ``now`` (monotonic seconds).

        Returns the silent ranks, if any.
        """
        if run.restarts[-1] != self._restart:
            self._restart, self._seen, self._when = run.restarts[-1], {}, {}
        # Include ranks whose script is over: their process still has to end.
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
            # This is the usual case and has to be cheap.
            return None
        limit = self._limit(alive, base)
        fresh = any(rank.status is not None and rank.status.step == 0 for rank in alive)
        if least >= limit:
            return SilentRanks(least, limit, tuple(quiet), True, fresh, lost)
        waiting = [
            rank.rank for rank in alive if quiet[rank.rank] >= WAIT_FACTOR * limit and waits(rank)
        ]
        if waiting:
            shortest = min(quiet[rank] for rank in waiting)
            return SilentRanks(shortest, WAIT_FACTOR * limit, tuple(waiting), False, fresh, lost)
        return None

    def _silence(self, alive: list[Rank], now: float) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds of each rank's silence with a core, and those without one."""
        quiet, lost = {}, {}
        for rank in alive:
            seconds = now - self._when[rank.rank]
            without = self._lost(rank, now) if seconds >= MIN_MEASURED_SILENCE else 0.0
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
        """Return the time of each rank's last sign of life (monotonic seconds)."""
        return {rank: self._when[rank] for rank in ranks if rank in self._when}


class StartWatch:
    """Follows a job before it has ranks. It is examined after ``base`` seconds without one."""

    def __init__(self, base: float) -> None:
        self._base = base
        self.began = time.monotonic()
        self._worked = self.began  # Time at which the job was last seen using the CPU
        self.pid: int | None = None  # The job's command
        self._cores: tuple[float, dict[int, CpuTimes]] | None = None
        """The time and result of the last reading of the job's CPU time."""

    def begin(self, pid: int) -> None:
        """Note that the job's command has started."""
        self.pid = pid
        self.began = self._worked = time.monotonic()

    def slept(self, seconds: float) -> None:
        """Ignore a period in which the job was stopped."""
        self.began += seconds
        self._worked += seconds

    def silence(self, run: Run, now: float) -> SilentRanks | None:
        """Return the silence of a job without ranks, if it is too long."""
        if self.works(now):
            self._worked = now
        quiet = now - self.began
        if quiet < FIRST_STEP_FACTOR * self._base:
            # A torchrun that lacked a core arrives late at the rendezvous, where it only waits.
            quiet = now - self._worked
        ended = any(isinstance(each, (ErrorRecord, ExitRecord)) for each in run.strays)
        if ended or quiet < self._base:
            return None
        return SilentRanks(quiet, self._base, (), True, True)

    def works(self, now: float) -> bool | None:
        """Return whether processes of the job use the CPU. None if still unknown."""
        if self.pid is None:
            return False
        known = self._cores
        if known is not None and now - known[0] < START_SAMPLE:
            return None
        turns = process_activity.cpu_times_of_tree(self.pid)
        self._cores = (now, turns)
        if known is None:
            return None
        since, before = known
        return process_activity.cores_of_tree(before, turns, now - since) >= process_activity.BUSY


def waits(rank: Rank) -> bool:
    """Return whether a rank may be in a collective."""
    return rank.status is not None and rank.status.phase in (Phase.WAIT, Phase.BACKWARD)


def _sign(rank: Rank) -> _Sign:
    status = rank.status
    assert status is not None
    return (int(status.phase), status.since, status.step, status.armed, status.reduced)


# -- jobs that make no progress: when to examine them, and whether the hang continues


REPEAT_FACTOR = 2.0
"""Factor by which the time without progress grows before the job is examined again."""

MAX_FILES = 8  # Maximum number of examinations whose files are kept: the first and the newest

SETTLE_TIME = 2.0  # Seconds to wait after a rank moved, because it may be failing

LAST_TIMEOUT = 3.0  # Seconds for a running examination once the job has ended

CONFIRM_DELAY = 2.0
"""Seconds before blamed ranks are examined again on a machine whose processes lack cores."""

_GIVES_UP = (ErrorRecord, ExitRecord, RankExitRecord, EndRecord)
_OF_HANGS = ("DDP4", "DDP8", "DDP109")  # Families of findings that explain why a job hangs
_AWAITS_RANKS = "DDP813"


class HangWatch:
    """Examines a job without signs of life, and examines it again when the situation changes.

    ``asking`` asks ranks for their Flight Recorders. ``note`` tells the user that the job
    continues, ``wake`` wakes the supervisor's loop.
    """

    def __init__(
        self,
        directory: Path,
        asking: RequestWriter,
        hang_after: float | None,
        write: Callable[[Record], None],
        note: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._write = write
        self._note = note
        self._wake = wake
        self._asking = asking
        self._cores = CoreWaits()
        self._signs = SignsOfLife(hang_after, self._cores.lost_by)
        self._start = StartWatch(hang_after if hang_after is not None else MIN_SILENCE)
        self._number = 0
        self._thread: threading.Thread | None = None
        self._found: HangRecord | None = None
        self._pending = False  # Whether the newest examination is still to be written
        self._written = False  # Whether an examination of this hang was written
        self._hung: SilentRanks | None = None
        self._marks: dict[int, float] = {}
        """Time of each rank's last sign of life before the hang (monotonic seconds)."""
        self._evidence: dict[int, RankEvidence] = {}  # The newest evidence about each rank
        self._elsewhere: Set[int] = frozenset()  # Ranks of other nodes
        self._native: dict[int, RankStacks] = {}
        """Stacks of blamed ranks with native frames, by rank."""
        self._seen: dict[int, hang_examination.Seen] = {}
        """The last samples of the ranks' processes."""
        self._confirmed = 0  # The examination after which blamed ranks were examined again
        self._below = 0  # The last examination for which native frames were captured
        self._dead = 0
        self._next = 0.0
        self._moved: float | None = None
        self._said = False  # Whether a finding has explained why the job hangs
        self._by_calls = False
        """Whether the ranks' calls prove the hang, wherever the next examination finds them."""
        self._ended = False
        self.left_to_head = False
        """Whether the head examines all ranks, so that only time without cores is measured here."""

    def begin(self, pid: int) -> None:
        """Note that the job's command has started as process ``pid``."""
        self._start.begin(pid)

    def slept(self, seconds: float) -> None:
        """Ignore a period in which the whole job and this process were stopped."""
        self._signs.slept(seconds)
        self._start.slept(seconds)
        self._next += seconds

    def look(self, run: Run) -> bool:
        """Process a snapshot.

        Return whether the rules should run now, because an examination is done or the job
        continues.
        """
        if self._ended or run.stopped_at is not None:
            return False
        run = run.heard
        now = time.monotonic()
        if self._thread is not None:
            if self._thread.is_alive():
                self._note_move(run, now)
                return False
            self._thread = None
            if self._starts_elsewhere():
                self._pending = False
                return False
            # First check whether it still hangs: py-spy would pause a rank that has continued.
            if not self._stands(run, now) or self._look_below(run) or self._doubts(run):
                return False
            return self._examined()
        still = self._signs.look(run, now) if run.ranks else self._start.silence(run, now)
        for record in self._cores.records(run):
            self._write(record)
        goes_on = self._hung is not None and self._goes_on(run, now)
        if goes_on or self.left_to_head:
            return goes_on
        if still is None or self._excused(run, still, now):
            return False
        dead = sum(rank.exit is not None for rank in run.last)
        if self._hung is None or now >= self._next or dead != self._dead:
            self._dead = dead
            self._examine(run, still)
        return False

    def end(self, run: Run, status: int) -> None:
        """Note that the job has ended with this exit status."""
        if self._thread is not None:
            self._thread.join(LAST_TIMEOUT)
            self._thread = None
        if self._pending:
            self._examined()
        gave_up = self._ended and _failed(run, self._examined_at, (ErrorRecord,))
        if self._hung is not None and status == 0 and not gave_up:
            # The job succeeded, so it did not hang.
            self._write(HangOverRecord(time=time.time_ns(), number=self._number))
        self._ended = True

    def close(self) -> None:
        """Close the file of requests to ranks."""
        self._asking.close()

    @property
    def _examined_at(self) -> int:
        """Time of the newest examination (Unix nanoseconds). 0 if there is none."""
        return self._found.time if self._found is not None else 0

    # -- when to examine

    def _excused(self, run: Run, still: SilentRanks, now: float) -> bool:
        """Return whether a debugger or a long first step explains the silence."""
        if any(end == FOREVER for _, end in run.debugged):
            return True
        if not still.fresh or still.seconds >= FIRST_STEP_FACTOR * still.limit:
            return False
        return bool(still.ranks) and self._start.works(now) is not False

    def _starts_elsewhere(self) -> bool:
        """Return whether ranks of other nodes were in a long first step when examined."""
        hung = self._hung
        if hung is None or not hung.fresh or hung.seconds >= FIRST_STEP_FACTOR * hung.limit:
            return False
        found = (self._evidence[rank].activity for rank in self._elsewhere)
        return any(each is not None and each.busy + each.children_busy >= BUSY for each in found)

    def _goes_on(self, run: Run, now: float) -> bool:
        """Return whether the ranks that made no progress are moving again for good."""
        hung = self._hung
        assert hung is not None
        if not (self._has_moved() if hung.ranks else run.ranks):
            return False
        if self._moved is None:
            self._moved = now
        if now - self._moved < SETTLE_TIME:
            return False
        self._moved = None
        if hung.ranks and _failed(run, self._examined_at):
            # The ranks give up, as the examination explains. A job whose ranks appear after a
            # long start was only slow, even if they fail later.
            self._ended = True
            return self._pending and self._examined()
        seconds = now - SETTLE_TIME - min(self._marks.values(), default=self._start.began)
        if self._said:
            self._note(f"the job is running again after no progress for {seconds:.0f} s")
        self._over()
        return True

    def _note_move(self, run: Run, now: float) -> None:
        """Note when the job continues during an examination, which takes seconds."""
        if self._hung is not None and self._hung.ranks:
            self._signs.look(run, now)
            self._moved = self._moved or (now if self._has_moved() else None)

    def _has_moved(self) -> bool:
        """Return whether a rank that made no progress has moved since."""
        marks = self._signs.marks(tuple(self._marks))
        return any(marks.get(rank, mark) > mark for rank, mark in self._marks.items())

    # -- the examination

    def _examine(self, run: Run, still: SilentRanks) -> None:
        self._number += 1
        self._hung, self._moved = still, None
        self._marks = self._signs.marks(still.ranks)
        self._next = time.monotonic() + max(still.seconds * (REPEAT_FACTOR - 1), 2.0)
        self._asking.ask(self._number)
        self._work(partial(self._gather, run, still, self._number))

    def _work(self, gather: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=gather, name="examination", daemon=True)
        self._thread.start()

    def _gather(self, run: Run, still: SilentRanks, number: int) -> None:
        found = HangRecord(
            time=time.time_ns(),
            number=number,
            restart=run.restarts[-1],
            seconds=round(still.seconds, 1),
            everybody=still.everybody,
            fresh=still.fresh,
            limit=round(still.limit, 1),
        )
        try:
            waiting = [rank.rank for rank in run.last if waits(rank)]
            nccl = nccl_ras.asked(run)
            others = hang_examination.of_other_nodes(run, number)
            ranks = hang_examination.examine(
                run, number, waiting, self._evidence, self._seen, self._start.pid, still.lost
            )
            # Old status pages prove nothing about the ranks of a node that does not respond.
            elsewhere = {rank.rank for rank in run.last if rank.elsewhere}
            own = {each.rank: each for each in ranks if each.rank not in elsewhere}
            found_there = others()
            self._elsewhere = found_there.keys() - own.keys()
            self._evidence = found_there | own
            works = any(each.launcher_works for each in self._evidence.values())
            file = f"hang-{number:04d}.json"
            whole = replace(found, launcher_works=works, ras=nccl(), links=dead_links(), file=file)
            self._put(whole)
            found = whole
        except Exception as error:
            # The error is noted in the record, and the job continues.
            found = replace(found, trouble=repr(error))
        self._found, self._pending = found, True
        self._wake()

    def _put(self, found: HangRecord) -> None:
        ranks = tuple(self._evidence[rank] for rank in sorted(self._evidence))
        line = json_line(as_json(replace(found, ranks=ranks)))
        rundir.put(self._directory / found.file, line)

    def _look_below(self, run: Run) -> bool:
        """Start to capture native frames of blamed ranks, once. Return whether it started."""
        found = self._found
        if found is None or not found.file or self._below == self._number:
            return False
        self._below = self._number
        ranks = self._guilty(run) - {rank.rank for rank in run.last if rank.elsewhere}
        if ranks:
            self._work(partial(self._hold, found, ranks))
        return bool(ranks)

    def _hold(self, found: HangRecord, ranks: frozenset[int]) -> None:
        with contextlib.suppress(Exception):
            hang_examination.add_native(self._evidence, ranks, self._native)
            self._put(found)
        self._wake()

    # -- whether it still hangs

    def _guilty(self, run: Run) -> frozenset[int]:
        """Return the ranks that the newest examination blames with certainty."""
        from ddpdoctor.diagnose.hangs.diagnosis import guilty

        if self._found is None:
            return frozenset()
        return guilty(replace(run, supervisor=Records((*run.supervisor, self._found))))

    def _doubts(self, run: Run) -> bool:
        """Start to examine blamed ranks once more, if in doubt. Return whether it started.

        On an idle machine, a second is enough to see that a process does nothing.
        """
        hung = self._hung
        if hung is None or self._confirmed == self._number or self._found is None:
            return False
        loaded = any(lost > 0.1 * hung.seconds for lost in hung.lost.values())
        if not self._found.file or not (loaded or is_loaded()):
            return False
        self._confirmed = self._number
        if not self._guilty(run):
            return False
        self._work(partial(self._look_again, run, CONFIRM_DELAY))
        return True

    def _look_again(self, run: Run, after: float = 0.0) -> None:
        """Examine the ranks once more, and write the evidence into the run directory."""
        pause(after)
        if (found := self._found) is None:
            return
        with contextlib.suppress(Exception):
            hang_examination.look_again(run, self._evidence, self._seen)
            self._put(found)
        if after:
            self._wake()

    def _stands(self, run: Run, now: float) -> bool:
        """Return whether the ranks have not moved since they were examined."""
        if run.ranks:
            self._signs.look(run, now)
        if self._has_moved():
            # The next snapshots show whether the job continues.
            return False
        guilty, since = self._guilty(run), self._examined_at
        exits = [rank.exit for rank in run.last if rank.rank in guilty and rank.exit is not None]
        if any(each.status == 0 and each.time >= since for each in exits):
            # A blamed rank ended successfully: it only took long to exit.
            self._over()
            return False
        return True

    def _over(self) -> None:
        """Forget a hang that is over."""
        if self._written or not self._pending:
            self._write(HangOverRecord(time=time.time_ns(), number=self._number))
        self._hung, self._found, self._marks, self._said = None, None, {}, False
        self._pending = self._written = False

    def confirmed(self, run: Run) -> bool:
        """Return whether a job that certainly hung still does. ``run`` is a new snapshot."""
        found = self._found
        if found is None or self._thread is not None or not self._stands(run, time.monotonic()):
            return False
        if not found.file or self._by_calls:
            return True
        self._look_again(run)
        if self._guilty(run):
            return True
        # Examine it again soon.
        self._next = time.monotonic() + CONFIRM_DELAY
        return False

    def _examined(self) -> bool:
        """Write the newest examination. Returns False if it is missing or empty."""
        if self._found is None:
            return False
        self._pending = False
        gave_up = any(each.since > self._examined_at for each in self._evidence.values())
        if self._written and gave_up:
            # A rank moved during the examination. The previous one explains the hang.
            return False
        self._write(self._found)
        self._written = True
        files = sorted(self._directory.glob(HANG))
        for old in files[1 : -MAX_FILES + 1]:
            with contextlib.suppress(OSError):
                old.unlink()
        return True

    def judged(self, findings: Iterable[Finding], *, one_node: bool = True) -> bool:
        """Process the findings of the rules. Returns whether the job certainly hangs.

        A job that only waits for ranks of other nodes does not count as hanging: they may start
        minutes later.
        """
        if self._hung is None or self._found is None or self._pending:
            return False
        found = [
            each
            for each in findings
            if each.code.startswith(_OF_HANGS) or STANDSTILL in each.subjects
        ]
        self._said |= bool(found)
        errors = [each for each in found if each.severity >= Severity.ERROR]
        self._by_calls = any(STANDSTILL not in each.subjects for each in errors)
        sure = one_node or any(each.code != _AWAITS_RANKS for each in errors)
        return self._moved is None and bool(errors) and sure


def _failed(run: Run, since: int, kinds: tuple[type[Record], ...] = _GIVES_UP) -> bool:
    """Return whether a process of the job failed or ended after ``since`` (Unix nanoseconds)."""
    records = [
        record
        for rank in run.last
        for record in (*rank.records, *([rank.exit] if rank.exit is not None else ()))
    ]
    return any(type(each) in kinds and getattr(each, "time", 0) >= since for each in records)
