"""``torch.compile`` makes the same graphs beside ddpdoctor, breaks and recompiles them alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import JOBS, Doctor

JOB = str(JOBS / "compiled.py")
LOGS = {"TORCH_LOGS": "recompiles,graph_breaks"}


def compiled(stdout: str, stderr: str) -> dict[str, object]:
    """What Dynamo counted, the loss, and the functions that it compiled again."""
    counted = next(line for line in stdout.splitlines() if "unique_graphs" in line)
    return {
        **json.loads(counted[counted.index("{") :]),
        "loss": re.findall(r"loss ([\d.]+)", stdout),
        "recompiled": re.findall(r"Recompiling function (\w+)", stderr),
        "broken": len(re.findall(r"\[__graph_breaks\].*Graph break", stderr)),
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_graphs_breaks_and_recompilations_are_the_same(doctor: Doctor) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(doctor.directory / "inductor")}
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", JOB]
    alone = subprocess.run(
        words,
        env={**os.environ, **LOGS, **cache},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    watched = doctor.run("--nproc-per-node", "1", JOB, env={**LOGS, **cache}, timeout=900)
    watched.check_success()
    expected = compiled(alone.stdout, alone.stderr)
    assert expected["recompiled"]
    assert expected["broken"]
    assert compiled(watched.stdout, watched.stderr) == expected
