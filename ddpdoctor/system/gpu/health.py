"""What is lasting about the GPUs of this machine: links, memory faults, settings, by NVML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddpdoctor.system.gpu.nvml import NvmlReader
from ddpdoctor.system.gpu.reader import Device, Process

MOST_LINKS = 18
"""NVLinks of the largest GPUs so far."""

BUSY = 50
"""Percent of the time in which kernels run, from which on its links are at full speed."""

_PEER_READ = 0
_PEER_NVLINK = 2
_PERSISTENT = 1
_EXCLUSIVE_THREAD, _PROHIBITED, _EXCLUSIVE_PROCESS = 1, 2, 3
"""Compute modes of NVML, other than 0, the default."""


@dataclass(frozen=True)
class Health:
    """A GPU that answers; what is not known is None."""

    device: Device
    memory_total: int | None = None
    """Bytes."""
    memory_used: int | None = None
    processes: tuple[Process, ...] = ()
    uncorrected: int | None = None
    """Memory errors since the driver was loaded that ECC could not correct."""
    rows_pending: bool = False
    """Whether a faulty row or page of memory waits for a reset to be replaced."""
    rows_failed: bool = False
    """Whether no spare rows are left to replace a faulty one."""
    throttled: tuple[str, ...] = ()
    temperature: int | None = None
    width: int | None = None
    """PCIe lanes now."""
    width_most: int | None = None
    """PCIe lanes that GPU and slot both have."""
    generation: int | None = None
    generation_most: int | None = None
    busy: bool = False
    """Whether it runs at full clocks: an idle GPU lowers its PCIe generation by design."""
    links: tuple[bool, ...] = ()
    """Its NVLinks: whether each is up."""
    fabric_ready: bool | None = None
    """Whether the NVSwitch fabric that it is part of is set up; None without one."""
    persistent: bool | None = None
    compute_mode: int | None = None
    """NVML's: 0 shared, 2 prohibited, 1 and 3 one process alone."""
    instances: tuple[str, ...] = ()
    """The UUIDs of its MIG instances."""
    problem: str = ""

    @property
    def closed(self) -> bool:
        """Whether its compute mode keeps a new process out."""
        alone = self.compute_mode in (_EXCLUSIVE_THREAD, _EXCLUSIVE_PROCESS)
        return self.compute_mode == _PROHIBITED or (alone and bool(self.processes))

    @property
    def lost(self) -> bool:
        """Whether it stopped answering while it was asked."""
        return any(word in self.problem for word in ("lost", "reset", "unknown error"))


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of this machine.

    Attributes:
        gpus: Those that answer.
        absent: Why others do not, by index.
        trouble: Why none can be read, in words; empty if they can.
        code: NVML's code for that, 0 if NVML has none (no library).
        driver: The driver's version.
        cuda: The newest CUDA that the driver runs, such as ``12.8``.
        peers: For pairs of indices, whether one can read the other's memory directly.
        nvlinked: The pairs that reach each other by NVLink, directly or through a switch.
    """

    gpus: tuple[Health, ...] = ()
    absent: tuple[tuple[int, str], ...] = ()
    trouble: str = ""
    code: int = 0
    driver: str = ""
    cuda: str = ""
    peers: tuple[tuple[int, int, bool], ...] = ()
    nvlinked: tuple[tuple[int, int], ...] = ()

    @property
    def held_by(self) -> dict[int, int]:
        """Bytes of GPU memory by pid."""
        held: dict[int, int] = {}
        for gpu in self.gpus:
            for process in gpu.processes:
                held[process.pid] = held.get(process.pid, 0) + (process.memory or 0)
        return held


def read_health(further: Callable[[], None] = lambda: None) -> GpuFacts:
    """Ask the driver once for everything.

    Args:
        further: Called whenever another GPU has answered.
    """
    reader = NvmlReader(further=further)
    try:
        devices = reader.devices()
        trouble, code = reader.trouble, reader.code
        gpus = []
        for device in devices:
            gpus.append(health(reader, device))
            further()
        return GpuFacts(
            gpus=tuple(gpus),
            absent=tuple(sorted(reader.absent.items())),
            # A GPU that broke the library on the way is reported with that GPU.
            trouble=trouble if not devices else "",
            code=code if not devices else 0,
            driver=_text(reader.system("DriverVersion")),
            cuda=_cuda(reader.system("CudaDriverVersion_v2")),
            peers=tuple(_peers(reader, devices, _PEER_READ)),
            nvlinked=tuple(
                (one, other) for one, other, works in _peers(reader, devices, _PEER_NVLINK) if works
            ),
        )
    finally:
        reader.close()


def health(reader: NvmlReader, device: Device) -> Health:
    """Ask the driver for everything about a GPU."""
    brief, rest = reader.brief(device), reader.rest(device)
    rows = reader.query(device, "RemappedRows")
    pages = reader.query(device, "RetiredPagesPendingStatus")
    performance = reader.query(device, "PerformanceState")
    persistence = reader.query(device, "PersistenceMode")
    return Health(
        device=device,
        memory_total=brief.memory_total,
        memory_used=brief.memory_used,
        processes=reader.processes(device) or (),
        uncorrected=rest.ecc_errors,
        rows_pending=bool(_item(rows, 2)) or bool(pages),
        rows_failed=bool(_item(rows, 3)),
        throttled=rest.throttled or (),
        temperature=rest.temperature,
        width=_whole(reader.query(device, "CurrPcieLinkWidth")),
        width_most=_whole(reader.query(device, "MaxPcieLinkWidth")),
        generation=_whole(reader.query(device, "CurrPcieLinkGeneration")),
        generation_most=_whole(reader.query(device, "MaxPcieLinkGeneration")),
        busy=performance == 0 and (brief.utilization or 0) >= BUSY,
        links=_links(reader, device),
        fabric_ready=reader.fabric_ready(device),
        persistent=None if persistence is None else persistence == _PERSISTENT,
        compute_mode=_whole(reader.query(device, "ComputeMode")),
        instances=reader.instances(device),
        problem=reader.problem(device),
    )


def _links(reader: NvmlReader, device: Device) -> tuple[bool, ...]:
    states = []
    for link in range(MOST_LINKS):
        state = reader.query(device, "NvLinkState", link)
        if state is None:
            # A link that is not there is "not supported", and so are all behind it.
            break
        states.append(state == 1)
    return tuple(states)


def _peers(
    reader: NvmlReader, devices: tuple[Device, ...], what: int
) -> list[tuple[int, int, bool]]:
    found = []
    for number, one in enumerate(devices):
        for other in devices[number + 1 :]:
            status = reader.between(one, other, "P2PStatus", what)
            if isinstance(status, int):
                found.append((one.index, other.index, status == 0))
    return found


def _item(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, (list, tuple)) and len(values) > place else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value != 0xFFFFFFFF else None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _cuda(number: Any) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if isinstance(number, int) else ""
