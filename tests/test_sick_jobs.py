"""Each sick job is named exactly as its own marks say, and its healed twin is left alone.

A mark stands on the guilty line: ``# expect: DDP305`` for a finding of the job as a whole or on any
rank, ``# expect: DDP305 rank 1`` or ``ranks 0,2`` for exactly these. ``# or: DDP805 rank 1`` is a
line at which the same finding may stand instead: it takes py-spy to know more. The head of a job
may say ``# ranks: 3``, ``# status: 1`` (the exit status that the job itself has, 0 unless said),
``# run: --hang-after 3`` (options of ``ddpdoctor run``), and ``# needs: gpu`` or
``# needs: 2 gpus``: it is skipped where fewer are visible.
The twin of ``sick/NAME.py`` is ``sick/NAME_healed.py``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpdoctor.gpu.visible import visible
from tests.conftest import ROOT, Doctor

SICK = sorted(
    path
    for path in (ROOT / "sample_jobs" / "sick").glob("*.py")
    if not path.stem.endswith("_healed")
)
HEALTHY = sorted((ROOT / "sample_jobs" / "healthy").glob("*.py"))
SAMPLE = {"ddp102_no_sampler", "ddp401_barrier_on_rank_0", "ddp305_unused_head"}
HEALED = {"ddp401_barrier_on_rank_0"}
"""Jobs that are run every time; the others are slow, all of them together."""


def jobs(paths: list[Path], twin: bool = False) -> list[object]:
    """The jobs as parameters, or their healed twins."""
    return [
        pytest.param(
            path.with_name(f"{path.stem}_healed.py") if twin else path,
            id=path.stem,
            marks=() if path.stem in (HEALED if twin else SAMPLE) else pytest.mark.slow,
        )
        for path in paths
    ]


_MARK = re.compile(r"# (expect|or): (DDP\d+)(?: ranks? ([\d,]+))?$")


@dataclass(frozen=True)
class Said:
    """A finding, as far as a mark tells it."""

    code: str
    path: str
    line: int
    ranks: tuple[int, ...] | None

    def fits(self, mark: Said) -> bool:
        same = (self.code, self.path, self.line) == (mark.code, mark.path, mark.line)
        return same and mark.ranks in (None, self.ranks)


def marks(path: Path) -> list[list[Said]]:
    """What is expected: of each finding the places at which it may stand."""
    found: list[list[Said]] = []
    others: list[Said] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _MARK.search(line)
        if match is not None:
            ranks = tuple(map(int, match[3].split(","))) if match[3] else None
            mark = Said(match[2], str(path), number, ranks)
            if match[1] == "or":
                others.append(mark)
            else:
                found.append([mark])
    for other in others:
        next(each for each in found if each[0].code == other.code).append(other)
    return found


def head(path: Path, word: str, default: int) -> int:
    match = re.search(rf"^# {word}: (\d+)$", path.read_text(), re.MULTILINE)
    return int(match[1]) if match is not None else default


def options(path: Path) -> list[str]:
    match = re.search(r"^# run: (.+)$", path.read_text(), re.MULTILINE)
    return match[1].split() if match is not None else []


def needed_gpus(path: Path) -> int:
    match = re.search(r"^# needs: (?:(\d+) )?gpus?$", path.read_text(), re.MULTILINE)
    return int(match[1] or 1) if match is not None else 0


def findings(doctor: Doctor, path: Path) -> list[dict[str, object]]:
    """What is said of a job, less than nothing if the job did not end as it says it does."""
    needed = needed_gpus(path)
    if needed and needed > visible(os.environ):
        pytest.skip(f"needs {needed} NVIDIA GPU(s), {visible(os.environ)} visible here")
    report = doctor.directory / "findings.json"
    ranks = str(head(path, "ranks", 2))
    words = ("--json", str(report), "--quiet", *options(path), "--nproc-per-node", ranks)
    result = doctor.run(*words, "--", str(path))
    expected = head(path, "status", 0)
    if expected:
        assert result.status == expected, result.stderr
    else:
        result.check_success()
    assert "Traceback" not in result.ours
    faults = [record for rank in result.run.ranks for record in rank.of_kind("fault")]
    assert not faults, faults
    return [json.loads(line) for line in report.read_text().splitlines()]


def said(finding: dict[str, object]) -> Said:
    location = finding.get("location")
    place = location if isinstance(location, dict) else {}
    ranks = finding["ranks"]
    assert isinstance(ranks, list)
    return Said(
        str(finding["code"]), str(place.get("path")), int(place.get("line", 0)), tuple(ranks)
    )


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
    assert findings(doctor, path) == []


@pytest.mark.parametrize("path", jobs(HEALTHY))
def test_a_healthy_job_is_left_alone(doctor: Doctor, path: Path) -> None:
    found = findings(doctor, path)
    assert [each for each in found if each["severity"] != "info"] == []
