"""Each sick job is named exactly as its own marks say (`tests.marks`), and its healed twin is left
alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.system.gpu.visible import visible
from tests.conftest import Doctor
from tests.marks import (
    HEALTHY,
    SICK,
    head,
    healed,
    marks,
    needed_gpus,
    needs_free_cores,
    options,
    read,
    said,
    standing,
)

SAMPLE = {"ddp401_barrier_on_rank_0"}
HEALED = {"ddp401_barrier_on_rank_0"}
"""Jobs that are run every time; the others are slow, all of them together."""

CROWDED = 8
"""Processes a core from which on none is to spare; the tests themselves are some."""


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


def findings(doctor: Doctor, path: Path) -> list[dict[str, object]]:
    """What is said of a job and stands at its end."""
    return standing(lines(doctor, path))


def lines(doctor: Doctor, path: Path) -> list[dict[str, object]]:
    """All that is said of a job, also what is withdrawn later; it has to end as it says it does."""
    needed = needed_gpus(path)
    if needed and needed > visible(os.environ):
        pytest.skip(f"needs {needed} NVIDIA GPU(s), {visible(os.environ)} visible here")
    if needs_free_cores(path) and os.getloadavg()[0] > CROWDED * (os.cpu_count() or 1):
        pytest.skip("makes a rank no slower than the others where none of them gets a core")
    report = doctor.directory / "findings.json"
    ranks = str(head(path, "ranks", 2))
    words = ("--json", str(report), "--quiet", *options(path), "--nproc-per-node", ranks)
    # On a machine that has other work they take minutes.
    result = doctor.run(*words, "--", str(path), timeout=600)
    expected = head(path, "status", 0)
    if expected:
        assert result.status == expected, result.stderr
    else:
        result.check_success()
    assert "Traceback" not in result.ours
    faults = [record for rank in result.run.ranks for record in rank.of_kind("fault")]
    assert not faults, faults
    return read(report)


@pytest.mark.parametrize("path", jobs(SICK))
def test_a_sick_job_is_named(doctor: Doctor, path: Path) -> None:
    expected = marks(path)
    assert expected, "no mark"
    found = findings(doctor, path)
    heard = [said(each) for each in found]
    for places in expected:
        assert any(each.fits(mark) for each in heard for mark in places), (places, found)
    for each in heard:
        assert any(each.fits(mark) for places in expected for mark in places), (each, found)


@pytest.mark.parametrize("path", jobs(SICK, twin=True))
def test_its_healed_twin_is_left_alone(doctor: Doctor, path: Path) -> None:
    # Not even what is withdrawn later.
    assert lines(doctor, path) == []


@pytest.mark.parametrize("path", jobs(HEALTHY))
def test_a_healthy_job_is_left_alone(doctor: Doctor, path: Path) -> None:
    found = [each for each in lines(doctor, path) if "retracts" not in each]
    assert [each for each in found if each["severity"] != "info"] == []
