"""Memory of ranks and load of GPUs over the whole run, in a file that never grows large.

Status pages and the GPUs' file hold the present alone. What is drawn over time after the run is
kept here: a sample every two seconds, and once there are many, every second one of them goes and
the next ones come half as often.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.names import VITALS
from ddpdoctor.run.records.base import encode
from ddpdoctor.run.records.supervisor import GpuVitals, RankMemory, VitalsRecord
from ddpdoctor.run.snapshot import Run

EVERY = 2.0
"""Seconds between the first samples."""

MOST = 600
"""Samples that are kept."""

MOST_BYTES = 1 << 20
"""And bytes of them: of a thousand ranks there are fewer samples."""

_MOST_GPUS = 1 << 20


class Vitals:
    """Samples a run; as the other watches it is called again and again.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lines: list[bytes] = []
        self._size = 0
        self._every = EVERY
        self._due = time.monotonic()

    def look(self, run: Run) -> bool:
        """Take a sample if one is due; never a reason to examine the run.

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
        if len(self._lines) > MOST or self._size > MOST_BYTES:
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
        """What the poll of this node's GPUs wrote last."""
        for path in self._directory.glob("gpus-*.json"):
            found = {}
            with contextlib.suppress(OSError, ValueError):
                found = opening.json_object(path, _MOST_GPUS)
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
        """Nothing is held."""
