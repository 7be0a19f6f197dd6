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
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import json_text
from ddpdoctor.top import headline, output
from ddpdoctor.top.frames import WANT_ALL, Replay, Visible
from ddpdoctor.top.snapshot import PHASES, Snapshot, Verdict

# -- recordings: gzip files with one snapshot per line, as `top --json` prints it

RECORDING_FORMAT = 2
"""Version of a recording, stored in each line. Recordings without one are older."""

MAX_FRAMES = 1 << 20  # Maximum number of played frames: twelve days at one per second

_MAX_EXPANDED = 1 << 31  # Maximum expanded size of a recording in bytes. The rest is not played.

_MAX_LINE = 1 << 26
_CHUNK = 1 << 18
_LINES_KEPT = 120
_CHART_POINTS = 120


class Recording:
    """Writes snapshots to a file, which must not exist.

    Raises:
        DoctorError: The file cannot be written.
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


class RecordingSource(Replay):
    """Plays a recording. It opens at the first frame.

    Raises:
        DoctorError: It is not a recording, or of another version.
    """

    def __init__(self, path: str) -> None:
        try:
            self._raw = opening.file(path, links=True)
        except OSError as error:
            raise DoctorError(f"cannot read {path}: {error.strerror}") from None
        self._file = gzip.GzipFile(fileobj=self._raw)
        self._path = path
        self._ends = array("Q", [0])
        """The end of each line, in bytes of the expanded file, after a 0."""
        self._lines: dict[int, bytes] = {}
        try:
            # A killed monitor leaves a truncated end.
            with contextlib.suppress(EOFError):
                self._index()
            self.length = len(self._ends) - 1
            if not self.length:
                raise ValueError("it holds no frame")
            first = self._frame(0)
        except (ValueError, OSError, zlib.error) as error:
            self.close()
            raise DoctorError(
                f"{path} is not a recording: {error}", "make one with `ddpdoctor top --record FILE`"
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
            # Going back in a gzip file means reading from its start, so keep earlier lines, too.
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

    def read(self, want: Visible) -> Snapshot:
        """Read the frame at the position. For a damaged frame, return one that reports it."""
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


# -- a made-up job of two nodes with a straggler, for users without a job

STEP_TIME = 0.222  # Seconds that a step of the job takes
AGE_AT_START = 600.0  # Seconds for which the job has run when the monitor starts

_STEPS_OF_EPOCH = 1250
_HISTORY_POINTS = 48

_PHASES = (
    ("data", 0.03, "train.py:57"),
    ("forward", 0.06, "train.py:61"),
    ("backward", 0.2, "train.py:61"),
    ("optimizer", STEP_TIME, "train.py:66"),
)
"""The phases of a step, the end of each, and the line that enters it."""


class DemoSource:
    """Frames of the made-up job. ``clock`` returns Unix seconds."""

    def __init__(self, interval: float, clock: Callable[[], float] = time.time) -> None:
        self.interval = interval
        self.replay = None
        self._clock = clock
        self._start = clock() - AGE_AT_START

    def read(self, want: Visible) -> Snapshot:
        """Make the current frame."""
        now = self._clock()
        return at(now - self._start, now)

    def history(self) -> Iterator[Snapshot]:
        """Make frames from the job's beginning until now."""
        age = self._clock() - self._start
        for number in range(1, _HISTORY_POINTS):
            then = age * number / _HISTORY_POINTS
            yield at(then, self._start + then)

    def close(self) -> None:
        """Close nothing."""


@lru_cache(maxsize=1)
def _template() -> Snapshot:
    """Read the constant parts of the job's frames, and the means of the varying ones."""
    path = Path(__file__).parent / "demo.json"
    return output.of_record(output.loads(opening.contents(path, 1 << 20, links=True)))


def at(age: float, now: float) -> Snapshot:
    """Make the frame of the job at an age in seconds, reached at Unix time ``now``."""
    made = _template()
    number, within = max(0, int(age / STEP_TIME) - 1), round(age % STEP_TIME, 3)
    phase, _, site = next(each for each in _PHASES if within <= each[1])
    epoch = number // _STEPS_OF_EPOCH
    rows = []
    for row in made.ranks:
        assert row.times is not None and row.gpu is not None
        swing = _noise(row.rank, number // 4)
        times = {
            name: (0.98 + 0.04 * swing) * getattr(row.times, name) for name in (*PHASES, "total")
        }
        gpu = replace(
            row.gpu,
            utilization=round(0.96 + 0.04 * swing, 2),
            power=round((row.gpu.power or 0.0) + 24 * swing, 1),
            temperature=round((row.gpu.temperature or 0.0) + 3 * swing),
        )
        row = replace(row, times=replace(row.times, **times), gpu=gpu, phase=phase, site=site)
        row = replace(row, since=within, heartbeat=within, step=number + 1, epoch=epoch)
        rows.append(row)
    findings = tuple(replace(each, time=now - age + 30) for each in made.findings)
    job = replace(
        made.job,
        step=number + 1,
        epoch=epoch,
        loss=round(1.8 + 5.1 / (1 + number / 400) + 0.1 * _noise(0, number), 3),
        left=max(0, (made.job.steps or 0) - number) * STEP_TIME,
    )
    snapshot = replace(
        made,
        time=now,
        started=now - age,
        job=job,
        gpus=tuple(row.gpu for row in rows if row.gpu is not None),
        findings=findings,
    )
    facts = headline.VerdictFacts(
        live=True, since_start=age, world_size=len(rows), findings=findings
    )
    return headline.judged_snapshot(snapshot, rows, facts)


def _noise(rank: int, number: int) -> float:
    """Return a number from 0 to 1, always the same for these numbers."""
    return crc32(struct.pack("<2q", rank, number)) / 2**32
