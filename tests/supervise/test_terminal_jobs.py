"""Job control on a terminal: the job's own group, Ctrl-Z, fg, kill."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor
from tests.support.launching import PYTHON, wait_until
from tests.support.pseudo_terminal import COUNT, Open

# -- job control


PLACE = """
import os
with open("/dev/tty") as tty:
    print("tty", os.ttyname(tty.fileno()))
print("leads", os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid())
print("in front", [os.tcgetpgrp(number) == os.getpgrp() for number in (0, 1)])
print("session", os.getsid(0) == os.tcgetsid(0) if hasattr(os, "tcgetsid") else True)
"""


def test_a_command_keeps_its_terminal(terminal: Open, doctor: Doctor) -> None:
    doctor.write("place.py", PLACE)
    # The shell stands in for ddpdoctor: in both cases Python is a child in its group.
    plain = terminal("bash", "-c", f"{PYTHON} place.py; true", watch=False)
    assert plain.finish() == 0
    ours = terminal("--quiet", "--", PYTHON, "place.py")
    assert ours.finish() == 0
    assert ours.seen == plain.seen
    assert b"in front [True, True]" in ours.seen


def test_a_password_is_asked_on_the_terminal(terminal: Open, doctor: Doctor) -> None:
    # As ssh and sudo do: past stdin and stdout.
    doctor.write(
        "ask.py",
        """
        import getpass
        print("got", getpass.getpass("word? ")[::-1])
        """,
    )
    command = f"{PYTHON} ask.py </dev/null | cat; read -p 'more? ' x </dev/tty; echo and $x"
    ours = terminal("--quiet", "--", "bash", "-c", command)
    ours.wait_for(b"word? ", 120)
    ours.type(b"secret\n")
    ours.wait_for(b"got terces")
    assert b"secret" not in ours.seen
    ours.wait_for(b"more? ")
    ours.type(b"text\n")
    assert ours.finish() == 0
    assert b"and text" in ours.seen


TICKS = """
import os, subprocess, sys, time
subprocess.Popen(["bash", "-c", "while sleep 0.05; do echo x >> far; done"], start_new_session=True)
number = 0
while not os.path.exists("go"):
    number += 1
    with open("near", "a") as file:
        file.write("x")
    if number == 1:
        print("tick", flush=True)
    time.sleep(0.05)
print("over", flush=True)
sys.exit(6)
"""


def grows(*files: Path) -> bool:
    before = [file.stat().st_size for file in files]
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if all(file.stat().st_size > size for file, size in zip(files, before, strict=True)):
            return True
    return False


def sizes(*files: Path) -> list[int]:
    return [file.stat().st_size for file in files]


STOP = b"\x1a"


def test_a_shell_stops_and_continues_the_whole_job(terminal: Open, doctor: Doctor) -> None:
    doctor.write("ticks.py", TICKS)
    shell = terminal("bash", "--norc", "--noprofile", "-i", watch=False)
    run = f"{PYTHON} -m ddpdoctor run --no-vscode --run-dir rd -- {PYTHON} ticks.py"
    shell.type(f"{run}; echo status $?\n".encode())
    shell.wait_for(b"tick\r", 180)
    files = doctor.directory / "near", doctor.directory / "far"
    wait_until(lambda: all(file.exists() for file in files), "both parts of the job")
    assert grows(*files)
    for resumed in (b"fg", b"bg"):
        shell.type(STOP)
        shell.wait_for(b"Stopped", LIMIT)
        shell.seen = b""
        before = sizes(*files)
        time.sleep(1.0)
        assert sizes(*files) == before, "it was not stopped"
        shell.type(resumed + b"\n")
        assert grows(*files), "it does not go on"
    shell.seen = b""
    (doctor.directory / "go").touch()
    shell.wait_for(b"over", LIMIT)
    shell.type(b"wait; jobs; exit 9\n")
    assert shell.finish(120) == 9


@pytest.mark.parametrize("words", [("bash", "--norc", "-i"), ("bash", "--norc")])
def test_a_shell_in_the_job_has_job_control(
    words: tuple[str, ...], terminal: Open, doctor: Doctor
) -> None:
    ours = terminal("--quiet", "--", *words)
    ours.type(b"echo rea'dy'\n")
    ours.wait_for(b"ready")
    ours.type(b"sleep 3600\n")
    time.sleep(2.0)
    ours.type(STOP)
    ours.wait_for(b"Stopped")
    ours.type(b"kill -9 %1; sleep 1; jobs; exit 5\n")
    assert ours.finish(60) == 5
    assert b"no job control" not in ours.seen


def test_without_a_shell_nothing_stops(terminal: Open, doctor: Doctor) -> None:
    doctor.write("ticks.py", TICKS)
    files = doctor.directory / "near", doctor.directory / "far"
    ours = terminal("--quiet", "--", PYTHON, "ticks.py")
    ours.wait_for(b"tick", 120)
    for _ in range(2):
        ours.type(STOP)
        time.sleep(0.5)
        assert grows(*files)
    (doctor.directory / "go").touch()
    assert ours.finish() == 6


@pytest.mark.parametrize("how", ["kill %1", "kill $!"])
def test_a_shells_kill_is_one_signal(how: str, terminal: Open, doctor: Doctor) -> None:
    # The first goes to the whole process group, the second to ddpdoctor alone.
    doctor.write("count.py", COUNT)
    shell = terminal("bash", "--norc", "--noprofile", "-i", watch=False)
    run = f"{PYTHON} -m ddpdoctor run --quiet --run-dir rd -- {PYTHON} count.py"
    shell.type(f"{run} &\n".encode())
    shell.wait_for(b"ready\r", 180)
    shell.type(f"{how}; wait $!; echo status $?; exit\n".encode())
    shell.wait_for(b"status 23", LIMIT)
    assert re.findall(rb"got (SIG.*)\r\n", shell.seen) == [b"SIGTERM"]


def test_the_whole_group_is_killed_on_a_terminal(terminal: Open, doctor: Doctor) -> None:
    # The fixture of all tests finds whoever is still there ten seconds later.
    doctor.write("ticks.py", TICKS)
    ours = terminal("--quiet", "--", PYTHON, "ticks.py")
    ours.wait_for(b"tick", 120)
    os.killpg(ours.process.pid, signal.SIGKILL)
    assert ours.process.wait(LIMIT) == -signal.SIGKILL
