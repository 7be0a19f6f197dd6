"""Record snapshots into a file, replay them, and generate a demonstration."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import json_text
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.status import PHASES, Parts
from ddpdoctor.top import headline, output, run_files
from ddpdoctor.top.frames import WANT_ALL, Played, Want
from ddpdoctor.top.snapshot import FindingRow, Gpu, Job, Machine, RankRow, Snapshot, Verdict

# -- recordings: a gzip file with one snapshot a line, as `top --json` prints it

RECORDING_FORMAT = 2
"""Version of a recording, stored in each line. Recordings without one are older."""

MAX_FRAMES = 1 << 20  # Maximum number of played frames: twelve days at one per second

_MAX_EXPANDED = 1 << 31
"""Maximum expanded size of a recording in bytes. The rest is not played."""

_MAX_LINE = 1 << 26
_CHUNK = 1 << 18
_LINES_KEPT = 120
_CHART_POINTS = 120


class Recording:
    """Writes snapshots to a file, which must not exist.

    Raises:
        DoctorError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: float | None = None
        self._packer = zlib.compressobj(9, wbits=31)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise DoctorError(f"{path} exists already", "name a new file for --record") from None
        except OSError as error:
            raise DoctorError(f"cannot write {path}: {error.strerror}") from None
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def add(self, snapshot: Snapshot) -> None:
        """Append a snapshot, unless it was the last one.

        Raises:
            DoctorError: It cannot be written.
        """
        if snapshot.time == self._last:
            return
        self._last = snapshot.time
        record = {"recording": RECORDING_FORMAT, **_rounded(output.record(snapshot))}
        line = json_text(record, separators=(",", ":")).encode() + b"\n"
        # Flushed, so that the file of a monitor that is killed can be read.
        self._write(self._packer.compress(line) + self._packer.flush(zlib.Z_SYNC_FLUSH))

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
        if not self._file.closed:
            with self._file:
                self._write(self._packer.flush())


def _rounded(value: Any, name: str = "") -> Any:
    """Round numbers to four digits, which makes a recording a third as large."""
    if isinstance(value, float):
        return round(value, 3) if name in ("time", "started") else float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each, key) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


class RecordingSource(Played):
    """Plays a recording. It opens at the first frame.

    Raises:
        DoctorError: It is no recording, or of another version.
    """

    def __init__(self, path: str) -> None:
        try:
            self._raw = opening.file(path, links=True)
        except OSError as error:
            raise DoctorError(f"cannot read {path}: {error.strerror}") from None
        self._file = gzip.GzipFile(fileobj=self._raw)
        self._path = path
        self._ends = array("Q", [0])
        """Where each line ends, in bytes of the expanded file, after a 0."""
        self._lines: dict[int, bytes] = {}
        try:
            # A monitor that was killed leaves an end that cannot be expanded.
            with contextlib.suppress(EOFError):
                self._index()
            self.length = len(self._ends) - 1
            if not self.length:
                raise ValueError("it holds no frame")
            first = self._frame(0)
        except (ValueError, OSError, zlib.error) as error:
            self.close()
            raise DoctorError(
                f"{path} is no recording: {error}", "make one with `ddpdoctor top --record FILE`"
            ) from None
        self.interval = 1.0  # Seconds between the first two frames
        if self.length > 1:
            with contextlib.suppress(ValueError):
                self.interval = min(60.0, max(0.1, self._frame(1).time - first.time))

    def _index(self) -> None:
        size = 0
        while size < _MAX_EXPANDED and (data := self._file.read1(_CHUNK)):
            for match in re.finditer(rb"\n", data):
                self._ends.append(size + match.end())
                if len(self._ends) > MAX_FRAMES:
                    return
            size += len(data)

    def _frame(self, position: int) -> Snapshot:
        """Read a frame. Raises ValueError if it is damaged, or of another version."""
        if position not in self._lines:
            # A gzip file is read from its start to go back, so earlier lines are kept, too.
            first = max(0, position - _LINES_KEPT) if position + 1 in self._lines else position
            self._lines = {each: self._line(each) for each in range(first, position + 1)}
        record = output.loads(self._lines[position])
        version = record.pop("recording", 1 if "format" in record else None)
        if version != RECORDING_FORMAT:
            known = "of an unknown format" if version is None else f"of format {version}"
            raise ValueError(f"it is {known}, this ddpdoctor reads format {RECORDING_FORMAT}")
        return output.of_record(record)

    def _line(self, position: int) -> bytes:
        begin, end = self._ends[position : position + 2]
        if end - begin > _MAX_LINE:
            raise ValueError(f"more than {_MAX_LINE >> 20} MB")
        try:
            self._file.seek(begin)
            return self._file.read(end - begin)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(str(error)) from None

    def read(self, want: Want) -> Snapshot:
        """Read the frame at the position. A damaged one says so."""
        try:
            return self._frame(self._position)
        except ValueError as error:
            text = f"frame {self._position + 1} of {self._path} is damaged"
            return Snapshot(
                time=time.time(), kind="run", verdict=Verdict(text, "warning"), notes=(str(error),)
            )

    def history(self) -> Iterator[Snapshot]:
        """Yield frames from the first to the last, evenly spread."""
        before = self._position
        try:
            for position in range(0, self.length, -(-self.length // _CHART_POINTS)):
                self._position = position
                yield self.read(WANT_ALL)
        finally:
            self._position = before

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()


# -- a made-up job of two nodes with a straggler, for people without a job

STEP = 0.222  # Seconds that a step of the job takes
AGE = 600.0  # Seconds for which the job has run when the monitor starts

_STEPS_OF_EPOCH, _EPOCHS = 1250, 90
_BATCH = 64
_HISTORY_POINTS = 48
_RANKS_OF_NODE = 4
_MS = 1_000_000
_GIB = 2**30


class DemoSource:
    """Frames of the made-up job.

    Args:
        interval: Seconds between frames.
        clock: Returns Unix seconds.
    """

    def __init__(self, interval: float, clock: Callable[[], float] = time.time) -> None:
        self.interval = interval
        self.replay = None
        self._clock = clock
        self._start = clock() - AGE

    def read(self, want: Want) -> Snapshot:
        """Make the current frame."""
        now = self._clock()
        return at(now - self._start, now, want)

    def history(self) -> Iterator[Snapshot]:
        """Make frames from the job's beginning until now."""
        age = self._clock() - self._start
        for number in range(1, _HISTORY_POINTS):
            then = age * number / _HISTORY_POINTS
            yield at(then, self._start + then, WANT_ALL)

    def close(self) -> None:
        """Close nothing."""


def at(age: float, now: float, want: Want, *, ranks: int = 8, seed: int = 0) -> Snapshot:
    """Make a frame of the job at an age in seconds, which is Unix time ``now``.

    Another seed makes another job.
    """
    number = max(0, int(age / STEP) - 1)
    slow = (5 + seed) % ranks
    rows = [_row(rank, number, age, slow, seed) for rank in range(ranks)]
    findings = (FindingRow(_finding(slow), now - age + 30),) if ranks > 1 else ()
    facts = headline.VerdictFacts(live=True, since_start=age, world_size=ranks, findings=findings)
    steps = _STEPS_OF_EPOCH * _EPOCHS
    snapshot = Snapshot(
        time=now,
        kind="demo",
        verdict=Verdict(""),
        run="demo",
        command="torchrun --nnodes 2 --nproc-per-node 4 train.py --epochs 90",
        started=now - age,
        live=True,
        world_size=ranks,
        job=Job(
            script="train.py --epochs 90",
            step=number + 1,
            steps=steps,
            epoch=number // _STEPS_OF_EPOCH,
            epochs=_EPOCHS,
            rate=1 / STEP,
            samples_rate=ranks * _BATCH / STEP,
            loss=round(1.8 + 5.1 / (1 + number / 400) + 0.1 * _noise(seed, 0, number, 5), 3),
            left=max(0, steps - number) * STEP,
        ),
        gpus=tuple(row.gpu for row in rows if row.gpu is not None),
        machine=Machine("node-a", 0.31, 96, 212 * _GIB, 1024 * _GIB),
        findings=findings,
        output=(f"[rank{slow}]: UserWarning: slow storage: 3 of 8 workers wait",),
        environment={"torch": "2.13.0", "cuda": "13.0", "backend": "nccl", "launcher": "torchrun"},
    )
    return headline.judged_snapshot(snapshot, rows, facts)


def _noise(*key: int) -> float:
    """Return a number from 0 to 1, always the same for a key of four numbers."""
    return crc32(struct.pack("<4q", *key)) / 2**32


def _step(seed: int, rank: int, number: int, slow: int) -> Parts:
    """Make a step, in which the first rank waits for the last."""

    def own(who: int) -> tuple[int, ...]:
        lengths = (6 + 41 * (who == slow), 52, 104, 11, 3)
        return tuple(
            int(length * _MS * (0.97 + 0.06 * _noise(seed, who, number, phase)))
            for phase, length in zip(range(len(PHASES)), lengths, strict=True)
        )

    mine = own(rank)
    wait = max(4 * _MS, sum(own(slow)) + 4 * _MS - sum(mine))
    return Parts._make((number, *mine, wait, True, 0, 0))


def _row(rank: int, number: int, age: float, slow: int, seed: int) -> RankRow:
    node = f"node-{'abcdefghijklmnopqrstuvwxyz'[rank // _RANKS_OF_NODE % 26]}"
    swing = _noise(seed, rank, number // 4, 9)
    gpu = Gpu(
        node=node,
        index=rank % _RANKS_OF_NODE,
        uuid=f"GPU-{seed:08x}-0000-4000-8000-{rank:012x}",
        name="NVIDIA H100 80GB HBM3",
        utilization=round(0.96 + 0.04 * swing, 2),
        memory_used=int((61.5 + 0.4 * swing) * _GIB),
        memory_total=80 * _GIB,
        # Waiting keeps a GPU busy and cool.
        power=round((612.0 if rank == slow else 498.0) + 24 * swing, 1),
        power_limit=700.0,
        temperature=round(58 + rank % _RANKS_OF_NODE + 3 * swing),
        clock=1.98e9,
        clock_max=1.98e9,
        ecc_errors=0,
        pcie=round((2.1 + 0.3 * swing) * 1e9),
        nvlink=round((118 + 6 * swing) * 1e9),
        processes=((4100 + rank, int(61.0 * _GIB)),),
    )
    within = age % STEP
    phases = (("data", 0.03), ("forward", 0.06), ("backward", 0.2))
    phase = next((name for name, until in phases if within <= until), "optimizer")
    first = max(0, number - run_files.WINDOW + 1)
    return RankRow(
        rank=rank,
        node=node,
        local_rank=rank % _RANKS_OF_NODE,
        pid=4100 + rank,
        phase=phase,
        since=round(within, 3),
        site={"data": "train.py:57", "optimizer": "train.py:66"}.get(phase, "train.py:61"),
        step=number + 1,
        epoch=number // _STEPS_OF_EPOCH,
        times=run_files.mean_times(
            [_step(seed, rank, each, slow) for each in range(first, number + 1)]
        ),
        heartbeat=round(within, 3),
        rss=int((9.2 + 0.1 * _noise(0, rank, 0, 7)) * _GIB),
        allocated=int(31.4 * _GIB),
        reserved=int(58.2 * _GIB),
        peak=int(55.1 * _GIB),
        gpu=gpu,
        debug_port=5678 + rank % _RANKS_OF_NODE,
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
