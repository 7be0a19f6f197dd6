"""The machine that the monitor runs on; and the monitor without a run, until there is one."""

from __future__ import annotations

import socket
import time

import psutil

from ddpdoctor.system.gpu.poller import Poller
from ddpdoctor.top import gpus
from ddpdoctor.top.snapshot import Gpu, Machine, Snapshot, Verdict
from ddpdoctor.top.source import Want

SHORTEST = 0.1
"""Seconds between two looks at the CPU: its counters are in hundredths."""


class Meter:
    """Reads CPU and memory of this machine."""

    def __init__(self) -> None:
        self._node = socket.gethostname()
        self._cores = psutil.cpu_count()
        self._read = 0.0
        self._cpu: float | None = None

    def read(self) -> Machine:
        """What they do; the CPU's load since the last reading, once there is one."""
        memory = None
        try:
            self._look_at_cpu()
            memory = psutil.virtual_memory()
        except (OSError, RuntimeError):
            # No /proc to read.
            pass
        return Machine(
            node=self._node,
            cpu=self._cpu,
            cores=self._cores,
            memory_used=None if memory is None else memory.total - memory.available,
            memory_total=None if memory is None else memory.total,
        )

    def _look_at_cpu(self) -> None:
        now = time.monotonic()
        if now - self._read < SHORTEST:
            return
        busy = psutil.cpu_percent() / 100
        # The first call has nothing to compare with.
        self._cpu = busy if self._read else None
        self._read = now


class LocalGpus:
    """The GPUs of this machine, polled here, since no supervisor does."""

    def __init__(self) -> None:
        self._poller: Poller | None = None

    def read(self) -> tuple[tuple[Gpu, ...], str]:
        """The GPUs, and why they cannot be read, in words."""
        if self._poller is None:
            self._poller = Poller()
        told = self._poller.read()
        return gpus.told_of(told), str(told["nvml"])

    def close(self) -> None:
        """Let go of the driver."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None


class MachineSource:
    """The machine alone.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._meter = Meter()
        self._gpus = LocalGpus()

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        found, trouble = self._gpus.read()
        return Snapshot(
            time=time.time(),
            kind="machine",
            verdict=Verdict(
                "no run of yours is live; the next one is shown when it starts", "info"
            ),
            gpus=found,
            machine=self._meter.read(),
            nvml=trouble,
        )

    def close(self) -> None:
        """Let go of the driver."""
        self._gpus.close()
