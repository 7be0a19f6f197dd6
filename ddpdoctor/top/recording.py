"""Record snapshots into a file, replay them, and invent a demonstration."""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO
from zlib import crc32

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Parts
from ddpdoctor.top import headline, output, step_times
from ddpdoctor.top.frames import Want
from ddpdoctor.top.snapshot import FindingRow, Gpu, Job, Machine, RankRow, Snapshot, Verdict

# -- snapshots kept in a file, and played again: gzip of JSON lines, most of them differences


MOST_FRAMES = 1 << 20
"""Frames that are played, the first ones: twelve days of one a second."""

_MOST, _MOST_MEMBER = 1 << 31, 1 << 27
"""Bytes that a file, and one of its members, may hold once it is expanded."""

_MEMBER = 120
"""Frames from one whole snapshot to the next."""

_GZIP = 31
_CHUNK = 1 << 18
_POINTS = 120
_EXACT = ("time", "started")
_GONE = "-"


class Recording:
    """Writes snapshots to a file.

    Args:
        path: The file; it must not exist.

    Raises:
        DoctorError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: float | None = None
        self._before: JsonObject = {}
        self._count = 0
        self._packer = zlib.compressobj(9, wbits=_GZIP)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise DoctorError(f"{path} is there already", "name a new file for --record") from None
        except OSError as error:
            raise DoctorError(f"cannot write {path}: {error.strerror}") from None
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=0)

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the same one only once.

        Raises:
            DoctorError: It cannot be written.
        """
        if snapshot.time == self._last:
            return
        self._last = snapshot.time
        record = _keyed(output.record(snapshot))
        whole = self._count % _MEMBER == 0
        line = _line(record if whole else _difference(self._before, record))
        self._before, self._count = record, self._count + 1
        # What a monitor that is killed has written can be read.
        data = self._packer.compress(line) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        if self._count % _MEMBER == 0:
            data += self._packer.flush()
            self._packer = zlib.compressobj(9, wbits=_GZIP)
        self._write(data)

    def _write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except (OSError, ValueError) as error:
            raise DoctorError(f"cannot write {self.path}: {error}") from None

    def close(self) -> None:
        """Close the file.

        Raises:
            DoctorError: Its end cannot be written.
        """
        try:
            if self._count % _MEMBER:
                self._write(self._packer.flush())
        finally:
            self._file.close()


def _line(record: JsonObject) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _keyed(record: JsonObject) -> JsonObject:
    """A snapshot's record with ranks and GPUs by name, so that two of them compare."""
    keyed = dict(_rounded(record))
    gpus = {gpu["uuid"]: gpu for gpu in keyed.pop("gpus", ())}
    rows = keyed.pop("ranks", ())
    for row in rows:
        row["times"] = {key: each for key, each in row.get("times", {}).items() if key != "own"}
        if row.get("gpu", {}).get("uuid") in gpus:
            row["gpu"] = row["gpu"]["uuid"]
    ranks = {str(row["rank"]): row for row in rows}
    return {**keyed, "gpus": gpus, "ranks": ranks, "order": [row["rank"] for row in rows]}


def _listed(keyed: JsonObject) -> JsonObject:
    """The record again."""
    record = dict(keyed)
    gpus, ranks = record.pop("gpus"), record.pop("ranks")
    rows = []
    for rank in record.pop("order"):
        row = {key: each for key, each in ranks[str(rank)].items() if each != {}}
        if isinstance(row.get("gpu"), str):
            row["gpu"] = gpus[row["gpu"]]
        rows.append(row)
    return {**record, "gpus": list(gpus.values()), "ranks": rows}


def _rounded(value: Any, name: str = "") -> Any:
    if isinstance(value, float):
        return round(value, 3) if name in _EXACT else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each, key) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _difference(before: JsonObject, after: JsonObject) -> JsonObject:
    """What has changed: new values, differences of objects, and the names that are gone."""
    changed: JsonObject = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            if inner:
                changed[key] = inner
        elif value != old or key not in before:
            changed[key] = value
    gone = [key for key in before if key not in after]
    return {**changed, _GONE: gone} if gone else changed


def _changed(before: JsonObject, difference: JsonObject) -> JsonObject:
    """The object to which a difference leads."""
    gone = difference.get(_GONE, ())
    after = {key: value for key, value in before.items() if key not in gone}
    for key, value in difference.items():
        old = after.get(key)
        if key != _GONE:
            if isinstance(value, dict) and isinstance(old, dict):
                after[key] = _changed(old, value)
            else:
                after[key] = value
    return after


class RecordingSource:
    """Plays a recording; it opens at the first frame.

    Args:
        path: The file.

    Raises:
        DoctorError: It is no recording.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = opening.file(path, links=True)
        except OSError as error:
            raise DoctorError(f"cannot read {path}: {error.strerror}") from None
        self._path = path
        self._position = 0
        self._members: list[tuple[int, int]] = []
        """Where the members begin, and the number of their first frame."""
        self.length = 0
        """How many frames there are."""
        self._lines: tuple[int, list[bytes]] = (-1, [])
        """The member that was read last."""
        self._shown: tuple[int, JsonObject] = (-1, {})
        """The frame that was read last."""
        try:
            self._index()
            if not self.length:
                raise ValueError("it holds no frame")
            first = self._frame(0)
            self.interval = self._pace(first)
        except (ValueError, zlib.error) as error:
            self._file.close()
            raise DoctorError(
                f"{path} is no recording: {error}", "make one with `ddpdoctor top --record FILE`"
            ) from None

    @property
    def replay(self) -> RecordingSource:
        """Itself."""
        return self

    def _index(self) -> None:
        """Find where the members begin, and count their frames."""
        at, size, left = 0, os.fstat(self._file.fileno()).st_size, _MOST
        while at < size and self.length < MOST_FRAMES and left > 0:
            frames, expanded, end = 0, 0, at
            for data, read in self._expanded(at):
                frames, expanded, end = frames + data.count(b"\n"), expanded + len(data), read
                if expanded > left:
                    break
            if frames:
                self._members.append((at, self.length))
            self.length, left = self.length + frames, left - expanded
            if end <= at:
                break
            at = end

    def _expanded(self, at: int) -> Iterator[tuple[bytes, int]]:
        """The member that begins at a byte, in pieces, each with the byte behind what was read."""
        unpacker, pending = zlib.decompressobj(wbits=_GZIP), b""
        while not unpacker.eof:
            if not pending:
                pending = os.pread(self._file.fileno(), _CHUNK, at)
                at += len(pending)
            if not pending:
                return
            data = unpacker.decompress(pending, _CHUNK)
            pending = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            yield data, at - len(pending)

    def _frame(self, position: int) -> Snapshot:
        try:
            return output.of_record(_listed(self._keyed_at(position)))
        except (KeyError, TypeError, AttributeError, StopIteration, zlib.error) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None

    def _keyed_at(self, position: int) -> JsonObject:
        number = next(n for n in reversed(range(len(self._members))) if self._first(n) <= position)
        if self._lines[0] != number:
            self._lines = number, self._read(self._members[number][0])
            self._shown = -1, {}
        first, lines = self._first(number), self._lines[1]
        begun, record = self._shown
        if not first <= begun <= position:
            begun, record = first, _record(lines[0])
        for frame in range(begun + 1, position + 1):
            record = _changed(record, _record(lines[frame - first]))
        self._shown = position, record
        return record

    def _first(self, number: int) -> int:
        return self._members[number][1]

    def _read(self, at: int) -> list[bytes]:
        text = bytearray()
        for data, _ in self._expanded(at):
            text += data
            if len(text) > _MOST_MEMBER:
                raise ValueError(f"more than {_MOST_MEMBER >> 20} MB in {_MEMBER} frames")
        return bytes(text).split(b"\n")[:-1]

    def _pace(self, first: Snapshot) -> float:
        """Seconds between the first two frames."""
        if self.length < 2:
            return 1.0
        try:
            return min(60.0, max(0.1, self._frame(1).time - first.time))
        except ValueError:
            return 1.0

    @property
    def position(self) -> int:
        """The frame that is read."""
        return self._position

    def seek(self, position: int) -> None:
        """Go to a frame; beyond the ends, to the nearest."""
        self._position = min(max(position, 0), self.length - 1)

    def read(self, want: Want) -> Snapshot:
        """The frame at the position; of one that is damaged, only that."""
        try:
            return self._frame(self._position)
        except (ValueError, OSError) as error:
            text = f"frame {self._position + 1} of {self._path} is damaged"
            return Snapshot(
                time=time.time(), kind="run", verdict=Verdict(text, "warning"), notes=(str(error),)
            )

    def history(self) -> Iterator[Snapshot]:
        """Frames from the first to the last; of a long recording those that are whole."""
        starts = [first for _, first in self._members]
        numbers = range(self.length) if len(starts) < _POINTS // 8 else starts
        before, self._position = self._position, 0
        try:
            for number in numbers[:: max(1, len(numbers) // _POINTS)]:
                self._position = number
                yield self.read(Want())
        finally:
            self._position = before

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _record(line: bytes) -> JsonObject:
    """A line's object.

    Raises:
        ValueError: It is none.
    """
    if opening.expanded(line) > output.MOST:
        raise ValueError("too large")
    record = opening.loads(line)
    if not isinstance(record, dict):
        raise ValueError("no object")
    return record


# -- A made-up job for people without one: two nodes, a straggler, and what it is blamed for


STEP = 0.222
"""Seconds that a step of the job takes."""

AGE = 600.0
"""Seconds for which the job has run when it is first looked at."""

_EPOCH, _EPOCHS = 1250, 90
"""Steps of an epoch, and epochs."""

_BATCH = 64
"""Samples of a rank in a step."""

_HISTORY_POINTS = 48
_PER_NODE = 4
_MS = 1_000_000
_GIB = 2**30


class DemoSource:
    """Frames of the made-up job.

    Args:
        interval: Seconds between frames.
        ranks: How many.
        seed: Makes another job of the kind.
        clock: Unix seconds.
    """

    def __init__(
        self,
        interval: float,
        ranks: int = 8,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.interval = interval
        self.replay = None
        self._ranks = ranks
        self._seed = seed
        self._clock = clock
        self._start = clock()

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        now = self._clock()
        return at(now - self._start + AGE, now, want, ranks=self._ranks, seed=self._seed)

    def history(self) -> Iterator[Snapshot]:
        """Frames from the job's beginning until now."""
        now = self._clock()
        age = now - self._start + AGE
        for number in range(1, _HISTORY_POINTS):
            then = age * number / _HISTORY_POINTS
            yield at(then, now - age + then, Want(), ranks=self._ranks, seed=self._seed)

    def close(self) -> None:
        """Nothing is held."""


def at(age: float, now: float, want: Want, *, ranks: int = 8, seed: int = 0) -> Snapshot:
    """The job at an age in seconds, which is Unix time ``now``."""
    number = max(0, int(age / STEP) - 1)
    slow = (5 + seed) % ranks
    rows, found = [], []
    for rank in range(ranks):
        first = max(0, number - step_times.WINDOW + 1)
        steps = [_step(seed, rank, each, slow) for each in range(first, number + 1)]
        gpu = _gpu(seed, rank, number, slow)
        found.append(gpu)
        rows.append(_row(rank, number, steps, gpu, age))
    findings = (FindingRow(_finding(slow), now - age + 30),) if ranks > 1 else ()
    seen = min(number, step_times.WINDOW)
    facts = headline.VerdictFacts(
        live=True, since_start=age, seen=seen, world_size=ranks, findings=findings
    )
    snapshot = Snapshot(
        time=now,
        kind="demo",
        verdict=Verdict(""),
        run="demo",
        command="torchrun --nnodes 2 --nproc-per-node 4 train.py --epochs 90",
        started=now - age,
        live=True,
        world_size=ranks,
        job=_job(seed, number, ranks),
        gpus=tuple(found),
        machine=Machine("node-a", 0.31, 96, 212 * _GIB, 1024 * _GIB),
        findings=findings,
        output=(f"[rank{slow}]: UserWarning: slow storage: 3 of 8 workers wait",),
        environment={"torch": "2.13.0", "cuda": "13.0", "backend": "nccl", "launcher": "torchrun"},
    )
    return headline.judged_snapshot(snapshot, rows, facts)


def _job(seed: int, number: int, ranks: int) -> Job:
    steps = _EPOCH * _EPOCHS
    return Job(
        script="train.py --epochs 90",
        step=number + 1,
        steps=steps,
        epoch=number // _EPOCH,
        epochs=_EPOCHS,
        rate=1 / STEP,
        samples_rate=ranks * _BATCH / STEP,
        loss=round(1.8 + 5.1 / (1 + number / 400) + 0.1 * _noise(seed, 0, number, 5), 3),
        left=max(0, steps - number) * STEP,
    )


def _noise(seed: int, rank: int, step: int, what: int) -> float:
    """A number from 0 to 1."""
    return crc32(struct.pack("<4q", seed, rank, step, what)) / 2**32


def _step(seed: int, rank: int, number: int, slow: int) -> Parts:
    """A step: whoever is first waits for the last."""

    def own(who: int) -> tuple[int, ...]:
        data, forward, backward, optimizer, other = 6, 52, 104, 11, 3
        data += 41 if who == slow else 0
        lengths = (data, forward, backward, optimizer, other)
        return tuple(
            int(length * _MS * (0.97 + 0.06 * _noise(seed, who, number, what)))
            for what, length in enumerate(lengths)
        )

    mine = own(rank)
    wait = max(4 * _MS, sum(own(slow)) + 4 * _MS - sum(mine))
    return Parts._make((number, *mine, wait, True, 0, 0))


def _gpu(seed: int, rank: int, number: int, slow: int) -> Gpu:
    swing = _noise(seed, rank, number // 4, 9)
    return Gpu(
        node=_node(rank),
        index=rank % _PER_NODE,
        uuid=f"GPU-{seed:08x}-0000-4000-8000-{rank:012x}",
        name="NVIDIA H100 80GB HBM3",
        utilization=round(0.96 + 0.04 * swing, 2),
        memory_used=int((61.5 + 0.4 * swing) * _GIB),
        memory_total=80 * _GIB,
        # Waiting keeps a GPU busy and cool.
        power=round((612.0 if rank == slow else 498.0) + 24 * swing, 1),
        power_limit=700.0,
        temperature=round(58 + rank % _PER_NODE + 3 * swing),
        clock=1.98e9,
        clock_max=1.98e9,
        ecc_errors=0,
        pcie=round((2.1 + 0.3 * swing) * 1e9),
        nvlink=round((118 + 6 * swing) * 1e9),
        processes=((4100 + rank, int(61.0 * _GIB)),),
    )


def _node(rank: int) -> str:
    return f"node-{'abcdefghijklmnopqrstuvwxyz'[rank // _PER_NODE % 26]}"


def _row(rank: int, number: int, steps: list[Parts], gpu: Gpu, age: float) -> RankRow:
    within = age % STEP
    phases = (("data", 0.03), ("forward", 0.06), ("backward", 0.2), ("optimizer", STEP))
    phase = next((name for name, until in phases if within <= until), "optimizer")
    return RankRow(
        rank=rank,
        node=_node(rank),
        local_rank=rank % _PER_NODE,
        pid=4100 + rank,
        phase=phase,
        since=round(within, 3),
        site={"data": "train.py:57", "optimizer": "train.py:66"}.get(phase, "train.py:61"),
        step=number + 1,
        epoch=number // _EPOCH,
        times=step_times.mean_times(steps[-step_times.WINDOW :]),
        heartbeat=round(within, 3),
        rss=int((9.2 + 0.1 * _noise(0, rank, 0, 7)) * _GIB),
        allocated=int(31.4 * _GIB),
        reserved=int(58.2 * _GIB),
        peak=int(55.1 * _GIB),
        gpu=gpu,
        debug_port=5678 + rank % _PER_NODE,
    )


def _finding(slow: int) -> Finding:
    return Finding(
        code="DDP610",
        severity=Severity.WARNING,
        message=f"rank {slow} holds the others up by 41.0 ms a step, in its data loading",
        ranks=(slow,),
        location=Location("train.py", 57),
        evidence=(
            "own time 217 ms a step; the others 176 ms (medians of 502 steps)",
            "data loading: 47.0 ms against 6.0 ms",
            f"the others wait 45.0 ms a step in the all-reduce, rank {slow} 4.0 ms",
        ),
        fix="Look at this rank's data: its storage, its workers, the cost of its samples.",
    )
