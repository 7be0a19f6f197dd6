"""Slow ranks and healthy jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import Severity
from tests.conftest import ROOT, Doctor
from tests.support.finding_jobs import TRAIN, TWO, findings


@pytest.mark.parametrize("slow", ["backward", "data"])
@pytest.mark.slow
def test_straggler_is_found_by_its_own_time(doctor: Doctor, slow: str) -> None:
    faults = {
        "backward": ("--slow-backward", "0.02"),
        "data": ("--slow-data", "0.005", "--slow-data-rank", "1"),
    }
    result = doctor.run(*TWO, TRAIN, "--steps", "45", "--rank", "1", *faults[slow])
    result.check_success()
    named = [each for each in findings(result) if each.code != "DDP906"]
    assert [each.code for each in named] == ["DDP610"], result.stderr
    assert named[0].ranks == (1,)
    assert {"backward": "backward compute", "data": "data loading"}[slow] in named[0].message
    assert "DDP610" in result.codes


@pytest.mark.slow
def test_a_rank_whose_core_others_use_is_no_slow_rank(doctor: Doctor) -> None:
    """Three processes spin on the core of rank 1."""
    script = doctor.write(
        "crowded.py",
        """
        import os, subprocess, sys
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        rank, cores = dist.get_rank(), sorted(os.sched_getaffinity(0))
        ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.001)
        batch = torch.randn(256, 512)
        spinning = []
        if rank == 1:
            os.sched_setaffinity(0, cores[:1])
            spin = [sys.executable, "-c", "while True: pass"]
            spinning = [subprocess.Popen(spin) for _ in range(3)]
        else:
            os.sched_setaffinity(0, cores[1:])
        try:
            for _ in range(140):
                optimizer.zero_grad()
                ddp(batch).square().mean().backward()
                optimizer.step()
        finally:
            for each in spinning:
                each.kill()
                each.wait()
        """,
    )
    result = doctor.run(*TWO, str(script))
    result.check_success()
    (finding,) = [each for each in findings(result) if each.code == "DDP610"]
    assert (finding.ranks, finding.severity.label) == ((1,), "warning"), finding
    assert "other processes take its CPU core" in finding.message


@pytest.mark.slow
def test_data_bound_on_all_ranks(doctor: Doctor) -> None:
    result = doctor.run(*TWO, TRAIN, "--steps", "45", "--slow-data", "0.005")
    result.check_success()
    named = [each for each in findings(result) if each.code != "DDP906"]
    assert [each.code for each in named] == ["DDP611"], result.stderr
    assert named[0].ranks == (0, 1)
    assert named[0].location is not None
    assert (
        "for (batch,) in loader" in Path(TRAIN).read_text().splitlines()[named[0].location.line - 1]
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", "60"),
        ("--steps", "25", "--epochs", "3", "--workers", "1"),
        ("--steps", "40", "--pause", "0.01"),
    ],
)
@pytest.mark.slow
def test_healthy_jobs_are_met_with_silence(doctor: Doctor, options: tuple[str, ...]) -> None:
    result = doctor.run(*TWO, TRAIN, *options)
    result.check_success()
    found = [each for each in findings(result) if each.severity > Severity.INFO]
    assert [each.code for each in found] == []


@pytest.mark.parametrize("job", ["cifar10.py", "resnet50_synthetic.py"])
@pytest.mark.slow
def test_reference_jobs_are_healthy(doctor: Doctor, job: str) -> None:
    result = doctor.run(*TWO, str(ROOT / "sample_jobs" / job))
    result.check_success()
    # Two images a rank are a small batch for BatchNorm, as an info says: a CPU bears no more.
    assert [code for code in result.codes if code not in ("DDP906", "DDP309")] == []
    assert re.search(r"findings: (none|\d info)", result.ours)


@pytest.mark.slow
def test_join_with_uneven_inputs_is_healthy(doctor: Doctor) -> None:
    script = doctor.write(
        "join.py",
        """
        import gc, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for _ in range(5 + 3 * dist.get_rank()):
                optimizer.zero_grad()
                ddp(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        del ddp, optimizer
        gc.collect()
        dist.destroy_process_group()
        """,
    )
    result = doctor.run(*TWO, str(script))
    result.check_success()
    assert [code for code in result.codes if code != "DDP906"] == []


@pytest.mark.slow
def test_interrupted_job_is_no_failure(doctor: Doctor) -> None:
    import signal

    live = doctor.start(*TWO, TRAIN, "--steps", "5000", "--pause", "0.02")
    live.wait_for_steps(3)
    live.process.send_signal(signal.SIGINT)
    result = live.finish()
    assert result.status != 0
    assert result.codes == []
    assert "after it was asked to stop" in result.ours
