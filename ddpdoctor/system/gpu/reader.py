"""What can be read of a GPU, whoever reads it. What is not known is None, never 0."""

from __future__ import annotations

from dataclasses import dataclass


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
    throttled: tuple[str, ...] | None = None
    """Why the clocks are held down, in words; empty if they are not."""
    pcie: int | None = None
    """Bytes a second over PCIe, both directions, in the last 20 ms."""
    nvlink: int | None = None
    """Bytes over all NVLinks, both directions, since the driver was loaded."""
    processes: tuple[Process, ...] = ()
    """The processes that hold its memory."""
    ecc_errors: int | None = None
    """Memory errors since the driver was loaded that ECC could not correct."""


def same_uuid(uuid: str) -> str:
    """A GPU's UUID without the prefix that NVML gives it and torch does not."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
