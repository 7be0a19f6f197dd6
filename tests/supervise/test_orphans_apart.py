"""Processes of a job in sessions, environments and runs of their own."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor
from tests.support.launching import PYTHON, wait_until
from tests.support.left_behind import (
    _words,
    alive,
    assert_all_end,
    pid_in,
    processes,
)

pytestmark = pytest.mark.usefixtures("bystanders")


# -- what a job leaves behind, and what hides


def test_helpers_in_sessions_of_their_own_end_with_the_job(doctor: Doctor) -> None:
    doctor.write(
        "leave.py",
        """
        import signal, subprocess, sys
        stubborn = "import signal, time; signal.signal(15, 1); print(flush=True); time.sleep(3600)"
        for command in (["sleep", "3600"], [sys.executable, "-c", stubborn]):
            child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.read(1)
        """,
    )
    live = doctor.start("--", PYTHON, "leave.py")
    result = live.finish(120)
    assert result.status == 0
    assert processes(doctor) == []
    assert "ended 2 processes that the job left behind" in result.ours


def test_a_double_fork_does_not_hide(doctor: Doctor) -> None:
    live = doctor.start(
        "--", "bash", "-c", "(setsid sleep 3600 & echo $! > pid) & wait; sleep 3600"
    )
    daemon = doctor.directory / "pid"
    wait_until(lambda: daemon.exists() and bool(daemon.read_text().strip()), "a daemon")
    live.process.kill()
    live.process.wait()
    assert_all_end(doctor)


CLOBBER = """
import ctypes, os, signal, sys, time

# What setproctitle does: the block that held the environment now holds something else.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open("/proc/self/stat") as file:
    start, end = map(int, file.read().rpartition(")")[2].split()[47:49])
ctypes.memset(start, 0, end - start)
with open(sys.argv[1] + ".tmp", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(3600)
"""


@pytest.mark.parametrize("end", ["asked", pytest.param("finished", marks=pytest.mark.slow)])
def test_a_process_whose_environment_is_gone(end: str, doctor: Doctor) -> None:
    # setproctitle and `env -i` hide a process from the search by environment; it is known for a
    # descendant.
    doctor.write("clobber.py", CLOBBER)
    hidden = doctor.directory / "hidden"
    rest = "while [ ! -e hidden ]; do sleep 0.05; done" if end == "finished" else "sleep 3600"
    live = doctor.start(
        "--grace", "0.5", "--", "bash", "-c", f"setsid {PYTHON} clobber.py hidden & {rest}"
    )
    wait_until(hidden.exists, "the process")
    process = psutil.Process(pid_in(hidden))
    try:
        if end == "asked":
            live.process.send_signal(signal.SIGTERM)
        live.process.wait(LIMIT)
        wait_until(lambda: not alive(process.pid), "its end")
    finally:
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.mark.slow
def test_a_run_within_a_run(doctor: Doctor) -> None:
    # A job script that itself calls `ddpdoctor run`: ending the outer one ends both.
    doctor.write(
        "inner.py",
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("inner", "w").close()
        time.sleep(3600)
        """,
    )
    inner = f"{PYTHON} -m ddpdoctor run --run-dir inner-run -- {PYTHON} inner.py; sleep 3600"
    live = doctor.start("--grace", "0.5", "--", "bash", "-c", inner)
    wait_until((doctor.directory / "inner").exists, "the inner job")
    live.process.send_signal(signal.SIGTERM)
    live.process.wait(LIMIT)
    assert_all_end(doctor)


def test_two_runs_side_by_side_do_not_meet(doctor: Doctor) -> None:
    first = doctor.start("--grace", "0.5", "--", "bash", "-c", "touch a; sleep 3600; true")
    second = doctor.start("--", "bash", "-c", "touch b; read line; exit 12", stdin=-1)
    for name in ("a", "b"):
        wait_until((doctor.directory / name).exists, name)
    first.process.kill()
    first.process.wait()
    wait_until(lambda: not any("3600" in _words(p) for p in processes(doctor)), "its end")
    assert second.process.poll() is None
    second.process.communicate(b"\n")
    assert second.process.returncode == 12
