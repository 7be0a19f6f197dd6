"""Why a job failed: files, disks and downloads."""

from __future__ import annotations

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.run.records.base import JsonObject
from tests.support.crash_records import error
from tests.support.written import SECOND, T0, Written


def save(time: int, file: str = "/data/last.pt") -> JsonObject:
    return {
        "kind": "save", "time": time, "file": file, "content": "data", "step": 3,
        "path": "/job/train.py", "line": 5,
    }  # fmt: skip


LEGACY = "Cannot use ``weights_only=True`` with files saved in the legacy .tar format."


def test_a_checkpoint_that_all_ranks_wrote_is_no_legacy_file(written: Written) -> None:
    read = {"path": "/data/last.pt", "access": "read", "size": 9}
    written.rank(0, [save(T0)])
    written.rank(1, [save(T0), error("RuntimeError", LEGACY, T0 + SECOND, file=read)])
    written.exit(1, 1, T0 + 2 * SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.severity, finding.ranks) == ("DDP501", Severity.ERROR, (0, 1))
    assert finding.message == "rank 1 could not read last.pt: 2 ranks write it at once"
    assert finding.location is not None
    assert finding.location.line == 5, "the line that saves, not the one that loads"
    assert any("unsafe" in line for line in finding.evidence)


def test_another_file_than_the_shared_one_is_just_damaged(written: Written) -> None:
    read = {"path": "/data/first.pt", "access": "read", "size": 9}
    written.rank(0, [save(T0)])
    written.rank(1, [save(T0), error("RuntimeError", LEGACY, T0 + SECOND, file=read)])
    written.exit(1, 1, T0 + 2 * SECOND)
    found = {finding.code: finding.severity for finding in written.findings(status=1)}
    assert found == {"DDP945": Severity.ERROR, "DDP501": Severity.WARNING}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"free": 0, "total": 10**9}, "could not write /data/last.pt: the disk is full"),
        (
            {"free": 10**8, "total": 10**9},
            "could not write /data/last.pt: a quota is reached, or the disk was full",
        ),
        (
            {"free": 10**8, "total": 10**9, "limit": 10**6, "size": 10**6},
            "files may be 1.0 MB at most",
        ),
        (
            {"free": 10**8, "total": 10**9, "limit": 1000, "size": 1000},
            "files may be 1.0 kB at most",
        ),
        (
            {"free": 10**8, "total": 10**9, "limit": 10**9, "size": 10**9},
            "files may be 1.0 GB at most",
        ),
        (
            {"free": 10**8, "total": 10**9, "limit": 999, "size": 999},
            "files may be 999 bytes at most",
        ),
        ({}, "could not write /data/last.pt: no room is left for it"),
    ],
)
def test_a_full_disk_in_disguise(written: Written, file: JsonObject, said: str) -> None:
    words = "[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 534"
    record = error("RuntimeError", words, file={"path": "/data/last.pt", "access": "write", **file})
    written.rank(0, [record])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP935"
    assert said in finding.message


@pytest.mark.parametrize(
    ("free", "total", "full"),
    [(1 << 20, 10**8, True), ((1 << 20) + 1, 10**8, False), (2 * 10**9, 10**12, True),
     (2 * 10**9 + 1, 10**12, False)],
)  # fmt: skip
def test_a_disk_is_full_but_for_what_is_kept_for_root(
    written: Written, free: int, total: int, full: bool
) -> None:
    words = "[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 534"
    file = {"path": "/data/last.pt", "access": "write", "free": free, "total": total}
    written.rank(0, [error("RuntimeError", words, file=file)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert finding.message.endswith("/data/last.pt: the disk is full") is full
    assert any(" are free in /data" in each for each in finding.evidence)


@pytest.mark.parametrize(("size", "limited"), [(900, True), (899, False)])
def test_a_file_has_come_to_the_limit_of_its_size(
    written: Written, size: int, limited: bool
) -> None:
    words = "[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 534"
    file = {"path": "/data/last.pt", "access": "write", "limit": 1000, "size": size}
    written.rank(0, [error("RuntimeError", words, file=file)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert ("files may be 1.0 kB at most" in finding.message) is limited
    assert (f"/data/last.pt has {size} bytes" in finding.evidence) is limited


@pytest.mark.parametrize(
    ("file", "said"),
    [({"url": "https://data.example/a.tar"}, " from https://data.example/a.tar"), ({}, "")],
)
def test_a_download_without_a_network_is_named_with_its_address(
    written: Written, file: JsonObject, said: str
) -> None:
    words = "<urlopen error [Errno -2] Name or service not known>"
    written.rank(0, [error("urllib.error.URLError", words, file=file)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP936"
    assert finding.message == f"rank 0 has no network for a download{said}"


def test_a_file_that_cannot_be_read_is_named_with_its_size(written: Written) -> None:
    read = {"path": "/data/first.pt", "access": "read", "size": 9000}
    written.rank(0, [error("RuntimeError", LEGACY, file=read)])
    written.exit(0, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP945"
    assert "the file is /data/first.pt, 9.0 kB" in finding.evidence
