"""Look closer at ranks that may be slow, and at what rules suspect."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator

from ddpdoctor.diagnose.replicas.differences import AVERAGED, FINGERPRINT_PATIENCE, unpacked
from ddpdoctor.diagnose.speed.lag import Lag, lags
from ddpdoctor.diagnose.speed.reasons import PATIENCE
from ddpdoctor.run.mapped import MOST_PROFILES, Asking, Suspicion, SuspicionWriter
from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import ElementsRecord, FingerprintRecord, TensorsRecord
from ddpdoctor.run.records.supervisor import (
    BusyProcess,
    CoreClock,
    ProfileRequestRecord,
    SuspicionRecord,
)
from ddpdoctor.run.records.training import ProfileRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.system import proc
from ddpdoctor.system.process_activity import CoreClocks

# -- asks the ranks where they spend their time once one of them holds the others up


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


# -- suspicions


STEPS = 16
"""Steps that ranks look at one by one."""

TENSORS = 3
"""Tensors whose elements ranks write: the first ones that differ."""

AHEAD = 0.1
"""Seconds that ranks have to hear of it before they come to the end of the step that is named."""

MOST_OPEN = 1024
"""Fingerprints that wait for those of the other ranks."""

_Key = tuple[int, int, int]
"""Module, step, forwards whose backward was reduced."""


class Suspicions:
    """Compares the fingerprints of a run as they come in.

    Args:
        page: Where ranks read what is suspected.
        write: Writes a record of the supervisor.
    """

    def __init__(self, page: SuspicionWriter, write: Callable[[Record], None]) -> None:
        self._page = page
        self._write = write
        self._begin(0)

    def _begin(self, restart: int) -> None:
        self._restart = restart
        self._read: dict[int, int] = {}
        self._groups: dict[int, dict[int, tuple[int, ...]]] = {}
        self._open: dict[_Key, dict[int, FingerprintRecord]] = {}
        self._suspected = False
        """The ranks were asked to look."""
        self._located: Suspicion | None = None
        """The one that named tensors, which is the last."""
        self._waiting: set[int] = set()
        """Ranks that have not written what they were asked for."""
        self._until: float | None = None

    def look(self, run: Run) -> bool:
        """Take in what is new.

        Returns:
            Whether the rules should look now: what ranks were asked for is there, or was waited for
            long enough.
        """
        if run.restarts[-1] != self._restart:
            self._begin(run.restarts[-1])
        for rank in run.last:
            fresh = rank.records[self._read.get(rank.rank, 0) :]
            self._read[rank.rank] = len(rank.records)
            for record in fresh:
                if isinstance(record, FingerprintRecord) and self._located is None:
                    self._compare(run, rank, record)
                elif isinstance(record, TensorsRecord):
                    averaged = AVERAGED in (record.hook or "")
                    groups = self._groups.setdefault(record.module, {})
                    groups[rank.rank] = () if averaged else record.group
                elif isinstance(record, ElementsRecord):
                    self._waiting.discard(rank.rank)
        arrived = self._located is not None and not self._waiting
        if self._until is None or not (arrived or time.monotonic() >= self._until):
            return False
        self._until = None
        return True

    def close(self) -> None:
        """Let go of the file."""
        self._page.close()

    def _compare(self, run: Run, rank: Rank, record: FingerprintRecord) -> None:
        """Put a fingerprint to those of the other ranks."""
        module = record.module
        group = self._groups.get(module, {}).get(rank.rank, ())
        # Those of other nodes are seen by their own supervisor.
        mine = {each.rank for each in run.last} & set(group)
        if len(mine) < 2:
            return
        key = (module, record.step, record.armed)
        prints = self._open.setdefault(key, {})
        prints[rank.rank] = record
        if len(self._open) > MOST_OPEN:
            del self._open[next(iter(self._open))]
        if not mine <= prints.keys():
            return
        self._open.pop(key, None)
        if len({each.parameters for each in prints.values()}) > 1:
            self._suspect(run, module, key[1], tuple(_differing(list(prints.values()))))

    def _suspect(self, run: Run, module: int, seen: int, tensors: tuple[int, ...]) -> None:
        """Ask the ranks, for the first time, or now that it is known for which tensors."""
        if self._located is not None or (self._suspected and not tensors):
            return
        newest = max((each.status.step for each in run.last if each.status is not None), default=0)
        totals = [each.total for rank in run.last for each in rank.steps[-64:] if each.total > 0]
        # A quick one, as a step may be when other processes leave the machine to it.
        quick = sorted(totals)[len(totals) // 4] if totals else AHEAD * 1e9
        ahead = 1 + math.ceil(AHEAD * 1e9 / quick)
        suspicion = Suspicion(self._restart, newest + ahead, STEPS, module, tensors[:TENSORS])
        self._page.write(suspicion)
        self._suspected = True
        self._until = time.monotonic() + FINGERPRINT_PATIENCE
        if tensors:
            self._located = suspicion
            self._waiting = {rank for rank, group in self._groups[module].items() if group}
        self._write(
            SuspicionRecord(
                time=time.time_ns(),
                restart=self._restart,
                module=module,
                seen=seen,
                step=suspicion.step,
                tensors=suspicion.tensors,
            )
        )


def _differing(prints: list[FingerprintRecord]) -> Iterator[int]:
    """The places of the tensors that differ, if the fingerprints show them."""
    details = [unpacked(each.detail or "") for each in prints]
    for index, tensors in enumerate(zip(*details, strict=False)):
        if len({hash_ for hash_, _ in tensors}) > 1:
            yield index
