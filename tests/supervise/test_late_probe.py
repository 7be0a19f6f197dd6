"""``ddpdoctor attach --probe``: the probe starts in ranks that run already."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Rule, Severity, examine
from ddpdoctor.debug import attach_points
from ddpdoctor.run import late_start
from ddpdoctor.run.late_start import RankStart
from ddpdoctor.run.mapped import RequestWriter
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.rundir import Lock
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.supervise import unprobed
from ddpdoctor.supervise.late_ranks import LateRanks
from tests.conftest import LIMIT, Doctor
from tests.supervise.test_unprobed import started
from tests.support.odd_jobs import interpreter


def test_a_rank_tells_what_it_waits_for(tmp_path: Path) -> None:
    assert late_start.read_start(str(tmp_path), 7) is None
    descriptor = os.open(late_start.rank_file(str(tmp_path), 7), os.O_WRONLY | os.O_CREAT)
    try:
        for start in (
            RankStart("refused", why="a long reason, in words"),
            RankStart("waits", 123456),
            RankStart("began", 3),
        ):
            late_start.write_start(descriptor, start)
            assert late_start.read_start(str(tmp_path), 7) == start
        late_start.write_start(descriptor, RankStart("refused", why="ü" * 500))
        found = late_start.read_start(str(tmp_path), 7)
        assert found is not None
        assert found.state == "refused"
    finally:
        os.close(descriptor)
    Path(late_start.rank_file(str(tmp_path), 7)).write_bytes(b"\xff\x00 nonsense")
    assert late_start.read_start(str(tmp_path), 7) is None


def test_all_ranks_read_one_beginning(tmp_path: Path) -> None:
    assert late_start.beginning(str(tmp_path)) == 0
    late_start.choose_beginning(str(tmp_path), 42)
    assert late_start.beginning(str(tmp_path)) == 42


def test_a_reader_lives_as_long_as_its_lock(tmp_path: Path) -> None:
    assert not late_start.has_reader(str(tmp_path))
    lock = Lock(tmp_path)
    assert late_start.has_reader(str(tmp_path))
    lock.close()
    assert not late_start.has_reader(str(tmp_path))


def test_a_rank_that_has_ended_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with pytest.raises(DoctorError, match="rank 3 has ended"):
        LateRanks(str(tmp_path), {3: ended.pid})


@pytest.mark.parametrize("late", [False, True])
def test_rules_on_the_beginning_of_a_job_are_silent(late: bool) -> None:
    finding = Finding("DDP999", Severity.ERROR, "")
    rule = Rule("DDP999", "made", Severity.ERROR, lambda run: iter([finding]), late=late)
    attached, started = (Run(Path(), {"launcher": each}, ()) for each in ("attach", "torchrun"))
    assert len(examine(attached, [rule])) == late
    assert len(examine(started, [rule])) == 1


JOB = """\
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed import barrier
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
if "compile" in sys.argv:
    model = torch.compile(model, backend="eager")
step = 0
while not os.path.exists("stop"):
    optimizer.zero_grad()
    time.sleep(0.1 if rank == 1 and os.path.exists("slow") else 0.02)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    step += 1
    if step % 50 == 0:
        barrier()
        if rank == 0:
            with open("steps", "w") as file:
                file.write(str(step))
    if os.path.exists(given := f"inside-{os.getpid()}"):
        with open(given) as file:
            exec(file.read(), {})
        os.remove(given)
    if rank == 1 and os.path.exists("fail"):
        raise ValueError("made to fail")
"""


def steps(folder: Path) -> int:
    try:
        return int((folder / "steps").read_text() or 0)
    except OSError:
        return 0


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def torchrun(python: str, script: Path, *arguments: str) -> list[str]:
    """Return a command whose stderr is a file."""
    words = [
        python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(script), *arguments,
    ]  # fmt: skip
    return ["sh", "-c", f"exec {shlex.join(words)} 2>stderr"]


@pytest.mark.slow
def test_a_running_job_is_watched_and_goes_on(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = doctor.write("train.py", JOB)
    folder = doctor.directory
    monkeypatch.chdir(folder)
    with started(torchrun(interpreter("3.14", ["torch"]), script)) as launcher:
        until(lambda: steps(folder), "no steps")
        command = [sys.executable, "-m", "ddpdoctor", "attach", "--probe", str(launcher)]
        # A reader that is killed leaves a job that goes on, and another one takes its place.
        first = doctor.start(*command, watch=False)
        until(lambda: "2 ranks watched" in first.err.read_text(), first.err.read_text())
        again = doctor.run(*command, watch=False)
        assert again.status == 2
        assert "another `ddpdoctor attach --probe` watches it" in again.stderr
        first.process.kill()
        first.process.wait()
        before = steps(folder)
        until(lambda: steps(folder) > before + 100, "the job stands still")
        (folder / "slow").touch()
        second = doctor.start(*command, watch=False)
        until(lambda: "DDP610" in second.err.read_text(), "no finding")
        second.process.send_signal(signal.SIGINT)
        done = second.finish()
        assert done.status == -signal.SIGINT
        assert "rank 1 holds the others up" in done.stderr
        assert "steps watched" in done.stderr
        assert "train.py:16" in done.stderr
        (folder / "slow").unlink()
        third = doctor.start(*command, watch=False)
        until(lambda: "2 ranks watched" in third.err.read_text(), "no start")
        assert "ddpdoctor" not in (folder / "stderr").read_text()
        (folder / "fail").touch()
        failed = third.finish()
        assert failed.status == 0, failed.stderr
        assert "DDP901: rank 1 raised ValueError: made to fail" in failed.stderr


@pytest.mark.slow
def test_the_probe_of_this_python_starts_late(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job looks itself for what PEP 768 would run."""
    script, folder = doctor.write("train.py", JOB), doctor.directory
    monkeypatch.chdir(folder)
    run = folder / "run"
    run.mkdir()

    def inside(pid: int, code: Path) -> None:
        fresh = folder / "fresh"
        fresh.write_text(code.read_text())
        fresh.rename(folder / f"inside-{pid}")

    monkeypatch.setattr(attach_points, "run_inside", inside)
    with started(torchrun(sys.executable, script)) as launcher:
        until(lambda: steps(folder), "no steps")
        job = unprobed.find(launcher)
        lock = Lock(run)
        RequestWriter(str(run))
        LateRanks(str(run), {rank: each.pid for rank, each in job.ranks.items()}).start()
        (run / "run.json").write_text('{"format": 1, "launcher": "attach"}')

        def seen() -> list[Rank]:
            return list(RunReader(run).snapshot().ranks)

        until(lambda: all(each.status and each.status.step > 300 for each in seen()), "no steps")
        lock.close()
        until(lambda: all(each.ended for each in seen()), "they do not end with the reader")
        first, second = seen()
        numbers = [[each.step for each in rank.steps] for rank in (first, second)]
        assert numbers[0][:100] == numbers[1][:100] == list(range(100))
        # Barriers, each 50th step of the job, have equal numbers and come in the same steps.
        calls = [rank.ring.collectives for rank in (first, second) if rank.ring is not None]
        names = [[(each.sequence, each.name) for each in rank[:5]] for rank in calls]
        assert names[0] == names[1] == [(1 + each, "barrier") for each in range(5)]
        assert not [each for rank in (first, second) for each in rank.records.of(FaultRecord)]
        (folder / "fail").touch()
        until(lambda: "ChildFailedError" in (folder / "stderr").read_text(), "it goes on")
        # Neither a warning, nor a frame in the traceback of a rank.
        assert "ddpdoctor" not in (folder / "stderr").read_text()


@pytest.mark.slow
def test_what_is_refused(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    script = doctor.write("train.py", JOB)
    monkeypatch.chdir(doctor.directory)
    for python, arguments, why in (
        (sys.executable, (), "does not run on Python 3.14"),
        (interpreter("3.14", ["torch"]), ("compile",), "torch.compile has compiled code of it"),
    ):
        with started(torchrun(python, script, *arguments)) as launcher:
            until(lambda: steps(doctor.directory), "no steps")
            command = [sys.executable, "-m", "ddpdoctor", "attach", "--probe", str(launcher)]
            refused = doctor.run(*command, watch=False)
            assert refused.status == 2
            assert why in refused.stderr
            (doctor.directory / "steps").unlink()
            until(lambda: steps(doctor.directory), "the job stands still")
            (doctor.directory / "steps").unlink()
