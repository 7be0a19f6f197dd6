"""`ddpdoctor vscode`: configurations and tasks for a command line."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor import cli
from ddpdoctor.commands import vscode
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.debug import vscode_configurations, vscode_files
from ddpdoctor.debug.vscode_configurations import ALL, AttachPoint
from tests.conftest import ROOT
from tests.support.vscode_schema import SCHEMA, check, load, ports


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock and the home directory are this test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / ".vscode").mkdir(parents=True)
    return folder


@pytest.fixture
def here(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workspace)
    return workspace


def run_task(workspace: Path) -> dict[str, Any]:
    tasks = load(workspace / ".vscode/tasks.json")["tasks"]
    ours = ("run", "report", "check", "lint", "top")
    assert [task["label"] for task in tasks] == [f"ddpdoctor: {name}" for name in ours]
    found: dict[str, Any] = tasks[0]
    return found


def job_words(workspace: Path) -> list[str]:
    """The words of the run's task after those that are always there."""
    words: list[str] = run_task(workspace)["args"]
    assert words[7:9] == ["--workspace", "${workspaceFolder}"]
    return words[9:]


def test_the_files_of_this_repository(here: Path) -> None:
    """They are what the command of today makes of them."""
    for name in ("launch.json", "tasks.json"):
        (here / ".vscode").mkdir(exist_ok=True)
        (here / ".vscode" / name).write_bytes((ROOT / ".vscode" / name).read_bytes())
    script = "sample_jobs/resnet50_synthetic.py"
    (here / script).parent.mkdir()
    (here / script).touch()
    before = (here / ".vscode/tasks.json").read_bytes()
    first = load(here / ".vscode/launch.json")["configurations"][0]
    assert first["postDebugTask"] == "ddpdoctor: report"
    assert vscode.main(["--nproc-per-node", "2", script, "--break-at", "1"]) == 0
    assert (here / ".vscode/tasks.json").read_bytes() == before


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ".vscode/launch.json and .vscode/tasks.json"
    press = 'press F5 and choose "ddpdoctor: run + attach"'
    assert vscode.main(["--", "--nproc-per-node", "3", "train.py", "--nproc-per-node=9"]) == 0
    assert capsys.readouterr().out == f"wrote {both}: {press}\n"
    assert ports(here) == [5678, 5679, 5680]
    run = load(here / ".vscode/launch.json")["configurations"][0]
    # Its problems stay when those of the run, which ends with the job, are taken away.
    report = load(here / ".vscode/tasks.json")["tasks"][1]
    after = [c.get("postDebugTask") for c in load(here / ".vscode/launch.json")["configurations"]]
    assert after == [report["label"], None, None, None, None]
    assert "background" not in report["problemMatcher"]
    assert "isBackground" not in report
    # Else VS Code, which starts it twice after a Stop of the compound, asks which one to end.
    assert report["runOptions"] == {"instancePolicy": "silent"}
    check(load(here / ".vscode/launch.json"), SCHEMA)
    assert run["preLaunchTask"] == run_task(here)["label"]
    before = (here / ".vscode/launch.json").read_bytes()
    points = [AttachPoint(rank, "127.0.0.1", 5678 + rank) for rank in (ALL, 0, 1, 2)]
    # A run of as many ranks finds everything as it wants it.
    assert not vscode_configurations.update_launch(here, points)
    assert (here / ".vscode/launch.json").read_bytes() == before
    assert run_task(here)["args"] == [
        *["-m", "ddpdoctor", "run", "--wait-for-attach", "--stop-with-debugger"],
        *["--output", "problems", "--workspace", "${workspaceFolder}"],
        *["--nproc-per-node", "3", "train.py", "--nproc-per-node=9"],
    ]
    assert run_task(here)["options"] == {"cwd": "${workspaceFolder}"}
    assert vscode.main(["--", "--nproc-per-node", "3", "train.py", "--nproc-per-node=9"]) == 0
    assert capsys.readouterr().out == f"unchanged: {both}: {press}\n"
    assert vscode.main(["--", "--nproc-per-node", "3", "other.py"]) == 0
    assert capsys.readouterr().out == f"wrote .vscode/tasks.json: {press}\n"
    (here / ".vscode/tasks.json").write_text(
        "// mine\n" + (here / ".vscode/tasks.json").read_text()
    )
    assert vscode.main(["--remove"]) == 0
    assert capsys.readouterr().out == (
        "removed .vscode/launch.json\nremoved the entries of ddpdoctor from .vscode/tasks.json\n"
    )
    assert vscode.main(["--remove"]) == 0
    assert capsys.readouterr().out == f"unchanged: no entries of ddpdoctor in {both}\n"


def test_the_open_file_is_run_if_there_is_no_script(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vscode.main(["--ranks", "4", "--debug-port=6000"])
    assert "tasks.json: open the script and press F5, then choose " in capsys.readouterr().out
    assert ports(here) == [6000, 6001, 6002, 6003]
    assert job_words(here) == [*["--debug-port", "6000", "--nproc-per-node", "4", "${file}"]]


@pytest.mark.parametrize(
    ("words", "ranks", "added"),
    [
        (["train.py"], 2, True),
        (["--standalone", "train.py", "--nproc-per-node", "8"], 2, True),
        (["--nproc_per_node=4", "train.py"], 4, False),
        (["--nproc-per-node", "gpu", "train.py"], 2, False),
        (["python", "train.py"], 2, False),
        (["--quiet", "--", "srun", "x"], 2, False),
        (["--nproc-per-node", "1" * 5000, "train.py"], 2, False),
    ],
)
def test_as_many_ranks_as_configurations(
    here: Path, words: list[str], ranks: int, added: bool
) -> None:
    vscode.main(["--", *words])
    assert len(ports(here)) == ranks
    extra = ["--nproc-per-node", str(ranks)] if added else []
    assert job_words(here) == [*extra, *words]


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "3", "train.py", "--lr", "0.1"],
        ["--nproc-per-node=3", "--hang-after", "10", "--", "train.py", "--ranks", "7"],
        ["--quiet", "--nproc-per-node", "3", "-m", "package.train"],
    ],
)
def test_the_command_line_that_run_takes(here: Path, words: list[str]) -> None:
    vscode.main(words)
    assert len(ports(here)) == 3
    assert job_words(here) == words
    # Those of both commands are understood, wherever they stand before the script.
    place = words.index("train.py") if "train.py" in words else words.index("-m")
    place -= words[place - 1] == "--"
    vscode.main([*words[:place], "--debug-port", "6000", *words[place:]])
    assert ports(here) == [6000, 6001, 6002]
    assert job_words(here) == ["--debug-port", "6000", *words]


def test_options_of_run_without_a_script_are_for_the_open_file(here: Path) -> None:
    vscode.main(["--quiet", "--ranks", "3"])
    assert job_words(here) == ["--nproc-per-node", "3", "--quiet", "${file}"]


def test_from_a_folder_below(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "src").mkdir()
    monkeypatch.chdir(here / "src")
    vscode.main(["--path-map", ".=/app", "--path-map", "/x=/y", "--", "train.py"])
    assert run_task(here)["options"] == {"cwd": "${workspaceFolder}/src"}
    first = load(here / ".vscode/launch.json")["configurations"][0]
    assert first["pathMappings"] == [
        {"localRoot": "${workspaceFolder}/src", "remoteRoot": "/app"},
        {"localRoot": "/x", "remoteRoot": "/y"},
    ]
    assert job_words(here) == [
        *["--path-map", "${workspaceFolder}/src=/app", "--path-map", "/x=/y"],
        *["--nproc-per-node", "2", "train.py"],
    ]
    assert str(here / ".vscode/launch.json") in capsys.readouterr().out


def test_the_name_that_the_shell_has_for_the_folder(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(here)
    monkeypatch.setenv("PWD", str(link))
    assert vscode_files.current_directory() == link
    monkeypatch.setenv("PWD", str(tmp_path))
    assert vscode_files.current_directory() == here


def test_the_lines_of_problems_match(here: Path) -> None:
    import re

    vscode.main([])
    matcher = run_task(here)["problemMatcher"]
    pattern = matcher["pattern"]
    line = "/a b/train.py:12:1: error DDP901 rank 1 raised ValueError: x: 1"
    found = re.match(pattern["regexp"], line)
    assert found is not None
    assert {key: found[int(group)] for key, group in pattern.items() if key != "regexp"} == {
        "file": "/a b/train.py",
        "line": "12",
        "severity": "error",
        "code": "DDP901",
        "message": "rank 1 raised ValueError: x: 1",
    }
    assert matcher["background"]["activeOnStart"] is True
    assert re.match(matcher["background"]["endsPattern"], "ddpdoctor: all ranks listening (2)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "3"], "unknown option --rank (did you mean --ranks?)"),
        (["--nproc-per-node"], "needs a value"),
        (["--quite", "train.py"], "did you mean --quiet?"),
        (["--ranks"], "option --ranks needs a number from 1 to 1024"),
        (["--ranks", "--remove"], "option --ranks needs a number from 1 to 1024"),
        (["--ranks", "0"], "from 1 to 1024, not '0'"),
        (["--ranks=²"], "needs a number"),
        (["--debug-port", "65536"], "from 2 to 65535"),
        (["--debug-port", "65535"], "beyond port 65535"),
        (["--path-map", "here"], "LOCAL=REMOTE"),
        (["--workspace", "nowhere"], "not a directory"),
        (["--remove=1"], "takes no value"),
        (["--remove", "--ranks", "2"], "no other option"),
        (["--"], "no script"),
    ],
)
def test_a_command_line_that_cannot_work(here: Path, words: list[str], message: str) -> None:
    with pytest.raises(DoctorError) as caught:
        vscode.main(words)
    assert message in str(caught.value)
    assert caught.value.status == 2
    assert list((here / ".vscode").iterdir()) == []


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vscode", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown == vscode.PARSER.help
    assert all(option in shown for option in vscode.PARSER.options)
    assert max(map(len, shown.splitlines())) <= 80


def test_it_loads_nothing_but_the_standard_library() -> None:
    code = "import sys, ddpdoctor.commands.vscode\nprint(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "debugpy", "psutil", "rich", "textual"}
