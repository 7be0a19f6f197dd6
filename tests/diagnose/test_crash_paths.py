"""Exceptions about paths that differ between ranks, or that two ranks make at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.run.records.base import JsonObject
from tests.support.crash_records import error
from tests.support.written import SECOND, T0, Written


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def saved(file: str, time: int = T0) -> JsonObject:
    return {"kind": "save", "path": "/job/train.py", "line": 42, "time": time, "file": file,
            "content": "data"}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "time", "named"),
    [
        ("/runs/amber-12/best.pt", T0, True),
        ("/runs/amber-12/last.pt", T0, False),
        ("/runs/calm-55/best.pt", T0, False),
        ("/runs/amber-12/best.pt", T0 + 2 * SECOND, False),
    ],
    ids=["elsewhere", "another file", "the same", "later"],
)
def test_a_path_that_each_rank_makes_up(
    written: Written, file: str, time: int, named: bool
) -> None:
    message = "[Errno 2] No such file or directory: '/runs/calm-55/best.pt'"
    written.rank(0, [saved(file, time)])
    written.rank(1, [error("FileNotFoundError", message, T0 + SECOND)])
    written.exit(1, 1, T0 + 2 * SECOND)
    found = next(each for each in written.findings(status=1) if each.code == "DDP901")
    assert (f"; rank 0 wrote it to another path, {file}" in found.message) is named
    assert ("broadcast" in found.fix) is named


@pytest.mark.parametrize("seconds", [0.01, 60])
def test_a_path_that_another_rank_has_just_made(
    written: Written, tmp_path: Path, seconds: float
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    when = os.stat(folder).st_ctime_ns + int(seconds * SECOND)
    message = f"[Errno 17] File exists: '{folder}'"
    written.rank(0, [])
    written.rank(1, [error("FileExistsError", message, when)])
    written.exit(1, 1, when + SECOND)
    found = next(each for each in written.findings(status=1) if each.code == "DDP901")
    assert ("it was created or changed 10 ms earlier" in found.message) is (seconds < 1)
