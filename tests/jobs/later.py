"""Runs a job whose losses and gradients are read some steps later, as a GPU's are.

With ``--broken`` the sizes of tensors cannot be had.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from ddpdoctor.probe.observers import readback
from ddpdoctor.probe.runtime import torch_private

at_once = readback.loss_reader


def later(loss: Any) -> Any:
    value = at_once(loss)
    return None if value is None else lambda: value


def broken(torch: Any, tensors: Any) -> Any:
    raise RuntimeError("broken")


readback.loss_reader = later
if sys.argv[1] == "--broken":
    torch_private.largest = broken
    del sys.argv[1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
