"""Whatever fails in the supervisor, the exit status is the job's."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Doctor
from tests.support.launching import PYTHON, wait_until
from tests.support.left_behind import assert_all_end, processes

DRIVER = """
import importlib, os, sys, time
import ddpdoctor.cli

PART, _, NAME = os.environ["BREAKS"].partition(":")
if PART == "clock":
    # A step of NTP, or a suspended machine: this clock goes back and forth.
    real, real_ns, jumps = time.time, time.time_ns, [0]
    def jump():
        jumps[0] += 1
        return (0, 4_000, -4_000, 1e7, -1e7)[jumps[0] % 5]
    time.time = lambda: real() + jump()
    time.time_ns = lambda: real_ns() + int(jump() * 1e9)
elif PART:
    module = importlib.import_module(f"ddpdoctor.{PART}")
    owner, _, attribute = NAME.rpartition(".")
    place = getattr(module, owner) if owner else module
    real = getattr(place, attribute)
    def broken(*args, **kwargs):
        raise ZeroDivisionError("broken by the test")
    setattr(place, attribute, property(broken) if isinstance(real, property) else broken)
sys.exit(ddpdoctor.cli.main())
"""

PARTS = [
    "supervise.run_watch:RunWatch.open",
    "supervise.run_watch:RunWatch.started",
    "supervise.run_watch:RunWatch.check",
    "supervise.run_watch:RunWatch.descriptors",
    "supervise.run_watch:RunWatch.write",
    "supervise.run_watch:RunWatch.end",
    "supervise.run_watch:RunWatch.summarize",
    "supervise.run_watch:RunWatch.close",
    "supervise.run_watch:RunReader.snapshot",
    "supervise.supervisor:RunWatch.slept",
    "supervise.job_signals:JobSignals.take",
    "supervise.job_signals:JobSignals.drain",
    "supervise.keepers:Keepers.dismiss",
    "supervise.keepers:Keepers._start_standby",
    "supervise.processes:end",
    "supervise.job_signals:Passthrough.finish",
    "supervise.job_signals:Passthrough._carry",
    "supervise.job_signals:Passthrough._release",
    "supervise.run_watch:run_manifest",
    "supervise.rank_processes:Unwatched.find",
    "run.vitals:Vitals.look",
    "supervise.hang_watch:HangWatch.begin",
    "supervise.hang_watch:HangWatch.end",
    "supervise.rank_processes:RankWatch.end_leftovers",
    "render.reporter:Reporter.examine",
    "render.reporter:Reporter.summary",
    "run.rundir:publish",
    "run.code_version:keep",
    "clock:",
]

FEW = ("supervise.run_watch:RunWatch.check", "supervise.job_signals:Passthrough._carry", "clock:")

JOB = ("bash", "-c", "echo out; echo error >&2; sleep 2; exit 7")


@pytest.mark.parametrize(
    "breaks", [*FEW, *(pytest.param(e, marks=pytest.mark.slow) for e in PARTS if e not in FEW)]
)
def test_a_fault_of_ours_is_not_the_jobs(breaks: str, doctor: Doctor) -> None:
    doctor.write("driver.py", DRIVER)
    env = {"BREAKS": breaks.replace("RunReader.snapshot", "RunWatch._read")}
    words = ("run", "--no-debug", "--run-dir", "run", "--", *JOB)
    result = doctor.start(PYTHON, "driver.py", *words, env=env, watch=False).finish()
    assert (result.status, result.stdout) == (7, "out\n"), result.stderr
    assert "error\n" in result.stderr
    assert "Traceback" not in result.stderr
    assert_all_end(doctor)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["removed", "a file", "read-only"])
def test_a_run_directory_that_is_destroyed(where: str, doctor: Doctor) -> None:
    live = doctor.start("--", "bash", "-c", "touch there; read line <go; exit 7")
    os.mkfifo(doctor.directory / "go")
    wait_until((live.run_dir / "run.json").exists, "the run")
    wait_until((doctor.directory / "there").exists, "the job")
    if where == "read-only":
        live.run_dir.chmod(0o500)
    else:
        shutil.rmtree(live.run_dir)
    if where == "a file":
        live.run_dir.write_text("")
    doctor.write("go", "\n")
    result = live.finish()
    assert result.status == 7, result.stderr
    assert "Traceback" not in result.stderr and "internal error" not in result.stderr
    if where != "read-only":
        # So that the fixture, which reads it, finds a directory.
        live.run_dir.unlink(missing_ok=True)


# -- a clock that jumps, as libfaketime lets it


def libfaketime() -> str:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.skip("needs libfaketime (the package faketime)")
    return str(found[0])


def faked(doctor: Doctor, real_monotonic: str) -> dict[str, str]:
    offset(doctor, "+0")
    return {
        "LD_PRELOAD": libfaketime(),
        "FAKETIME_TIMESTAMP_FILE": str(doctor.directory / "offset"),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": real_monotonic,
    }


def offset(doctor: Doctor, by: str) -> None:
    doctor.write("offset.new", by).rename(doctor.directory / "offset")


def jump(doctor: Doctor, jumps: tuple[str, ...], ticks: Path) -> None:
    """Move the clock again and again, with some of the job's time in between."""
    for by in jumps:
        before = ticks.stat().st_size
        wait_until(lambda least=before + 8: ticks.stat().st_size >= least, "the job's time")  # type: ignore[misc]
        offset(doctor, by)


TICKS = "while [ ! -e go ]; do printf . >>ticks; sleep 0.1; done; exit 7"
"""A job of bash: most programs that sleep by a clock are broken by such a library themselves."""

JUMPS = [("+4000", "+0"), ("-4000", "+0"), ("+5", "-5", "+100000", "-100000", "+0")]


@pytest.mark.parametrize("real_monotonic", ["0", "1"])
@pytest.mark.parametrize(
    "jumps", [JUMPS[2], *(pytest.param(e, marks=pytest.mark.slow) for e in JUMPS[:2])]
)
def test_a_clock_that_jumps(doctor: Doctor, jumps: tuple[str, ...], real_monotonic: str) -> None:
    env = faked(doctor, real_monotonic)
    ticks = doctor.write("ticks", "")
    live = doctor.start("--no-debug", "--", "bash", "-c", TICKS, env=env)
    jump(doctor, jumps, ticks)
    doctor.write("go", "")
    result = live.finish()
    assert result.status == 7, result.stderr
    assert "internal error" not in result.stderr
    assert_all_end(doctor)


@pytest.mark.parametrize("real_monotonic", ["0", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", ["supervisor", pytest.param("asked", marks=pytest.mark.slow)])
def test_a_job_ends_with_its_supervisor_whatever_the_clock_says(
    doctor: Doctor, victim: str, real_monotonic: str
) -> None:
    env = faked(doctor, real_monotonic)
    ticks = doctor.write("ticks", "")
    command = f"trap '' TERM; {TICKS}"
    live = doctor.start("--no-debug", "--grace", "1", "--", "bash", "-c", command, env=env)
    jump(doctor, ("+4000", "+0"), ticks)
    live.process.send_signal(signal.SIGKILL if victim == "supervisor" else signal.SIGTERM)
    assert live.finish().status == -signal.SIGKILL
    wait_until(lambda: not processes(doctor), "the end of the job's processes")


STEPS = """
import os, select, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
ddp = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
while True:
    ddp(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    select.select([], [], [], 0.05)
    if dist.get_rank() == 0:
        with open("ticks", "a") as file:
            file.write(".")
    over = torch.tensor(float(os.path.exists("go")))
    dist.all_reduce(over)
    if over:
        break
dist.destroy_process_group()
sys.exit(7)
"""


@pytest.mark.slow
def test_ranks_whose_clock_jumps(doctor: Doctor) -> None:
    env = faked(doctor, "0")
    ticks = doctor.write("ticks", "")
    doctor.write("steps.py", STEPS)
    live = doctor.start("--no-debug", "--nproc-per-node", "2", "steps.py", env=env)
    jump(doctor, JUMPS[2], ticks)
    doctor.write("go", "")
    result = live.finish()
    assert result.status == 1, result.stderr
    assert "internal error" not in result.stderr
    assert result.codes in ([], ["DDP905"]), result.stderr
    assert_all_end(doctor)
