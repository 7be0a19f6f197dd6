"""What can be read of a GPU, whoever reads it. What is not known is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Device:
    """A GPU: what it is and stays."""

    index: int
    """Its number in NVML's order, which is that of the PCI bus, not CUDA's."""
    uuid: str
    name: str
    bus_id: str
    mig: bool
    """Whether it is partitioned: then what is read of the whole says nothing about its parts."""

    @property
    def key(self) -> str:
        """Its UUID as :func:`same_uuid` makes it."""
        return same_uuid(self.uuid)


@dataclass(frozen=True)
class Process:
    """A process with memory on a GPU; its pid is that of the driver's own namespace."""

    pid: int
    memory: int | None
    """Bytes."""


@dataclass(frozen=True)
class Reading:
    """What a GPU does at one moment."""

    memory_total: int | None = None
    """Bytes."""
    memory_used: int | None = None
    """Bytes."""
    utilization: int | None = None
    """Percent of the time in which a kernel ran."""
    memory_utilization: int | None = None
    """Percent of the time in which memory was read or written."""
    power: float | None = None
    """Watts."""
    power_limit: float | None = None
    """Watts."""
    temperature: int | None = None
    """Degrees Celsius."""
    clock: int | None = None
    """MHz of the multiprocessors."""
    clock_max: int | None = None
    """The most that they can have."""
    memory_clock: int | None = None
    """MHz."""
    throttled: tuple[str, ...] | None = None
    """Why the clocks are held down, in words; empty if they are not."""
    ecc_corrected: int | None = None
    """Memory errors since the driver was loaded that were corrected."""
    ecc_uncorrected: int | None = None
    """Those that were not."""
    processes: tuple[Process, ...] | None = None


class Reader(Protocol):
    """Reads the GPUs of this machine. Nothing raises; one thread at a time."""

    def devices(self) -> tuple[Device, ...]:
        """The GPUs that this process may use; empty where they cannot be read, for now or ever."""

    def read(self, device: Device) -> Reading:
        """What a GPU does now."""

    def processes(self, device: Device) -> tuple[Process, ...] | None:
        """The processes with memory on a GPU."""

    def brief(self, device: Device) -> Reading:
        """What changes within a second: utilization, memory, power."""

    def rest(self, device: Device) -> Reading:
        """What changes slowly: temperature, clocks and what holds them down, memory errors."""

    def problem(self, device: Device) -> str:
        """Why a GPU tells less than it could, in words; empty if it does not."""

    @property
    def trouble(self) -> str:
        """Why no GPUs can be read, in words; empty if they can."""

    def close(self) -> None:
        """Let go of the driver."""


def same_uuid(uuid: str) -> str:
    """A GPU's UUID without the prefix that NVML gives it and torch does not."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
