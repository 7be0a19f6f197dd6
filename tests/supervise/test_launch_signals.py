"""`ddpdoctor run` is invisible: the same signals and exit status as without it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor, Live
from tests.support.launching import PYTHON, STUBBORN, TORCHRUN, wait_until

COUNT_SIGNALS = """
import json, os, signal, sys, time

counts = {}
def count(number, frame):
    name = signal.Signals(number).name
    counts[name] = counts.get(name, 0) + 1

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, count)
mine = os.environ.get("RANK", "0")
open("ready" + mine, "w").close()
until = time.monotonic() + 300
while not counts and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(0.8)  # a second delivery would come now
with open("counts" + mine + ".tmp", "w") as file:
    json.dump(counts, file)
os.rename("counts" + mine + ".tmp", "counts" + mine)
sys.exit(9)
"""


def wait_for_files(live: Live, folder: Path, *names: str, timeout: float = LIMIT) -> None:
    def there() -> bool:
        if live.process.poll() is not None and not all((folder / n).exists() for n in names):
            raise AssertionError(f"ended too soon: {live.err.read_text('utf-8', 'replace')}")
        return all((folder / name).exists() for name in names)

    wait_until(there, timeout=timeout)


# -- the same exit status


@pytest.mark.parametrize("status", [0, 1, 2, 3, 5, 130, 255])
def test_exit_status_of_a_command(status: int, doctor: Doctor) -> None:
    assert doctor.run("--", PYTHON, "-c", f"raise SystemExit({status})").status == status


@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT),
        *(signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGALRM),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_that_ended_the_job_ends_us(number: signal.Signals, doctor: Doctor) -> None:
    result = doctor.run("--", "sh", "-c", f"kill -{number.name[3:]} $$")
    assert result.status == -number
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_exit_status_under_torchrun(doctor: Doctor) -> None:
    doctor.write("five.py", "raise SystemExit(5)")
    doctor.write("bare.py", "pass")
    for script in ("five.py", "bare.py"):
        plain = doctor.start(*TORCHRUN, "--nproc-per-node", "2", script, watch=False)
        ours = doctor.start("--nproc-per-node", "2", script)
        assert ours.finish().status == plain.finish().status


# -- signals reach the job, once


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_command_gets_a_signal_once(name: str, doctor: Doctor) -> None:
    doctor.write("count.py", COUNT_SIGNALS)
    live = doctor.start("--", PYTHON, "count.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.Signals[name])
    assert live.finish().status == 9
    assert json.loads((doctor.directory / "counts0").read_text()) == {name: 1}


WAITING = """
import pathlib, time
{first}
pathlib.Path("ready0").touch()
time.sleep(300)
"""
GROUP = """import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import torch", GROUP], ids=["bare", "torch", "group"])
def test_python_dies_of_ctrl_c_as_it_does_alone(first: str, doctor: Doctor) -> None:
    # A shell's loop ends only if it sees that; Python forgets it if it runs a text meanwhile.
    doctor.write("waiting.py", WAITING.format(first=first))
    live = doctor.start("--", PYTHON, "waiting.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    done = live.finish()
    assert done.status == -signal.SIGINT
    assert done.stderr.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize(
    "name",
    ["SIGINT", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGTERM", "SIGHUP"))],
)
def test_ranks_get_what_torchrun_would_give_them(name: str, doctor: Doctor) -> None:
    # Plain torchrun gets it as a terminal or a scheduler sends it; each in a folder of its own.
    lives: list[Live] = []
    folders: list[Path] = []
    for watch in (False, True):
        folder = doctor.directory / str(watch)
        folder.mkdir()
        doctor.write(f"{watch}/count.py", f"import os\nos.chdir({str(folder)!r})\n{COUNT_SIGNALS}")
        words = ("--nproc-per-node", "2", f"{watch}/count.py")
        lives.append(doctor.start(*words if watch else (*TORCHRUN, *words), watch=watch))
        folders.append(folder)
    for live, folder in zip(lives, folders, strict=True):
        wait_for_files(live, folder, "ready0", "ready1")
        live.process.send_signal(signal.Signals[name])
    statuses = [live.finish().status for live in lives]
    assert statuses[0] == statuses[1]
    counts = [
        [json.loads((folder / f"counts{rank}").read_text()) for rank in (0, 1)]
        for folder in folders
    ]
    assert counts[0] == counts[1]
    assert all(sum(one.values()) == 1 for one in counts[1])


def test_the_whole_foreground_group_of_a_shell_job(doctor: Doctor) -> None:
    # As a terminal does it: Ctrl-C reaches what a shell script runs, too.
    doctor.write("count.py", COUNT_SIGNALS)
    live = doctor.start("--", "bash", "-c", f"{PYTHON} count.py; exit 21")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    live.finish()
    assert json.loads((doctor.directory / "counts0").read_text()) == {"SIGINT": 1}


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_schedulers_warning_reaches_the_job(name: str, doctor: Doctor) -> None:
    doctor.write(
        "save.py",
        f"""
        import signal, sys
        signal.signal(signal.{name}, lambda *_: sys.exit(4))
        open("ready0", "w").close()
        while True:
            signal.pause()
        """,
    )
    live = doctor.start("--", PYTHON, "save.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.Signals[name])
    assert live.finish().status == 4


def test_an_ignored_signal_stays_ignored(doctor: Doctor) -> None:
    # As under nohup.
    doctor.write(
        "ignored.py",
        """
        import signal, sys
        open("ready0", "w").close()
        sys.exit(8 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1)
        """,
    )
    command = f"trap '' HUP; exec {PYTHON} -m ddpdoctor run --run-dir rd -- {PYTHON} ignored.py"
    live = doctor.start("bash", "-c", command, watch=False)
    assert live.finish().status == 8


def test_a_signal_in_the_moment_of_the_start_is_not_lost(doctor: Doctor) -> None:
    code = """
import os, signal, sys
from ddpdoctor.cli import main
from ddpdoctor.supervise.supervisor import Supervisor

start = Supervisor._start
def late(self):
    os.kill(os.getpid(), signal.SIGTERM)
    start(self)
Supervisor._start = late
sys.exit(main(["run", "--run-dir", "rd", "--grace", "1000", "--", "sleep", "1000"]))
"""
    live = doctor.start(PYTHON, "-c", code, watch=False)
    try:
        assert live.process.wait(LIMIT) == -signal.SIGTERM
    finally:
        live.process.send_signal(signal.SIGINT)
        live.process.send_signal(signal.SIGINT)
        live.process.wait(LIMIT)


# -- the grace period


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)]
)
def test_after_the_grace_period_the_job_is_ended(name: str, doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "0.5", "--", PYTHON, "stubborn.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.Signals[name])
    assert live.finish().status == -signal.SIGKILL


def test_no_grace_at_all(doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "0", "--", "bash", "-c", f"{PYTHON} stubborn.py & wait; wait")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    live.finish()


def test_the_job_has_its_grace_period(doctor: Doctor) -> None:
    doctor.write(
        "slow.py",
        """
        import signal, sys, time
        def save(*_):
            time.sleep(2)
            sys.exit(17)
        signal.signal(signal.SIGTERM, save)
        open("ready0", "w").close()
        while True:
            time.sleep(60)
        """,
    )
    live = doctor.start("--grace", "20", "--", PYTHON, "slow.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGTERM)
    assert live.finish(30).status == 17


def test_a_second_interrupt_ends_at_once(doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "1000", "--", PYTHON, "stubborn.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    wait_for_files(live, doctor.directory, "got-SIGINT")
    live.process.send_signal(signal.SIGINT)
    result = live.finish()
    assert result.status == -signal.SIGKILL
    assert "ending the job now" in result.ours


def test_an_interrupt_after_a_term_is_the_first_of_its_kind(doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "1000", "--", PYTHON, "stubborn.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGTERM)
    wait_for_files(live, doctor.directory, "got-SIGTERM")
    live.process.send_signal(signal.SIGINT)
    wait_for_files(live, doctor.directory, "got-SIGINT")
    assert live.process.poll() is None
    live.process.send_signal(signal.SIGINT)
    assert live.finish().status == -signal.SIGKILL


def test_a_job_with_an_emptied_environment_can_be_stopped(doctor: Doctor) -> None:
    stubborn = doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "0.5", "--", "env", "-i", PYTHON, str(stubborn))
    wait_for_files(live, doctor.directory, "ready0")
    below = psutil.Process(live.process.pid).children(recursive=True)
    (job,) = (each for each in below if str(stubborn) in each.cmdline())
    live.process.send_signal(signal.SIGTERM)
    try:
        assert live.process.wait(LIMIT) == -signal.SIGKILL
        assert not job.is_running()
    finally:
        if job.is_running():
            job.kill()
        live.process.wait(LIMIT)
