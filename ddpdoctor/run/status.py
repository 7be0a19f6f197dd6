"""The status page: a memory-mapped file for each rank that says what the rank does now.

It is mapped into the rank's memory: a few stores, which survive SIGKILL. Standard library only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import lru_cache, partial
from typing import NamedTuple

from ddpdoctor.run import mapped
from ddpdoctor.run.names import FORMAT

PHASES = ("data", "forward", "backward", "optimizer", "other")
"""The phases whose sum is a rank's own time; ``wait`` is the rest of a step."""


class Phase(IntEnum):
    """What the training thread of a rank is doing."""

    STARTING = 0
    OTHER = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    WAIT = 6
    ENDED = 7

    @property
    def label(self) -> str:
        """The phase as a person reads it."""
        return self.name.lower()


class Parts(NamedTuple):
    """Where a closed step went; durations in nanoseconds."""

    number: int
    data: int
    forward: int
    backward: int
    optimizer: int
    other: int
    wait: int
    split: bool
    cpu: int = 0
    """For how long the training thread ran."""
    waited: int = 0
    """For how long it was ready to run and had no core. Both are 0 where that is not known, or is
    no part of the times, which a GPU's are not."""

    @property
    def total(self) -> int:
        """The step's duration."""
        return self.data + self.forward + self.backward + self.optimizer + self.other + self.wait


class Status(NamedTuple):
    """One reading of a status page. Times are Unix nanoseconds, durations nanoseconds."""

    pid: int
    rank: int
    world_size: int
    local_rank: int
    restart: int
    started: int
    phase: Phase
    since: int
    step: int
    """Steps closed so far, which is the number of the step under way."""
    epoch: int | None
    armed: int
    """Forward passes whose backward will be all-reduced: equal on all ranks of a healthy group."""
    last_total: int
    """Duration of the last closed step; 0 before the first."""
    dropped: int
    unwritten: bool
    """The disk refused the journal: records are missing from then on."""
    collective: str
    """Name of the collective under way, empty outside one."""
    site: str
    """``path:line`` of the user's code that entered the phase, empty when unknown."""
    reduced: int = 0
    """Backward passes begun that are all-reduced; 0, too, if an older version wrote the page."""
    parts: Parts | None = None
    """The newest closed step that was split; of steps that never are, the newest."""
    beat: int | None = None
    """When the rank's writing thread was last awake, a few times a second."""
    rss: int | None = None
    """Bytes of memory of the process."""
    allocated: int | None = None
    """Bytes that torch's CUDA allocator has given out on the rank's GPU, at a step's end."""
    reserved: int | None = None
    """Bytes that it has taken from the GPU."""
    peak: int | None = None
    """The most that it ever had given out."""
    gpu: str = ""
    """UUID of the rank's GPU, without the prefix that NVML gives it; empty if it has none."""
    stage: str = ""
    """The stages of a pipeline that the rank runs, from 0: ``1``, ``0,2``; empty without one."""
    cost: float | None = None
    """What ddpdoctor takes of the rank's time, as a part of it, as far as the rank measures it."""


_MAGIC = b"DDPDOCT\0"
_HEAD = struct.Struct("<8sII q ii ii q")
_PARTS = struct.Struct("<8q2I")
_PARTS_AT = 48
_MOST_SHORT = (1 << 32) - 1
_BEAT = struct.Struct("<q")
_BEAT_AT = 120
_LIVE = struct.Struct("<qqq")
_LIVE_AT = 128
_TOTALS = struct.Struct("<qqqq")
_TOTALS_AT = 160
_FLAGS = struct.Struct("<q")
_FLAGS_AT = 200
_REDUCED = struct.Struct("<q")
_REDUCED_AT = 192
_MEMORY = struct.Struct("<4q")
_MEMORY_AT = 208
_GPU_AT, _GPU_SIZE = 240, 16
_COLLECTIVE_AT, _COLLECTIVE_SIZE = 256, 64
_COLLECTIVE = struct.Struct(f"{_COLLECTIVE_SIZE}s")
_SITE_AT, _SITE_SIZE = 320, 688
_STAGE_AT, _STAGE_SIZE = 1008, 16
_COST = struct.Struct("<q")
_COST_AT = 152
_WHOLE = struct.Struct("<8sIIqiiiiq 8q2Iq 3q q4q qq 4q16s")
"""All of them at once, for readers: up to the first text."""
_PHASES = {int(phase): phase for phase in Phase}
PAGE_SIZE = 1024
"""Bytes of a status page."""

NO_EPOCH = -1


class StatusPage:
    """The writing end of a status page: a few stores into mapped memory, which survive SIGKILL."""

    def __init__(
        self, path: str, *, rank: int, world_size: int, local_rank: int, restart: int, started: int
    ) -> None:
        self.memory = self._memory = mapped.create(path, PAGE_SIZE)
        """The page itself, for who stores into it without these methods."""
        _HEAD.pack_into(
            self._memory, 0, _MAGIC, FORMAT, PAGE_SIZE,
            os.getpid(), rank, world_size, local_rank, restart, started,
        )  # fmt: skip
        self.show: Callable[[int, int, int], None] = partial(
            _LIVE.pack_into, self._memory, _LIVE_AT
        )
        """Store phase, since and armed, which change several times a step (`Status`: units)."""
        self.totals: Callable[[int, int, int, int], None] = partial(
            _TOTALS.pack_into, self._memory, _TOTALS_AT
        )
        """Store step, epoch, last_total and dropped, which change once a step."""
        self.reduced: Callable[[int], None] = partial(_REDUCED.pack_into, self._memory, _REDUCED_AT)
        """Store the number of backward passes begun that are all-reduced."""
        self.set_collective: Callable[[bytes], None] = partial(
            _COLLECTIVE.pack_into, self._memory, _COLLECTIVE_AT
        )
        """Store the name of the collective under way, made by :func:`page_name`."""
        self.totals(0, NO_EPOCH, 0, 0)

    # What follows a rank's writing thread stores. Zeros, as in a page of a version that has no such
    # field, say that nothing is known; so numbers that may be 0 are stored one higher.

    def set_parts(self, parts: Parts) -> None:
        """Store where a closed step went."""
        *times, cpu, waited = parts
        # Microseconds of these two are enough, and fit where a page had room.
        short = (min(each // 1000, _MOST_SHORT) for each in (cpu, waited))
        _PARTS.pack_into(self._memory, _PARTS_AT, *times, *short)

    def set_beat(self, now: int) -> None:
        """Say that the rank is awake, at Unix nanoseconds ``now``."""
        _BEAT.pack_into(self._memory, _BEAT_AT, now)

    def set_memory(self, rss: int | None, allocator: tuple[int, int, int] | None) -> None:
        """Store bytes: of the process, and allocated, reserved and peak of torch's allocator."""
        numbers = (rss, *(allocator or (None, None, None)))
        stored = (0 if number is None else number + 1 for number in numbers)
        _MEMORY.pack_into(self._memory, _MEMORY_AT, *stored)

    def set_cost(self, share: float) -> None:
        """Store what ddpdoctor takes of the rank's time, as a part of it; 0 if it is not known."""
        _COST.pack_into(self._memory, _COST_AT, int(share * 1e6))

    def set_gpu(self, uuid: str) -> None:
        """Store the UUID of the rank's GPU; one that is none is left out."""
        digits = uuid.rpartition("GPU-")[2].rpartition("MIG-")[2].replace("-", "")
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            return
        if len(raw) == _GPU_SIZE:
            self._memory[_GPU_AT : _GPU_AT + _GPU_SIZE] = raw

    def set_stage(self, stages: Iterable[int]) -> None:
        """Store the stages of a pipeline that the rank runs."""
        text = ",".join(map(str, stages)).encode()[: _STAGE_SIZE - 1]
        self._memory[_STAGE_AT : _STAGE_AT + _STAGE_SIZE] = text.ljust(_STAGE_SIZE, b"\0")

    def set_unwritten(self) -> None:
        """Say that the disk refused the journal."""
        _FLAGS.pack_into(self._memory, _FLAGS_AT, 1)

    def set_site(self, site: bytes) -> None:
        """Store a call site, made by :func:`page_text`."""
        self._memory[_SITE_AT : _SITE_AT + len(site)] = site


def _terminated(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[-(size - 1) :] + b"\0"


def page_text(site: str) -> bytes:
    """A call site as the page stores it; of a path that is too long the end is kept."""
    return _terminated(site, _SITE_SIZE)


def page_name(name: str) -> bytes:
    """A collective's name as the page stores it."""
    return _terminated(name, _COLLECTIVE_SIZE)


def read_status(path: str) -> Status:
    """Read a status page, live or left behind.

    Raises:
        UnreadableError: The file is too short, not a status page, or of a newer format.
        OSError: The file cannot be opened.
    """
    return parse_status(mapped.read(path, PAGE_SIZE), path)


def parse_status(page: bytes, path: str) -> Status:
    """What a status page says, read from ``path``.

    Raises:
        UnreadableError: It is too short, not a status page, or of a newer format.
    """
    mapped.check(page, path, "a status page", _MAGIC, FORMAT, PAGE_SIZE)
    (
        _, _, _, pid, rank, world, local_rank, restart, started,
        number, data, forward, backward, optimizer, other, wait, split, cpu, waited,
        beat, phase, since, armed, cost, step, epoch, last_total, dropped, reduced,
        unwritten, rss, allocated, reserved, peak, gpu,
    ) = _WHOLE.unpack_from(page, 0)  # fmt: skip
    parts = Parts(
        number, data, forward, backward, optimizer, other, wait, bool(split),
        cpu * 1000, waited * 1000,
    )  # fmt: skip
    return Status(
        pid,
        rank,
        world,
        local_rank,
        restart,
        started,
        _PHASES.get(phase, Phase.OTHER),
        since,
        step,
        None if epoch == NO_EPOCH else epoch,
        armed,
        last_total,
        dropped,
        bool(unwritten),
        _text(page, _COLLECTIVE_AT, _COLLECTIVE_SIZE),
        _text(page, _SITE_AT, _SITE_SIZE),
        reduced,
        parts if parts.total else None,
        beat or None,
        rss - 1 if rss > 0 else None,
        allocated - 1 if allocated > 0 else None,
        reserved - 1 if reserved > 0 else None,
        peak - 1 if peak > 0 else None,
        _uuid(gpu),
        _text(page, _STAGE_AT, _STAGE_SIZE),
        cost / 1e6 if cost > 0 else None,
    )


def _text(page: bytes, at: int, size: int) -> str:
    end = page.find(b"\0", at, at + size)
    return page[at : at + size if end < 0 else end].decode("utf-8", "replace")


@lru_cache(maxsize=2048)
def _uuid(raw: bytes) -> str:
    digits = raw.hex()
    places = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    return "-".join(digits[start:end] for start, end in places) if any(raw) else ""
