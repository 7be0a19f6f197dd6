"""Read random number generators to show whether ranks and workers draw the same numbers.

States are read and hashed, and nothing is drawn. torch, numpy and Python each have one generator
that all code of a process shares. The Mersenne Twister of all three holds a block of 624 numbers
and replaces it when all are used. So the block and the position in it show approximately how many
numbers were drawn. A rank reads them at each forward and backward of a few consecutive steps, and
when a batch arrives. A worker of a loader reads them at its first batches and writes into a
separate file.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from typing import Any
from zlib import crc32

from ddpdoctor.probe.runtime import rank
from ddpdoctor.probe.runtime.events import Observer
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.base import encode
from ddpdoctor.run.records.training import GeneratorState, RandomRecord

FIRST_FORWARD, LAST_FORWARD = 3, 8  # the first and the last forward at which generators are read
WORKER_BATCHES = 3  # number of a worker's first batches
MAX_WORKERS = 2  # maximum number of workers of a loader that write
MAX_RANKS = 8  # maximum number of ranks whose workers write
MAX_GENERATIONS = 2  # maximum number of workers with the same number that write
_BLOCK = 624


def states(place: str) -> list[GeneratorState]:
    """Read the generators of the loaded libraries."""
    found: list[GeneratorState] = []
    torch = sys.modules["torch"]
    state = torch.default_generator.get_state()
    if state.numel() >= 24 + 8 * _BLOCK:
        # struct mt19937_data_pod (2.4 to 2.15): seed, left, seeded, next, and the block.
        data = state.numpy().tobytes() if "numpy" in sys.modules else bytes(state.tolist())
        used = struct.unpack_from("<QiiQ", data)[3]
        found.append(GeneratorState("torch", place, crc32(data[24 : 24 + 8 * _BLOCK]), used))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, block, used, *_ = numpy.get_state()
        if name == "MT19937":
            found.append(GeneratorState("numpy", place, crc32(block.tobytes()), int(used)))
    python = sys.modules.get("random")
    if python is not None:
        numbers = python.getstate()[1]
        if len(numbers) == _BLOCK + 1:
            block = crc32(struct.pack(f"<{_BLOCK}I", *numbers[:-1]))
            found.append(GeneratorState("python", place, block, numbers[-1]))
    return found


class RandomNumbers(Observer):
    """The generators of a rank."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        # Read it now, because the job may have destroyed its process group at the end.
        self._rank = sys.modules["torch"].distributed.get_rank()
        self._forwards = 0
        self._drops = False
        self._states: list[GeneratorState] = []

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """Read the states after the data set's draws."""
        if self._forwards >= FIRST_FORWARD:
            self._read("batch")

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """Read the states before the first draws of the model."""
        self._forwards += 1
        if self._forwards == FIRST_FORWARD:
            self._drops = any("drop" in type(each).__name__.lower() for each in ddp.modules())
        if self._forwards >= FIRST_FORWARD:
            self._read("forward")

    def backward_begins(self) -> None:
        """Read the states after the last draws of the loss."""
        if self._forwards < FIRST_FORWARD:
            return
        self._read("backward")
        if self._forwards >= LAST_FORWARD:
            self._end()

    def rank_ends(self) -> None:
        """Record the states also for a job of few steps."""
        if self._states:
            self._end()

    def _read(self, place: str) -> None:
        budget = self.state.budget
        if budget.left() <= 0 or len(self._states) > 9 * (LAST_FORWARD - FIRST_FORWARD + 1):
            # A missing state would look like more draws.
            self._states.clear()
            self._rest()
            return
        with budget.spending():
            self._states += states(place)

    def _end(self) -> None:
        self.state.recorder.add(
            RandomRecord(
                time=time.time_ns(), rank=self._rank, drops=self._drops, states=tuple(self._states)
            )
        )
        self._states = []
        self._rest()

    def _rest(self) -> None:
        self.rest("batch_fetched", "forward_begins", "backward_begins")


_batches = 0  # state of this process if it is a loader's worker
_seen: list[GeneratorState] = []


def worker_begins() -> bool:
    """Read the generators of a worker before its first batch. Return False in other processes."""
    if rank.active is not None or _seen or not sys.modules["torch"].utils.data.get_worker_info():
        return False
    _seen.extend(states("begin"))
    return True


def batch_made(result: Any, fetcher: Any, *args: Any) -> None:
    """Read the generators after a worker's batch, and record the states of the first batches."""
    global _batches
    if _batches >= WORKER_BATCHES:
        return
    _batches += 1
    _seen.extend(states("batch"))
    if _batches == WORKER_BATCHES:
        _write(type(fetcher.dataset).__name__)


def _write(dataset: str) -> None:
    number = rank.environment_int("RANK")
    worker = sys.modules["torch"].utils.data.get_worker_info().id
    if number is None or number >= MAX_RANKS or worker >= MAX_WORKERS:
        return
    restart = rank.environment_int("TORCHELASTIC_RESTART_COUNT") or 0
    stem = os.path.join(rank.run_directory(), f"process-worker-{number}-{restart}-{worker}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for generation in range(MAX_GENERATIONS):
        try:
            descriptor = os.open(f"{stem}-{generation}.jsonl", flags, 0o600)
        except FileExistsError:
            continue
        record = RandomRecord(
            time=time.time_ns(),
            rank=number,
            restart=restart,
            worker=worker,
            dataset=dataset,
            generation=generation,
            states=tuple(_seen),
        )
        try:
            os.write(descriptor, encode(record))
        finally:
            os.close(descriptor)
        return
