"""Find evidence of growing memory: its rate, the time until memory is full, and the holder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ddpdoctor.core.user_code import Location, user_file
from ddpdoctor.diagnose.source_files import files_of
from ddpdoctor.diagnose.speed.growing_names import source_of
from ddpdoctor.run.memory_growth import EARLY_SEGMENTS, Growth, steady_growth
from ddpdoctor.run.records.memory import (
    Allocated,
    DatasetRecord,
    Holder,
    HoldersRecord,
    MemoryPoint,
    MemoryRecord,
    WorkerMemory,
)
from ddpdoctor.run.records.training import LoopRecord, PassRecord
from ddpdoctor.run.snapshot import Rank, Run

MIN_GROWTH = 32 << 20  # Minimum growth of a rank in bytes
MIN_UNEXPLAINED = 192 << 20  # The same without a known holder
MIN_UNEXPLAINED_SHARE = 0.25  # And the minimum relative to the memory before
MIN_LOOKS = 3  # Minimum number of consecutive samples in which an object grows
MIN_SHARE = 0.2  # Minimum fraction of the growth that an object explains
MIN_WORKER = 48 << 20  # Minimum growth of a worker process in bytes
MIN_COPIES = 4  # Minimum number of samples that show copied pages
NEW_SHARE = 0.25  # Maximum growth of its memory in the same time, relative to the copies
HEAVIER = 1.25  # Minimum factor of CPU time or samples per step if batches get larger


def points_of(rank: Rank) -> tuple[MemoryPoint, ...]:
    """Return the readings of a rank's memory, oldest first."""
    return tuple(each for record in rank.records.of(MemoryRecord) for each in record.points)


class Grows(NamedTuple):
    """A rank whose memory grows steadily."""

    rank: Rank
    growth: Growth
    gpu: bool  # Whether it is GPU memory, not host memory


def growing(rank: Rank, least: int = MIN_GROWTH, segments: int | None = None) -> Grows | None:
    """Return the steady growth of a rank's memory. None if there is none."""
    points = points_of(rank)
    given = [(each.step, each.allocated) for each in points if each.allocated is not None]
    of_host = [(each.step, each.host) for each in points]
    for gpu, values in ((True, given), (False, of_host)):
        found = (
            steady_growth(values, least)
            if segments is None
            else steady_growth(values, least, segments)
        )
        if found is not None:
            return Grows(rank, found, gpu)
    return None


# -- the object that holds it


class Held(NamedTuple):
    """An object that holds the memory a rank gains."""

    holder: Holder
    line: Location | None
    rate: float | None  # Bytes that it gains per step. None if unknown.
    bounded: bool


def held_by(run: Run, found: Grows, fewest: int = MIN_LOOKS) -> Held | None:
    """Return the object that holds most of a rank's new memory. None if not found."""
    records = [each for each in found.rank.records.of(HoldersRecord) if each.looks >= fewest]
    candidates = [held for record in reversed(records) for held in _plausible(run, found, record)]
    return max(candidates, key=_weight, default=None)


def allocated_by(found: Grows) -> Allocated | None:
    """Return the line that allocates most of a rank's new GPU memory. None if unknown."""
    sites = [each for record in found.rank.records.of(HoldersRecord) for each in record.allocated]
    site = max(sites, key=lambda each: each.size, default=None)
    if site is None or site.size < MIN_SHARE * found.growth.per_step * site.steps:
        return None
    return site


def looked(rank: Rank, fewest: int) -> bool:
    """Return whether a rank has searched for holders of its memory at least this often."""
    return any(each.looks >= fewest for each in rank.records.of(HoldersRecord))


def _weight(held: Held) -> tuple[bool, bool, float]:
    hooks, graph = held.holder.sort == "hooks", held.holder.graph
    return hooks, graph and not held.bounded, float("inf") if held.rate is None else held.rate


def _plausible(run: Run, found: Grows, record: HoldersRecord) -> Iterator[Held]:
    steps = max(record.step - record.first, 1)
    for holder in record.found:
        rate = None if holder.each is None else holder.grew * holder.each / steps
        if rate is not None and rate < MIN_SHARE * found.growth.per_step:
            continue
        at = holder.at
        files = [each for each in files_of(run) if user_file(each)]
        source = source_of(files, at.path, at.function, holder.name, holder.sort)
        full = source.per_item and not _passed(found)
        # An object that keeps graphs is a fault even if it is re-created after thousands of steps.
        again = source.bounded and not holder.graph
        yield Held(holder, source.line, rate, holder.bound is not None or again or full)


def _passed(found: Grows) -> bool:
    """Return whether a pass over the data ended before memory began to grow."""
    loops = found.rank.records.of(LoopRecord)
    return any(each.state == "ended" and each.step <= found.growth.start for each in loops)


def heavier(run: Run, found: Grows) -> bool:
    """Return whether batches get larger: steps take more samples, or more CPU time."""
    span = range(found.growth.start, found.growth.end + 1)
    steps = [each for each in found.rank.steps if each.step in span and run.undisturbed(each)]
    third = len(steps) // 3
    if third < 2:
        return False
    early, late = (
        median(each.cpu if each.cpu is not None else each.own for each in part)
        for part in (steps[:third], steps[-third:])
    )
    samples = [each.samples for each in steps if each.samples]
    more = bool(samples) and samples[-1] > samples[0] * HEAVIER
    return more or late > HEAVIER * early


def _beyond_pass(rank: Rank, growth: Growth) -> bool:
    """Return whether growth over time lasts longer than a pass, which may fill a cache."""
    loops = rank.records.of(LoopRecord)
    ended = any(each.state == "ended" and each.time // 1_000_000 <= growth.start for each in loops)
    return ended or any(each.iterable for each in rank.records.of(PassRecord))


# -- the time until memory is full


def steps_left(run: Run, found: Grows, together: Sequence[Grows]) -> int | None:
    """Return the number of steps until memory is full, if the ranks ``together`` keep growing."""
    records = found.rank.records.of(MemoryRecord)
    newest = records[-1] if records else None
    if newest is None:
        return None
    beside = [each for each in together if each.gpu == found.gpu and _shares(each, found)]
    rate = sum(each.growth.per_step for each in beside)
    if found.gpu:
        used = [each.reserved or 0 for each in (_newest(one.rank) for one in beside) if each]
        free = None if newest.total is None else newest.total - sum(used)
    else:
        free = newest.available
    return None if free is None or rate <= 0 else max(int(free / rate), 0)


def _newest(rank: Rank) -> MemoryPoint | None:
    return next(reversed(points_of(rank)), None)


def _shares(one: Grows, other: Grows) -> bool:
    """Return whether two ranks fill the same memory."""
    if not one.gpu:
        return one.rank.opened.host == other.rank.opened.host
    mine, theirs = one.rank.status, other.rank.status
    same = mine is not None and theirs is not None and bool(mine.gpu) and mine.gpu == theirs.gpu
    return same or one.rank is other.rank


# -- workers of loaders


class WorkerGrows(NamedTuple):
    """A rank with a worker process whose memory grows steadily."""

    rank: Rank
    growth: Growth  # Its steps are milliseconds
    children: int
    copies: bool  # Whether it copies pages of the data set that it shared with the rank
    dataset: DatasetRecord | None


def _copied(readings: Sequence[tuple[int, WorkerMemory]]) -> Growth | None:
    """Return the pages that a worker copied while its memory did not grow.

    Fewer and fewer pages are left to copy, so this growth slows down from the start.
    """
    own = [(time, each.private) for time, each in readings if each.private is not None]
    if len(own) < MIN_COPIES:
        return None
    (start, low), (end, high) = own[0], own[-1]
    copied, grown = high - low, readings[-1][1].own - readings[0][1].own
    largest = max(after - before for (_, before), (_, after) in pairwise(own))
    if copied < MIN_WORKER or grown > NEW_SHARE * copied or largest > copied / 2:
        return None
    return Growth(start, end, low, high, copied / max(end - start, 1))


def growing_worker(rank: Rank) -> WorkerGrows | None:
    """Return the growth of a rank's worker process. None if there is none."""
    readings = [
        (each.time // 1_000_000, each.worker)
        for each in rank.records.of(MemoryRecord)
        if each.worker is not None
    ]
    if not readings:
        return None
    newest = readings[-1][1]
    mine = [each for each in readings if each[1].pid == newest.pid]
    datasets = rank.records.of(DatasetRecord)
    whole = [(time, worker.own) for time, worker in mine[1:]]
    grown = steady_growth(whole, MIN_WORKER, EARLY_SEGMENTS, warm_up=0)
    copied = _copied(mine[1:])
    if grown is not None and _beyond_pass(rank, grown):
        return WorkerGrows(rank, grown, newest.children, False, None)
    if copied is None or not datasets:
        return None
    largest = max(datasets, key=lambda each: each.size)
    return WorkerGrows(rank, copied, newest.children, True, largest)
