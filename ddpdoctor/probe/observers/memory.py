"""Follow the memory of a rank. Once it grows steadily, find the objects that hold it.

Between two steps the allocator's counters and the process's pages are read in 20 to 40 us. This
happens in each of the first steps, then at growing intervals: doubling the number of steps adds 33
readings. If they grow steadily, several scans compare the objects that the job's names
refer to (`ddpdoctor.probe.observers.holders`). The writing thread reads the memory of child
processes, and that of the machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from ddpdoctor.probe.observers import holders
from ddpdoctor.probe.observers.loaders import built_loaders
from ddpdoctor.probe.observers.stack_sampling import child_pids
from ddpdoctor.probe.runtime import events, rank, torch_devices, torch_memory
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.probe.runtime.recorder import statm
from ddpdoctor.run.memory_growth import EARLY_SEGMENTS, steady_growth
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.memory import (
    Allocated,
    DatasetRecord,
    Holder,
    HoldersRecord,
    MemoryPoint,
    MemoryRecord,
    OutOfMemoryRecord,
    WorkerMemory,
)

# -- readings between two steps

READINGS = 48  # number of readings while the number of steps grows by a factor of 2.7
JUDGED_EVERY = 4  # number of readings between two judgements
MIN_SUSPECT_GROWTH = 24 << 20  # minimum growth in bytes that starts a series of scans
MAX_POINTS = 4096  # maximum number of readings; then every second one is dropped

SCAN_INTERVALS = (0, 2, 4, 8, 16)  # steps from a suspicion or a scan to the next scan
MAX_SITES = 3  # maximum number of recorded lines
MAX_SITE_SCANS = 4  # number of scans during which torch records allocations
MIN_SCANS = 2  # minimum number of scans for a record if the rank ends early
MAX_SERIES = 3  # maximum number of series; a later one needs twice the growth, and no result yet


class Memory(Observer):
    """The memory of one rank."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._points: list[MemoryPoint] = []
        self._written = 0  # number of recorded points
        self._host: tuple[int, int] | None = None  # private and virtual bytes in the first reading
        self._first: int | None = None  # the step of the first reading
        self._device: Any = None
        self._total: int | None = None
        self._datasets: set[tuple[str, str]] = set()
        self._workers = Workers()
        self._scans = Scans(state)
        self._shape: tuple[int, ...] = ()
        self._largest: tuple[int, ...] = ()
        events.before_step(1, self._read)

    def _read(self) -> None:
        """Read the memory at the end of a step."""
        tracker = self.state.tracker
        if self._device is None and tracker.memory_of is not None:
            self._device = tracker.memory_of
            self._total = torch_devices.total_memory(self._device)
            self.wake("batch_fetched")
        allocated = reserved = None
        if self._device is not None:
            with contextlib.suppress(Exception):
                allocated, reserved, _ = torch_devices.allocated_memory(self._device)
        if len(self._points) >= MAX_POINTS:
            del self._points[1::2]
            self._written = len(self._points)
        host = self._private()
        if host is not None:
            self._points.append(
                MemoryPoint(tracker.steps, time.time_ns(), host, allocated, reserved)
            )
        if self._first is None:
            self._first = tracker.steps
        ahead = max(1, (tracker.steps - self._first) // READINGS)
        events.before_step(tracker.steps + ahead, self._read)
        if not len(self._points) % JUDGED_EVERY:
            self._scans.consider(self._points, self._device)
            self._note_datasets()

    def _private(self) -> int | None:
        """Return the private memory, without growth within the initially reserved address space."""
        found = statm()
        if found is None:
            return None
        size, resident, shared = found
        private = resident - shared
        if self._host is None:
            self._host = private, size
        return min(private, self._host[0] + size - self._host[1])

    def _note_datasets(self) -> None:
        """Record the large containers of data sets that workers read."""
        for loader, _ in built_loaders.living() if len(self._datasets) < MAX_DATASETS else ():
            if getattr(loader, "num_workers", 0) > 0:
                self._workers.present = True
                for record in large_containers(loader.dataset):
                    self._workers.copies = True
                    if (record.type, record.name) not in self._datasets:
                        self._datasets.add((record.type, record.name))
                        self.state.recorder.add(record)

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """Remember the shapes of the largest tensor in this batch and in all batches so far."""
        if _elements(self._shape) > _elements(self._largest):
            self._largest = self._shape
        self._shape = max(_shapes(data), key=_elements, default=())

    def write(self) -> None:
        """Record the new points, in the writing thread, once a second."""
        points = tuple(self._points[self._written :])
        worker = self._workers.look()
        if points or worker is not None:
            self._written += len(points)
            self.state.recorder.add(
                MemoryRecord(
                    time=time.time_ns(),
                    points=points,
                    available=available(),
                    total=self._total,
                    worker=worker,
                )
            )

    def rank_ends(self) -> None:
        """Record the rest."""
        self.write()
        self._scans.write()

    def rank_fails(self, error: BaseException) -> None:
        """Record the rank's memory if an exception reports that the GPU is out of memory."""
        self.write()
        self._scans.write()
        if not torch_memory.is_out_of_memory(error) or self._device is None:
            return
        facts = torch_memory.allocator_facts(self._device)
        found = torch_memory.snapshot(self._device)
        if facts is not None and found is not None:
            facts = torch_memory.with_snapshot(facts, found)
        number = sys.modules["torch"].distributed.get_rank()
        name = f"{rank_stem(number, self.state.restart)}.memory.pickle"
        kept = False
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = bool(found) and torch_memory.keep(
                found, os.path.join(rank.run_directory(), name)
            )
        self.state.recorder.add(
            OutOfMemoryRecord(
                time=time.time_ns(),
                step=self.state.tracker.steps,
                gpu=facts,
                shape=self._shape,
                largest=self._largest,
                file=name if kept else "",
            )
        )


def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if shape else 0


def _shapes(data: Any) -> Iterator[tuple[int, ...]]:
    kind = type(data)
    parts = data.values() if kind is dict else data if kind in (list, tuple) else (data,)
    for each in parts:
        if torch_memory.is_plain(type(each)):
            yield tuple(each.shape)


# -- scans for the objects that hold it


class Scans:
    """The scans of one rank for the objects that grow."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._series = 0
        self._least = MIN_SUSPECT_GROWTH
        self._sizes: dict[holders.Place, holders.Noted] | None = None
        self._grown: dict[holders.Place, Holder] = {}
        self._count = 0
        self._soon = False
        self._first = 0
        self._cost = 0
        self._sites: torch_memory.AllocationSites | None = None
        self._allocated: tuple[Allocated, ...] = ()
        self._at = 0  # the step of the last scan
        self._complete = True
        self._fresh = False  # whether a result is still to be recorded

    def consider(self, points: list[MemoryPoint], device: Any) -> None:
        """Begin a series of scans if memory grows steadily."""
        if self._count or self._series >= MAX_SERIES or not self._state.budget.enabled:
            return
        host = [(each.step, each.host) for each in points]
        gpu = [(each.step, each.allocated) for each in points if each.allocated is not None]
        series = [steady_growth(each, self._least, EARLY_SEGMENTS) for each in (host, gpu)]
        grown = [each for each in series if each is not None]
        if grown:
            self._series += 1
            self._least = 2 * max(each.size for each in grown)
            # Fast growth may fill the memory before the usual scans are done.
            self._soon = any(each.size >= each.low for each in grown)
            self._sizes, self._grown, self._cost = None, {}, 0
            self._allocated = ()
            if series[1] is not None:
                self._sites = torch_memory.AllocationSites(device)
            self._next()

    def _next(self) -> None:
        ahead = 1 if self._soon else max(SCAN_INTERVALS[self._count], 1)
        events.before_step(self._state.tracker.steps + ahead, self._scan)

    def _scan(self) -> None:
        began, budget = time.thread_time_ns(), self._state.budget
        scan = holders.Scan(sys._getframe(1), self._sizes)
        if self._sizes is None:
            self._first, self._complete = self._state.tracker.steps, scan.complete
        else:
            self._grown = holders.merged(self._grown, scan)
        self._complete = self._complete and scan.complete
        self._sizes = scan.sizes
        self._count += 1
        self._scan_sites()
        cost = time.thread_time_ns() - began
        self._cost += cost
        # A suspicion has an extra allowance, so that other diagnoses keep their budget.
        budget.grant(cost)
        self._fresh = self._count >= MIN_SCANS
        if self._count < len(SCAN_INTERVALS):
            self._next()
            if self._count > MIN_SCANS:
                self.write()
            return
        self.write()
        self._sizes, self._count = None, 0
        if any(map(holders.weighs, self._grown.values())):
            self._series = MAX_SERIES

    def _scan_sites(self) -> None:
        """Find the lines with allocations since the last scan that were not freed."""
        at, self._at = self._at, self._state.tracker.steps
        if self._sites is None:
            return
        steps = self._at - at
        found = [Allocated(*each, steps) for each in self._sites.look().most_common(MAX_SITES)]
        # Blocks that live for a few steps appear in one scan only.
        lines = {each.line for each in self._allocated}
        kept = [each for each in found if not lines or each.line in lines]
        self._allocated = tuple(kept)
        if self._count == MAX_SITE_SCANS:
            self._sites.end()
            self._sites = None

    def write(self) -> None:
        """Record the objects that have grown in all scans so far."""
        if not self._fresh:
            return
        self._fresh = False
        self._state.recorder.add(
            HoldersRecord(
                time=time.time_ns(),
                first=self._first,
                step=self._state.tracker.steps,
                looks=self._count,
                complete=self._complete,
                found=holders.weightiest(self._grown),
                allocated=self._allocated,
                cost=self._cost,
            )
        )


# -- the memory of worker processes

WORKERS_EVERY = 2_000_000_000  # nanoseconds between two readings of workers at first
WORKERS_LATER = 10_000_000_000  # nanoseconds between later ones
EARLY_READINGS = 12
EARLY_PRICE, LATE_PRICE = 50, 1000  # wait before the next reading, in durations of the last one
MIN_COPIED = 16 << 20  # minimum size in bytes of a container whose copies matter
MAX_DATASETS = 8
MAX_WRAPPED = 4  # maximum number of nested data sets that are opened
_ROLLUP = b"Private_"


class Workers:
    """The memory of a rank's child process, read in the writing thread.

    Only the kernel's list of pages shows copies of pages that the parent had written. It takes 5 to
    50 ms per GB, so it is read only if the data set has much to copy.
    """

    def __init__(self) -> None:
        self.present = False  # whether a loader has workers
        self.copies = False  # whether the workers may copy much of the loader's data set
        self._pid = 0
        self._due = 0
        self._readings = 0

    def look(self) -> WorkerMemory | None:
        """Read the memory of one child process if a reading is due."""
        now = time.perf_counter_ns()
        if not self.present or now < self._due:
            return None
        began = time.thread_time_ns()
        pids = child_pids()
        if self._pid not in pids:
            # Choose the oldest one: workers start in the order of their numbers.
            self._pid = min(pids, default=0)
            self._readings = 0
        found = statm(self._pid) if self._pid else None
        private = _private_of(self._pid) if found is not None and self.copies else None
        early = self._readings < EARLY_READINGS
        took = time.thread_time_ns() - began
        self._readings += 1
        wait = max(WORKERS_EVERY, EARLY_PRICE * took) if early else WORKERS_LATER
        self._due = now + (wait if early else max(wait, LATE_PRICE * took))
        if found is None:
            return None
        return WorkerMemory(self._pid, found[1] - found[2], len(pids), private)


def _private_of(pid: int) -> int | None:
    """Return the bytes of a process's unshared pages."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb", buffering=0) as file:
            lines = file.read(8192).splitlines()
        return sum(int(each.split()[1]) for each in lines if each.startswith(_ROLLUP)) << 10
    except (OSError, ValueError, IndexError):
        return None


def large_containers(dataset: Any) -> Iterator[DatasetRecord]:
    """Yield the large containers of Python objects in a data set and those that it wraps."""
    for _ in range(MAX_WRAPPED):
        named = holders.dict_of(dataset) or {}
        for name, value in named.items():
            size, each = holders.worth(value)
            if size * (each or 0) >= MIN_COPIED:
                method = getattr(type(dataset), "__getitem__", None) or getattr(
                    type(dataset), "__iter__", None
                )
                code = getattr(method, "__code__", None)
                yield DatasetRecord(
                    type=type(dataset).__name__,
                    name=str(name),
                    holds=holders.words_of(value),
                    size=size,
                    path="" if code is None else os.path.abspath(code.co_filename),
                    line=0 if code is None else code.co_firstlineno,
                )
        dataset = named.get("dataset")
        if dataset is None:
            return


# -- the memory of the machine

_CGROUPS = (
    ("/sys/fs/cgroup{path}", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory{path}", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available() -> int | None:
    """Return the free memory of the machine, or of this process's cgroup if that is less."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/meminfo", "rb", buffering=0) as file:
            lines = file.read(512).splitlines()
        found += [int(each.split()[1]) << 10 for each in lines if each[:13] == b"MemAvailable:"]
    paths = {""}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        with open("/proc/self/cgroup", encoding="utf-8") as text:
            rows = [line.rstrip("\n").split(":", 2) for line in text]
        paths |= {row[2].rstrip("/") for row in rows if row[1] in ("", "memory")}
    for folder, limit, usage in _CGROUPS:
        for path in paths:
            with contextlib.suppress(OSError, ValueError):
                most, used = (
                    int(_read(os.path.join(folder.format(path=path), name)))
                    for name in (limit, usage)
                )
                found.append(most - used)
    return max(min(found), 0) if found else None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read(32)
