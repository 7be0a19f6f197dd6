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


def touched(what: str, file: Path | str, time: int) -> JsonObject:
    return {"kind": "file", "path": "/job/prepare.py", "line": 9, "time": time, "what": what,
            "file": str(file)}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "file", "seconds", "said"),
    [
        (
            "write",
            "labels.csv",
            0.3,
            "; rank 0 opened it for writing at prepare.py:9, 300 ms later",
        ),
        ("remove", "labels.csv", -0.05, "; rank 0 removed it at prepare.py:9, 50 ms before"),
        ("remove", "", -0.05, "; rank 0 removed it at prepare.py:9, 50 ms before"),
        ("move", "labels.csv", -0.05, "; rank 0 moved it away at prepare.py:9, 50 ms before"),
        ("write", "labels.csv", -60, ""),
        ("remove", "labels.csv", -60, ""),
    ],
)
def test_a_path_that_another_rank_makes_or_removes(
    written: Written, what: str, file: str, seconds: float, said: str
) -> None:
    time = T0 + 100 * SECOND
    message = "[Errno 2] No such file or directory: '/data/labels.csv'"
    written.rank(0, [touched(what, Path("/data") / file, time + int(seconds * SECOND))])
    written.rank(1, [error("FileNotFoundError", message, time)])
    written.exit(1, 1, time + SECOND)
    found = next(each for each in written.findings(status=1) if each.code == "DDP901")
    assert found.message.endswith(f"labels.csv'{said}")
    assert ("barrier" in found.fix) is bool(said)


@pytest.mark.parametrize(
    ("exception", "touches", "named"),
    [
        ("EOFError", [("write", 0.02)], True),
        ("json.decoder.JSONDecodeError", [("write", 0.02)], True),
        ("EOFError", [("write", 60)], False),
        ("EOFError", [("write", 0.02), ("replace", 0.01)], False),
        ("EOFError", [("make", 0.02)], False),
        ("KeyError", [("write", 0.02)], False),
    ],
)
def test_a_file_that_another_rank_is_writing(
    written: Written, exception: str, touches: list[tuple[str, float]], named: bool
) -> None:
    file, time = "/data/index.bin", T0 + 100 * SECOND
    written.rank(0, [touched(what, file, time - int(ago * SECOND)) for what, ago in touches])
    failed = error(exception, "unexpected", time + 1)
    written.rank(1, [{**failed, "read": [[file, time], ["/etc/hosts", T0]]}])
    written.exit(1, 1, time + SECOND)
    found = next(each for each in written.findings(status=1) if each.code == "DDP901")
    said = f": it read {file} while another rank was writing it; rank 0 opened it for writing"
    assert (said in found.message) is named
    assert ("os.replace" in found.fix) is named


def test_a_file_that_changed_after_it_was_read(written: Written, tmp_path: Path) -> None:
    file = tmp_path / "shards.txt"
    file.write_text("part 0")
    changed = os.stat(file).st_mtime_ns
    written.rank(0, [touched("write", file, changed - SECOND)])
    failed = error("IndexError", "list index out of range", changed)
    written.rank(1, [{**failed, "read": [[str(file), changed - 1]]}])
    written.exit(1, 1, changed + SECOND)
    found = next(each for each in written.findings(status=1) if each.code == "DDP901")
    assert f"it read {file} while another rank was writing it" in found.message
