"""The NVIDIA binding of a machine that a JSON file describes; a test puts it on the path.

``{"gpus": [{"uuid": ..., "processes": [[pid, bytes], ...], ...}], "errors": {"nvmlInit": 9}}``:
``errors``, of the whole or of a GPU, gives the code that a function fails with. The file is read at
each call, and each call is counted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC = 0
nvmlMemory_v2 = 0x02000028  # noqa: N816

calls: Counter[str] = Counter()
opened = 0


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def _machine(function: str) -> Any:
    calls[function] += 1
    machine = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    _fail(machine, function)
    if function != "nvmlInit" and not opened:
        raise NVMLError(1)
    return machine


def _fail(of: Any, function: str) -> None:
    code = of.get("errors", {}).get(function)
    if code is not None:
        raise NVMLError(code)


def _gpu(handle: int, function: str) -> Any:
    gpu = _machine(function)["gpus"][handle]
    _fail(gpu, function)
    return gpu


def nvmlInit() -> None:  # noqa: N802
    global opened
    _machine("nvmlInit")
    opened += 1


def nvmlShutdown() -> None:  # noqa: N802
    global opened
    opened -= 1


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_machine("nvmlDeviceGetCount")["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    _gpu(index, "nvmlDeviceGetHandleByIndex")
    return index


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return str(_gpu(handle, "nvmlDeviceGetUUID")["uuid"])


def nvmlDeviceGetName(handle: int) -> bytes:  # noqa: N802
    # As the old package does.
    return str(_gpu(handle, "nvmlDeviceGetName").get("name", "NVIDIA H100")).encode()


def nvmlDeviceGetPciInfo(handle: int) -> Any:  # noqa: N802
    _gpu(handle, "nvmlDeviceGetPciInfo")
    return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0")


def nvmlDeviceGetMigMode(handle: int) -> list[int]:  # noqa: N802
    mig = int(_gpu(handle, "nvmlDeviceGetMigMode").get("mig", 0))
    return [mig, mig]


def nvmlDeviceGetMemoryInfo(handle: int, version: int | None = None) -> Any:  # noqa: N802
    function = "nvmlDeviceGetMemoryInfo" + ("_v2" if version else "")
    gpu = _gpu(handle, function)
    reserved = 512
    used = int(gpu.get("used", 1000))
    return SimpleNamespace(total=80_000, used=used if version else used + reserved)


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:  # noqa: N802
    _gpu(handle, "nvmlDeviceGetUtilizationRates")
    return SimpleNamespace(gpu=97, memory=40)


def nvmlDeviceGetPowerUsage(handle: int) -> int:  # noqa: N802
    return int(_gpu(handle, "nvmlDeviceGetPowerUsage").get("power", 412_500))


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:  # noqa: N802
    _gpu(handle, "nvmlDeviceGetEnforcedPowerLimit")
    return 700_000


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:  # noqa: N802
    _gpu(handle, "nvmlDeviceGetTemperature")
    return 61


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:  # noqa: N802
    usual = int(_gpu(handle, "nvmlDeviceGetClockInfo").get("clock", 1980))
    return {NVML_CLOCK_SM: usual, NVML_CLOCK_MEM: 2619}[clock]


def nvmlDeviceGetCurrPcieLinkWidth(handle: int) -> int:  # noqa: N802
    return int(_gpu(handle, "nvmlDeviceGetCurrPcieLinkWidth").get("width", 16))


def nvmlDeviceGetProcessUtilization(handle: int, since: int) -> list[Any]:  # noqa: N802
    gpu = _gpu(handle, "nvmlDeviceGetProcessUtilization")
    if "computing" not in gpu:
        raise NVMLError(6)
    return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in gpu["computing"]]


def nvmlDeviceGetCurrentClocksEventReasons(handle: int) -> int:  # noqa: N802
    return int(_gpu(handle, "nvmlDeviceGetCurrentClocksEventReasons").get("reasons", 0x24))


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:  # noqa: N802
    _gpu(handle, "nvmlDeviceGetTotalEccErrors")
    return {0: 7, 1: 0}[kind]


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:  # noqa: N802
    gpu = _gpu(handle, "nvmlDeviceGetComputeRunningProcesses")
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in gpu.get("processes", [])
    ]
