"""Explain an out-of-memory error: the memory of the rank, its growth, and that of others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from ddpdoctor.core.formatting import binary_size, count, named
from ddpdoctor.diagnose.crashes.rank_endings import Ending
from ddpdoctor.diagnose.crashes.resource_errors import FailureFacts
from ddpdoctor.diagnose.source_files import brief
from ddpdoctor.diagnose.speed.memory import Grows, growing, held_by, points_of
from ddpdoctor.run.memory_growth import EARLY_SEGMENTS
from ddpdoctor.run.records.memory import AllocatorFacts, MemoryRecord, OutOfMemoryRecord
from ddpdoctor.run.snapshot import Rank, Run

GPU_MEMORY = "DDP928"  # The code of torch's message that a GPU is out of memory
MIN_GROWTH = 16 << 20  # Minimum growth in bytes to mention. It may not be the cause.
MIN_FRAGMENTED = 0.1  # Minimum fraction of memory, reserved and unused, to count as fragmentation
MIN_BATCH_FACTOR = 1.2
"""Minimum factor by which a batch that may be too large exceeds all earlier ones."""
MAX_BLOCKS = 3
_LOOKS = 2

_SIZE = r"([\d.]+) ([KMGT]?)i?B"
_FREE = re.compile(rf"total capacity of {_SIZE} of which {_SIZE} is free")
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_MINE = re.compile(rf"this process has {_SIZE} memory in use")
_RESERVED = re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated")
_POWER = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class Message(NamedTuple):
    """The content of torch's message, in bytes. Missing values are None or empty."""

    total: int | None
    free: int | None
    mine: int | None
    unused: int | None
    others: dict[int, int]  # Memory of other processes on the GPU, by pid


def _bytes(number: str, letter: str) -> int:
    return int(float(number) * (1 << _POWER[letter]))


def message_of(text: str) -> Message:
    """Parse torch's message about a full GPU (1.13 to 2.13)."""
    free, mine, unused = _FREE.search(text), _MINE.search(text), _RESERVED.search(text)
    return Message(
        _bytes(free[1], free[2]) if free else None,
        _bytes(free[3], free[4]) if free else None,
        _bytes(mine[1], mine[2]) if mine else None,
        _bytes(unused[1], unused[2]) if unused else None,
        {int(pid): _bytes(number, letter) for pid, number, letter in _OTHER.findall(text)},
    )


def gpu_facts(run: Run, cause: Ending) -> FailureFacts:
    """Return the facts about a rank whose GPU was full."""
    rank = _rank_of(run, cause)
    said = message_of(cause.message)
    record = None if rank is None else rank.records.first(OutOfMemoryRecord)
    gpu = None if record is None else record.gpu
    grown = None if rank is None else growing(rank, MIN_GROWTH, EARLY_SEGMENTS)
    evidence = [*_held(said, gpu), *_others(run, said)]
    fragments, fix = _fragmentation(said, gpu)
    evidence += fragments
    if (
        record is not None
        and _elements(record.shape) > MIN_BATCH_FACTOR * _elements(record.largest) > 0
    ):
        shapes = " x ".join(map(str, record.shape)), " x ".join(map(str, record.largest))
        evidence.append(f"its last batch was {shapes[0]}, the largest before it {shapes[1]}")
        fix = "Limit the length of a batch: cut, bucket or pack long samples."
    if rank is not None and grown is not None and grown.gpu:
        evidence += _growth(run, grown)
        fix = "Find what it keeps of each step, and keep numbers (`.item()`) or less of it."
    if record is not None and record.file:
        evidence.append(f"for pytorch.org/memory_viz: {run.path / record.file}")
    return FailureFacts(fix=fix, evidence=tuple(evidence))


def _held(said: Message, gpu: AllocatorFacts | None) -> Iterator[str]:
    if said.mine is not None and said.total is not None:
        yield f"it held {binary_size(said.mine)} of the GPU's {binary_size(said.total)}"
    elif gpu is not None:
        yield f"torch held {binary_size(gpu.reserved)}, {binary_size(gpu.allocated)} of it in use"
    for block in gpu.blocks[:MAX_BLOCKS] if gpu is not None else ():
        where = f" from {brief(block.line)}" if block.line is not None else ""
        yield f"{count(block.times, 'block')} of {binary_size(block.size)}{where}"


def _fragmentation(said: Message, gpu: AllocatorFacts | None) -> tuple[list[str], str]:
    """Return evidence and a fix if much memory is reserved and not used."""
    total = said.total or (gpu.total if gpu is not None else None)
    unused = said.unused or (gpu.reserved - gpu.allocated if gpu is not None else 0)
    if not total or unused < MIN_FRAGMENTED * total:
        return [], ""
    free = gpu.largest_free if gpu is not None else None
    pieces = f", in pieces of at most {binary_size(free)}" if free else ""
    fix = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or keep shapes alike."
    if gpu is not None and gpu.expandable:
        fix = "Keep shapes alike: the allocator's segments are expandable already."
    return [f"fragmentation: {binary_size(unused)} reserved and not used{pieces}"], fix


def _others(run: Run, said: Message) -> Iterator[str]:
    """Describe the other holders of the GPU's memory."""
    if not said.others:
        return
    pids = {rank.opened.pid: rank.rank for rank in run.last if not rank.elsewhere}
    mine = {pids[pid]: size for pid, size in said.others.items() if pid in pids}
    if mine:
        who = f"{named(mine)}, on the same GPU,"
        yield f"{who} held {binary_size(sum(mine.values()))} of it"
    rest = [size for pid, size in said.others.items() if pid not in pids]
    if rest:
        other = count(len(rest), "other process", "other processes")
        yield f"{other} held {binary_size(sum(rest))}"


def _growth(run: Run, found: Grows) -> Iterator[str]:
    growth, held = found.growth, held_by(run, found, _LOOKS)
    span = f"step {growth.start} to {binary_size(growth.high)} at step {growth.end}"
    rate = f"it grew by {binary_size(growth.per_step)} in each step"
    yield f"{rate}, from {binary_size(growth.low)} at {span}"
    if held is not None and not held.bounded:
        where = f", {brief(held.line)}" if held.line is not None else ""
        yield f"what grew is `{held.holder.name}` ({held.holder.sort}){where}"


def host_facts(run: Run, cause: Ending) -> Iterator[str]:
    """Describe how the memory of ranks grew before the kernel killed one of them."""
    killed = _rank_of(run, cause)
    if killed is None:
        return
    newest = {rank.rank: points_of(rank)[-1].host for rank in run.last if points_of(rank)}
    if killed.rank in newest:
        yield f"it had {binary_size(newest[killed.rank])} of private memory at its last step"
    beside = sum(size for number, size in newest.items() if number != killed.rank)
    if beside:
        yield f"the other ranks had {binary_size(beside)}"
    workers = [each.worker for each in killed.records.of(MemoryRecord) if each.worker is not None]
    if workers:
        yield (
            f"one of its {count(workers[-1].children, 'child process', 'child processes')} had "
            f"{binary_size(workers[-1].own)}"
        )
    grown = growing(killed, MIN_GROWTH, EARLY_SEGMENTS)
    if grown is not None and not grown.gpu:
        yield from _growth(run, grown)


def _rank_of(run: Run, cause: Ending) -> Rank | None:
    return next((each for each in run.last if each.rank == cause.rank), None)


def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if shape else 0
