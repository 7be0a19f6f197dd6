"""Read the health of GPUs, and poll their load for the run directory."""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.system.nvml import Device, NvmlReader, Process, Reading, text_of

# -- Health: links, memory faults, settings


MAX_LINKS = 18  # Maximum number of NVLinks of a GPU
BUSY = 50  # Minimum percent of the time with running kernels at which links are at full speed

_PEER_READ = 0
_PEER_NVLINK = 2
_PERSISTENT = 1
_EXCLUSIVE_THREAD, _PROHIBITED, _EXCLUSIVE_PROCESS = 1, 2, 3
"""NVML's compute modes besides the default, 0."""


@dataclass(frozen=True)
class Health:
    """A GPU that responds. None if not known."""

    device: Device
    memory_total: int | None = None  # Bytes
    memory_used: int | None = None
    processes: tuple[Process, ...] = ()
    uncorrected: int | None = None  # Uncorrectable memory errors since the driver was loaded
    rows_pending: bool = False  # A faulty memory row or page will be replaced by a reset
    rows_failed: bool = False
    """A faulty memory row could not be replaced, as there are no spare rows."""
    throttled: tuple[str, ...] = ()
    temperature: int | None = None
    width: int | None = None  # PCIe lanes now
    width_most: int | None = None  # PCIe lanes that both GPU and slot have
    generation: int | None = None
    generation_most: int | None = None
    busy: bool = False  # It runs at full clocks. An idle GPU lowers its PCIe generation by design.
    links: tuple[bool, ...] = ()  # Whether each NVLink is up
    fabric_ready: bool | None = None  # Whether its NVSwitch fabric is set up. None without one.
    persistent: bool | None = None
    compute_mode: int | None = None
    """NVML's number: 0 shared, 2 prohibited, 1 and 3 a single process."""
    instances: tuple[str, ...] = ()  # The UUIDs of its MIG instances
    problem: str = ""

    @property
    def closed(self) -> bool:
        """Whether its compute mode refuses a new process."""
        alone = self.compute_mode in (_EXCLUSIVE_THREAD, _EXCLUSIVE_PROCESS)
        return self.compute_mode == _PROHIBITED or (alone and bool(self.processes))

    @property
    def lost(self) -> bool:
        """Whether it stopped responding meanwhile."""
        return any(word in self.problem for word in ("lost", "reset", "unknown error"))


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs of this machine.

    Attributes:
        gpus: The GPUs that respond.
        absent: Why others do not respond, by index.
        trouble: Why GPUs cannot be read, in words. Empty if they can.
        code: NVML's code for that. 0 if there is none, as without the library.
        driver: The driver's version.
        cuda: The newest CUDA version that the driver supports, such as ``12.8``.
        peers: Whether two GPUs can read each other's memory directly, by their indices.
        nvlinked: The pairs of indices that are connected by NVLink, directly or through a switch.
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
        """Bytes of GPU memory that each process holds, by pid."""
        held: dict[int, int] = {}
        for gpu in self.gpus:
            for process in gpu.processes:
                held[process.pid] = held.get(process.pid, 0) + (process.memory or 0)
        return held


def read_health(further: Callable[[], None] = lambda: None) -> GpuFacts:
    """Read everything once.

    Args:
        further: Called after each GPU, to show progress.
    """
    reader = NvmlReader(further=further)
    try:
        devices = reader.devices()
        cuda = reader.system("CudaDriverVersion_v2")
        trouble, code = reader.trouble, reader.code
        gpus = []
        for device in devices:
            gpus.append(health(reader, device))
            further()
        return GpuFacts(
            gpus=tuple(gpus),
            absent=tuple(sorted(reader.absent.items())),
            # A GPU that broke the library meanwhile is reported with that GPU.
            trouble=trouble if not devices else "",
            code=code if not devices else 0,
            driver=text_of(reader.system("DriverVersion") or ""),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else "",
            peers=tuple(_peers(reader, devices, _PEER_READ)),
            nvlinked=tuple(
                (one, other) for one, other, works in _peers(reader, devices, _PEER_NVLINK) if works
            ),
        )
    finally:
        reader.close()


def health(reader: NvmlReader, device: Device) -> Health:
    """Read everything about a GPU."""
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
    for link in range(MAX_LINKS):
        state = reader.query(device, "NvLinkState", link)
        if state is None:
            # A missing link is "not supported", and so are all after it.
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


# -- Polling for the run directory


EVERY = 1.0  # Seconds between two samples of values that change fast
SLOWLY = 5.0  # Seconds between two samples of the others


def file_name(host: str) -> str:
    """Return the name of a node's file in the run directory."""
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in host)
    return f"gpus-{safe}.json"


class Poller:
    """Samples all GPUs of this machine. For one thread at a time. Never raises.

    Args:
        reader: Reads a GPU.
        clock: Returns seconds.
    """

    def __init__(
        self, reader: NvmlReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = NvmlReader() if reader is None else reader
        self._clock = clock
        self._host = socket.gethostname()
        self._known: dict[str, Device] = {}
        self._rest: dict[str, Reading] = {}
        self._slow_due = float("-inf")
        self._carried: dict[str, tuple[float, int, float | None]] = {}
        """By GPU: time and NVLink bytes of the last slow sample, and the rate."""

    def read(self) -> JsonObject:
        """Return a sample as JSON: ``format, time, host, nvml, gpus``.

        ``nvml`` says why GPUs cannot be read. A GPU that disappeared stays in the list, with a
        ``problem`` instead of numbers.
        """
        devices = {device.uuid: device for device in self._reader.devices()}
        self._known.update(devices)
        now = self._clock()
        slow = now >= self._slow_due
        if slow:
            self._slow_due = now + SLOWLY
        gpus = []
        for device in sorted(self._known.values(), key=lambda each: each.index):
            if device.uuid in devices:
                brief = self._reader.brief(device)
                if slow or device.uuid not in self._rest:
                    self._rest[device.uuid] = self._reader.rest(device)
                problem = self._reader.problem(device) or self._reader.trouble
                rest = self._rest[device.uuid]
                links = self._nvlink(device, rest, now)
                gpus.append(_record(device, brief, rest, links, problem))
            else:
                self._rest.pop(device.uuid, None)
                trouble = self._reader.trouble or "not there any more"
                gpus.append(_record(device, Reading(), Reading(), None, trouble))
        return {
            "format": FORMAT,
            "time": time.time_ns(),
            "host": self._host,
            "nvml": self._reader.trouble,
            "gpus": gpus,
        }

    def _nvlink(self, device: Device, rest: Reading, now: float) -> float | None:
        """Return bytes per second over NVLink, between the last two slow samples."""
        if rest.nvlink is None:
            self._carried.pop(device.uuid, None)
            return None
        since, before, rate = self._carried.get(device.uuid, (now, rest.nvlink, None))
        if now > since and rest.nvlink >= before and now == self._slow_due - SLOWLY:
            rate = (rest.nvlink - before) / (now - since)
            since, before = now, rest.nvlink
        self._carried[device.uuid] = since, before, rate
        return rate

    def close(self) -> None:
        """Close the driver."""
        self._reader.close()


def _record(
    device: Device, brief: Reading, rest: Reading, nvlink: float | None, problem: str
) -> JsonObject:
    silent = brief == Reading()
    numbers: dict[str, Any] = {
        "utilization": None if brief.utilization is None else brief.utilization / 100,
        "memory_used": brief.memory_used,
        "memory_total": brief.memory_total,
        "power": brief.power,
    }
    if not silent:
        # The slow values of a GPU that does not respond any more are outdated as well.
        numbers |= {
            "power_limit": rest.power_limit,
            "temperature": rest.temperature,
            "clock": _hertz(rest.clock),
            "clock_max": _hertz(rest.clock_max),
            "ecc_errors": rest.ecc_errors,
            "throttle": list(rest.throttled) if rest.throttled else None,
            "pcie": rest.pcie,
            "nvlink": nvlink,
            "processes": [[each.pid, each.memory] for each in rest.processes] or None,
        }
    words: dict[str, Any] = {
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "bus_id": device.bus_id,
        "mig": device.mig or None,
        "problem": problem or None,
    }
    return {key: value for key, value in (words | numbers).items() if value is not None}


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


LIBRARY = "libnvidia-ml.so.1"


class GpuPoll:
    """Polls in a thread, since the driver may take seconds to respond, or hang.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.failed: Exception | None = None  # The error in ddpdoctor or the binding that ended it

    def start(self) -> None:
        """Start, if this machine has the driver's library."""
        try:
            # This calls nothing.
            ctypes.CDLL(LIBRARY)
        except OSError:
            return
        threading.Thread(target=self._run, name="ddpdoctor-gpu-poll", daemon=True).start()

    def stop(self) -> None:
        """Stop. Does not wait, since the driver may not respond."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:
            # Only the numbers are lost.
            self.failed = error

    def _poll(self) -> None:
        poller = Poller()
        due = time.monotonic()
        while not self._stop.is_set():
            gpus = poller.read()
            path = self._directory / file_name(str(gpus["host"]))
            with contextlib.suppress(OSError):
                rundir.put(path, json.dumps(gpus).encode())
            due = max(due + EVERY, time.monotonic() + EVERY / 4)
            self._stop.wait(due - time.monotonic())
        poller.close()
