"""Jobs that Slurm ends before they are done: preempted, requeued, cancelled, out of time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.conftest import LIMIT
from tests.lab.checking import Checks, Make
from tests.lab.slurm import Slurm, missing, slurm
from tests.support.launching import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}"),
]

JOB = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
started = True
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    if dist.get_rank() == 0 and started:
        print("stepped", flush=True)
    started = False
    time.sleep(0.05)
"""

BATCH = """\
#!/bin/bash
#SBATCH --output={log} --open-mode=append --ntasks=1 --cpus-per-task=2 --requeue
exec {python} -m ddpdoctor run --debug-port 0 --no-vscode --nproc-per-node 2 -- {job}
"""


class Submitted:
    """A batch job on a cluster of one node."""

    def __init__(self, checks: Checks, made: Slurm) -> None:
        self.made, self.log = made, checks.directory / "job.log"
        job = checks.directory / "train.py"
        job.write_text(JOB)
        self.script = checks.directory / "job.sh"
        self.script.write_text(BATCH.format(log=self.log, python=sys.executable, job=job))
        self.number = ""

    def submit(self, *options: str) -> None:
        self.number = self.made.tool("sbatch", "--parsable", *options, str(self.script)).strip()
        self.wait_for("the first step", "stepped")

    def end(self) -> None:
        """End all jobs: a requeued one may be about to start again."""

        def ended() -> bool:
            self.made.tool("scancel", "--user=root")
            return not self.made.tool("squeue", "--noheader").strip()

        wait_until(ended, "the end of all jobs", 3 * LIMIT)

    def wait_for(self, what: str, text: str, count: int = 1) -> str:
        def read() -> str:
            return self.log.read_text(errors="replace") if self.log.exists() else ""

        wait_until(lambda: read().count(text) >= count, what, 3 * LIMIT)
        return read()


@pytest.fixture
def submitted(nodes: Make) -> Iterator[Submitted]:
    checks = nodes(2)
    with slurm(checks) as made:
        one = Submitted(checks, made)
        yield one
        one.end()


SUMMARY = "; the job "


def test_a_preempted_job_says_so_and_starts_again(submitted: Submitted) -> None:
    submitted.submit("--nodelist=node0", "--exclusive")
    submitted.made.tool(
        "sbatch", "--parsable", "--partition=urgent", "--nodelist=node0", "--exclusive",
        "--output=/dev/null", "--wrap", "sleep 8",
    )  # fmt: skip
    log = submitted.wait_for("its end", SUMMARY)
    line = next(each for each in log.splitlines() if SUMMARY in each)
    assert line.endswith(
        f"Slurm requeued job {submitted.number}, as after a preemption: it starts again"
    )
    assert "error DDP" not in log, "to be preempted is no fault of the job"
    log = submitted.wait_for("its second start", "stepped", 2)
    assert f"Slurm has started job {submitted.number} again (restart 1)" in log


def test_a_requeued_job(submitted: Submitted) -> None:
    submitted.submit()
    # Where nodes admit no ssh, commands reach the ranks by the job's own allocation.
    within = ["srun", "--overlap", "--jobid", submitted.number, "--nodelist", "node0"]
    doctor = [sys.executable, "-m", "ddpdoctor"]
    assert "train.py" in submitted.made.tool(*within, *doctor, "stacks")
    assert submitted.made.tool(*within, *doctor, "eval", "6 * 7") == "ranks 0-1: 42\n"
    assert submitted.made.tool(*within, *doctor, "attach", "--stdio") == "[0, 1]\n"
    submitted.made.tool("scontrol", "requeue", submitted.number)
    log = submitted.wait_for("its end", SUMMARY)
    assert f"Slurm requeued job {submitted.number}" in log
    assert "error DDP" not in log


def test_a_cancelled_job(submitted: Submitted) -> None:
    submitted.submit()
    submitted.made.tool("scancel", "--full", submitted.number)
    log = submitted.wait_for("its end", SUMMARY)
    assert f"job {submitted.number} was cancelled (scancel)" in log
    assert "error DDP" not in log
