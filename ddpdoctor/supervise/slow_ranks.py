"""Gather details about ranks that may be slow, their GPUs and links, and suspected differences."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ddpdoctor.diagnose.replicas.differences import AVERAGED, FINGERPRINT_PATIENCE, unpacked
from ddpdoctor.diagnose.speed.lag import lags
from ddpdoctor.diagnose.speed.reasons import PATIENCE
from ddpdoctor.run.mapped import MAX_PROFILES, RequestWriter, Suspicion, SuspicionWriter
from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import DdpRecord, ElementsRecord, FingerprintRecord, TensorsRecord
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.supervisor import (
    BusyProcess,
    CoreClock,
    GpusRecord,
    GpuState,
    HeldMemory,
    LinkRecord,
    ProfileRequestRecord,
    SuspicionRecord,
)
from ddpdoctor.run.records.training import ProfileRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.system import proc
from ddpdoctor.system.network import Traffic, traffic
from ddpdoctor.system.nvml import Device, Health, NvmlReader, Reading, health
from ddpdoctor.system.process_activity import CoreClocks

# -- profiles of the ranks once one of them may hold up the others


MIN_STEPS, MIN_FIRST_STEPS = 8, 4
"""Minimum number of steps after the warm-up, or in total, to suspect a rank. A verdict needs more,
but a job that ends soon has to be sampled early.
"""

CHECK_INTERVAL = 1.0  # Minimum seconds between two checks of the steps
MAX_CHECK_SHARE = 0.1  # Maximum share of a core for the checks
MIN_BUSY = 0.1  # Minimum share of a core for a process to be recorded
MAX_NAMED = 6  # Maximum number of processes to record


class Stragglers:
    """Watch the pace of the ranks, and request profiles through a page of the run directory."""

    def __init__(self, page: RequestWriter, write: Callable[[Record], None]) -> None:
        self._page = page
        self._write = write
        self._asked = 0
        self._due = 0.0
        self._begin(0)

    def _begin(self, restart: int) -> None:
        self._restart = restart
        self._suspected: set[tuple[int, bool]] = set()
        """Suspected ranks, each with whether few steps were enough."""
        self._waiting: set[int] = set()  # Ranks that have not answered yet
        self._until = 0.0
        self._before: tuple[float, dict[int, float]] | None = None
        self._clocks = CoreClocks()

    def look(self, run: Run) -> bool:
        """Request profiles if a rank seems slow. Return whether the rules should examine them."""
        if run.restarts[-1] != self._restart:
            self._begin(run.restarts[-1])
        now = time.monotonic()
        if self._waiting:
            return self._answered(run, now)
        if now >= self._due:
            self.ask(run)
        return False

    def ask(self, run: Run) -> None:
        """Request samples if a rank seems slow.

        The rules wait for requested samples. So request them before the rules examine the run, or
        their finding lacks the line.
        """
        now = time.monotonic()
        if run.restarts[-1] != self._restart or self._waiting or run.exit_status is not None:
            return
        if now < self._due - CHECK_INTERVAL:
            # The last check took long, because there are many ranks.
            return
        if len(self._suspected) >= MAX_PROFILES:
            return
        began = time.thread_time()
        # A rank may be slow for a different reason later.
        fresh = (
            each
            for each in lags(run, MIN_STEPS, MIN_FIRST_STEPS)
            if (each.rank.rank, each.few) not in self._suspected
        )
        lag = next(fresh, None)
        self._due = now + max(CHECK_INTERVAL, (time.thread_time() - began) / MAX_CHECK_SHARE)
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
        """Close the file."""
        self._page.close()

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
    """Return the CPU time of every visible process."""
    stats = {pid: proc.read_stat(pid) for pid in proc.pids()}
    return {pid: stat.cpu_seconds for pid, stat in stats.items() if stat is not None}


def _busy(
    before: tuple[float, dict[int, float]], after: tuple[float, dict[int, float]]
) -> tuple[BusyProcess, ...]:
    """Return the busiest processes."""
    seconds = max(after[0] - before[0], 0.1)
    shares = {
        pid: (cpu - before[1].get(pid, 0.0)) / seconds
        for pid, cpu in after[1].items()
        if pid != os.getpid()
    }
    found: list[BusyProcess] = []
    for pid in sorted(shares, key=lambda each: -shares[each])[:MAX_NAMED]:
        stat = proc.read_stat(pid)
        if shares[pid] >= MIN_BUSY and stat is not None:
            share = round(shares[pid], 2)
            found.append(BusyProcess(pid, share, stat.core, proc.described(pid)))
    return tuple(found)


# -- fingerprints of replicas that may differ


EXAMINED_STEPS = 16  # Number of steps that the ranks examine one by one
MAX_TENSORS = 3  # Maximum number of differing tensors whose elements the ranks write
LEAD_TIME = 0.1  # Seconds for the ranks to read the request before the named step ends
MAX_OPEN = 1024  # Maximum number of fingerprints waiting for those of other ranks
_Key = tuple[int, int, int]  # Module, step, number of forwards whose backward was reduced


class Suspicions:
    """Compare the fingerprints of a run as they are written, and request details through a page."""

    def __init__(self, page: SuspicionWriter, write: Callable[[Record], None]) -> None:
        self._page = page
        self._write = write
        self._begin(0)

    def _begin(self, restart: int) -> None:
        self._restart = restart
        self._read: dict[int, int] = {}
        self._groups: dict[int, dict[int, tuple[int, ...]]] = {}
        self._open: dict[_Key, dict[int, FingerprintRecord]] = {}
        self._suspected = False  # Whether the ranks were asked to examine their steps
        self._located: Suspicion | None = None  # The last request, which named tensors
        self._waiting: set[int] = set()  # Ranks that have not written their elements yet
        self._until: float | None = None

    def look(self, run: Run) -> bool:
        """Compare new fingerprints.

        Return whether the rules should examine the run now, because the ranks have answered or the
        timeout is over.
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
        """Close the file."""
        self._page.close()

    def _compare(self, run: Run, rank: Rank, record: FingerprintRecord) -> None:
        """Compare a fingerprint with those of the other ranks, once all have arrived."""
        module = record.module
        group = self._groups.get(module, {}).get(rank.rank, ())
        # Other nodes compare their ranks themselves.
        mine = {each.rank for each in run.last} & set(group)
        if len(mine) < 2:
            return
        key = (module, record.step, record.armed)
        prints = self._open.setdefault(key, {})
        prints[rank.rank] = record
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        if not mine <= prints.keys():
            return
        self._open.pop(key, None)
        if len({each.parameters for each in prints.values()}) > 1:
            details = [unpacked(each.detail or "") for each in prints.values()]
            differing = tuple(
                index
                for index, tensors in enumerate(zip(*details, strict=False))
                if len({hash_ for hash_, _ in tensors}) > 1
            )
            self._suspect(run, module, key[1], differing)

    def _suspect(self, run: Run, module: int, seen: int, tensors: tuple[int, ...]) -> None:
        """Ask the ranks: for the first time, or again now that the tensors are known."""
        if self._located is not None or (self._suspected and not tensors):
            return
        newest = max((each.status.step for each in run.last if each.status is not None), default=0)
        totals = [each.total for rank in run.last for each in rank.steps[-64:] if each.total > 0]
        # Steps become faster when other processes leave the machine, so assume a fast step.
        quick = sorted(totals)[len(totals) // 4] if totals else LEAD_TIME * 1e9
        ahead = 1 + math.ceil(LEAD_TIME * 1e9 / quick)
        suspicion = Suspicion(
            self._restart, newest + ahead, EXAMINED_STEPS, module, tensors[:MAX_TENSORS]
        )
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


# -- ask the driver for the memory held on GPUs, and for the GPUs' state if a rank is slow


FIRST_QUERY_DELAY = 5.0  # Seconds from a rank's first complete step on a GPU to the first query
QUERY_INTERVAL = 60.0  # Seconds between two queries

READINGS, READING_INTERVAL = 3, 0.25
"""Number of readings of the GPUs once a rank seems slow, and seconds between them."""

_NEVER = float("inf")


class GpuWatch:
    """Query the driver in a thread, because that may take seconds, or hang with the driver.

    Of other users' processes, only the number is kept. Ranks in another pid namespace are skipped,
    because their pids mean something else. ``make`` creates the reader in that thread.
    """

    def __init__(
        self,
        make: Callable[[], NvmlReader] = NvmlReader,
        first: float = FIRST_QUERY_DELAY,
        again: float = QUERY_INTERVAL,
        pause: float = READING_INTERVAL,
    ) -> None:
        self._make = make
        self._reader: NvmlReader | None = None
        self._first, self._again, self._pause = first, again, pause
        self._namespace = namespace()
        self._due: float | None = None
        self._thread: threading.Thread | None = None
        self._results: list[GpusRecord | FaultRecord] = []
        self._reported: set[tuple[object, ...]] = set()
        self._slow = 0  # Number of times that ranks were suspected to be slow

    def look_at(self, run: Run) -> Iterator[GpusRecord | FaultRecord]:
        """Start a query when one is due. Yield the results of the last one if they are new."""
        ranks = self._ranks(run)
        now = time.monotonic()
        if self._due is None and ranks:
            self._due = now + self._first
        asked = sum(each.rank is not None for each in run.supervisor.of(ProfileRequestRecord))
        suspected = asked > self._slow
        due = self._due is not None and (now >= self._due or (suspected and self._due < _NEVER))
        if due and ranks and not (self._thread is not None and self._thread.is_alive()):
            self._due, self._slow = now + self._again, asked
            readings = READINGS if suspected else 0
            self._thread = threading.Thread(
                target=self._query, args=(ranks, readings), name="ddpdoctor-gpus", daemon=True
            )
            self._thread.start()
        while self._results:
            record = self._results.pop(0)
            if isinstance(record, FaultRecord):
                self._due = _NEVER
                yield record
                continue
            key = {(each.rank, each.restart, each.device_uuid) for each in record.held}
            if record.states or key - self._reported:
                self._reported |= key
                yield record

    def _ranks(self, run: Run) -> dict[int, tuple[int, int]]:
        """Return the rank and restart of each process that trains on a GPU of this machine."""
        return {
            rank.status.pid: (rank.rank, rank.restart)
            for rank in run.last
            if rank.status is not None
            and rank.status.step > 0
            and rank.status.phase != Phase.ENDED
            and rank.exit is None
            and rank.opened.namespace == self._namespace
            and any(record.device_uuid for record in rank.records.of(DdpRecord))
        }

    def _query(self, ranks: dict[int, tuple[int, int]], readings: int) -> None:
        try:
            self._results.append(self._held(ranks, readings))
        except Exception as error:
            self._results.append(FaultRecord(time=time.time_ns(), error=repr(error)))

    def _held(self, ranks: dict[int, tuple[int, int]], readings: int) -> GpusRecord:
        if self._reader is None:
            self._reader = self._make()
        held: list[HeldMemory] = []
        foreign: dict[Device, set[int]] = {}
        for device in self._reader.devices():
            # The driver lists processes of the whole GPU, whose UUID is not that of a partition.
            processes = (not device.mig and self._reader.processes(device)) or ()
            foreign[device] = {process.pid for process in processes} - ranks.keys()
            for process in processes:
                place = ranks.get(process.pid)
                if place is not None:
                    held.append(
                        HeldMemory(
                            rank=place[0],
                            restart=place[1],
                            device_uuid=device.uuid,
                            gpu=device.index,
                            name=device.name,
                            bytes=process.memory,
                        )
                    )
        states = self._states(held, foreign, readings) if readings else []
        return GpusRecord(time=time.time_ns(), held=tuple(held), states=tuple(states))

    def _states(
        self, held: Sequence[HeldMemory], foreign: Mapping[Device, set[int]], readings: int
    ) -> Iterator[GpuState]:
        """Yield the state of the GPUs on which ranks hold memory, from several readings."""
        assert self._reader is not None
        users = {device: [each for each in held if each.gpu == device.index] for device in foreign}
        seen: dict[Device, list[Reading]] = {device: [] for device in foreign if users[device]}
        for number in range(readings):
            if number:
                time.sleep(self._pause)
            for device, found in seen.items():
                found.append(self._reader.rest(device))
        for device, found in seen.items():
            computing = self._reader.computing(device)
            others = foreign[device] if computing is None else foreign[device] & computing
            lasting = health(self._reader, device)
            for user in users[device]:
                yield _gpu_state(user, found, lasting, len(others))


def _gpu_state(
    user: HeldMemory, readings: Sequence[Reading], lasting: Health, others: int
) -> GpuState:
    clocks = [each.clock * 1e6 for each in readings if each.clock is not None]
    reasons = [each.throttled or () for each in readings]
    return GpuState(
        rank=user.rank,
        restart=user.restart,
        device_uuid=user.device_uuid,
        gpu=user.gpu,
        others=others,
        clock=max(clocks, default=None),
        power_limit=readings[-1].power_limit,
        throttled=tuple(word for word in reasons[0] if all(word in each for each in reasons)),
        width=lasting.width,
        links=len(lasting.links),
        links_up=sum(lasting.links),
        remapping=lasting.rows_pending or lasting.rows_failed,
        uncorrected=readings[-1].ecc_errors,
    )


# -- the ranks' traffic to other nodes, once they wait for most of a step


RECENT_STEPS = 64
MIN_WAIT = 0.5  # Minimum share of steps that ranks spend waiting
FIRST_WINDOW, MAX_WINDOW = 5.0, 300.0  # Seconds. Each window is twice as long as the one before.
MIN_SENT = 64 << 10  # Minimum bytes that a link sends in a window to be recorded
MAX_LINKS = 16  # Maximum number of recorded links per window, those with the most bytes

MIN_FULL_SHARE = 0.5  # Minimum share of a window in which a full connection has data in flight

MIN_RATE = 0.25
"""Minimum rate of a full connection while data are in flight, as a share of the rate that the
kernel estimates for the path. A connection that mainly waits for acknowledgements of small messages
is far below.
"""


class LinkWatch:
    """Record the links to other nodes, unless no rank waits for the network."""

    def __init__(
        self,
        write: Callable[[Record], None],
        read: Callable[[set[int]], dict[int, Traffic]] = traffic,
    ) -> None:
        self._write = write
        self._read = read
        self._due = 0.0
        self._window = FIRST_WINDOW
        self._before: tuple[float, dict[int, Traffic]] | None = None

    def look(self, run: Run) -> bool:
        """Measure for a window if one is due. Returns whether the rules should examine the run."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + self._window
        own = [each for each in run.last if not each.elsewhere and each.exit is None]
        if not own or len(own) == run.world_size or not _wait(own):
            self._before = None
            return False
        before, self._before = self._before, None
        inodes = {
            inode
            for rank in own
            if rank.status is not None
            for inode in proc.sockets(Path("/proc") / str(rank.status.pid))
        }
        found = self._read(inodes)
        self._before = now, found
        if before is not None:
            self._window = min(2 * self._window, MAX_WINDOW)
            self._due = now + self._window
            links = sorted(_links(before[1], found, now - before[0]), key=lambda each: -each.sent)
            for each in links[:MAX_LINKS]:
                self._write(each)
        return False

    def close(self) -> None:
        """Do nothing: no file is open."""


def _wait(ranks: Sequence[Rank]) -> bool:
    """Return whether ranks wait for most of their newest steps, as far as measured."""
    steps = [step for rank in ranks for step in rank.steps[-RECENT_STEPS:]]
    steps = [step for step in steps if step.split] or steps
    total = sum(step.total for step in steps)
    # Steps that are not split have their waits in the backward.
    waits = sum(step.wait if step.split else step.backward + step.wait for step in steps)
    return total > 0 and waits >= MIN_WAIT * total


def _links(
    before: dict[int, Traffic], now: dict[int, Traffic], seconds: float
) -> Iterator[LinkRecord]:
    """Yield the traffic over each link in a window."""
    by_link: dict[tuple[str, str], list[tuple[Traffic, Traffic]]] = defaultdict(list)
    for inode, each in now.items():
        if inode in before:
            by_link[each.source, each.target].append((before[inode], each))
    for (source, target), connections in by_link.items():
        sent = sum(new.sent - old.sent for old, new in connections)
        if sent < MIN_SENT:
            continue
        full = [
            (new.sent - old.sent, new.busy - old.busy)
            for old, new in connections
            if new.busy - old.busy >= MIN_FULL_SHARE * seconds
            and new.sent - old.sent >= MIN_RATE * new.rate * (new.busy - old.busy)
        ]
        busy = max((each for _, each in full), default=0.0)
        yield LinkRecord(
            time=time.time_ns(),
            host=socket.gethostname(),
            source=source,
            target=target,
            seconds=round(seconds, 1),
            sent=sent,
            busy=round(min(busy / seconds, 1.0), 2),
            rate=round(sum(each for each, _ in full) / busy) if busy else 0,
            rtt=max(new.rtt for _, new in connections),
        )
