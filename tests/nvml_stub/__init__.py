"""The driver's library as a stub in C, so that tests run the real binding without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def build(directory: Path) -> Path:
    """The directory with the stub as ``libnvidia-ml.so.1``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here, which builds the stub of NVML")
    library = directory / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-o", str(library), str(HERE / "nvml.c")],
        check=True,
    )
    return directory


class Stub:
    """A process that reads the stub's GPUs by the real binding."""

    def __init__(self, library: Path, control: Path) -> None:
        self._control = control
        self.has()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "ticks.py")],
            env={**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB": str(control)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def has(self, *lines: str) -> None:
        """Let the stub have these faults, and no others."""
        self._control.write_text("".join(f"{line}\n" for line in lines))

    def read(self, now: float) -> Any:
        """What is read at that time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(now, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
