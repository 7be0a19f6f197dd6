"""``ddpdoctor report A B``: what got slower, where, and what was changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.run import code_version
from ddpdoctor.run.names import CODE
from ddpdoctor.run.records.base import as_json
from tests.support import drawn_runs
from tests.support.drawn_runs import write_run


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert report.main(list(words)) == 0
    return capsys.readouterr().out


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A run without a slow rank, and one in which rank 1 loads its data slowly."""
    before = write_run(tmp_path / "before", slow=-1)
    after = write_run(tmp_path / "after", manifest={"command": ["python", "train.py"]})
    return before, after


def test_the_slower_rank_is_named_with_its_phase(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = compared(capsys, *map(str, pair))
    assert "own time of ranks\n  rank 1 " in out
    assert "most of it in data" in out
    assert "rank 2" not in out, "the others are as they were"
    assert "command\n    before: python -m torch.distributed.run train.py --lr 0.1" in out
    assert "    after:  python train.py\n" in out


def test_a_job_that_is_slower_on_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_run(tmp_path / "before", slow=-1)
    monkeypatch.setitem(drawn_runs.USUAL, "forward", 152)
    after = write_run(tmp_path / "after", slow=-1)
    head = compared(capsys, str(before), str(after)).splitlines()[0]
    assert head.startswith("after is slower than before: +100 ms (+4")
    assert head.endswith("most of it in forward")
    head = compared(capsys, str(after), str(before)).splitlines()[0]
    assert head.startswith("before is faster than after: -100 ms")


def test_waiting_alone_is_no_rank_s_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks with less each to do may be slower, since communication takes longer."""
    before = write_run(tmp_path / "before", slow=-1)
    monkeypatch.setitem(drawn_runs.USUAL, "forward", drawn_runs.USUAL["forward"] - 20)
    monkeypatch.setattr(drawn_runs, "REST", drawn_runs.REST + 120)
    after = write_run(tmp_path / "after", slow=-1)
    head = compared(capsys, str(before), str(after)).splitlines()[0]
    assert head.startswith("after is slower than before: +")
    assert head.endswith("most of it in waiting for the other ranks")


def test_a_run_is_as_fast_as_itself(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = compared(capsys, str(pair[0]), str(pair[0]))
    assert out.startswith("before is as fast as before: ")
    assert "command, versions and code are the same" in out
    assert "own time of ranks" not in out


def test_versions_ranks_and_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    project = tmp_path / "project"
    project.mkdir()
    for name, rate, version in (("old", "0.1", "2.8.0"), ("new", "0.2", "2.13.0")):
        run = write_run(tmp_path / name, 2, 20, manifest={"versions": {"torch": version}})
        (project / "train.py").write_text(f"import model\n\nrate = {rate}\n")
        (project / "model.py").write_text(f"depth = {name!r}\n")
        (project / f"{name}.py").write_text("")
        seen = code_version.look(project / "train.py")
        (run / CODE).write_text(json.dumps(as_json(seen)))
        runs.append(str(run))
    out = compared(capsys, *runs)
    assert "  torch\n    before: 2.8.0\n    after:  2.13.0\n" in out
    assert "  model.py\n    before: there\n    after:  changed\n" in out
    assert "  new.py\n    before: absent\n    after:  there\n" in out
    assert "  -rate = 0.1\n  +rate = 0.2\n" in out
    assert "old.py" not in out


def test_json(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(compared(capsys, "--json", *map(str, pair)))
    assert (found["before"], found["after"]) == ("before", "after")
    assert found["ranks"].keys() == {"1"} and found["ranks"]["1"]["phase"] == "data"
    assert found["phases"].keys() == {"data", "forward", "backward", "optimizer", "other", "wait"}
    assert found["changed"].keys() == {"command"}


def test_a_run_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, 2, count)) for name, count in (("a", 0), ("b", 30))]
    assert compared(capsys, *runs).startswith("a and b cannot be compared by speed: a closed no")


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": "c" * 40}, "c" * 40),
        ({"HEAD": "ref: refs/heads/main", "refs/heads/main": "a" * 40}, "a" * 40),
        ({"HEAD": "ref: refs/heads/x", "packed-refs": f"{'b' * 40} refs/heads/x\n"}, "b" * 40),
        ({"HEAD": "ref: refs/heads/unborn"}, ""),
    ],
)  # fmt: skip
def test_the_commit_is_read_without_git(tmp_path: Path, files: dict[str, str], commit: str) -> None:
    for name, text in files.items():
        path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "src").mkdir()
    script = tmp_path / "src" / "train.py"
    script.write_text("pass\n")
    assert code_version.look(script).commit == commit
