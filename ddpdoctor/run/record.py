"""The wire between a rank and its readers: phases, the status page, the journal.

Standard library only: the probe imports this module inside interpreters that have nothing of
ours installed. Readers and writers meet here and nowhere else.

A *status page* is one fixed-size file per rank, mapped into its memory: what the rank does now.
A *journal* is one JSON-lines file per rank: what it did. A *suspicion* is one fixed-size file that
the supervisor writes and the ranks of its node map: at which steps to look closely. All carry a
format version; a reader refuses a newer one.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run.records import base
from ddpdoctor.run.records.base import EVERY as EVERY
from ddpdoctor.run.records.base import encode as encode

FORMAT = 1
"""Version of every file in a run directory; raised when an old reader would misread a new file."""

Record = dict[str, Any]
"""One journal line. ``kind`` is always there; readers skip kinds and keys they do not know."""

MOST_WORLD = 1 << 17
"""Ranks of a job; a file that tells of more is not believed."""

BUFFERS = "DDP's broadcast of buffers"
"""How the broadcast before DDP's forward is shown, next to the names of collectives."""

BUCKETS = "DDP's broadcast of the order of buckets"
"""The same of the one before the first forward in grad mode after a reduced backward."""

BEFORE_FORWARD = (BUFFERS, BUCKETS)


class Kind(NamedTuple):
    """What a journal holds of a kind of record."""

    doc: str
    """What it tells."""
    first: int
    """How many of them, the first ones, are written again at the head of each new segment, so that
    rotation does not lose them; the newest are there anyway. 0 for those that rules need of late
    only, `EVERY` for those that cannot become many."""


KINDS: dict[str, Kind] = {
    # of a rank
    "open": Kind("A process became a rank: who it is, where, and with what versions.", EVERY),
    "end": Kind("The regular end of a rank's script.", EVERY),
    "error": Kind("An uncaught exception, of a rank or of another process of the job.", EVERY),
    "exit": Kind("A call of sys.exit, os._exit or the like.", EVERY),
    "fault": Kind("An error of ddpdoctor's own, of which each part tells once.", EVERY),
    "step": Kind("A step and where its time went; a line every step.", 0),
    "site": Kind("A line of the user's code that enters a phase, told once.", EVERY),
    "profile": Kind("Where the time of a rank went, by samples of its stack; 3 of a rank.", EVERY),
    "ddp": Kind("A DDP module was built.", EVERY),
    "model": Kind("The parameters that a rank gave to DDP; long.", 8),
    "tensors": Kind("The names of what fingerprints are of, told when they change.", EVERY),
    # Whether replicas differ from the first step on is what tells one cause from another.
    "fingerprint": Kind("Hashes of the parameters after a step.", 16),
    "buffers": Kind("Hashes of the buffers after a step.", 16),
    "outside": Kind("Parameters were changed between two optimizer steps.", 1024),
    # Replicas that were made equal again by the job itself do not diverge.
    "together": Kind("Hashes of the parameters after collectives of their size.", 16),
    "clip": Kind("Gradients were clipped by another call than before, or by none.", 64),
    "edit": Kind("Other gradients than before were changed ahead of the step.", 64),
    "unzeroed": Kind("Gradients that were never set to zero.", EVERY),
    "solo": Kind("A rank that trains without DDP: what of it other ranks share.", 16),
    "solo_end": Kind("The same at its end.", EVERY),
    "statistics": Kind("Running statistics in an evaluation.", 16),
    "elements": Kind("Elements of tensors that were suspected to differ; long.", 8),
    "nonfinite": Kind("A loss that was not finite; a few of a rank.", EVERY),
    "nonfinite_gradient": Kind("A gradient of the rank alone that was not finite; a few.", EVERY),
    "load": Kind("Weights were loaded into a module; 64 of a rank.", EVERY),
    "gpu_load": Kind("torch.load put tensors on a GPU; 50 of a rank.", EVERY),
    "save": Kind("A checkpoint was saved; 50 of a rank.", EVERY),
    "resume": Kind("An optimizer's state was loaded; 64 of a rank.", EVERY),
    "cut": Kind("A scheduler cut the learning rate; 64 of a rank.", EVERY),
    "pass": Kind("What a pass over a loader drew; 32 passes of a rank.", EVERY),
    # Its begin without its end would be a loop that was never left.
    "loop": Kind("A training loop began, or ended: of late ones it is said how.", 0),
    "evaluation": Kind("A forward of DDP without gradients, its buffers broadcast; 64.", EVERY),
    "applied": Kind("A load that was not applied was made up for.", EVERY),
    "not_applied": Kind("Most of a checkpoint was passed over by strict=False.", EVERY),
    "thread_error": Kind("An exception that ended a thread; a few of a rank.", EVERY),
    "shown_error": Kind("The exception whose traceback was printed last.", EVERY),
    "own_store": Kind("A rank joins a store of the script that no rank opens.", EVERY),
    "no_gradient": Kind("Parameters that got no gradient.", EVERY),
    "unreduced": Kind("Gradients that were not all-reduced, and an optimizer stepped.", EVERY),
    "no_sync_vain": Kind("A no_sync() that saved nothing.", EVERY),
    "find_unused": Kind("find_unused_parameters, and whether any were unused.", EVERY),
    "batchnorm": Kind("BatchNorms of a small batch.", EVERY),
    "unowned": Kind("Parameters that no optimizer holds.", EVERY),
    "remade": Kind("Optimizers or schedulers re-created at each step or epoch.", EVERY),
    "local_rank": Kind("A local rank that the script parsed and torchrun did not fill.", EVERY),
    "data_parallel": Kind("An nn.DataParallel was built.", EVERY),
    # of the supervisor
    "job": Kind("The job's command ended.", EVERY),
    "signal": Kind("A signal that was passed on to the job.", EVERY),
    "rank_exit": Kind("A rank's process ended.", EVERY),
    "hang": Kind("An examination of a job that makes no progress.", EVERY),
    "hang_over": Kind("It goes on.", EVERY),
    "debug": Kind("A debugger came, stopped a rank, or went.", EVERY),
    "gpus": Kind("On which GPUs the ranks hold memory; written when that changes.", EVERY),
    "suspicion": Kind("Ranks were asked to look closely at tensors.", EVERY),
    "finding": Kind("A finding was said.", EVERY),
    "retraction": Kind("Something that was said stands no more.", EVERY),
    "no_core": Kind("Ranks that wanted a core and got none.", EVERY),
    "unwatched": Kind("Why nothing is known of the ranks.", EVERY),
}
"""Every kind of record there is. A journal takes others, too, and loses them with its segment."""


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
    """Where a closed step went; durations in nanoseconds (`ddpdoctor.run.snapshot.Step`)."""

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
_SITE_AT, _SITE_SIZE = 320, 704
_WHOLE = struct.Struct("<8sIIqiiiiq 8q2Iq 3q 8x4q qq 4q16s")
"""All of them at once, for readers: up to the first text."""
_PHASES = {int(phase): phase for phase in Phase}
PAGE_SIZE = 1024
"""Bytes of a status page."""

NO_EPOCH = -1


def mapped(path: str, size: int) -> mmap.mmap:
    """A new file of so many zeros, mapped.

    Raises:
        OSError: It exists, or there is no room for all of it; then there is none of it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Real blocks, not a sparse file: a store into a hole on a full disk is a SIGBUS.
        if os.write(descriptor, bytes(size)) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return mmap.mmap(descriptor, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


class StatusPage:
    """The writing end of a status page: a few stores into mapped memory, which survive SIGKILL."""

    def __init__(
        self, path: str, *, rank: int, world_size: int, local_rank: int, restart: int, started: int
    ) -> None:
        self._memory = mapped(path, PAGE_SIZE)
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

    def set_gpu(self, uuid: str) -> None:
        """Store the UUID of the rank's GPU; one that is none is left out."""
        digits = uuid.rpartition("GPU-")[2].rpartition("MIG-")[2].replace("-", "")
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            return
        if len(raw) == _GPU_SIZE:
            self._memory[_GPU_AT : _GPU_AT + _GPU_SIZE] = raw

    def set_unwritten(self) -> None:
        """Say that the disk refused the journal."""
        _FLAGS.pack_into(self._memory, _FLAGS_AT, 1)

    def set_site(self, site: bytes) -> None:
        """Store a call site, made by :func:`page_text`."""
        self._memory[_SITE_AT : _SITE_AT + len(site)] = site

    def set_collective(self, name: bytes) -> None:
        """Store the name of the collective under way, made by :func:`page_name`."""
        self._memory[_COLLECTIVE_AT : _COLLECTIVE_AT + len(name)] = name


def _terminated(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[-(size - 1) :] + b"\0"


def page_text(site: str) -> bytes:
    """A call site as the page stores it; of a path that is too long the end is kept."""
    return _terminated(site, _SITE_SIZE)


def page_name(name: str) -> bytes:
    """A collective's name as the page stores it."""
    return _terminated(name, _COLLECTIVE_SIZE)


SUSPICION = "suspicion"
"""The file in the run directory that says where ranks look closely."""

_SUSPECT_MAGIC = b"DDPSUSP\0"
_SUSPECT_HEAD = struct.Struct("<8sII")
_SEQUENCE = struct.Struct("<q")
_SEQUENCE_AT = 64
_SUSPECT = struct.Struct("<qqqqq8q")
_SUSPECT_AT = 128
_SUSPECT_SIZE = 256
MOST_SUSPECTS = 8
"""Tensors that a suspicion can name."""


class Suspicion(NamedTuple):
    """Look at every step from ``step`` on, ``steps`` times; after the first, write out tensors."""

    restart: int
    """The attempt that is meant: ranks of another one do not look."""
    step: int
    steps: int
    module: int
    tensors: tuple[int, ...]
    """Places among the names that the ranks told of the module."""


class SuspicionWriter:
    """The supervisor's end of a suspicion.

    Args:
        path: The file, which must not exist.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._memory = mapped(path, _SUSPECT_SIZE)
        _SUSPECT_HEAD.pack_into(self._memory, 0, _SUSPECT_MAGIC, FORMAT, _SUSPECT_SIZE)
        self._sequence = 0

    def write(self, suspicion: Suspicion) -> None:
        """Tell the ranks; what was told before holds no more."""
        tensors = suspicion.tensors[:MOST_SUSPECTS]
        padded = (*tensors, *(0,) * (MOST_SUSPECTS - len(tensors)))
        # Odd while the rest is being written, and another number afterwards.
        _SEQUENCE.pack_into(self._memory, _SEQUENCE_AT, self._sequence + 1)
        _SUSPECT.pack_into(
            self._memory, _SUSPECT_AT,
            suspicion.restart, suspicion.step, suspicion.steps, suspicion.module, len(tensors),
            *padded,
        )  # fmt: skip
        self._sequence += 2
        _SEQUENCE.pack_into(self._memory, _SEQUENCE_AT, self._sequence)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._memory.close()


class SuspicionReader:
    """A rank's end of a suspicion.

    Args:
        path: The file.

    Raises:
        UnreadableError: It is no suspicion, or has a newer format.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        with opening.file(path) as file:
            head = file.read(_SUSPECT_SIZE)
            if len(head) < _SUSPECT_SIZE or head[:8] != _SUSPECT_MAGIC:
                raise UnreadableError(f"{path} is no suspicion, or was cut short")
            if _SUSPECT_HEAD.unpack_from(head)[1] > FORMAT:
                raise UnreadableError(f"{path} has a newer format than {FORMAT}")
            self._memory = mmap.mmap(file.fileno(), _SUSPECT_SIZE, access=mmap.ACCESS_READ)
        self._read: Callable[[], tuple[int]] = partial(
            _SEQUENCE.unpack_from, self._memory, _SEQUENCE_AT
        )
        self._seen = 0

    def news(self) -> Suspicion | None:
        """What was written since the last call, if it is written to its end; 0.2 us if nothing."""
        (sequence,) = self._read()
        if sequence == self._seen or sequence & 1:
            return None
        restart, step, steps, module, count, *tensors = _SUSPECT.unpack_from(
            self._memory, _SUSPECT_AT
        )
        if self._read()[0] != sequence:
            # Torn: the next call will see it whole.
            return None
        self._seen = sequence
        return Suspicion(restart, step, steps, module, tuple(tensors[:count]))


class UnreadableError(Exception):
    """A file of a run directory that this version cannot read; the text is for a person."""


def read_status(path: str) -> Status:
    """Read a status page, live or left behind.

    Raises:
        UnreadableError: The file is too short, not a status page, or of a newer format.
        OSError: The file cannot be opened.
    """
    with opening.file(path) as file:
        page = file.read(PAGE_SIZE)
        # The writer takes no lock; two equal readings in a row cannot be a torn one.
        for _ in range(4):
            file.seek(0)
            again = file.read(PAGE_SIZE)
            if again == page:
                break
            page = again
    return parse_status(page, path)


def parse_status(page: bytes, path: str) -> Status:
    """What a status page says, read from ``path``.

    Raises:
        UnreadableError: It is too short, not a status page, or of a newer format.
    """
    if len(page) < PAGE_SIZE or page[:8] != _MAGIC:
        raise UnreadableError(f"{path} is not a status page, or was cut short")
    (
        _, version, _, pid, rank, world, local_rank, restart, started,
        number, data, forward, backward, optimizer, other, wait, split, cpu, waited,
        beat, phase, since, armed, step, epoch, last_total, dropped, reduced,
        unwritten, rss, allocated, reserved, peak, gpu,
    ) = _WHOLE.unpack_from(page, 0)  # fmt: skip
    if version > FORMAT:
        raise UnreadableError(
            f"{path} has format {version}; this ddpdoctor reads up to format {FORMAT}"
        )
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
    )


def _text(page: bytes, at: int, size: int) -> str:
    end = page.find(b"\0", at, at + size)
    return page[at : at + size if end < 0 else end].decode("utf-8", "replace")


@lru_cache(maxsize=2048)
def _uuid(raw: bytes) -> str:
    digits = raw.hex()
    places = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
    return "-".join(digits[start:end] for start, end in places) if any(raw) else ""


_WORD = 1 << 63


def integer(record: Record, key: str, default: int = 0) -> int:
    """A number of a record that may be damaged; ``default`` if it is missing or no number.

    Nor is one that no writer has: with more than 64 bits it could not even be divided.
    """
    value = record.get(key)
    return value if isinstance(value, int) and -_WORD <= value < _WORD else default


def whole(text: str | bytes, default: int = 0) -> int:
    """A number out of a text that may be damaged; ``default`` if it is none, or is too long."""
    try:
        return int(text) if len(text) < 20 else default
    except ValueError:
        return default


_SEGMENT = b'{"kind":"segment","number":"%012d"}\n'
SEGMENT_SIZE = len(_SEGMENT % 0)
"""Bytes of a segment's first line."""


def segment_line(number: int) -> bytes:
    """The first line of a journal's segment."""
    return _SEGMENT % number


def segment_number(head: bytes) -> int | None:
    """The number in a segment's first `SEGMENT_SIZE` bytes, None if that is no segment's."""
    digits = head[-15:-3]
    return int(digits) if digits.isdigit() and head == _SEGMENT % int(digits) else None


class Journal:
    """The writing end of a journal: whole lines, bounded, never a surprise for the caller.

    When half of ``limit`` bytes is written the file becomes the older segment (``NAME.1``) and a
    new one starts with the sticky records, so at most ``limit`` bytes stay on disk.

    Args:
        path: The journal's path; it must not exist.
        limit: Most bytes of both segments together.

    Raises:
        OSError: From any method, when the disk says no.
    """

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self._half = max(limit // 2, 1 << 14)
        self._sticky: list[bytes] = []
        self._sticky_size = 0
        self._frequent_size = 0
        """Of them, those of kinds that are written often."""
        self._kept: Counter[str] = Counter()
        self._written = 0
        self._number = 0
        # One descriptor for all segments: `write_now` may use it at any moment.
        self._file: BinaryIO = os.fdopen(self._create(), "ab", buffering=0)
        self._begin(self._file.fileno())

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(self.path, flags, 0o600)

    def _begin(self, descriptor: int, sticky: Sequence[bytes] = ()) -> None:
        """Write the head of a segment."""
        # By its number a reader knows a segment again: inodes are given away anew.
        data = b"".join((segment_line(self._number), *sticky))
        self._written = len(data)
        self._check(os.write(descriptor, data), len(data))

    def write(self, records: Iterable[base.Record | Record | bytes]) -> None:
        """Append records, or lines made already, in one write (two where a segment ends)."""
        chunk: list[bytes] = []
        size = 0
        for record in records:
            line = record if isinstance(record, bytes) else encode(record)
            if isinstance(record, base.Record):
                self._keep(record.kind, record.kept, line)
            elif isinstance(record, dict) and record.get("kind") in KINDS:
                self._keep(record["kind"], KINDS[record["kind"]].first, line)
            if self._written + size + len(line) > self._half:
                self._append(chunk)
                chunk, size = [], 0
                self._rotate()
            chunk.append(line)
            size += len(line)
        self._append(chunk)

    def _keep(self, kind: str, first: int, line: bytes) -> None:
        """Remember a line for the heads of later segments, if its kind is to survive rotation.

        Such lines take a quarter of a segment at most, for rotation must free space; those of kinds
        that are written often take half of it.
        """
        room, size = self._half // 4, len(line)
        if self._kept[kind] >= first or self._sticky_size + size > room:
            return
        if first < EVERY:
            if self._frequent_size + size > room // 2:
                # One that is shorter must not take its place: the first ones are wanted.
                self._kept[kind] = first
                return
            self._frequent_size += size
        self._kept[kind] += 1
        self._sticky.append(line)
        self._sticky_size += size

    def _append(self, chunk: list[bytes]) -> None:
        if chunk:
            data = b"".join(chunk)
            written = self._file.write(data)
            self._written += len(data)
            self._check(written, len(data))

    def _check(self, written: int, size: int) -> None:
        if written != size:
            raise OSError(f"{self.path}: only {written} of {size} bytes were written")

    def write_now(self, line: bytes) -> None:
        """Append a line while another thread may be in `write`, which this does not wait for.

        It ends no segment, and is in no later one's head.
        """
        self._written += len(line)
        self._check(self._file.write(line), len(line))

    def _rotate(self) -> None:
        os.replace(self.path, self.path + ".1")
        self._number += 1
        descriptor = self._create()
        try:
            self._begin(descriptor, self._sticky)
            os.dup2(descriptor, self._file.fileno(), inheritable=False)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close the file; what was written stays."""
        self._file.close()


STACKS_SUFFIX = ".txt"
"""Ends the name of the file in which a process says how it is asked for its stacks, in a first line
of JSON, and to which its answers are appended (`ddpdoctor.probe.runtime.stacks`)."""


def stacks_stem(pid: int, start: int) -> str:
    """The beginning of the name of that file.

    Args:
        pid: Its process id.
        start: When it started, in the kernel's ticks: together they name one process of this boot.
    """
    return f"stacks-{pid}-{start}"


def rank_stem(rank: int, restart: int) -> str:
    """The common beginning of a rank's file names: ``rank-0003.r0``."""
    return f"rank-{rank:04d}.r{restart}"
