"""Asks the ranks where they spend their time once one of them holds the others up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ddpdoctor.analysis.lag import lags
from ddpdoctor.analysis.reasons import PATIENCE
from ddpdoctor.analysis.surplus import Lag
from ddpdoctor.run.environment import namespace
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.supervisor import BusyProcess, CoreClock, ProfileRequestRecord
from ddpdoctor.run.records.training import ProfileRecord
from ddpdoctor.run.requests import MOST_PROFILES, Asking
from ddpdoctor.run.snapshot import Run
from ddpdoctor.system import proc
from ddpdoctor.system.core_clocks import CoreClocks

ENOUGH, FEW = 8, 4
"""Steps after the warm-up, and steps in all, from which on a rank may be suspected: fewer than a
verdict takes, as that of a job which ends soon can only be reached by samples taken before."""

EVERY = 1.0
"""Seconds between two looks at the steps."""

SHARE = 0.1
"""Of a core that the looks may take: those at many ranks are rarer."""

BUSY = 0.1
"""Share of a core from which on a process is named."""

NAMED = 6
"""Processes that are named at most."""


class Stragglers:
    """Watches the pace of the ranks.

    Args:
        page: By which ranks are asked for a profile.
        write: Writes a record of the supervisor.
    """

    def __init__(self, page: Asking, write: Callable[[Record], None]) -> None:
        self._page = page
        self._write = write
        self._asked = 0
        self._due = 0.0
        self._begin(0)

    def _begin(self, restart: int) -> None:
        self._restart = restart
        self._suspected: set[tuple[int, bool]] = set()
        """Ranks for whose sake the others were asked, and whether for few steps."""
        self._waiting: set[int] = set()
        """Ranks that have not answered."""
        self._until = 0.0
        self._before: tuple[float, dict[int, float]] | None = None
        self._clocks = CoreClocks()

    def look(self, run: Run) -> bool:
        """Ask if there is reason to.

        Returns:
            Whether the rules should look now: the answers are there.
        """
        if run.restarts[-1] != self._restart:
            self._begin(run.restarts[-1])
        now = time.monotonic()
        if self._waiting:
            return self._answered(run, now)
        if now >= self._due:
            self.ask(run)
        return False

    def ask(self, run: Run) -> None:
        """Ask for samples of a rank that seems slow.

        The rules wait for samples that were asked for. So this comes before they look, or what they
        report has no line.
        """
        now = time.monotonic()
        if run.restarts[-1] != self._restart or self._waiting or run.exit_status is not None:
            return
        if len(self._suspected) >= MOST_PROFILES:
            return
        began = time.thread_time()
        lag = next((each for each in lags(run, ENOUGH, FEW) if self._is_new(each)), None)
        self._due = now + max(EVERY, (time.thread_time() - began) / SHARE)
        if lag is None:
            return
        self._asked += 1
        self._suspected.add((lag.rank.rank, lag.few))
        self._waiting = {rank.rank for rank in run.last if rank.status is not None}
        self._until = now + PATIENCE
        self._before = now, _cpu_seconds()
        self._clocks = CoreClocks()
        self._page.ask(self._asked)
        self._record(rank=lag.rank.rank)

    def close(self) -> None:
        """Let go of the file."""
        self._page.close()

    def _is_new(self, lag: Lag) -> bool:
        # What holds it up at the beginning may not be what does so later.
        return (lag.rank.rank, lag.few) not in self._suspected

    def _answered(self, run: Run, now: float) -> bool:
        for rank in run.last:
            if any(each.asked == self._asked for each in rank.records.of(ProfileRecord)):
                self._waiting.discard(rank.rank)
        here = namespace()
        self._clocks.look(
            {
                rank.rank: rank.status.pid
                for rank in run.last
                if rank.status is not None and rank.opened.namespace in (None, here)
            }
        )
        if self._waiting and now < self._until:
            return False
        self._waiting = set()
        if self._before is not None:
            busy = _busy(self._before, (now, _cpu_seconds()))
            self._record(busy=busy, clocks=self._clocks.highest)
        return True

    def _record(
        self,
        rank: int | None = None,
        busy: tuple[BusyProcess, ...] = (),
        clocks: tuple[CoreClock, ...] = (),
    ) -> None:
        self._write(
            ProfileRequestRecord(
                time=time.time_ns(),
                restart=self._restart,
                asked=self._asked,
                rank=rank,
                busy=busy,
                clocks=clocks,
            )
        )


def _cpu_seconds() -> dict[int, float]:
    """CPU time of every process that can be seen."""
    stats = {pid: proc.read_stat(pid) for pid in proc.pids()}
    return {pid: stat.cpu_seconds for pid, stat in stats.items() if stat is not None}


def _busy(
    before: tuple[float, dict[int, float]], after: tuple[float, dict[int, float]]
) -> tuple[BusyProcess, ...]:
    """The busiest processes."""
    seconds = max(after[0] - before[0], 0.1)
    shares = {
        pid: (cpu - before[1].get(pid, 0.0)) / seconds
        for pid, cpu in after[1].items()
        if pid != os.getpid()
    }
    found: list[BusyProcess] = []
    for pid in sorted(shares, key=lambda each: -shares[each])[:NAMED]:
        stat = proc.read_stat(pid)
        if shares[pid] >= BUSY and stat is not None:
            share = round(shares[pid], 2)
            found.append(BusyProcess(pid, share, stat.core, proc.described(pid)))
    return tuple(found)
