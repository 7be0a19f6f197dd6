"""A stand-in for NVIDIA's binding, so that tests run the real reader without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent


class Machine:
    """The GPUs of the machine that the fake tells of, in this process."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = file
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        monkeypatch.setenv("FAKE_NVML", str(file))

    @property
    def module(self) -> ModuleType:
        return sys.modules["pynvml"]

    def has(self, *gpus: dict[str, Any], **errors: int) -> None:
        """Describe it; ``errors`` are of the library as a whole."""
        self._file.write_text(json.dumps({"gpus": gpus, "errors": errors}))
