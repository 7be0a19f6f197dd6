"""Samples of ranks' memory and GPUs' load over a whole run, in a file of bounded size.

Status pages and the GPUs' files hold only current values. Here a sample is kept every two seconds.
Once there are many, every second one is dropped, and the interval doubles.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.names import VITALS
from ddpdoctor.run.reader import MAX_RANKS
from ddpdoctor.run.records.base import encode
from ddpdoctor.run.records.supervisor import GpuVitals, RankMemory, VitalsRecord
from ddpdoctor.run.records.typed_json import SUPERVISOR_RECORDS, parse
from ddpdoctor.run.snapshot import Run

SAMPLE_INTERVAL = 2.0  # Seconds between the first samples
MAX_KEPT = 600  # Maximum number of samples

MAX_WRITTEN = 1 << 20
"""Maximum bytes of all samples. With a thousand ranks there are fewer samples."""

_MAX_GPUS = 1 << 20


class Vitals:
    """Samples a run. Called as often as the other watches."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lines: list[bytes] = []
        self._size = 0
        self._every = SAMPLE_INTERVAL
        self._due = time.monotonic()

    def look(self, run: Run) -> bool:
        """Take a sample if one is due. Return False, since it is not a reason to examine the run.

        Raises:
            OSError: The disk refuses the file.
        """
        now = time.monotonic()
        if now < self._due or not run.last:
            return False
        self._due = now + self._every
        line = encode(self._sample(run))
        self._lines.append(line)
        self._size += len(line)
        path = self._directory / VITALS
        if len(self._lines) > MAX_KEPT or self._size > MAX_WRITTEN:
            del self._lines[1::2]
            self._size = sum(map(len, self._lines))
            self._every *= 2
            rundir.put(path, b"".join(self._lines))
        elif len(self._lines) == 1:
            rundir.put(path, line)
        else:
            with path.open("ab", buffering=0) as file:
                file.write(line)
        return False

    def _sample(self, run: Run) -> VitalsRecord:
        pages = ((rank.rank, rank.status) for rank in run.last if rank.status is not None)
        return VitalsRecord(
            time=run.taken,
            restart=run.restarts[-1],
            ranks=tuple(
                RankMemory(rank, page.rss, page.allocated, page.reserved) for rank, page in pages
            ),
            gpus=tuple(self._gpus()),
        )

    def _gpus(self) -> Iterator[GpuVitals]:
        """Read the latest values of the GPU poller."""
        for found in _gpu_files(self._directory):
            for each in found.get("gpus", ()):
                if "utilization" in each or "memory_used" in each:
                    yield GpuVitals(
                        str(found.get("host", "")),
                        integer(each, "index"),
                        each.get("utilization"),
                        each.get("memory_used"),
                        each.get("memory_total"),
                        each.get("power"),
                        each.get("temperature"),
                    )

    def close(self) -> None:
        """Do nothing, since no resource is held."""


def _gpu_files(directory: Path) -> Iterator[Mapping[str, Any]]:
    """Read the newest values from the GPU poller of each node."""
    for path in directory.glob("gpus-*.json"):
        with contextlib.suppress(OSError, ValueError):
            yield opening.json_object(path, _MAX_GPUS)


def gpu_counts(directory: Path) -> dict[str, int]:
    """Return the number of GPUs of each node that has any, by host name."""
    found = ((str(each.get("host", "")), each.get("gpus")) for each in _gpu_files(directory))
    return {host: len(gpus) for host, gpus in found if host and gpus and isinstance(gpus, list)}


MAX_READ = 4 << 20
MAX_LINE = 1 << 18
MAX_SAMPLES = 1200
MAX_CURVES = 64
"""Maximum number of ranks or GPUs with their own curves. Otherwise minimum, median and maximum."""


def read_vitals(directory: Path) -> list[VitalsRecord]:
    """Return the samples, oldest first. Empty if they cannot be read."""
    try:
        lines = opening.ending(directory / VITALS, MAX_READ).split(b"\n")[-MAX_SAMPLES:]
    except OSError:
        return []
    found = (parse(line, SUPERVISOR_RECORDS) for line in lines if len(line) <= MAX_LINE)
    return [each for each in found if isinstance(each, VitalsRecord)]


def vitals_curves(directory: Path, restart: int, started: float) -> dict[str, Any]:
    """Return the curves of an attempt: seconds since ``started``, and values or null by name."""
    samples = [each for each in read_vitals(directory) if each.restart == restart]
    ranks = sorted({memory.rank for each in samples for memory in each.ranks})[:MAX_RANKS]
    gpus = sorted({(gpu.host, gpu.gpu) for each in samples for gpu in each.gpus})[:MAX_RANKS]
    memory = [{each.rank: each for each in sample.ranks} for sample in samples]
    load = [{(each.host, each.gpu): each for each in sample.gpus} for sample in samples]

    def of_ranks(value: Callable[[RankMemory], int | None]) -> list[list[float | None]]:
        return _curves([[value(at[key]) if key in at else None for key in ranks] for at in memory])

    def of_gpus(value: Callable[[GpuVitals], float | None]) -> list[list[float | None]]:
        return _curves([[value(at[key]) if key in at else None for key in gpus] for at in load])

    return {
        "times": [round(each.time / 1e9 - started, 2) for each in samples],
        "ranks": _names([f"rank {rank}" for rank in ranks]),
        "gpus": _names([f"{host} GPU {number}" for host, number in gpus]),
        "curves": {
            "rss": of_ranks(lambda each: each.rss),
            "allocated": of_ranks(lambda each: each.allocated),
            "reserved": of_ranks(lambda each: each.reserved),
            "memory": of_gpus(lambda each: each.memory_used),
            "utilization": of_gpus(lambda each: each.utilization),
            "power": of_gpus(lambda each: each.power),
            "temperature": of_gpus(lambda each: each.temperature),
        },
    }


def _names(names: list[str]) -> list[str]:
    return names if len(names) <= MAX_CURVES else ["least", "median", "most"]


def _curves(rows: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Turn rows, one for each time, into curves. Empty if no value is known."""
    if not any(value is not None for row in rows for value in row):
        return []
    if len(rows[0]) > MAX_CURVES:
        rows = [_spread([value for value in row if value is not None]) for row in rows]
    return [list(curve) for curve in zip(*rows, strict=True)]


def _spread(values: Sequence[float]) -> list[float | None]:
    return [min(values), median(values), max(values)] if values else [None] * 3
