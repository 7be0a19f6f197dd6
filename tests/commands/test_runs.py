"""``ddpdoctor runs``: the list, and what is removed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ddpdoctor.commands import runs
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.run.records.supervisor import FindingRecord, HangRecord, SignalRecord
from tests.support.drawn_runs import T0, write_run


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The base directory of a user without runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return rundir.private_base()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert runs.main(words) == 0
    return capsys.readouterr().out


def found(code: str, severity: str, number: int) -> FindingRecord:
    return FindingRecord(
        time=T0, restart=0, number=number, code=code, severity=severity, message="rank 1 is slow"
    )


def test_without_a_run_it_says_how_one_is_started(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys) == "there is no run yet; `ddpdoctor run` starts one\n"


def test_each_run_has_its_status_age_size_and_worst_finding(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [found("DDP101", "info", 1), found("DDP610", "warning", 2)]
    hour_ago = time.time_ns() - 3_700 * 10**9
    write_run(base / "1", 1, 1, supervisor=slow, manifest={"started": hour_ago})
    write_run(base / "2", 1, 1, status=1)
    write_run(base / "3", 1, 1, status=None)
    write_run(base / "4", 1, 1, status=-9)
    ended = SignalRecord(time=T0, signal=15, hang=True)
    write_run(base / "5", 1, 1, supervisor=[ended], status=-15)
    write_run(base / "6", 1, 1, status=None)
    lock = rundir.Lock(base / "6")
    write_run(
        base / "7", 1, 1, status=None,
        supervisor=[HangRecord(time=T0, number=1, restart=0, seconds=31.0)],
    )  # fmt: skip
    other = rundir.Lock(base / "7")
    try:
        head, *rows = said(capsys).splitlines()
    finally:
        lock.close()
        other.close()
    assert head.split() == ["run", "status", "age", "size", "verdict"]
    states = ["hung", "running", "hung", "SIGKILL", "killed", "failed (1)", "succeeded"]
    assert [row[5:17].strip() for row in rows] == states
    assert rows[-1].endswith("DDP610 rank 1 is slow")
    assert "62m" in rows[-1]


def test_json_has_a_line_for_each(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(base / "1", 1, 1)
    (line,) = said(capsys, "--json").splitlines()
    entry = json.loads(line)
    assert (entry["run"], entry["path"], entry["status"]) == ("1", str(path), "succeeded")
    assert entry["bytes"] == sum(each.stat().st_size for each in path.iterdir())
    assert (entry["started"], entry["verdict"]) == (T0 / 1e9, None)


def test_prune_leaves_the_newest_and_the_live_ones(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        write_run(base / str(number), 1, 1)
    live = rundir.Lock(base / "0")
    chosen = write_run(tmp_path / "chosen", 1, 1)
    (base / "1-chosen").symlink_to(chosen)
    try:
        assert said(capsys, "--prune").startswith("removed 3 runs")
    finally:
        live.close()
    assert sorted(each.name for each in base.iterdir()) == ["0", "3", "4", "5", "6", "7"]
    assert (chosen / "run.json").exists(), "what a person chose is theirs"
    assert said(capsys, "--prune", "0").startswith("removed 6 runs")
    assert list(base.iterdir()) == []


def test_damaged_runs_are_listed_too(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "1").mkdir()
    (base / "1" / "run.json").write_text("{")
    (base / "1" / "supervisor.jsonl").write_bytes(b"\xff\n{")
    assert said(capsys).splitlines()[1].split() == ["1", "killed", "-", "4B", "-"]


def test_it_takes_no_run(base: Path) -> None:
    with pytest.raises(DoctorError, match="takes no run"):
        runs.main(["latest"])
