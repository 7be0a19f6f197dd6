"""Read AMD GPUs by the Python library of AMD SMI (``amdsmi``), where it is installed."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpdoctor.system.nvml import MAX_RETRY_INTERVAL, Device, NvmlReader, Process, Reading, tried

DRIVER = Path("/sys/class/kfd")  # Exists if the kernel has AMD's driver for computing

_LIBRARY = "libamd_smi.so"
_MISSING = "AMD's GPUs are read by amdsmi, which is not installed: it comes with ROCm"


def is_here() -> bool:
    """Return whether this machine has AMD's driver, but not NVIDIA's."""
    return DRIVER.exists() and not Path("/proc/driver/nvidia").exists()


def reader() -> NvmlReader | AmdReader:
    """Return the reader of this machine's GPUs."""
    return AmdReader() if is_here() else NvmlReader()


class AmdReader:
    """Reads AMD GPUs, as `NvmlReader` reads NVIDIA's. Never raises. For one thread at a time.

    The library opens the driver in the process that calls it, so a forked child opens it itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._smi: Any = None
        self._owner = 0
        self._handles: dict[Device, Any] = {}
        self._retry = float("-inf")
        self.trouble = ""  # Why GPUs cannot be read, in words. Empty if they can.

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs that respond."""
        if self._owner != os.getpid() and self._clock() >= self._retry:
            self._open()
        return tuple(self._handles)

    def brief(self, device: Device) -> Reading:
        """Read values that change within a second: utilization, memory, power."""
        memory = [
            self._ask(device, f"memory_{what}", ("AmdSmiMemoryType", "VRAM"))
            for what in ("total", "usage")
        ]
        activity, power = self._ask(device, "activity"), self._ask(device, "amdsmi_get_power_info")
        watts = (_number(power, f"{which}_socket_power") for which in ("current", "average"))
        return Reading(
            memory_total=memory[0],
            memory_used=memory[1],
            utilization=_number(activity, "gfx_activity"),
            power=next((float(each) for each in watts if each is not None), None),
        )

    def rest(self, device: Device) -> Reading:
        """Read values that change slowly. Temperatures, clocks and errors are not read."""
        return Reading(processes=self.processes(device))

    def processes(self, device: Device) -> tuple[Process, ...]:
        """Return the processes that hold memory on a GPU."""
        listed = self._ask(device, "process_list")
        found = []
        for each in listed if isinstance(listed, list) else ():
            pid, memory = _number(each, "pid"), each.get("memory_usage")
            if pid is not None:
                found.append(Process(pid, _number(memory, "vram_mem")))
        return tuple(found)

    def problem(self, device: Device) -> str:
        """Return what is wrong with a GPU, in words. Always empty: amdsmi is not asked."""
        return ""

    def close(self) -> None:
        """Close the library."""
        smi, self._smi, self._handles = self._smi, None, {}
        if smi is not None and self._owner == os.getpid():
            tried(smi.amdsmi_shut_down)
        self._owner = 0

    def _open(self) -> None:
        self._handles, self._retry = {}, self._clock() + MAX_RETRY_INTERVAL
        spec = importlib.util.find_spec("amdsmi")
        if spec is None:
            self.trouble = _MISSING
            return
        if not _has_library(Path(spec.origin or "").parent):
            self.trouble = f"amdsmi finds no {_LIBRARY}: it is in the package amd-smi-lib"
            return
        try:
            smi = importlib.import_module("amdsmi")
            smi.amdsmi_init()
            handles = smi.amdsmi_get_processor_handles()
        except Exception as error:  # KeyError without the library, or another error of the library
            self.trouble = f"amdsmi: {type(error).__name__} {error}".strip()
            return
        self._smi, self._owner, self.trouble = smi, os.getpid(), ""
        for index, handle in enumerate(handles):
            asic = tried(smi.amdsmi_get_gpu_asic_info, handle)
            facts = asic if isinstance(asic, dict) else {}
            uuid = torch_uuid(str(facts.get("asic_serial", ""))) or str(
                tried(smi.amdsmi_get_gpu_device_uuid, handle)
            )
            bus = str(tried(smi.amdsmi_get_gpu_device_bdf, handle) or "")
            device = Device(index, uuid, str(facts.get("market_name", "AMD GPU")), bus, False)
            self._handles[device] = handle

    def _ask(self, device: Device, what: str, *constants: tuple[str, str]) -> Any:
        """Call a function of the library for a GPU. None if it fails, or is missing."""
        name = what if what.startswith("amdsmi") else f"amdsmi_get_gpu_{what}"
        handle = self._handles.get(device)
        if handle is None:
            return None
        return tried(
            lambda: getattr(self._smi, name)(
                handle, *(getattr(getattr(self._smi, kind), each) for kind, each in constants)
            )
        )


def _has_library(package: Path) -> bool:
    """Return whether the library is there. Without it, the import prints, and fails."""
    roots = [os.environ.get(name, "/opt/rocm") for name in ("ROCM_HOME", "ROCM_PATH")]
    folders = [package, *(Path(root, each) for root in roots for each in ("lib", "lib64"))]
    there = any((folder / _LIBRARY).exists() for folder in folders)
    return there or ctypes.util.find_library("amd_smi") is not None


def torch_uuid(serial: str) -> str:
    """Return torch's UUID of the GPU with a serial number such as ``0xF330DC4D00DEE22B``.

    It holds the digits as text: https://github.com/ROCm/ROCm/issues/4203. Empty for another number.
    """
    digits = serial.lower().removeprefix("0x")
    if len(digits) != 16 or not digits.isascii():
        return ""
    text = digits.encode().hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _number(found: Any, key: str) -> int | None:
    """Return an integer of a dict. None for ``N/A``, which the GPU does not report."""
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, int) else None
