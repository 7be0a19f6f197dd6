"""What findings look like to machines and in pipes, and which of them are selected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.options import CODES, Parser, Selection
from ddpdoctor.core.user_code import Location
from ddpdoctor.render import console
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run.reported import Reported, Withdrawn
from ddpdoctor.supervise import command
from tests.conftest import Doctor

DEEP = "/data/" + "a-long-folder/" * 9 + "train.py"
FOUND = Finding(
    "DDP403",
    Severity.ERROR,
    f"rank 1 alone left the training loop at {DEEP}:35, " + "one word after the other " * 6,
    (1,),
    Location("/w/src/train.py", 35),
    ("rank 1 took 9 batches, 50 % of rank 0's", "more " * 40),
    "Reduce it over the ranks",
)


def test_nothing_is_wrapped_in_a_pipe() -> None:
    lines = console.render(FOUND, colour=False, width=None).splitlines()
    assert [line.split()[0] for line in lines] == ["error", "-->", "evidence:", "evidence:", "fix:"]
    assert f"{DEEP}:35" in lines[0]
    assert not any(line.endswith(" ") for line in lines)


@pytest.mark.parametrize("width", [40, 80, 100])
def test_on_a_terminal_no_path_is_split_and_no_line_ends_in_a_blank(width: int) -> None:
    text = console.render(FOUND, colour=False, width=width)
    assert f"{DEEP}:35" in text
    long = [line for line in text.splitlines() if len(line) > width and DEEP not in line]
    assert not long
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_notes_keep_words_whole_as_findings_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpdoctor.render.reporter.terminal.width", lambda descriptor: 60)
    said: list[str] = []
    own = command.build(["--quiet", "true"], {})
    assert own is not None
    Reporter(said.append, own.own).say(f"records of the run that has just ended are in {DEEP}")
    assert DEEP in said[0]
    assert all(line.startswith("ddpdoctor: ") for line in said[0].splitlines())


def test_an_annotation_of_github_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", "/w")
    line = console.github_line(FOUND, "/w/other.py")
    assert line.startswith("::error file=src/train.py,line=35,title=DDP403::rank 1 alone left")
    assert "50 %25 of rank 0's%0A" in line
    assert "\n" not in line
    assert line.endswith("%0Afix: Reduce it over the ranks")
    gone = console.github_retraction(
        Withdrawn(2, Reported(1, FOUND, 0), "over", "done"), "/w/other.py"
    )
    assert gone == "::notice file=src/train.py,line=35,title=DDP403 over::done"
    placed = console.github_line(Finding("DDP1", Severity.INFO, "a\nb"), "/x/a,b:c.py")
    assert placed == "::notice file=/x/a%2Cb%3Ac.py,line=1,title=DDP1::a%0Ab"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], {"DDP309", "DDP310", "DDP403", "DDP901"}),
        (["--ignore", "DDP309"], {"DDP310", "DDP403", "DDP901"}),
        (["--ignore=ddp3,DDP901"], {"DDP403"}),
        (["--select", "DDP4", "--select", "DDP9"], {"DDP403", "DDP901"}),
        (["--select", "DDP3", "--ignore", "DDP309"], {"DDP310"}),
        (["--select", "DDP309", "--ignore", "DDP3"], {"DDP309"}),
        (["--select", "DDP309", "--ignore", "DDP309"], set()),
    ],
)
def test_what_is_selected_and_ignored(words: list[str], shown: set[str]) -> None:
    parser = Parser("x", "\n  --select C\n  --ignore C\n", {"--select": CODES, "--ignore": CODES})
    selection = Selection.given(parser.read(words))
    assert {code for code in ("DDP309", "DDP310", "DDP403", "DDP901") if code in selection} == shown


def test_a_code_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(DoctorError, match="needs codes, or how they begin"):
        command.build(["--ignore", "straggler", "true"], {})


def test_run_and_report_leave_out_what_is_ignored(doctor: Doctor, tmp_path: Path) -> None:
    source = "import torch.distributed as d\nd.init_process_group('gloo')\n1/0\n"
    doctor.write("fails.py", source)
    options = ("--nproc-per-node", "1", "--json", "found.jsonl", "--no-vscode")
    result = doctor.run(*options, "--ignore", "DDP901", "fails.py")
    assert result.codes == []
    assert "findings: none (1 ignored)" in result.ours
    (end,) = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert (end["event"], end["exit_status"]) == ("end", result.status)
    assert set(end["findings"].values()) == {0}
    report = doctor.cli("report", "--json", str(result.run_dir))
    (line,) = map(json.loads, report.stdout.splitlines())
    assert line["code"] == "DDP901"
    report = doctor.cli("report", "--ignore=DDP9", str(result.run_dir))
    assert (report.status, "(1 ignored)" in report.stdout) == (0, True)
    annotated = doctor.cli("report", "--output", "github", str(result.run_dir))
    assert annotated.stdout.startswith(f"::error file={tmp_path}/fails.py,line=3,title=DDP901::")
