"""Sick jobs are named as their marks say (`tests.support.marks`); healed twins are left alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.errors import HANG
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.system.nvml import visible
from tests.conftest import ROOT, Doctor
from tests.support.marks import (
    HEALTHY,
    SICK,
    Kind,
    Verdict,
    fix,
    head,
    healed,
    judged,
    marks,
    needed_cores,
    needed_gpus,
    options,
    read,
    sizes,
)

SAMPLE = {"ddp401_barrier_on_rank_0"}
HEALED = {"ddp401_barrier_on_rank_0"}
"""Jobs that are run every time; the others are slow, all of them together."""

CROWDED = 8
"""Processes a core from which on none is to spare; the tests themselves are some."""

Note = Callable[[str, object], None]
"""pytest's ``record_property``."""


def jobs(paths: list[Path], twin: bool = False) -> list[object]:
    """The jobs as parameters, or their healed twins."""
    return [
        pytest.param(
            healed(path) if twin else path,
            id=path.stem,
            marks=() if path.stem in (HEALED if twin else SAMPLE) else pytest.mark.slow,
        )
        for path in paths
    ]


def noted(note: Note, kind: Kind, verdict: Verdict) -> Verdict:
    """Note what `benchmarks/load.py` counts."""
    note("named", kind == "sick" and not verdict.missing)
    note("others", [f"{each['severity']} {each['code']}" for each in verdict.others])
    return verdict


def examined(doctor: Doctor, kind: Kind, path: Path, note: Note) -> Verdict:
    """Run a job and judge all that is said of it, also what is withdrawn later.

    The job has to end as it says it does. Where it is not there to hang, ddpdoctor may end what
    hangs: nothing is to be ended.
    """
    needed = needed_gpus(path)
    if needed and needed > visible(os.environ):
        pytest.skip(f"needs {needed} NVIDIA GPU(s), {visible(os.environ)} visible here")
    cores, has = needed_cores(path), os.cpu_count() or 1
    if cores > has:
        pytest.skip(f"needs {cores} cores, {has} here")
    if cores and os.getloadavg()[0] > CROWDED * has:
        pytest.skip("makes a rank no slower than the others where none of them gets a core")
    report = doctor.directory / "findings.json"
    report.touch()
    if sizes(path):
        words = ["parity", "--json", "--run-dir", "sizes", "--nproc", *sizes(path)]
        compared = json.loads(doctor.cli(*words, "--", str(path)).stdout)
        assert compared["failed"] == []
        report.write_text("".join(f"{json.dumps(each)}\n" for each in compared["findings"]))
        return noted(note, kind, judged(kind, path, read(report)))
    hangs = kind == "sick" and path.stem.startswith(("ddp4", "ddp8"))
    words = ["--json", str(report), "--quiet", *options(path)]
    words += [] if hangs else ["--kill-on-hang"]
    ranks = str(head(path, "ranks", 2))
    # On a machine that has other work they take minutes.
    result = doctor.run(*words, "--nproc-per-node", ranks, "--", str(path), timeout=900)
    verdict = noted(note, kind, judged(kind, path, read(report)))
    note("killed", result.status == HANG and not hangs)
    expected = head(path, "status", 0)
    if expected:
        assert result.status == expected, result.stderr
    else:
        result.check_success()
    assert "Traceback" not in result.ours
    faults = [record for rank in result.run.ranks for record in rank.records.of(FaultRecord)]
    assert not faults, faults
    return verdict


@pytest.mark.parametrize("path", jobs(SICK))
def test_a_sick_job_is_named(doctor: Doctor, path: Path, record_property: Note) -> None:
    assert marks(path), "no mark"
    verdict = examined(doctor, "sick", path, record_property)
    assert verdict.as_wanted, verdict
    wanted = re.escape(fix(path)).replace(r"\{\}", ".*")
    fixes = [each["fix"] for each in read(doctor.directory / "findings.json") if "fix" in each]
    assert any(re.match(wanted, each) for each in fixes), fixes


@pytest.mark.parametrize("path", jobs(SICK, twin=True))
def test_its_healed_twin_is_left_alone(doctor: Doctor, path: Path, record_property: Note) -> None:
    verdict = examined(doctor, "healed", path, record_property)
    assert verdict.as_wanted, verdict


@pytest.mark.parametrize("path", jobs(HEALTHY))
def test_a_healthy_job_is_left_alone(doctor: Doctor, path: Path, record_property: Note) -> None:
    verdict = examined(doctor, "healthy", path, record_property)
    assert verdict.as_wanted, verdict


def test_the_sample_jobs_are_those_that_their_page_names() -> None:
    folder = ROOT / "sample_jobs"
    named = re.findall(r"\(sick/(\w+)\.py\)", (folder / "README.md").read_text())
    pairs = [f"{name}{end}.py" for name in named for end in ("", "_healed")]
    assert sorted(pairs) == sorted(path.name for path in (folder / "sick").glob("*.py"))


def test_a_job_is_judged_by_its_marks(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("a = 1  # expect: DDP610 rank 1\nb = 2  # or: DDP610\n")

    def said_at(line: int, *ranks: int, code: str = "DDP610") -> dict[str, Any]:
        location = {"path": str(path), "line": line}
        return {"code": code, "severity": "error", "ranks": [*ranks], "location": location}

    other = said_at(1, 1, code="DDP611")
    withdrawn = [other, {"retracts": 1, "why": "untrue"}]
    info = {**other, "severity": "info"}
    assert judged("sick", path, [said_at(1, 1)]).as_wanted
    assert judged("sick", path, [said_at(2, 0)]).as_wanted
    assert judged("sick", path, [*withdrawn, said_at(1, 1)]).as_wanted
    assert judged("sick", path, [said_at(1, 0)]).missing == marks(path)
    assert judged("sick", path, [said_at(1, 1), other]).others == [other]
    assert not judged("sick", path, [said_at(1, 1), other]).as_wanted
    assert not judged("sick", path, []).as_wanted
    assert judged("healed", path, []).as_wanted
    assert not judged("healed", path, withdrawn).as_wanted
    assert judged("healthy", path, [info]).as_wanted
    assert not judged("healthy", path, withdrawn).as_wanted
