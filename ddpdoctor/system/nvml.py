"""Read NVIDIA GPUs by NVML (package ``nvidia-ml-py``): load, health, and samples of both."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.opening import whole

# -- read NVIDIA GPUs by NVML, the driver's library (package ``nvidia-ml-py``)


MAX_RETRY_INTERVAL = 60.0  # Maximum seconds between two attempts to reach the driver
MAX_FAILURES = 3  # Number of times that a GPU may break the library before it is skipped

_NEVER = frozenset({3, 4, 13, 25})
"""NVML's codes: not supported, no permission, no such function, other version of a struct."""

_FORBIDDEN = 4  # NVML's code: no permission
_GONE = frozenset({15, 16})  # NVML's codes: the GPU fell off the bus, or needs a reset
_BROKEN = frozenset({1, 9, 12, 17, 18, 999})  # NVML's codes: the library has to be opened again

_FABRIC_BEGINS, _FABRIC_READY = 2, 3
"""States of an NVSwitch fabric. 0 means none, and 1 is reported for GPUs that work without one."""

_WORDS = {
    3: "not supported",
    4: "no permission",
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver",
    15: "the GPU is lost: it fell off the bus",
    16: "the GPU needs a reset",
    17: "the operating system denies access to the GPUs",
    18: "the NVIDIA driver was updated: its library and kernel module differ; a reboot helps",
    999: "NVML fails with an unknown error",
}

_REPORTED = {"UtilizationRates": "utilization", "PowerUsage": "power", "Temperature": "temperature"}
"""The queries whose absence is reported. Others, such as ECC, are missing on many GPUs."""

_TEMPERATURE_GPU, _CLOCK_SM, _UNCORRECTED, _SINCE_DRIVER = 0, 1, 1, 0
"""NVML's numbers for a sensor, the clock of the multiprocessors, and an error counter."""

_NVLINK_SENT_AND_RECEIVED, _ALL_LINKS = (138, 139), 0xFFFFFFFF
"""NVML's numbers for payload bytes of links, and for all links together."""

_THROTTLED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for a slow GPU. Idle and chosen clocks are not among them."""


class NvmlReader:
    """Reads NVIDIA GPUs. Never raises. For one thread at a time.

    NVML may open and then fail, so only a call that succeeds proves that it works. Queries that a
    GPU does not support are made once. After an error NVML is opened again, at growing intervals. A
    forked child opens NVML itself.

    Args:
        clock: Returns seconds, for the intervals between attempts.
        further: Called after each opened GPU, which can take seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        further: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._further = further
        self._nvml: Any = None
        self._owner = 0
        self._handles: dict[Device, Any] = {}
        self._unsupported: set[tuple[str, str]] = set()
        self._lost: set[str] = set()
        self._refused: dict[str, dict[str, int]] = {}
        self._breaks: dict[str, int] = {}
        self._skipped_until: dict[str, float] = {}
        self.trouble = ""  # Why GPUs cannot be read, in words. Empty if they can.
        self.code = 0  # NVML's code for that, or 0
        self._absent: dict[int, str] = {}
        self._failures = 0
        self._retry = float("-inf")

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs that respond."""
        return tuple(self._handles) if self._opened() else ()

    def brief(self, device: Device) -> Reading:
        """Read values that change within a second: utilization, memory, power."""
        handle = self._handle(device)
        if handle is None:
            return Reading()
        total, used = self._memory(device, handle)
        busy = None if device.mig else self._ask(device, "UtilizationRates", handle)
        return Reading(
            memory_total=total,
            memory_used=used,
            utilization=_number(getattr(busy, "gpu", None)),
            power=_watts(self._ask(device, "PowerUsage", handle)),
        )

    def rest(self, device: Device) -> Reading:
        """Read values that change slowly: temperature, clocks, throttling, memory errors."""
        handle = self._handle(device)
        if handle is None:
            return Reading()
        limits = ("EnforcedPowerLimit", "PowerManagementLimit")
        fields = [(field, _ALL_LINKS) for field in _NVLINK_SENT_AND_RECEIVED]
        return Reading(
            power_limit=_watts(self._first(device, limits, handle)),
            temperature=_number(self._ask(device, "Temperature", handle, _TEMPERATURE_GPU)),
            clock=_number(self._ask(device, "ClockInfo", handle, _CLOCK_SM)),
            clock_max=_number(self._ask(device, "MaxClockInfo", handle, _CLOCK_SM)),
            throttled=self._throttled(device, handle),
            # NVML waits 20 ms for each direction.
            pcie=_sum_of_kib(
                _number(self._ask(device, "PcieThroughput", handle, each)) for each in (0, 1)
            ),
            nvlink=_sum_of_kib(
                int(each.value.ullVal) if each.nvmlReturn == 0 else None
                for each in self._ask(device, "FieldValues", handle, fields) or ()
            ),
            processes=self.processes(device) or (),
            ecc_errors=_number(
                self._ask(device, "TotalEccErrors", handle, _UNCORRECTED, _SINCE_DRIVER)
            ),
        )

    def problem(self, device: Device) -> str:
        """Return why values of a GPU are missing, in words. Empty if none are."""
        refused = self._refused.get(device.uuid, {})
        gone = next((code for code in refused.values() if code in _GONE), None)
        if gone is not None:
            return _WORDS[gone]
        if self._is_skipped(device):
            return _WORDS[999]
        if device.mig:
            return "partitioned (MIG): no utilization of the whole"
        return "; ".join(
            f"{_REPORTED[what]}: {_WORDS[code]}"
            for what, code in refused.items()
            if what in _REPORTED and code in _NEVER & _WORDS.keys()
        )

    @property
    def absent(self) -> dict[int, str]:
        """Why GPUs that the driver counts do not respond, by index."""
        return dict(self._absent) if self._opened() else {}

    def query(self, device: Device, what: str, *arguments: Any) -> Any:
        """Return the result of ``nvmlDeviceGet<what>`` for a GPU, or None."""
        handle = self._handle(device)
        return None if handle is None else self._ask(device, what, handle, *arguments)

    def between(self, device: Device, other: Device, what: str, *arguments: Any) -> Any:
        """Return the result of ``nvmlDeviceGet<what>`` for two GPUs, or None."""
        first, second = self._handle(device), self._handle(other)
        if first is None or second is None:
            return None
        return self._ask(device, what, first, second, *arguments)

    def instances(self, device: Device) -> tuple[str, ...]:
        """Return the UUIDs of a GPU's MIG instances."""
        if not device.mig:
            return ()
        handle = self._handle(device)
        most = _number(self.query(device, "MaxMigDeviceCount")) or 0
        found = []
        for index in range(most):
            # The instance may not exist, or may belong to another container.
            with contextlib.suppress(Exception):
                instance = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                found.append(text_of(self._nvml.nvmlDeviceGetUUID(instance)))
        return tuple(found)

    def fabric_ready(self, device: Device) -> bool | None:
        """Return whether a GPU's NVSwitch fabric is set up. None without one, or if not known.

        By ``nvmlDeviceGetGpuFabricInfo``, for Hopper and later.
        """
        struct = getattr(self._nvml, "c_nvmlGpuFabricInfo_t", None)
        if struct is None:
            return None
        info = struct()
        if self.query(device, "GpuFabricInfo", ctypes.byref(info)) is None:
            return None
        # One byte in the driver's header, four in the binding's.
        return {_FABRIC_BEGINS: False, _FABRIC_READY: True}.get(info.state & 0xFF)

    def system(self, what: str) -> Any:
        """Return the result of ``nvmlSystemGet<what>``, or None."""
        if not self._opened():
            return None
        with contextlib.suppress(Exception):
            return getattr(self._nvml, f"nvmlSystemGet{what}")()
        return None

    def processes(self, device: Device) -> tuple[Process, ...] | None:
        """Return the processes with memory on a GPU, or None if not known."""
        handle = self._handle(device)
        queries = ("ComputeRunningProcesses", "ComputeRunningProcesses_v2")
        found = None if handle is None else self._first(device, queries, handle)
        if found is None:
            return None
        return tuple(
            Process(int(each.pid), _number(getattr(each, "usedGpuMemory", None))) for each in found
        )

    def computing(self, device: Device) -> frozenset[int] | None:
        """Return the processes that ran kernels in the last seconds, or None if not known."""
        samples = self.query(device, "ProcessUtilization", 0)
        if samples is None:
            return None
        return frozenset(int(each.pid) for each in samples if each.smUtil)

    def close(self) -> None:
        """Close the driver. The next query opens it again."""
        nvml, self._nvml = self._nvml, None
        self._handles = {}
        if nvml is not None and self._owner == os.getpid():
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    # -- the library

    def _opened(self) -> bool:
        if self._nvml is not None and self._owner == os.getpid():
            return True
        if self._clock() < self._retry:
            return False
        try:
            # The old binding of this name works as well. It returns bytes, and lacks newer structs.
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # the errors for a missing driver are of many kinds
            self._failed(error)
            return False
        self._nvml, self._owner = pynvml, os.getpid()
        self._lost = set()
        self._refused = {}
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        except Exception as error:
            self._failed(error)
            return False
        self.trouble = ""
        self.code = 0
        self._handles = {}
        self._absent = {}
        for index in range(count):
            self._further()
            # A GPU that is lost, or that a container may not use, is missing.
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pci = tried(pynvml.nvmlDeviceGetPciInfo, handle)
                device = Device(
                    index=index,
                    uuid=text_of(pynvml.nvmlDeviceGetUUID(handle)),
                    name=text_of(tried(pynvml.nvmlDeviceGetName, handle) or ""),
                    bus_id=text_of(getattr(pci, "busId", "")),
                    mig=bool((tried(pynvml.nvmlDeviceGetMigMode, handle) or (0,))[0]),
                )
            except Exception as error:
                if getattr(error, "value", 0) == _FORBIDDEN:
                    # It belongs to another container or batch job.
                    continue
                self._absent[index] = _WORDS.get(getattr(error, "value", 0), f"NVML: {error}")
            else:
                self._handles[device] = handle
        self._further()
        return True

    def _failed(self, error: Exception) -> None:
        self.close()
        self.code = int(getattr(error, "value", 0) or 0)
        self.trouble = _WORDS.get(self.code, f"NVML: {error}")
        self._retry = self._clock() + min(MAX_RETRY_INTERVAL, 2.0**self._failures)
        self._failures = min(self._failures + 1, 10)

    def _handle(self, device: Device) -> Any:
        return self._handles.get(device) if self._opened() else None

    # -- queries

    def _ask(self, device: Device, what: str, *arguments: Any) -> Any:
        """Return the result of ``nvmlDeviceGet<what>``, or None."""
        query = f"{what}{arguments[1:]}"
        if self._nvml is None or device.uuid in self._lost:
            return None
        if (device.uuid, query) in self._unsupported or self._is_skipped(device):
            return None
        try:
            answer = getattr(self._nvml, f"nvmlDeviceGet{what}")(*arguments)
        except (AttributeError, TypeError):
            # The binding is older than the query.
            self._unsupported.add((device.uuid, query))
            return None
        except Exception as error:
            code = getattr(error, "value", None)
            self._refused.setdefault(device.uuid, {})[what] = int(code or 0)
            if code in _NEVER:
                self._unsupported.add((device.uuid, query))
            elif code in _GONE:
                self._lost.add(device.uuid)
            elif code in _BROKEN:
                # Skip a GPU that often breaks the library, so that others can be read.
                breaks = self._breaks[device.uuid] = self._breaks.get(device.uuid, 0) + 1
                if breaks >= MAX_FAILURES:
                    self._breaks[device.uuid] = 0
                    self._skipped_until[device.uuid] = self._clock() + MAX_RETRY_INTERVAL
                self._failed(error)
            return None
        self._failures = 0
        self._refused.get(device.uuid, {}).pop(what, None)
        return answer

    def _is_skipped(self, device: Device) -> bool:
        return self._clock() < self._skipped_until.get(device.uuid, float("-inf"))

    def _first(self, device: Device, queries: tuple[str, ...], handle: Any) -> Any:
        """Return the first result of several queries."""
        answers = (self._ask(device, each, handle) for each in queries)
        return next((answer for answer in answers if answer is not None), None)

    def _memory(self, device: Device, handle: Any) -> tuple[int | None, int | None]:
        # The second version does not count the driver's own memory as used.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = self._ask(device, "MemoryInfo", handle, version) if version is not None else None
        if memory is None:
            memory = self._ask(device, "MemoryInfo", handle)
        return _number(getattr(memory, "total", None)), _number(getattr(memory, "used", None))

    def _throttled(self, device: Device, handle: Any) -> tuple[str, ...] | None:
        queries = ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
        reasons = self._first(device, queries, handle)
        if not isinstance(reasons, int):
            return None
        return tuple(word for bit, word in _THROTTLED.items() if reasons & bit)


def tried(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call of a driver's library. None if it fails in any way."""
    with contextlib.suppress(Exception):
        return call(*arguments)
    return None


def _number(value: Any) -> int | None:
    """Return a number of NVML. None for the largest ones, which mean "not available"."""
    if not isinstance(value, int) or value in (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF):
        return None
    return value


def _sum_of_kib(counters: Iterable[int | None]) -> int | None:
    """Return the bytes of some counters in KiB. None if all are missing."""
    known = [each for each in counters if each is not None]
    return 1024 * sum(known) if known else None


def _watts(milliwatts: Any) -> float | None:
    number = _number(milliwatts)
    return None if number is None else number / 1000


def text_of(value: Any) -> str:
    """Return a text of NVML, which the old binding gives as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# -- Values of a GPU. None if not known, never 0


@dataclass(frozen=True)
class Device:
    """The identity of a GPU."""

    index: int  # Its index in NVML's order, that of the PCI bus, which may differ from CUDA's
    uuid: str
    name: str
    bus_id: str
    mig: bool  # It is partitioned. Values of the whole GPU say nothing about its parts.

    @property
    def key(self) -> str:
        """Its normalized UUID (:func:`same_uuid`)."""
        return same_uuid(self.uuid)


@dataclass(frozen=True)
class Process:
    """A process with memory on a GPU. Its pid is the one in the driver's pid namespace."""

    pid: int
    memory: int | None  # Bytes


@dataclass(frozen=True)
class Reading:
    """A sample of a GPU."""

    memory_total: int | None = None  # Bytes
    memory_used: int | None = None  # Bytes
    utilization: int | None = None  # Percent of the time with a running kernel
    power: float | None = None  # Watts
    power_limit: float | None = None  # Watts
    temperature: int | None = None  # Degrees Celsius
    clock: int | None = None  # MHz of the multiprocessors
    clock_max: int | None = None  # Maximum MHz of the multiprocessors
    throttled: tuple[str, ...] | None = None
    """Reasons for throttling, in words. Empty if there are none."""
    pcie: int | None = None  # Bytes per second over PCIe, both directions, in the last 20 ms
    nvlink: int | None = None
    """Bytes over all NVLinks, both directions, since the driver was loaded."""
    processes: tuple[Process, ...] = ()  # The processes that hold memory on it
    ecc_errors: int | None = None  # Uncorrectable memory errors since the driver was loaded


def same_uuid(uuid: str) -> str:
    """Normalize a UUID: without NVML's prefix, which torch does not use."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


# -- The GPUs that a job would see, without importing torch


HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values of ``CUDA_VISIBLE_DEVICES`` with which a person, or Slurm, hides all GPUs."""


@dataclass(frozen=True)
class Choice:
    """CUDA's reading of ``CUDA_VISIBLE_DEVICES``."""

    places: tuple[int, ...]
    """The chosen GPUs in CUDA's order, as indices into those that respond. CUDA counts the GPUs
    that this process may use, whatever the driver's numbers."""
    count: int
    """Number of devices that a process sees. It sees at most one MIG instance, and no whole GPU
    together with one."""
    wrong: str = ""  # The problem with the entry at which CUDA stopped. Empty if there is none.


def visible(environ: Mapping[str, str]) -> int:
    """Return the number of NVIDIA GPUs that a process sees. 0 without a driver."""
    if hides_all(environ):
        return 0
    reader = NvmlReader()
    found = [(each, reader.instances(each)) for each in reader.devices()]
    reader.close()
    return choice(environ, found).count


def hides_all(environ: Mapping[str, str]) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` hides all GPUs."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    return wanted is not None and wanted.strip() in HIDES_ALL


def choice(environ: Mapping[str, str], gpus: Sequence[tuple[Device, tuple[str, ...]]]) -> Choice:
    """Interpret ``CUDA_VISIBLE_DEVICES`` as CUDA and torch's ``_parse_visible_devices`` do.

    Args:
        environ: The environment. Without the variable all GPUs are chosen.
        gpus: The GPUs that respond, in the driver's order, with the UUIDs of their MIG
            instances.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    places: list[int] = list(range(len(gpus)))
    wrong = ""
    if hides_all(environ):
        return Choice((), 0)
    if wanted is not None:
        places, wrong = _entries(wanted, gpus)
    usable = [place for place in places if not gpus[place][0].mig or gpus[place][1]]
    count = 1 if any(gpus[place][0].mig for place in usable) else len(usable)
    return Choice(tuple(dict.fromkeys(places)), count, wrong)


def _entries(wanted: str, gpus: Sequence[tuple[Device, tuple[str, ...]]]) -> tuple[list[int], str]:
    """Return the GPUs of the entries before the first wrong one, and what is wrong with it."""
    by_uuid = wanted.strip().startswith(("GPU-", "MIG-"))
    found: list[int] = []
    seen: list[str | int] = []
    for entry in (each.strip() for each in wanted.split(",")):
        if not entry:
            return found, "an entry is empty"
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        number = re.match(r"\+?(\d+)", entry)
        if is_uuid != by_uuid and (is_uuid or number):
            return found, "it mixes numbers and UUIDs"
        if is_uuid:
            owners = [place for place, gpu in enumerate(gpus) if _owns(gpu, entry)]
            if len(owners) != 1:
                return found, f"{entry} fits several GPUs" if owners else (
                    f"this machine has no {entry}"
                )
            place, name = owners[0], entry
        elif number:
            place, name = whole(number[1], len(gpus)), number[1]
            if place >= len(gpus):
                return found, f"there is no GPU {name}"
        else:
            return found, f"{entry!r} is not a number or UUID"
        # Two instances of one GPU are two devices.
        key = entry if entry.startswith("MIG-") else place
        if key in seen:
            return [], f"{name} is listed twice"
        seen.append(key)
        found.append(place)
    return found, ""


def _owns(gpu: tuple[Device, tuple[str, ...]], entry: str) -> bool:
    """Return whether an entry names a GPU, by the beginning of its UUID, or an instance of it."""
    device, instances = gpu
    if entry.startswith("GPU-"):
        return device.key.startswith(same_uuid(entry))
    # Before driver 470 an instance was MIG-GPU-<the GPU's UUID>/<numbers>.
    return entry in instances or same_uuid(entry.removeprefix("MIG-")).startswith(f"{device.key}/")


# -- Health: links, memory faults, settings


MAX_LINKS = 18  # Maximum number of NVLinks of a GPU
MIN_BUSY = 50  # Minimum utilization, in percent, at which links run at full speed

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
    """The GPUs of this machine."""

    gpus: tuple[Health, ...] = ()  # The GPUs that respond
    absent: tuple[tuple[int, str], ...] = ()  # Why others do not respond, by index
    trouble: str = ""  # Why GPUs cannot be read, in words. Empty if they can.
    code: int = 0  # NVML's code for that. 0 if there is none, as without the library.
    driver: str = ""  # The driver's version
    cuda: str = ""  # The newest CUDA version that the driver supports, such as ``12.8``
    peers: tuple[tuple[int, int, bool], ...] = ()
    """Whether two GPUs can read each other's memory directly, by their indices."""
    nvlinked: tuple[tuple[int, int], ...] = ()
    """The pairs of indices that are connected by NVLink, directly or through a switch."""

    @property
    def held_by(self) -> dict[int, int]:
        """Bytes of GPU memory that each process holds, by pid."""
        held: dict[int, int] = {}
        for gpu in self.gpus:
            for process in gpu.processes:
                held[process.pid] = held.get(process.pid, 0) + (process.memory or 0)
        return held


def read_health(further: Callable[[], None] = lambda: None) -> GpuFacts:
    """Read everything once. ``further`` is called after each GPU, to show progress."""
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
            # If a GPU broke the library meanwhile, that is reported with that GPU.
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
        width=_number(reader.query(device, "CurrPcieLinkWidth")),
        width_most=_number(reader.query(device, "MaxPcieLinkWidth")),
        generation=_number(reader.query(device, "CurrPcieLinkGeneration")),
        generation_most=_number(reader.query(device, "MaxPcieLinkGeneration")),
        busy=performance == 0 and (brief.utilization or 0) >= MIN_BUSY,
        links=_links(reader, device),
        fabric_ready=reader.fabric_ready(device),
        persistent=None if persistence is None else persistence == _PERSISTENT,
        compute_mode=_number(reader.query(device, "ComputeMode")),
        instances=reader.instances(device),
        problem=reader.problem(device),
    )


def _links(reader: NvmlReader, device: Device) -> tuple[bool, ...]:
    states = []
    for link in range(MAX_LINKS):
        state = reader.query(device, "NvLinkState", link)
        if state is None:
            # A missing link is "not supported", and so are all following ones.
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
