"""The status page: a memory-mapped file for each rank with the rank's current activity.

Updates are a few stores into mapped memory, which survive SIGKILL. Standard library only, since
ranks load this.
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
"""The phases of a rank's own time. The rest of a step is ``wait``."""


class Phase(IntEnum):
    """The activity of a rank's training thread."""

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
        """The phase as shown to people."""
        return self.name.lower()


class Parts(NamedTuple):
    """The time of a closed step by part. Durations are nanoseconds."""

    number: int
    data: int
    forward: int
    backward: int
    optimizer: int
    other: int
    wait: int
    split: bool
    cpu: int = 0  # CPU time of the training thread
    waited: int = 0
    """Time in which the thread was ready to run and had no core. Both are 0 if not known, or if the
    times are a GPU's."""

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
    step: int  # Number of closed steps, which is the number of the current step
    epoch: int | None
    armed: int
    """Number of forwards whose backward is all-reduced. Equal on all ranks of a healthy group."""
    last_total: int  # Duration of the last closed step. 0 before the first.
    dropped: int
    unwritten: bool  # Whether the disk refused the journal, so that later records are missing
    collective: str  # Name of the current collective. Empty outside one.
    site: str  # ``path:line`` of the user's code that entered the phase. Empty if not known.
    reduced: int = 0  # Number of begun backward passes that are all-reduced
    parts: Parts | None = None
    """The newest closed step that was split, or the newest one if none is."""
    beat: int | None = None
    """Last time that the rank's writing thread ran, which it does a few times a second."""
    rss: int | None = None  # Resident bytes of the process
    allocated: int | None = None
    """Bytes allocated by torch's CUDA allocator on the rank's GPU at the end of a step."""
    reserved: int | None = None  # Bytes that the allocator has reserved on the GPU
    peak: int | None = None  # Maximum of allocated bytes
    gpu: str = ""  # UUID of the rank's GPU without NVML's prefix. Empty without GPU.
    stage: str = ""
    """The pipeline stages of the rank, from 0: ``1``, ``0,2``. Empty without a pipeline."""
    cost: float | None = None  # The measured share of the rank's time that ddpdoctor takes, 0 to 1
    elsewhere: bool = False  # Whether this is a copy of a page from another node


_MAGIC = b"DDPDOCT\0"
_HEAD = struct.Struct("<8sII q ii ii q")
_PARTS, _PARTS_AT = struct.Struct("<8q2I"), 48
_LIVE, _LIVE_AT = struct.Struct("<qqq"), 128
_TOTALS, _TOTALS_AT = struct.Struct("<qqqq"), 160
_MEMORY, _MEMORY_AT = struct.Struct("<4q"), 208
_NUMBER = struct.Struct("<q")
_UNWRITTEN, _ELSEWHERE = 1, 2  # Flags
_BEAT_AT, _COST_AT, _REDUCED_AT, _FLAGS_AT = 120, 152, 192, 200
_GPU_AT, _GPU_SIZE = 240, 16
_COLLECTIVE_AT, _COLLECTIVE_SIZE = 256, 64
_COLLECTIVE = struct.Struct(f"{_COLLECTIVE_SIZE}s")
_SITE_AT, _SITE_SIZE = 320, 688
_STAGE_AT, _STAGE_SIZE = 1008, 16
_WHOLE = struct.Struct("<8sIIqiiiiq 8q2Iq 3q q4q qq 4q16s")
"""All fields before the texts at once, for readers."""
_PHASES = {int(phase): phase for phase in Phase}
PAGE_SIZE = 1024  # Bytes of a status page

NO_EPOCH = -1


class StatusPage:
    """Writes a status page."""

    def __init__(
        self, path: str, *, rank: int, world_size: int, local_rank: int, restart: int, started: int
    ) -> None:
        self.memory = self._memory = mapped.create(path, PAGE_SIZE)
        """The mapped page, for C code that stores into it directly."""
        _HEAD.pack_into(
            self._memory, 0, _MAGIC, FORMAT, PAGE_SIZE,
            os.getpid(), rank, world_size, local_rank, restart, started,
        )  # fmt: skip
        self.show: Callable[[int, int, int], None] = partial(
            _LIVE.pack_into, self._memory, _LIVE_AT
        )
        """Store phase, since and armed, which change several times a step."""
        self.totals: Callable[[int, int, int, int], None] = partial(
            _TOTALS.pack_into, self._memory, _TOTALS_AT
        )
        """Store step, epoch, last_total and dropped, which change once a step."""
        self.reduced: Callable[[int], None] = partial(_NUMBER.pack_into, self._memory, _REDUCED_AT)
        """Store the number of begun backward passes that are all-reduced."""
        self.set_collective: Callable[[bytes], None] = partial(
            _COLLECTIVE.pack_into, self._memory, _COLLECTIVE_AT
        )
        """Store the name of the current collective, encoded by :func:`page_name`."""
        self.totals(0, NO_EPOCH, 0, 0)

    # The rank's writing thread calls the following methods. 0 means that a value is not known, so
    # numbers that may be 0 are stored one higher.

    def set_parts(self, parts: Parts) -> None:
        """Store the parts of a closed step."""
        *times, cpu, waited = parts
        # In microseconds, to fit into 32 bits.
        short = (min(each // 1000, (1 << 32) - 1) for each in (cpu, waited))
        _PARTS.pack_into(self._memory, _PARTS_AT, *times, *short)

    def set_beat(self, now: int) -> None:
        """Store that the writing thread ran at ``now``, in Unix nanoseconds."""
        _NUMBER.pack_into(self._memory, _BEAT_AT, now)

    def set_memory(self, rss: int | None, allocator: tuple[int, int, int] | None) -> None:
        """Store resident bytes, and allocated, reserved and peak bytes of torch's allocator."""
        numbers = (rss, *(allocator or (None, None, None)))
        stored = (0 if number is None else number + 1 for number in numbers)
        _MEMORY.pack_into(self._memory, _MEMORY_AT, *stored)

    def set_cost(self, share: float) -> None:
        """Store the share of the rank's time that ddpdoctor takes. 0 if not known."""
        _NUMBER.pack_into(self._memory, _COST_AT, int(share * 1e6))

    def set_gpu(self, uuid: str) -> None:
        """Store the UUID of the rank's GPU. Ignore a text that is not a UUID."""
        digits = uuid.rpartition("GPU-")[2].rpartition("MIG-")[2].replace("-", "")
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            return
        if len(raw) == _GPU_SIZE:
            self._memory[_GPU_AT : _GPU_AT + _GPU_SIZE] = raw

    def set_stage(self, stages: Iterable[int]) -> None:
        """Store the pipeline stages of the rank."""
        text = ",".join(map(str, stages)).encode()[: _STAGE_SIZE - 1]
        self._memory[_STAGE_AT : _STAGE_AT + _STAGE_SIZE] = text.ljust(_STAGE_SIZE, b"\0")

    def set_unwritten(self) -> None:
        """Store that the disk refused the journal."""
        _NUMBER.pack_into(self._memory, _FLAGS_AT, _UNWRITTEN)

    def set_site(self, site: bytes) -> None:
        """Store a call site, encoded by :func:`page_text`."""
        self._memory[_SITE_AT : _SITE_AT + len(site)] = site


def _terminated(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[-(size - 1) :] + b"\0"


def page_text(site: str) -> bytes:
    """Encode a call site for the page. Keep the end of a path that is too long."""
    return _terminated(site, _SITE_SIZE)


def page_name(name: str) -> bytes:
    """Encode a collective's name for the page."""
    return _terminated(name, _COLLECTIVE_SIZE)


def read_status(path: str) -> Status:
    """Read the status page of a process, live or not.

    Raises:
        UnreadableError: It is another file, truncated, or of a newer format.
        OSError: The file cannot be opened.
    """
    return parse_status(mapped.read(path, PAGE_SIZE), path)


def parse_status(page: bytes, path: str) -> Status:
    """Parse a status page that was read from ``path``.

    Raises:
        UnreadableError: It is another file, truncated, or of a newer format.
    """
    mapped.check(page, path, "a status page", _MAGIC, FORMAT, PAGE_SIZE)
    (
        _, _, _, pid, rank, world, local_rank, restart, started,
        number, data, forward, backward, optimizer, other, wait, split, cpu, waited,
        beat, phase, since, armed, cost, step, epoch, last_total, dropped, reduced,
        flags, rss, allocated, reserved, peak, gpu,
    ) = _WHOLE.unpack_from(page, 0)  # fmt: skip
    # Stored one higher, since 0 means that they are not known.
    rss, allocated, reserved, peak = (
        each - 1 if each > 0 else None for each in (rss, allocated, reserved, peak)
    )
    parts = Parts(
        number, data, forward, backward, optimizer, other, wait, bool(split),
        cpu * 1000, waited * 1000,
    )  # fmt: skip
    return Status(
        pid, rank, world, local_rank, restart, started, _PHASES.get(phase, Phase.OTHER), since,
        step, None if epoch == NO_EPOCH else epoch, armed, last_total, dropped,
        bool(flags & _UNWRITTEN),
        _text(page, _COLLECTIVE_AT, _COLLECTIVE_SIZE), _text(page, _SITE_AT, _SITE_SIZE), reduced,
        parts if parts.total else None, beat or None,
        rss, allocated, reserved, peak, _uuid(gpu), _text(page, _STAGE_AT, _STAGE_SIZE),
        cost / 1e6 if cost > 0 else None, bool(flags & _ELSEWHERE),
    )  # fmt: skip


def moved(page: bytes, restart: int, later: int) -> bytes:
    """Return a page from another node with this node's attempt number and clock.

    This node's clock is ``later`` nanoseconds ahead.
    """
    copy = bytearray(page)
    _HEAD.pack_into(copy, 0, *(head := _HEAD.unpack_from(page))[:-2], restart, head[-1] + later)
    phase, since, armed = _LIVE.unpack_from(page, _LIVE_AT)
    _LIVE.pack_into(copy, _LIVE_AT, phase, since + later, armed)
    (beat,) = _NUMBER.unpack_from(page, _BEAT_AT)
    if beat:
        _NUMBER.pack_into(copy, _BEAT_AT, beat + later)
    (flags,) = _NUMBER.unpack_from(page, _FLAGS_AT)
    _NUMBER.pack_into(copy, _FLAGS_AT, flags | _ELSEWHERE)
    return bytes(copy)


def _text(page: bytes, at: int, size: int) -> str:
    end = page.find(b"\0", at, at + size)
    return page[at : at + size if end < 0 else end].decode("utf-8", "replace")


@lru_cache(maxsize=2048)
def _uuid(raw: bytes) -> str:
    digits = raw.hex()
    places = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    return "-".join(digits[start:end] for start, end in places) if any(raw) else ""
