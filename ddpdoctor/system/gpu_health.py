"""Read GPU faults and throttling, and poll GPUs in a separate process."""

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
from ddpdoctor.system.nvml import Device, NvmlReader, Process, Reading

# -- what is lasting about the GPUs of this machine: links, memory faults, settings, by NVML


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


# -- the GPUs of this machine, read again and again, as a JSON object for the run directory


EVERY = 1.0
"""Seconds between two readings of what changes fast."""

SLOWLY = 5.0
"""Seconds between two readings of the rest."""


def file_name(host: str) -> str:
    """Where the GPUs of a node are, in the run directory."""
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in host)
    return f"gpus-{safe}.json"


class Poller:
    """Reads all GPUs of this machine. One thread at a time; nothing raises.

    Args:
        reader: Reads a GPU.
        clock: Seconds.
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
        """What the NVLinks of a GPU had carried, when, and how much a second."""

    def read(self) -> JsonObject:
        """What they do now: ``format, time, host, nvml, gpus``.

        ``nvml`` says in words why they cannot be read. A GPU that was there stays in the list, with
        its ``problem`` instead of numbers.
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
        """Bytes a second over NVLink, between the last two readings of the rest."""
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
        """Let go of the driver."""
        self._reader.close()


def _record(
    device: Device, brief: Reading, rest: Reading, nvlink: float | None, problem: str
) -> JsonObject:
    silent = brief == Reading()
    numbers: dict[str, Any] = {
        "utilization": _ratio(brief.utilization),
        "memory_used": brief.memory_used,
        "memory_total": brief.memory_total,
        "power": brief.power,
    }
    if not silent:
        # Of a GPU that does not answer any more, what it said seconds ago is no news either.
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


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


# -- gpu poll


LIBRARY = "libnvidia-ml.so.1"


class GpuPoll:
    """Its own thread, since the driver may take seconds to answer, or hang.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.failed: Exception | None = None
        """The fault of ours, or of the binding, that ended it."""

    def start(self) -> None:
        """Begin to read, if this machine has the driver's library."""
        try:
            # Loads it, and calls nothing.
            ctypes.CDLL(LIBRARY)
        except OSError:
            return
        threading.Thread(target=self._run, name="ddpdoctor-gpu-poll", daemon=True).start()

    def stop(self) -> None:
        """Read no more. Does not wait: the driver may not answer."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:
            # It costs the numbers and nothing else.
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
