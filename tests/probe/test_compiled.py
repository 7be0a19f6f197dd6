"""``torch.compile`` makes the same graphs beside ddpdoctor, breaks and recompiles them alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import JOBS, Doctor

JOB = str(JOBS / "compiled.py")
LOGS = {"TORCH_LOGS": "recompiles"}


def compiled(stdout: str, stderr: str) -> dict[str, Any]:
    """What Dynamo counted, the loss, and the functions that it compiled again."""
    counted = next(line for line in stdout.splitlines() if "unique_graphs" in line)
    return {
        **json.loads(counted[counted.index("{") :]),
        "loss": re.findall(r"loss ([\d.]+)", stdout),
        "recompiled": re.findall(r"Recompiling function (\w+)", stderr),
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
    expected, found = (compiled(each.stdout, each.stderr) for each in (alone, watched))
    assert expected["recompiled"]
    for name in ("loss", "stats", "recompiled"):
        assert found[name] == expected[name], name
    # DDP's forward may break once less, where our own context stands for one that Dynamo skips.
    assert set(found["graph_break"]) <= set(expected["graph_break"])
    assert 0 < sum(found["graph_break"].values()) <= sum(expected["graph_break"].values())
