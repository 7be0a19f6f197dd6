"""How fast the CPU cores run that ranks are on, by the kernel (Linux, ``cpufreq``)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from ddpdoctor.run.records.supervisor import CoreClock
from ddpdoctor.system.proc import PROC, read_stat

MOST = 16
"""Ranks whose cores are looked at."""


class CoreClocks:
    """The highest clock that was read of each rank's core.

    A core that waits may run slowly; one that is at work does so only if it cannot run faster.

    Args:
        processes: The kernel's files of processes.
        cores: Those of cores; without frequencies there, as in many virtual machines,
            nothing is known.
    """

    def __init__(
        self, processes: Path = PROC, cores: Path = Path("/sys/devices/system/cpu")
    ) -> None:
        self._processes, self._cores = processes, cores
        self._seen: dict[int, CoreClock] = {}

    def look(self, pids: Mapping[int, int]) -> None:
        """Read the clock of the core that each rank is on; ``pids`` by rank."""
        for rank, pid in list(pids.items())[:MOST]:
            with contextlib.suppress(OSError, ValueError):
                stat = read_stat(pid, proc=self._processes)
                if stat is None:
                    continue
                folder = self._cores / f"cpu{stat.core}" / "cpufreq"
                clock = int((folder / "scaling_cur_freq").read_bytes())
                most = int((folder / "cpuinfo_max_freq").read_bytes())
                seen = self._seen.get(rank, CoreClock(rank, 0, 0, 0))
                self._seen[rank] = CoreClock(
                    rank, max(clock, seen.clock), max(most, seen.most), seen.readings + 1
                )

    @property
    def highest(self) -> tuple[CoreClock, ...]:
        """What was read, by rank; empty where nothing is known."""
        return tuple(self._seen[rank] for rank in sorted(self._seen))
