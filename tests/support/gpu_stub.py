"""GPUs of the stub of NVIDIA's driver library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ddpdoctor.preflight.check import CHECKS
from ddpdoctor.system.nvml import Device
from tests.conftest import Doctor

GPU_CHECKS = [name for name in CHECKS if name.startswith("gpu-") and name != "gpu-acs"]
"""Those that go by NVML."""
HEALTHY = ("ecc * 0", "throttle * 0", "memory * 80", "used * 0", "links * 18")


class Gpus:
    """A machine with eight GPUs that have faults."""

    def __init__(self, doctor: Doctor, library: Path) -> None:
        self._doctor = doctor
        self._control = doctor.directory / "control"
        self._env = {"LD_LIBRARY_PATH": str(library), "NVML_STUB": str(self._control)}

    def check(self, *faults: str, words: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
        """Each check's record, by name, with these faults before the healthy values."""
        self._control.write_text("".join(f"{line}\n" for line in (*faults, *HEALTHY)))
        only = ("--only", ",".join(GPU_CHECKS))
        result = self._doctor.cli("check", "--json", *only, *words, env={**self._env, **env})
        assert result.stderr == ""
        told = json.loads(result.stdout)
        assert told["exit_status"] == result.status
        return {each["check"]: each for each in told["checks"]}


def device(index: int, name: str = "NVIDIA H100") -> Device:
    return Device(index, f"GPU-{index}", name, f"00000000:{index:02X}:00.0", False)
