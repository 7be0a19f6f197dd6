"""A kill of any process of ours at the start: the job runs to its own status, or it is 70."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from ddpdoctor.core.errors import INTERNAL
from tests.conftest import LIMIT, ROOT

if TYPE_CHECKING:
    from tests.conftest import Doctor
    from tests.support.pseudo_terminal import Open
from tests.support.launching import PYTHON
from tests.support.left_behind import assert_all_end

pytestmark = pytest.mark.usefixtures("bystanders")

DRIVER = """
import sys
from ddpdoctor.supervise import keepers
keepers._script = lambda *words: [sys.executable, "-S", "keeper.py", *words]
from ddpdoctor.cli import main
sys.exit(main())
"""

KEEPER = f"""
import errno, os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from ddpdoctor.supervise import keeper

MOMENT, VICTIMS = os.environ["MOMENT"], os.environ["VICTIMS"].split()
ON_TERMINAL = sys.argv[6:7] != ["0"]
pids = {{"supervisor": os.getppid(), "first": os.getpid()}}
forks = 0
fork, execvpe, let_go = os.fork, os.execvpe, keeper._let_go

def reached(moment):
    if moment != MOMENT:
        return
    own = os.getpid()
    for name in sorted(pids.keys() & VICTIMS, key=lambda name: pids[name] == own):
        os.kill(pids[name], signal.SIGKILL)
    # Others notice it before this process goes on.
    time.sleep(0.3)

def forked():
    global forks
    forks += 1
    what = "second" if forks == 1 else "witness" if ON_TERMINAL and forks == 2 else "command"
    reached(f"before {{what}}")
    if MOMENT == f"no {{what}}":
        raise OSError(errno.EAGAIN, "as if")
    pid = fork()
    pids[what] = pid or os.getpid()
    if pid == 0 and MOMENT == f"parent of {{what}}":
        time.sleep(0.6)
    reached(f"parent of {{what}}" if pid else f"in {{what}}")
    return pid

def executes(*words):
    reached("before exec")
    execvpe(*words)

def lets_go(begun):
    if os.getpid() == pids.get("second"):
        time.sleep(0.3)
        reached("after exec")
    let_go(begun)

os.fork, os.execvpe, keeper._let_go = forked, executes, lets_go
if sys.argv[1] == "standby":
    if "standby" in VICTIMS:
        os.kill(os.getpid(), signal.SIGKILL)
else:
    reached("argv")
keeper.main(sys.argv[1:])
"""

JOB = ("bash", "-c", "touch ran; sleep 1; exit 7")

FEW = [
    ("argv", "first"),
    ("in second", "second"),
    ("parent of command", "second"),
    ("in command", "first second"),
    ("before exec", "first second"),
    ("parent of command", "supervisor"),
]
"""Moments and who is killed then, tried always."""

ALL = [
    ("argv", "supervisor"),
    ("before second", "first"),
    ("before second", "supervisor"),
    ("parent of second", "first"),
    ("parent of second", "second"),
    ("parent of second", "first second"),
    ("parent of second", "supervisor"),
    ("in second", "first"),
    ("in second", "first second"),
    ("in second", "supervisor"),
    ("before command", "first"),
    ("before command", "second"),
    ("before command", "first second"),
    ("before command", "supervisor"),
    ("before command", "supervisor second"),
    ("before command", "supervisor first"),
    ("parent of command", "first"),
    ("parent of command", "first second"),
    ("parent of command", "command"),
    ("parent of command", "supervisor second"),
    ("parent of command", "supervisor first"),
    ("in command", "first"),
    ("in command", "second"),
    ("in command", "command"),
    ("in command", "supervisor"),
    ("in command", "supervisor second"),
    ("in command", "supervisor first"),
    ("before exec", "first"),
    ("before exec", "second"),
    ("before exec", "command"),
    ("before exec", "supervisor"),
    ("after exec", "first"),
    ("after exec", "second"),
    ("after exec", "first second"),
    ("after exec", "command"),
    ("after exec", "supervisor"),
    ("after exec", "first standby"),
    ("no second", ""),
    ("no command", ""),
]

ON_A_TERMINAL = [
    ("before witness", "second"),
    ("parent of witness", "witness"),
    ("parent of witness", "second witness"),
    ("in witness", "witness"),
    ("in witness", "second"),
    ("in witness", "first second"),
    ("in witness", "supervisor"),
    ("parent of command", "witness"),
    ("parent of command", "second"),
    ("in command", "second witness"),
    ("before exec", "first second witness"),
    ("no witness", ""),
]


def check(doctor: Doctor, status: int, said: str, moment: str, victims: str) -> None:
    """Assert that an ending is one of those that are promised."""
    assert_all_end(doctor)
    ours = [line for line in said.splitlines() if line.startswith("ddpdoctor: ")]
    assert "Traceback" not in said and "internal error" not in said, said
    if "supervisor" in victims:
        assert status == -signal.SIGKILL
    elif (doctor.directory / "ran").exists() and "command" not in victims:
        assert status == 7, said
    elif status != -signal.SIGKILL or "command" not in victims:
        assert status == INTERNAL, said
        errors = [line for line in ours if "the job was not started: " in line]
        assert len(errors) == 1, said


def cases(slow: list[tuple[str, str]], *fast: tuple[str, str]) -> list[object]:
    """Parameters, of which those that are not fast are marked as slow."""
    marked = [pytest.param(*each, marks=pytest.mark.slow) for each in slow]
    return [*fast, *marked]


def prepare(doctor: Doctor, moment: str, victims: str) -> dict[str, str]:
    doctor.write("driver.py", DRIVER)
    doctor.write("keeper.py", KEEPER)
    return {"MOMENT": moment, "VICTIMS": victims, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(("moment", "victims"), cases(ALL, *FEW))
def test_a_kill_at_the_start(moment: str, victims: str, doctor: Doctor) -> None:
    words = ("run", "--no-debug", "--run-dir", "run", "--", *JOB)
    env = prepare(doctor, moment, victims)
    live = doctor.start(PYTHON, "driver.py", *words, env=env, watch=False)
    try:
        result = live.finish(LIMIT / 3)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"hangs: {live.err.read_text()}") from None
    check(doctor, result.status, result.stderr, moment, victims)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "victims"), ON_A_TERMINAL)
def test_a_kill_at_the_start_on_a_terminal(
    moment: str, victims: str, doctor: Doctor, terminal: Open
) -> None:
    env = prepare(doctor, moment, victims)
    settings = [f"{name}={value}" for name, value in env.items()]
    words = (PYTHON, "driver.py", "run", "--no-debug", "--run-dir", "run", "--", *JOB)
    opened = terminal("env", *settings, *words, watch=False)
    status = opened.finish(LIMIT / 3)
    text = opened.seen.decode().replace("\r\n", "\n")
    check(doctor, status, text, moment, victims)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 9, 1 << 16, 1 << 17])
def test_half_a_command_is_never_started(size: int, doctor: Doctor) -> None:
    """What a supervisor wrote of a command line that is longer than a pipe, and was killed then."""
    doctor.write(
        "half.py",
        f"""
        import os, subprocess, sys
        from ddpdoctor.supervise import keeper
        pipes = [os.pipe() for _ in range(4)]
        numbers = (pipes[0][0], pipes[1][1], pipes[2][1], 0, pipes[3][0])
        words = [sys.executable, "-I", "-S", keeper.__file__, "keep", "1-a", *map(str, numbers)]
        child = subprocess.Popen(words, pass_fds=[n for n in numbers if n], start_new_session=True)
        for number in numbers:
            number and os.close(number)
        command = b"touch\\0ran\\0" + b"x" * {size}
        os.write(pipes[3][1], command[:{size}]) if {size} <= 9 else None
        if {size} > 9:
            with open(pipes[3][1], "wb") as file:
                file.write(command)
        else:
            os.close(pipes[3][1])
        assert os.read(pipes[2][0], 99) == b""
        os.close(pipes[0][1])
        sys.exit(child.wait())
        """,
    )
    result = doctor.run(PYTHON, "half.py", env={"PYTHONPATH": str(ROOT)}, watch=False)
    assert result.status == 0, result.stderr
    assert not (doctor.directory / "ran").exists()
