"""The GPUs that the tests of this folder run on, as ``nvidia-smi`` and CUDA itself tell of them.

All of it, on a machine with one GPU or several that nobody uses:
``pytest tests/gpu -m 'slow or not slow'``.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

from ddpdoctor.preflight.selftest.collectives import why_no_nccl
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.system.nvml import visible

GPUS = visible(os.environ)

needs_gpu = pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU is visible on this machine")

NO_NCCL = why_no_nccl(Situation(), min(GPUS, 16)) if GPUS else "no GPU"
needs_nccl = pytest.mark.skipif(bool(NO_NCCL), reason=f"NCCL cannot be tested here: {NO_NCCL}")

needs_two = pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} NVIDIA GPU(s) visible, two are needed")

SLACK = 64
"""MiB by which what is in use on a GPU may differ without a reason."""


def smi(*fields: str) -> list[dict[str, str]]:
    """What ``nvidia-smi --query-gpu`` tells of each GPU, in its order."""
    return _query("--query-gpu", *fields)


def compute_processes() -> set[int]:
    """The processes that ``nvidia-smi`` sees on the GPUs; none, perhaps, in a container."""
    rows = _query("--query-compute-apps", "pid")
    return {int(row["pid"]) for row in rows if row["pid"].isdigit()}


def used() -> list[int]:
    """MiB in use on each GPU."""
    return [int(row["memory.used"]) for row in smi("memory.used")]


def wait_until_used(most: list[int], seconds: float = 20) -> list[int]:
    """What is in use on each GPU once it is no more than that, or when the time is over."""
    deadline = time.monotonic() + seconds
    while any(now > limit + SLACK for now, limit in zip(used(), most, strict=True)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return used()


def plain_smi(*words: str) -> str:
    """What another command of ``nvidia-smi`` prints; the test is skipped if it cannot."""
    done = subprocess.run(
        [_program(), *words], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"nvidia-smi {' '.join(words)}: {done.stdout.strip() or done.stderr.strip()}")
    return done.stdout


def cuda_count(environ: Mapping[str, str]) -> int:
    """How many devices CUDA itself counts in a process with that environment."""
    code = (
        "import ctypes\n"
        "cuda, count = ctypes.CDLL('libcuda.so.1'), ctypes.c_int()\n"
        "failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))\n"
        "print(0 if failed else count.value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


def _query(what: str, *fields: str) -> list[dict[str, str]]:
    text = plain_smi(f"{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if row]


def _program() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        pytest.skip("no nvidia-smi here to compare with")
    return program
