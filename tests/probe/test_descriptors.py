"""A job has the descriptors that it has without ddpdoctor, and no process of ours holds them."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shlex
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from tests.conftest import Doctor, Live, Result
    from tests.support.pseudo_terminal import Open
from tests.support.launching import PYTHON, TORCHRUN, wait_until
from tests.support.left_behind import processes

DOCTOR = (PYTHON, "-m", "ddpdoctor", "run", "--debug-port", "0", "--no-vscode")

WAYS = [
    pytest.param((), id="plain"),
    pytest.param(("--no-debug",), id="no debugger", marks=pytest.mark.slow),
    pytest.param(("--quiet",), id="quiet", marks=pytest.mark.slow),
]

LISTS = """
import fcntl, json, os, sys

def held(pid):
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if int(name) > 2 and not target.startswith(f"/proc/{pid}/"):
            found[int(name)] = target
    return found

with open(sys.argv[1] + os.environ.get("RANK", ""), "w") as file:
    own = held(os.getpid())
    own.pop(file.fileno(), None)
    flags = {number: fcntl.fcntl(number, fcntl.F_GETFD) for number in own}
    json.dump({"own": own, "flags": flags, "parent": held(os.getppid())}, file)
"""


def bash(doctor: Doctor, script: str, *words: str) -> Live:
    """Start a script of bash; ``"$@"`` in it is the command."""
    return doctor.start("bash", "-c", script, "bash", *words, watch=False)


def to_its_end(doctor: Doctor, script: str, *words: str) -> Result:
    return bash(doctor, script, *words).finish()


def listed(doctor: Doctor, name: str) -> dict[str, dict[str, object]]:
    return dict(json.loads((doctor.directory / name).read_text()))


@pytest.mark.parametrize("way", WAYS)
def test_a_command_has_the_same_numbers_and_flags(doctor: Doctor, way: tuple[str, ...]) -> None:
    doctor.write("lists.py", LISTS)
    doctor.write("config", "")
    script = 'exec 9<config 17>written 5<config; "$@"'
    job = (PYTHON, "lists.py")
    assert to_its_end(doctor, script, *job, "bare").status == 0
    assert to_its_end(doctor, script, *DOCTOR, *way, "--", *job, "watched").status == 0
    bare, watched = listed(doctor, "bare"), listed(doctor, "watched")
    assert {"5", "9", "17"} <= bare["own"].keys()
    assert (watched["own"], watched["flags"]) == (bare["own"], bare["flags"])


def test_torchrun_has_them_and_its_ranks_have_what_it_gives_them(doctor: Doctor) -> None:
    doctor.write("lists.py", LISTS)
    config = str(doctor.write("config", ""))
    script = 'exec 9<config; "$@"'
    job = ("--nproc-per-node", "2", "lists.py")
    for name, words in (("bare", TORCHRUN), ("watched", DOCTOR)):
        assert to_its_end(doctor, script, *words, *job, name).status == 0
        for rank in (0, 1):
            found = listed(doctor, f"{name}{rank}")
            assert config not in found["own"].values()
            assert found["parent"].get("9") == config


def test_a_process_substitution_can_be_read(doctor: Doctor) -> None:
    reads = "import sys; print(open(sys.argv[1]).read())"
    result = to_its_end(doctor, '"$@" <(echo settings)', *DOCTOR, "--", PYTHON, "-c", reads)
    assert (result.status, result.stdout.split()) == (0, ["settings"])


def test_findings_go_to_a_process_substitution(doctor: Doctor) -> None:
    script = f"{shlex.join(DOCTOR)} --json >(cat >findings; touch done) -- {PYTHON} -c 1/0; exit $?"
    assert to_its_end(doctor, script).status == 1
    wait_until((doctor.directory / "done").exists, "the end of what reads them")
    assert "ZeroDivisionError" in (doctor.directory / "findings").read_text()


CLOSES = """
import os, time
os.closerange(3, 1000)
open("closed", "w").close()
while not os.path.exists("go"):
    time.sleep(0.05)
raise SystemExit(6)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_pipe_ends_when_the_job_closes_it(doctor: Doctor, way: tuple[str, ...]) -> None:
    doctor.write("closes.py", CLOSES)
    script = '"$@" 9> >(cat; touch ended)'
    live = bash(doctor, script, *DOCTOR, *way, "--", PYTHON, "closes.py")
    wait_until((doctor.directory / "ended").exists, "the end of the pipe")
    assert live.process.poll() is None
    doctor.write("go", "")
    assert live.finish().status == 6


def test_a_lock_is_free_when_the_job_gives_it_up(doctor: Doctor) -> None:
    doctor.write("closes.py", CLOSES)
    script = 'exec 9>lock; flock 9; exec "$@"'
    live = bash(doctor, script, *DOCTOR, "--", PYTHON, "closes.py")
    wait_until((doctor.directory / "closed").exists, "the job")
    with (doctor.directory / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    doctor.write("go", "")
    assert live.finish().status == 6


def test_no_process_of_ours_holds_what_the_job_does(doctor: Doctor) -> None:
    config = str(doctor.write("config", ""))
    script = 'exec 9<config; exec "$@"'
    live = bash(doctor, script, *DOCTOR, "--", "bash", "-c", "touch there; read line <go; exit 6")
    os.mkfifo(doctor.directory / "go")
    wait_until((doctor.directory / "there").exists, "the job")

    def holders() -> list[str]:
        found = []
        for process in processes(doctor):
            folder = Path(f"/proc/{process.pid}/fd")
            if any(os.path.realpath(each) == config for each in folder.iterdir()):
                found.append(process.cmdline()[0])
        return found

    wait_until(lambda: holders() == ["bash"], "the job to be the only holder")
    doctor.write("go", "\n")
    assert live.finish().status == 6


def test_on_a_terminal(doctor: Doctor, terminal: Open) -> None:
    doctor.write("lists.py", LISTS)
    doctor.write("config", "")
    script = f'exec 9<config; {shlex.join(DOCTOR)} -- {PYTHON} lists.py watched; echo "end $?"'
    opened = terminal("bash", "-c", script)
    assert opened.finish() == 0
    found = listed(doctor, "watched")
    assert found["own"] == {"9": str(doctor.directory / "config")}
    assert found["flags"] == {"9": 0}


def test_the_jobserver_of_make(doctor: Doctor) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    doctor.write("Makefile", f"all:\n\t+@{shlex.join(DOCTOR)} -- {make} -f inner.mk\n")
    doctor.write("inner.mk", "all: a b\na b:\n\t@echo $@\n")
    result = doctor.run(make, "--no-print-directory", "-j3", watch=False)
    assert sorted(result.stdout.split()) == ["a", "b"]
    assert "jobserver unavailable" not in result.stderr


def test_sockets_of_systemd_are_for_the_command(doctor: Doctor) -> None:
    says = (
        "import os; print(os.environ['LISTEN_PID'] == str(os.getpid()), os.environ['LISTEN_FDS'])"
    )
    script = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec 3<&0; exec "$@"'
    for words in ((), (*DOCTOR, "--")):
        assert to_its_end(doctor, script, *words, PYTHON, "-c", says).stdout.split() == [
            "True",
            "1",
        ]
    # What was for a process above is for none of these.
    script = 'export LISTEN_PID=$PPID LISTEN_FDS=1; "$@"'
    assert to_its_end(doctor, script, *DOCTOR, "--", PYTHON, "-c", says).stdout.startswith("False")


def test_more_descriptors_than_select_takes(doctor: Doctor) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("needs a limit of 3000 open files")
    script = (
        'ulimit -n 3000; for ((i = 20; i < 1100; i++)); do eval "exec $i</dev/null"; done; "$@"'
    )
    job = ("bash", "-c", "echo out; echo error >&2; : <&1099 && exit 6")
    result = to_its_end(doctor, script, *DOCTOR, "--", *job)
    assert (result.status, result.stdout) == (6, "out\n")
    assert "error\n" in result.stderr
    assert "internal error" not in result.stderr


def test_keepers_of_a_job_without_stdin_sleep(doctor: Doctor) -> None:
    """Their own pipe is not the standard input that was closed, which they replace."""
    live = bash(
        doctor, 'exec "$@" <&-', *DOCTOR, "--", "bash", "-c", "touch there; sleep 3600; true"
    )
    wait_until((doctor.directory / "there").exists, "the job")
    keepers = [each for each in processes(doctor) if "keep" in each.cmdline()[4:5]]
    assert len(keepers) == 2
    for keeper in keepers:
        # The supervisor's pipe, that for words, and the two ends of the one that a signal wakes.
        links = [os.readlink(each) for each in Path(f"/proc/{keeper.pid}/fd").iterdir()]
        assert len([link for link in links if link.startswith("pipe:")]) == 4, links
        assert keeper.status() == psutil.STATUS_SLEEPING
    live.process.send_signal(signal.SIGTERM)
    assert live.finish().status == -signal.SIGTERM
