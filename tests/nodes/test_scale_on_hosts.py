"""``ddpdoctor scale`` over hosts of a lab, started by hand on each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import JOBS, LIMIT
from tests.lab.checking import PORT, Checks, Make

TRAIN = str(JOBS / "train.py")


def start(checks: Checks, *words: str) -> list[tuple[subprocess.Popen[bytes], Path, Path]]:
    """Start the same command on every host, but for its node rank."""
    endpoint = f"{checks.lab.hosts[0].name}:{PORT}"
    return [
        checks.start(
            host,
            [
                *(sys.executable, "-m", "ddpdoctor", "scale", "--node-rank", str(host.rank)),
                *("--rdzv-endpoint", endpoint, "--repeat", "1", "--json"),
                *("--run-dir", str(checks.directory / f"runs{host.rank}")),
                *words,
            ],
        )
        for host in checks.lab.hosts
    ]


def results(
    running: list[tuple[subprocess.Popen[bytes], Path, Path]], runs: int, status: int
) -> list[list[dict[str, Any]]]:
    """The rows that each host printed of so many runs."""
    found = []
    for process, out, err in running:
        assert process.wait(runs * LIMIT) == status, out.read_text() + err.read_text()
        assert "Traceback" not in err.read_text()
        found.append(json.loads(out.read_text())["rows"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_each_host_measures_the_runs_that_it_is_part_of(nodes: Make, size: int) -> None:
    sizes = ",".join(str(number) for number in range(1, size + 1))
    # Of short steps, DDP's timers are those of each fourth.
    words = ("--nnodes", sizes, "--nproc", "1", TRAIN, "--steps", "40")
    for node, rows in enumerate(results(start(nodes(size), *words), size, 0)):
        assert [row["nodes"] for row in rows] == [*range(node + 1, size + 1)]
        for row in rows:
            (run,) = row["runs"]
            assert run["measured"]["ranks"] == row["ranks"] == row["nodes"]
            assert run["measured"]["local"] == 1
            assert run["measured"]["steps"] == 35
            assert 0 < run["measured"]["exposed"] < run["measured"]["step"]


@pytest.mark.slow
def test_a_crash_over_hosts_leaves_the_other_sizes(nodes: Make) -> None:
    # Rank 1 fails: of one host the job is whole, and of two it is not.
    words = ("--nnodes", "1,2", "--nproc", "1", TRAIN, "--steps", "12", "--fail", "exception")
    first, second = results(start(nodes(2), *words), 2, 1)
    assert [(row["ranks"], row["median"] is not None) for row in first] == [(1, True), (2, False)]
    assert [row["median"] for row in second] == [None]
    assert "DDP901 rank 1 raised ValueError" in second[0]["runs"][0]["failure"]
