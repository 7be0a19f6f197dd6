"""The code of a job is checked while it starts, which never changes the job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.errors import Faults
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.lint import check, job
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.rules import LINT_RULES, Hit

SICK = """\
import torch.distributed as dist

def report(rank):
    if rank == 0:
        dist.barrier()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SICK)
    return "train.py"


def done(source: job.SourceCheck) -> list[Finding]:
    source._thread.join()
    return source.news()


def test_errors_are_told_once_with_their_lines(script: str, tmp_path: Path) -> None:
    source = job.SourceCheck(["python", "-u", script, "--epochs", "3"])
    (found,) = done(source)
    assert (found.code, found.severity) == ("DDP401", Severity.ERROR)
    assert found.location == Location(str(tmp_path / "train.py"), 5)
    assert source.news() == []


def test_files_that_a_script_imports(script: str, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(SICK)
    (tmp_path / "train.py").write_text("import torch\nimport helpers\n")
    assert [Path(each).name for each in job.sources(script)] == ["train.py", "helpers.py"]
    assert [job.place_of(each) for each in job.errors(script)] == ["helpers.py:5"]
    (tmp_path / "helpers.py").write_text(SICK + "#" * job.MAX_SOURCE)
    assert [Path(each).name for each in job.sources(script)] == ["train.py"]


def test_a_module_is_found(script: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "main.py").write_text(SICK)
    assert job.script_of(["torchrun", "-m", "pkg.main"]) == "pkg/main.py"
    assert job.script_of(["srun", "bash", "run.sh"]) is None


def test_a_finding_of_the_run_names_the_line(script: str) -> None:
    source = job.SourceCheck([script])
    (found,) = done(source)
    elsewhere = Finding("DDP401", Severity.ERROR, "rank 0 waits", evidence=("it waits",))
    other = Finding("DDP610", Severity.WARNING, "slow")
    placed = source.placed([elsewhere, other, found])
    assert placed[0].evidence == ("it waits", "seen in the code: train.py:5")
    assert placed[0].id == elsewhere.id
    # Where it names the line itself, nothing is added.
    assert placed[1:] == [other, found]


def test_a_finding_of_a_finished_run_names_the_line(script: str, tmp_path: Path) -> None:
    faults = Faults(print)
    path = str(tmp_path / script)
    since = (tmp_path / script).stat().st_mtime_ns
    in_code = job.of_run(path, since, faults)
    (found,) = job.placed([Finding("DDP401", Severity.ERROR, "rank 0 waits")], in_code)
    assert found.evidence == ("seen in the code: train.py:5",)
    # A file that changed since shows other lines.
    assert job.of_run(path, since - 1, faults) == []
    assert job.of_run(str(tmp_path / "gone.py"), since, faults) == []


def test_warnings_are_for_findings_of_the_run(script: str, tmp_path: Path) -> None:
    text = "import torch.distributed as dist\ndist.init_process_group('gloo', world_size=4)\n"
    (tmp_path / "train.py").write_text(text)
    source = job.SourceCheck([script])
    assert done(source) == []
    (found,) = source.placed([Finding("DDP201", Severity.WARNING, "it waits")])
    assert found.evidence == ("seen in the code: train.py:2",)


@pytest.mark.slow
def test_strict_fails_for_errors_in_the_code(script: str) -> None:
    command = [sys.executable, "-m", "ddpdoctor", "run", "--no-debug", "--run-dir", "run"]
    for option, status in (("--strict", 3), ("--quiet", 0)):
        done = subprocess.run(
            [*command, option, "--", sys.executable, script], capture_output=True, check=False
        )
        assert done.returncode == status
        shutil.rmtree("run")


def test_a_rule_that_fails_is_no_fault_of_the_job(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such rule")

    monkeypatch.setattr(check, "check", broken)
    source = job.SourceCheck([script])
    assert done(source) == []
    (line,) = source.remarks
    assert "internal error in the check of the job's code: ValueError('no such rule')" in line


def test_the_other_rules_go_on_if_one_fails(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(code: Code) -> Iterator[Hit]:
        yield Hit(code.tree.body[0], "found", "fix")
        raise KeyError("lost")

    monkeypatch.setitem(LINT_RULES, "DDP101", replace(LINT_RULES["DDP101"], find=broken))
    source = job.SourceCheck([script])
    assert [each.code for each in done(source)] == ["DDP401"]
    assert len(source.remarks) == 1


@pytest.mark.parametrize("text", ["def broken(:\n", "", "\0", "x = " + "(" * 5000])
def test_code_that_does_not_parse_is_the_jobs_own(script: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert done(job.SourceCheck([script])) == []


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--no-lint",), marks=pytest.mark.slow),
        pytest.param(("--ignore", "DDP4"), marks=pytest.mark.slow),
    ],
)
def test_run_prints_errors_while_the_job_runs(
    script: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    text = SICK.replace("import torch", "input()\n\nimport torch")
    (tmp_path / "train.py").write_text(f'{text}\nif __name__ == "other":\n    report(0)\n')
    command = [sys.executable, "-m", "ddpdoctor", "run", "--no-debug", "--run-dir", "run", *options]
    with subprocess.Popen(
        [*command, "--", sys.executable, script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        first = "" if options else process.stderr.readline()
        process.stdin.write("\n")
        process.stdin.close()
        rest = process.stderr.read()
        status = process.wait()
    assert status == 0
    expected = "ddpdoctor: train.py:7: error DDP401: only some ranks reach barrier()"
    assert first.startswith(expected) is not bool(options)
    assert "DDP401" not in rest
