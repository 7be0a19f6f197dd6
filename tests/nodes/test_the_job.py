"""``ddpdoctor check`` across nodes, in a lab: the job itself, after the check."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LIMIT, ROOT
from tests.lab import faults
from tests.lab.checking import PORT, Checks, Make

ABOVE_LOOPBACK = "192.168.77"
"""Addresses higher than 127.0.1.1, so that gloo there dials it; those of 10.0.0.0/8 are lower."""


def line_of(checks: Checks, rank: int) -> str:
    """The line that the check prints on a node."""
    out = checks.directory / f"table{rank}.out"
    return out.read_text().splitlines()[-1]


def print_tables(checks: Checks, script: list[str]) -> list[int]:
    """Run the check for people on all nodes; the exit statuses."""
    running = []
    for host in checks.lab.hosts:
        words = checks.words(host, "--", *script)
        process, out, _ = checks.start(host, words)
        running.append((host, process, out))
    statuses = []
    for host, process, out in running:
        statuses.append(process.wait(100))
        out.rename(checks.directory / f"table{host.rank}.out")
    return statuses


def train(
    checks: Checks, lines: list[str], env: dict[str, str] | None = None
) -> list[tuple[subprocess.Popen[bytes], Path, Path]]:
    running = []
    for host, line in zip(checks.lab.hosts, lines, strict=True):
        words = shlex.split(line)
        assert words[:2] == ["ddpdoctor", "run"]
        own = ["--no-debug", "--no-vscode", "--run-dir", str(checks.directory / f"run{host.rank}")]
        command = [sys.executable, "-m", "ddpdoctor", "run", *own, *words[2:]]
        running.append(checks.start(host, command))
    return running


SCRIPT = [
    str(ROOT / "sample_jobs" / "cifar10.py"),
    "--train-size", "256", "--test-size", "64", "--epochs", "1",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_after_a_green_check_the_line_trains(nodes: Make, size: int) -> None:
    checks = nodes(size)
    assert print_tables(checks, SCRIPT) == [0] * size
    lines = [line_of(checks, rank) for rank in range(size)]
    running = train(checks, lines)
    for process, _out, err in running:
        assert process.wait(LIMIT) == 0, err.read_text()
    told = running[0][1].read_text()
    assert f"ranks {size}, device " in told
    assert "summary: 1 epochs, test accuracy" in told


def blocked(checks: Checks) -> None:
    faults.firewall(checks.lab, checks.lab.hosts[0], ports=faults.EPHEMERAL)


def shrunk(checks: Checks) -> None:
    faults.packet_size_limit(checks.lab, checks.lab.hosts[1])


def misnamed(checks: Checks) -> None:
    faults.own_name_is_loopback(checks.lab.hosts[1])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [blocked, shrunk, misnamed])
def test_after_a_red_check_the_line_fails(nodes: Make, fault: Callable[[Checks], None]) -> None:
    checks = nodes(2, ABOVE_LOOPBACK)
    fault(checks)
    assert print_tables(checks, SCRIPT) == [2, 2]
    assert "ddpdoctor run" not in (checks.directory / "table0.out").read_text()
    lines = [
        shlex.join(
            [
                *("ddpdoctor", "run", "--nnodes", "2", "--node-rank", str(rank)),
                *("--nproc-per-node", "1", "--rdzv-endpoint", f"node0:{PORT}", "--", *SCRIPT),
            ]
        )
        for rank in (0, 1)
    ]
    running = train(checks, lines)
    until = time.monotonic() + 40
    while time.monotonic() < until and all(process.poll() is None for process, _, _ in running):
        time.sleep(0.5)
    # A healthy one has ended by now; torch may be silent for 40 minutes, which is not waited for.
    assert not any(process.poll() == 0 for process, _, _ in running)
    assert "train loss" not in running[0][1].read_text()
    for process, _, _ in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process, _, _ in running:
        process.wait(LIMIT)
