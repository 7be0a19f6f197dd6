"""``ddpdoctor compare A B``: what got slower, where, what was changed, and limits for CI."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddpdoctor.commands import compare, report
from ddpdoctor.core.errors import DoctorError
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


def gate(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    return compare.main(list(words)), capsys.readouterr().out


def test_a_slower_step_exceeds_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, limit = write_run(tmp_path / "before", slow=-1), "--max-step-time=+5%"
    monkeypatch.setitem(drawn_runs.USUAL, "forward", 152)
    after = write_run(tmp_path / "after", slow=-1)
    junit = tmp_path / "gate.xml"
    status, out = gate(capsys, str(before), str(after), limit, "--junit", str(junit))
    assert status == 1
    assert out.startswith("failed: step time +4")
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("failures") == "1"
    assert "limit +5.0%" in str(suite.find("testcase/failure[@message]").get("message"))  # type: ignore[union-attr]
    status, out = gate(capsys, str(after), str(before), limit, "--junit", str(junit))
    assert status == 0
    assert out.startswith("passed: step time -")
    assert ElementTree.parse(junit).getroot().get("failures") == "0"


def test_variation_of_the_steps_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is busier in the second half of both runs."""
    monkeypatch.setattr(drawn_runs, "REST", drawn_runs.REST + 60)
    before = write_run(tmp_path / "before", 2, slow=-1)
    journals = [path.read_bytes() for path in sorted(before.glob("rank-*.jsonl"))]
    monkeypatch.setattr(drawn_runs, "REST", drawn_runs.REST + 60)
    after = write_run(tmp_path / "after", 2, slow=-1)
    for path, old in zip(sorted(after.glob("rank-*.jsonl")), journals, strict=True):
        lines, slow = old.splitlines(keepends=True), path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join([*lines[:25], *slow[25:]]))
    status, out = gate(capsys, str(before), str(after), "--max-step-time", "+5%")
    assert status == 0, out
    assert "within the variation of" in out.splitlines()[0]


def test_memory_of_the_gpu_has_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_run(tmp_path / "before", slow=-1)
    monkeypatch.setattr(drawn_runs, "GIB", drawn_runs.GIB * 5 // 4)
    after = write_run(tmp_path / "after", slow=-1)
    limit = "--max-memory=10%"
    status, out = gate(capsys, str(before), str(after), limit)
    assert status == 1
    assert out.startswith("failed: memory +25.0%, limit +10.0%\n")
    assert "GPU memory" in out
    assert gate(capsys, str(before), str(before), limit)[0] == 0


def test_a_limit_that_cannot_be_judged_does_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = str(write_run(tmp_path / "short", count=25, slow=-1))
    status, out = gate(capsys, short, short, "--max-step-time=5%")
    assert status == 3
    assert out.startswith("not judged: step time: a run has fewer than 20 steps after the first 10")
    found = json.loads(gate(capsys, short, short, "--max-step-time=5%", "--json")[1])
    assert found["limits"]["max-step-time"]["exceeded"] is False
    with pytest.raises(DoctorError) as raised:
        compare.main([short, str(tmp_path / "nothere"), "--max-memory=1%"])
    assert raised.value.status == 3


def test_a_junit_file_is_xml_whatever_the_command_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_run(
        tmp_path / "before", slow=-1, manifest={"command": ["a\uffff", "\x1b\ud800"]}
    )
    monkeypatch.setitem(drawn_runs.USUAL, "forward", 152)
    after = write_run(tmp_path / "after", slow=-1)
    junit = tmp_path / "gate.xml"
    words = [str(before), str(after), "--max-step-time", "+5%", "--junit", str(junit)]
    assert compare.main(words) == 1
    assert ElementTree.parse(junit).getroot().get("failures") == "1"


@pytest.mark.parametrize(
    "words", [["only-one"], ["a", "b", "--max-step-time", "-5%"], ["a", "b", "--junit", "x"]]
)
def test_wrong_words_of_a_comparison(words: list[str]) -> None:
    with pytest.raises(DoctorError) as raised:
        compare.main(words)
    assert raised.value.status == 2
