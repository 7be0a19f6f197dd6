"""Jobs are found when their logs come to rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.failures import watching
from ddpdoctor.failures.watching import Watch
from tests.support.launching import wait_until


def test_a_job_is_found_once_it_is_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (tmp_path / "old.log").write_text("x")
    watch = Watch([str(tmp_path)])
    assert watch.settled() == []
    log = tmp_path / "new.log"
    log.write_text("a")
    assert watch.settled() == []
    now[0] += watching.SETTLE - 1
    log.write_text("ab")
    assert watch.settled() == []
    now[0] += watching.SETTLE - 1
    assert watch.settled() == []
    now[0] += 2
    assert watch.settled() == [(str(tmp_path / "new"), [str(log)])]
    assert watch.settled() == []
    log.write_text("abc")
    watch.settled()
    now[0] += watching.SETTLE
    assert [job for job, _ in watch.settled()] == [str(tmp_path / "new")]


def test_files_of_one_job_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "SETTLE", 0.0)
    watch = Watch([str(tmp_path)])
    (tmp_path / "run_a/attempt_0/1").mkdir(parents=True)
    names = (
        *("run_a/attempt_0/1/stderr.log", "run_a/rank0.log"),
        *("slurm-4711.out", "train_4711_1.err", "slurm-4712.out"),
        *("eval.out", "eval.err", "big-rank0.log", "big-rank1.log", "0.log", "1.log"),
    )
    for name in names:
        (tmp_path / name).write_text("x")
    watch.settled()
    for name in names:
        (tmp_path / name).write_text("xy")
    found = {Path(job).name: len(paths) for job, paths in watch.settled()}
    assert found == {"run_a": 2, "4711": 2, "4712": 1, "eval": 2, "big": 2, tmp_path.name: 2}


def test_only_directories_are_watched(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("")
    with pytest.raises(DoctorError, match="is not a directory"):
        Watch([str(tmp_path / "a.log")])


def test_the_command_reports_until_it_is_interrupted(tmp_path: Path) -> None:
    code = (
        "import sys; from ddpdoctor.failures import watching; watching.POLL = 0.1\n"
        "watching.SETTLE = 0.3\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ddpdoctor.commands import report; sys.exit(report.main(sys.argv[1:]))\n"
    )
    sent = tmp_path / "sent"
    words = ["--log", "--watch", str(tmp_path), "--notify", f"cat >> {sent}"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stderr is not None
    assert "waits for failures" in child.stderr.readline()
    (tmp_path / "job-4711.out").write_text("step 2\nOSError: [Errno 28] No space left on device\n")
    (tmp_path / "job-4712.out").write_text("epoch 1 step 2\n")
    wait_until(lambda: sent.exists() and "DDP935" in sent.read_text())
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    assert "4711:\nerror DDP935" in out and "4712" not in out
