"""A line to paste on one machine is typed in a real shell, and the check is green after it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import Doctor

JOB = "export RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500; "


@pytest.mark.parametrize(
    ("before", "check", "line"),
    [
        ("export RANK=0", "launch-environment", "unset RANK WORLD_SIZE"),
        (JOB + "export RANK=none", "launch-environment", "unset RANK WORLD_SIZE"),
        (JOB + "export RANK=1", "launch-environment", "unset RANK WORLD_SIZE"),
        (JOB + "export LOCAL_RANK=x", "launch-environment", "unset LOCAL_RANK"),
        (JOB + "export MASTER_PORT=none", "launch-environment", "export MASTER_PORT=29500"),
        (JOB + "export MASTER_PORT=70000", "launch-environment", "export MASTER_PORT=29500"),
        (JOB + "export MASTER_ADDR=tcp://node0:1", "launch-environment", "export MASTER_ADDR="),
        ("ulimit -S -n 128", "limits", "ulimit -n "),
    ],
)
def test_the_line_repairs(doctor: Doctor, before: str, check: str, line: str) -> None:
    words = [sys.executable, "-m", "ddpdoctor", "check", "--json", "--only", check]
    typed = shlex.join([*words, "--nproc-per-node", "1"])

    def outcome(script: str) -> dict[str, Any]:
        done = subprocess.run(
            ["sh", "-c", script],
            env=doctor.environment(),
            capture_output=True,
            text=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    sick = outcome(f"{before}; {typed}")
    (row,) = sick["checks"]
    pasted = row["findings"][0]["paste"]
    assert pasted.startswith(line), sick
    healthy = outcome(f"{before}; {pasted}; {typed}")
    assert healthy["exit_status"] == 0, healthy
