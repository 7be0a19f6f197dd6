"""Memory of a GPU that grows is named with what holds it and its line, and nothing else is."""

from __future__ import annotations

import pytest

from tests.conftest import JOBS, Doctor, Result
from tests.gpu.machine import GPUS, needs_gpu, needs_nccl

pytestmark = [needs_gpu, needs_nccl]

JOB = JOBS / "gpu_memory.py"
TWO = ("--standalone", "--nproc-per-node", "2", str(JOB))
BESIDE = {"DDP203"} if GPUS < 2 else set()


def line_of(kind: str) -> str:
    lines = JOB.read_text().splitlines()
    at = next(at for at, line in enumerate(lines, 1) if line.endswith(f"# guilty: {kind}"))
    return f"{JOB.name}:{at}"


def codes(result: Result) -> list[str]:
    return [code for code in result.codes if code not in BESIDE]


@pytest.mark.parametrize(
    ("kind", "holder"),
    [
        ("graphs", "`HISTORY`"),
        ("total", "`total`"),
        ("module", "`ddp.module.seen`"),
        ("cache", "`MASKS`"),
        ("hooks", "hooks are added again and again"),
    ],
)
def test_what_holds_the_memory_is_named(doctor: Doctor, kind: str, holder: str) -> None:
    result = doctor.run(*TWO, kind)
    assert codes(result) == ["DDP620"], result.stderr
    assert holder in result.ours
    assert line_of(kind) in result.ours


def test_memory_that_no_name_holds_has_the_line_that_takes_it(doctor: Doctor) -> None:
    result = doctor.run(*TWO, "library")
    assert codes(result) == ["DDP620"], result.stderr
    assert f"what stays is allocated at {line_of('library')}" in result.ours


def test_a_rank_that_runs_out_has_grown(doctor: Doctor) -> None:
    result = doctor.run(*TWO, "full")
    assert codes(result) == ["DDP928"], result.stderr
    assert line_of("full") in result.ours
    assert "grew by 1 GiB in each step" in result.ours
    assert "`HISTORY`" in result.ours


@pytest.mark.parametrize("kind", ["replay", "batches", "offset"])
def test_nothing_is_said_of_a_healthy_job(doctor: Doctor, kind: str) -> None:
    result = doctor.run(*TWO, kind)
    assert result.status == 0, result.stderr
    assert codes(result) == [], result.stderr
