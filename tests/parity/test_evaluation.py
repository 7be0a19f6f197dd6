"""Evaluations with fewer samples, and steps that were not kept, on written runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.commands import parity
from ddpdoctor.diagnose.parity.rules_evaluation import compared_evaluations
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.snapshot import Run
from tests.support.written import Written


def evaluated(draws: int, **changed: object) -> list[JsonObject]:
    """The records of a rank that evaluates so many of 70 samples."""
    return [
        {
            "kind": "pass", "path": "/job/train.py", "line": 9, "time": 1, "pass": 1, "number": 0,
            "state": "ended", "made": ["/job/train.py", 5], "dataset": "TensorDataset",
            "length": 70, "followed": 35, "fetched": 3, "draws": draws, **changed,
        }
    ]  # fmt: skip


def run_of(folder: Path, *ranks: list[JsonObject]) -> Run:
    folder.mkdir()
    written = Written(folder)
    written.world_size = len(ranks)
    for number, records in enumerate(ranks):
        written.rank(number, records)
    written.findings(status=0)
    return RunReader(written.path).snapshot()


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ([evaluated(70)], [evaluated(28), evaluated(28)], "has 56 samples, one of 1 rank 70"),
        ([evaluated(70)], [evaluated(35), evaluated(35)], ""),
        ([evaluated(70)], [evaluated(70), evaluated(70)], ""),
        ([evaluated(70)], [evaluated(28), evaluated(28, state="left")], ""),
        ([evaluated(70)], [evaluated(28), []], ""),
        ([evaluated(70)], [evaluated(28), evaluated(28, marks=3)], ""),
        ([evaluated(70, iterable=True)], [evaluated(28), evaluated(28)], ""),
        ([evaluated(70, line=8)], [evaluated(28), evaluated(28)], ""),
        ([evaluated(35), evaluated(35)], [evaluated(17)] * 4, ""),
        ([evaluated(70), evaluated(70)], [evaluated(16)] * 4, "has 64 samples, one of a rank of 2"),
    ],
)
def test_samples_that_are_left_out(
    tmp_path: Path, one: list[list[JsonObject]], two: list[list[JsonObject]], message: str
) -> None:
    found = list(compared_evaluations(run_of(tmp_path / "a", *one), run_of(tmp_path / "b", *two)))
    assert len(found) == bool(message) and all(message in each.message for each in found)
    assert all((each.code, str(each.location)) == ("DDP349", "/job/train.py:5") for each in found)


@pytest.mark.parametrize(
    ("why", "asked", "expected"),
    [
        ("more than 4 GiB of tensors", False, "more than 4 GiB of tensors"),
        ("", True, "the run ended before step 5"),
        ("", False, None),
    ],
)
def test_why_a_step_was_not_kept(
    tmp_path: Path, why: str, asked: bool, expected: str | None
) -> None:
    kept: JsonObject = {"kind": "capsule", "time": 1, "step": 5, "bytes": 0, "why_not": why}
    run = run_of(tmp_path / "a", [kept] if why else [])
    found = parity._replayed(run, asked)
    assert (found and found.why_not) == expected
