"""``srun ddpdoctor run`` on the hosts of a Slurm cluster, all of which write to one log."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.lab.checking import PORT, Checks, Make
from tests.lab.slurm import Slurm, missing, slurm
from tests.nodes.test_run_on_nodes import FAST, job, line_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}"),
]

ONE_A_TASK = """
rank, world = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
"""


@pytest.fixture
def cluster(nodes: Make, request: pytest.FixtureRequest) -> Iterator[tuple[Checks, Slurm]]:
    checks = nodes(request.param)
    with slurm(checks) as made:
        yield checks, made


def words(checks: Checks, script: str, *, tasks: bool, nproc: int) -> list[str]:
    """The command of docs/nodes.md: one ddpdoctor a node, or one a task."""
    own = [sys.executable, "-m", "ddpdoctor", "run", *FAST, "--kill-on-hang", "--no-debug"]
    own.append("--no-vscode")
    size = len(checks.lab.hosts)
    if tasks:
        return [f"--nodes={size}", f"--ntasks-per-node={nproc}", *own, "--", sys.executable, script]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", f"node0:{PORT}"]
    ranks = ["--nnodes", str(size), "--nproc-per-node", str(nproc)]
    return [f"--nodes={size}", "--ntasks-per-node=1", *own, *ranks, *rendezvous, "--", script]


@pytest.mark.parametrize(
    ("cluster", "tasks", "nproc"),
    [(2, False, 1), (2, True, 2), (3, False, 2), (3, True, 1)],
    indirect=["cluster"],
)
def test_a_hang_is_reported_once_in_the_log_of_all_nodes(
    cluster: tuple[Checks, Slurm], tasks: bool, nproc: int
) -> None:
    checks, made = cluster
    hangs = "rank == world - 1 and step == 60 and time.sleep(1000)"
    path = job(checks, hangs, before=ONE_A_TASK if tasks else "")
    status, log = made.run(*words(checks, str(path), tasks=tasks, nproc=nproc))
    assert status == 4, log
    found = re.findall(r"ddpdoctor: (?:error|warning) (DDP\d+): (.*)", log)
    assert [code for code, _ in found] == ["DDP802"], log
    rank = len(checks.lab.hosts) * nproc - 1
    assert f"rank {rank} " in found[0][1] and f"job.py:{line_of(path, 'sleep(1000)')}" in log


@pytest.mark.parametrize(
    ("cluster", "tasks", "nproc"), [(2, True, 1), (3, False, 1)], indirect=["cluster"]
)
def test_a_healthy_step_hears_nothing(
    cluster: tuple[Checks, Slurm], tasks: bool, nproc: int
) -> None:
    checks, made = cluster
    path = job(checks, steps=150, before=ONE_A_TASK if tasks else "")
    status, log = made.run(*words(checks, str(path), tasks=tasks, nproc=nproc))
    assert status == 0, log
    assert not re.findall(r"ddpdoctor: (?:error|warning)", log), log
    assert "node0 judges" in log and "ranks, 150 steps; the job succeeded" in log
