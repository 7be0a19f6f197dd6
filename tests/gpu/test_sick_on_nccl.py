"""Sick jobs with NCCL in place of gloo, each named as its own marks say.

With NCCL a host goes on while its GPU waits: what is seen of a rank is another thing than with
gloo. The jobs are those whose findings come from how ranks meet; all are slow.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import JOBS, Doctor
from tests.gpu.machine import needs_gpu, needs_nccl
from tests.support.marks import SICK, Kind, head, healed, judged, options, read

pytestmark = [needs_gpu, needs_nccl, pytest.mark.slow]

RUNNER = JOBS / "site-packages" / "on_nccl.py"

FAMILIES = ("ddp109", "ddp30", "ddp319", "ddp4", "ddp610", "ddp70", "ddp80")

BESIDE = {"DDP203"}
"""What is true of ranks that share a GPU, whatever else they do."""

ONLY = os.environ.get("DDPDOCTOR_TEST_SICK", "")
"""Where there is no time for all: the jobs whose names begin like one of these words."""

CHOSEN = tuple(ONLY.split()) or FAMILIES


@pytest.mark.parametrize("kind", ["sick", "healed"])
@pytest.mark.parametrize(
    "path", [p for p in SICK if p.stem.startswith(CHOSEN)], ids=lambda p: p.stem
)
def test_a_job_on_nccl(doctor: Doctor, path: Path, kind: Kind) -> None:
    job = path if kind == "sick" else healed(path)
    report = doctor.directory / "findings.json"
    report.touch()
    words = ["--json", str(report), "--quiet", *options(job), "--kill-on-hang"]
    words += ["--nproc-per-node", str(head(job, "ranks", 2))]
    result = doctor.run(*words, "--", str(RUNNER), str(job), timeout=120)
    lines = [each for each in read(report) if each.get("code") not in BESIDE]
    verdict = judged(kind, job, lines)
    assert verdict.as_wanted, (verdict, result.stderr[-3000:])
