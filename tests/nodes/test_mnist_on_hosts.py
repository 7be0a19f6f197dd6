"""The MNIST job, started by hand on every host of a lab, under ddpdoctor."""

from __future__ import annotations

import re
import sys

import pytest

from tests.conftest import LIMIT, ROOT
from tests.lab.checking import Make

JOB = str(ROOT / "sample_jobs" / "mnist_tcp.py")
PORT = 22225
SMALL = ("--train-size", "600", "--test-size", "101", "--epochs", "2")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_each_host_trains_its_share(nodes: Make, size: int) -> None:
    checks = nodes(size)
    running = []
    for host in checks.lab.hosts:
        own = ["--no-debug", "--no-vscode", "--run-dir", str(checks.directory / f"run{host.rank}")]
        place = ["--rank", str(host.rank), "--world-size", str(size)]
        where = ["--init-method", f"tcp://{checks.lab.hosts[0].address}:{PORT}"]
        job = [sys.executable, JOB, *where, *place, *SMALL]
        running.append(
            checks.start(host, [sys.executable, "-m", "ddpdoctor", "run", *own, "--", *job])
        )
    for process, _out, err in running:
        assert process.wait(LIMIT) == 0, err.read_text()
        # The job may be over before the nodes have found each other.
        judged = rf"ddpdoctor: (1 of )?{size} ranks, .*\n(.*\n)*ddpdoctor: findings: none"
        assert re.search(rf"{judged}|findings: see node0", err.read_text()), err.read_text()
    output = running[0][1].read_text()
    # 600 digits in batches of 64 for each rank.
    assert f"{-(-600 // size // 64)} steps of 64 per rank and epoch" in output
    assert len(re.findall(r"^epoch \d/2 time \d+\.\d+ s loss ", output, re.M)) == 2
    assert re.search(rf"^summary: ranks {size}, 2 epochs in \d+\.\d+ s, ", output, re.M)
