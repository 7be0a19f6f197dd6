"""A job of Slurm: its state and logs, as ``scontrol`` and ``sacct`` print them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.failures import slurm

_SHOWN = (
    "JobId={id} JobName=train one UserId=me(1000) JobState={state} Reason={reason} Dependency=none "
    "ExitCode={code} DerivedExitCode=0:0 EndTime=2026-11-27T19:31:40 NodeList=n[1-2] BatchHost=n1 "
    "Command=/job/run.sh --name a b WorkDir={folder} StdErr={folder}/{out} StdOut={folder}/{out} "
)
RAISED = (
    "[rank1]: Traceback (most recent call last):\n"
    '[rank1]:   File "/job/train.py", line 9, in <module>\n'
    "[rank1]: ValueError: bad batch\n"
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for commands of Slurm."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("scontrol", "sacct"):
        prints(folder, name, status=1)
    return folder


def prints(tools: Path, name: str, text: str = "", status: int = 0) -> None:
    file = tools / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    file.chmod(0o755)


def shown(folder: Path, state: str = "FAILED", reason: str = "None", code: str = "1:0") -> str:
    out = "train-4711.out"
    return _SHOWN.format(id=4711, state=state, reason=reason, code=code, folder=folder, out=out)


def test_its_output_and_those_of_its_tasks_are_read(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prints(tools, "scontrol", shown(tmp_path))
    (tmp_path / "train-4711.out").write_text("srun: error: n2: task 1: Exited with exit code 1\n")
    (tmp_path / "train-4711-1.log").write_text(RAISED)
    (tmp_path / "train-47110.out").write_text("OSError: of another job\n")
    assert report.main(["--slurm", "4711"]) == 2
    out = capsys.readouterr().out
    assert "rank 1 raised ValueError: bad batch" in out and "another job" not in out
    assert "in 2 files" in out


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("FAILED", "0:9", "DDP902"),
        ("FAILED", "137:0", "DDP902"),
        ("FAILED", "0:11", "DDP904"),
        ("FAILED", "139:0", "DDP904"),
        ("FAILED", "0:53", "DDP960"),
        ("FAILED", "1:0", "DDP907"),
        ("TIMEOUT", "0:15", "DDP908"),
        ("NODE_FAIL", "0:0", "DDP908"),
        ("PREEMPTED", "0:0", "DDP908"),
        ("CANCELLED", "0:0", "DDP908"),
        ("OUT_OF_MEMORY", "0:125", "DDP903"),
        ("COMPLETED", "0:0", ""),
        ("RUNNING", "0:0", ""),
    ],
)
def test_a_job_without_logs_is_judged_by_its_state(
    tools: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: str,
    expected: str,
) -> None:
    prints(tools, "scontrol", shown(tmp_path, state, code=code))
    status = report.main(["--slurm", "4711"])
    said = capsys.readouterr()
    assert f"no such file on this machine: {tmp_path}/train-4711.out" in said.err
    assert (status, expected in said.out) == (2 if expected else 0, True)
    assert ("Slurm: JobId=4711" in said.out) == (not expected)


def test_a_cause_in_the_log_is_nearer_than_the_state(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prints(tools, "scontrol", shown(tmp_path, code="1:0"))
    (tmp_path / "train-4711.out").write_text(RAISED)
    report.main(["--slurm", "4711", "--notify", f"cat > {tmp_path}/sent"])
    assert "DDP901" in capsys.readouterr().out
    sent = json.loads((tmp_path / "sent").read_text())
    assert (sent["event"], sent["script"], sent["finding"]["code"]) == (
        "crash",
        "job 4711",
        "DDP901",
    )


def test_accounting_knows_a_job_for_longer(tools: Path, tmp_path: Path) -> None:
    prints(tools, "sacct", f"88|train|TIMEOUT|0:0|0:0|None|n1|2026-11-27T19:31:40|{tmp_path}")
    (tmp_path / "slurm-88.out").write_text("step 1\n")
    job = slurm.job("88")
    assert job.said.startswith("JobId=88 JobState=TIMEOUT")
    assert job.logs == [f"{tmp_path}/slurm-88.out"]


def test_accounting_of_newer_versions_knows_the_output_files(tools: Path, tmp_path: Path) -> None:
    """Of each task of an array. The error file is empty if it is the output file."""
    ended = "OUT_OF_MEMORY|0:125|0:0|None|n1|2026-11-27T19:31:40"
    (tmp_path / "88_1.txt").write_text("step 1\n")
    (tmp_path / "88_2.err").write_text("step 1\n")
    rows = (
        f"88_1|train|{ended}|{tmp_path}|88_1.txt|",
        f"88_2|train|{ended}|{tmp_path}|/dev/null|{tmp_path}/88_2.err",
    )
    prints(tools, "sacct", "\n".join(rows))
    job = slurm.job("88")
    assert "JobId=88_2 JobState=OUT_OF_MEMORY" in job.said
    assert (job.logs, job.missing) == ([f"{tmp_path}/88_1.txt", f"{tmp_path}/88_2.err"], "")


def test_all_tasks_of_an_array_are_read(tools: Path, tmp_path: Path) -> None:
    lines = [
        _SHOWN.format(
            id=id, state="COMPLETED", reason="None", code="0:0", folder=tmp_path, out=f"a-{id}.out"
        )
        for id in (5, 6)
    ]
    prints(tools, "scontrol", "\n".join(lines))
    for name in ("a-5.out", "a-6.out", "b-5.log", "other-5.out"):
        (tmp_path / name).write_text("")
    # A short number may be a rank in the names of others.
    assert [Path(each).name for each in slurm.job("5").logs] == ["a-5.out", "a-6.out"]


@pytest.mark.parametrize("number", ["", "x", "1;id", "--help", "1 2"])
def test_only_numbers_are_given_to_slurm(tools: Path, number: str) -> None:
    with pytest.raises(DoctorError, match="not a Slurm job number"):
        slurm.job(number)


def test_a_job_that_slurm_forgot(tools: Path) -> None:
    with pytest.raises(DoctorError, match="does not know job 4711"):
        slurm.job("4711")


@pytest.mark.parametrize(
    ("state", "more", "why"),
    [
        ("RUNNING", "PreemptTime=2026-11-27T19:31:00 Requeue=0", "Slurm preempted job 4711: "),
        ("COMPLETING", "Restarts=1", "Slurm requeued job 4711, as after a preemption: "),
        ("PENDING", "Restarts=1", "Slurm requeued job 4711, as after a preemption: "),
        ("COMPLETING", "Restarts=0", "job 4711 was cancelled (scancel)"),
        ("RUNNING", "RunTime=1-00:00:30 TimeLimit=1-00:00:00",
         "Slurm ended job 4711 at its time limit of 1-00:00:00"),
        ("NODE_FAIL", "", "Slurm ended job 4711 because a node failed"),
        ("RUNNING", "PreemptTime=None RunTime=00:01:00 TimeLimit=UNLIMITED", ""),
    ],
)  # fmt: skip
def test_why_slurm_asks_a_job_to_end(
    tools: Path, tmp_path: Path, state: str, more: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    prints(tools, "scontrol", shown(tmp_path, state) + more)
    found = slurm.why_stopped("4711", 10)
    assert found.startswith(why) and bool(found) == bool(why)


def test_why_slurm_asks_a_task_of_an_array_to_end(tools: Path, tmp_path: Path) -> None:
    other = shown(tmp_path, "PENDING").replace("4711", "4712")
    prints(tools, "scontrol", f"{other}\n{shown(tmp_path, 'NODE_FAIL')}")
    assert slurm.why_stopped("4711", 10) == "Slurm ended job 4711 because a node failed"


def test_a_controller_that_does_not_answer_in_time(tools: Path) -> None:
    (tools / "scontrol").write_text("#!/bin/sh\nexec sleep 20\n")
    assert slurm.why_stopped("4711", 0.2) == ""
