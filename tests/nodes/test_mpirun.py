"""``mpirun ddpdoctor run`` on the hosts of a lab: Open MPI starts a ddpdoctor of each rank."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import LIMIT
from tests.lab.checking import Checks, Make
from tests.nodes.test_run_on_nodes import FAST, job, line_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="not installed: mpirun"),
]

READS_VARIABLES = """
rank, world = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
"""


def mpirun(checks: Checks, script: Path, nproc: int) -> tuple[int, str]:
    """Run a job from the first host. Return its exit status, and what all ranks wrote."""
    directory, hosts = checks.directory, checks.lab.hosts
    # Hosts of the lab have no sshd. Each runs the lines that come to a FIFO of its own.
    serves = "mkfifo {0}; exec 3<> {0}; while read -r line <&3; do "
    serves += 'sh -c "$line" 3>&- </dev/null & done'
    for host in hosts:
        fifo = directory / f"{host.name}.commands"
        checks.start(host, ["sh", "-c", serves.format(shlex.quote(str(fifo)))])
        until = time.monotonic() + LIMIT
        while not fifo.exists():
            assert time.monotonic() < until
            time.sleep(0.05)
    agent = directory / "agent"
    agent.write_text(
        f'#!/bin/sh\nhost=$1; shift\necho "$*" > {shlex.quote(str(directory))}/$host.commands\n'
        "exec sleep infinity\n"
    )
    agent.chmod(0o755)
    mpi = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(len(hosts) * nproc)]
    mpi += ["-H", ",".join(f"{host.name}:{nproc}" for host in hosts)]
    mpi += ["--mca", "plm_rsh_agent", str(agent)]
    own = [sys.executable, "-m", "ddpdoctor", "run", *FAST, "--kill-on-hang", "--no-debug"]
    own += ["--no-vscode", "--", sys.executable, str(script)]
    process, out, err = checks.start(hosts[0], [*mpi, *own])
    status = process.wait(LIMIT)
    return status, out.read_text(errors="replace") + err.read_text(errors="replace")


@pytest.mark.parametrize(("size", "nproc"), [(2, 2), (3, 1)])
def test_a_hang_is_reported_once_in_the_output_of_all_ranks(
    nodes: Make, size: int, nproc: int
) -> None:
    checks = nodes(size)
    hangs = "rank == world - 1 and step == 60 and time.sleep(1000)"
    path = job(checks, hangs, before=READS_VARIABLES)
    status, log = mpirun(checks, path, nproc)
    assert status == 4, log
    found = re.findall(r"ddpdoctor: (?:error|warning) (DDP\d+): (.*)", log)
    assert [code for code, _ in found] == ["DDP802"], log
    rank = size * nproc - 1
    assert f"rank {rank} " in found[0][1] and f"job.py:{line_of(path, 'sleep(1000)')}" in log


def test_a_healthy_job_hears_nothing(nodes: Make) -> None:
    checks = nodes(2)
    status, log = mpirun(checks, job(checks, before=READS_VARIABLES), 2)
    assert status == 0, log
    assert not re.findall(r"ddpdoctor: (?:error|warning)", log), log
    assert "node0 judges" in log and "4 ranks, 100 steps; the job succeeded" in log
