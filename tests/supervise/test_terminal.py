"""A job on a terminal: what it sees, sizes, keys, and the screen."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.reader import RunReader
from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor
from tests.support.launching import PYTHON, wait_until
from tests.support.pseudo_terminal import COUNT, Open

TRAIN = str(Path(__file__).parents[1] / "jobs" / "train.py")
INTERRUPT, QUIT = b"\x03", b"\x1c"


WHAT_IT_SEES = """
import os, sys
print("tty", [os.isatty(number) for number in (0, 1, 2)])
for number in (0, 1, 2):
    print("size", number, tuple(os.get_terminal_size(number)))
sys.stderr.write("on stderr\\n")
print("last")
"""


def test_the_job_sees_the_terminal_it_would_have_seen(terminal: Open, doctor: Doctor) -> None:
    doctor.write("see.py", WHAT_IT_SEES)
    plain = terminal(PYTHON, "see.py", watch=False, rows=33, columns=77)
    assert plain.finish() == 0
    ours = terminal("--quiet", "--", PYTHON, "see.py", rows=33, columns=77)
    assert ours.finish() == 0
    assert b"tty [True, True, True]" in ours.seen
    assert b"size 2 (77, 33)" in ours.seen
    # stdout and stderr take two ways, and a line and its end may be two writes to the terminal:
    # the bytes are the same, their order may differ.
    assert b"on stderr" in ours.seen
    assert b"last" in ours.seen
    assert sorted(ours.seen) == sorted(plain.seen)


def test_stderr_bytes_are_those_of_a_terminal(terminal: Open, doctor: Doctor) -> None:
    doctor.write(
        "bytes.py",
        "import os\n"
        "for number in range(300):\n"
        "    os.write(2, b'\\r%3d %% \\x1b[1mbold\\x1b[0m \\t\\x07 \\xc3\\xa4' % number)\n"
        "    os.write(2, b'\\nline\\r\\n\\n')\n"
        "os.write(2, b'no newline')\n",
    )
    plain = terminal(PYTHON, "bytes.py", watch=False)
    assert plain.finish() == 0
    ours = terminal("--quiet", "--", PYTHON, "bytes.py")
    assert ours.finish() == 0
    assert ours.seen == plain.seen


def test_the_first_and_the_last_line_say_where_to_look(terminal: Open, doctor: Doctor) -> None:
    ours = terminal("--", PYTHON, "-c", "print('at work')")
    assert ours.finish() == 0
    first, work, last = (
        ours.seen.index(words)
        for words in (b"watch it: `ddpdoctor top`", b"at work", b"see it again: `ddpdoctor report ")
    )
    # The job is started before anything else is done.
    assert max(first, work) < last
    piped = doctor.run("--", PYTHON, "-c", "print('at work')")
    assert "watch it" not in piped.stderr and "see it again" not in piped.stderr


def test_under_torchrun_too(terminal: Open, doctor: Doctor) -> None:
    doctor.write("see.py", WHAT_IT_SEES)
    ours = terminal("--quiet", "--nproc-per-node", "1", "see.py", rows=33, columns=77)
    assert ours.finish() == 0
    assert b"tty [True, True, True]" in ours.seen
    assert b"size 2 (77, 33)" in ours.seen


def test_a_new_size_reaches_the_job(terminal: Open, doctor: Doctor) -> None:
    doctor.write(
        "resize.py",
        """
        import os, time
        before = os.get_terminal_size(2)
        print("size", tuple(before), flush=True)
        while os.get_terminal_size(2) == before:
            time.sleep(0.02)
        print("then", tuple(os.get_terminal_size(2)), tuple(os.get_terminal_size(1)))
        """,
    )
    ours = terminal("--quiet", "--", PYTHON, "resize.py", rows=20, columns=80)
    ours.wait_for(b"size (80, 20)")
    ours.resize(25, 132)
    ours.wait_for(b"then (132, 25) (132, 25)")
    assert ours.finish() == 0


def test_the_job_is_told_of_a_new_size(terminal: Open, doctor: Doctor) -> None:
    doctor.write(
        "winch.py",
        """
        import os, signal, sys
        def told(*_):
            # stderr has a terminal of its own, whose size follows, with a second signal.
            if os.get_terminal_size(1) == os.get_terminal_size(2):
                print("told", tuple(os.get_terminal_size(2)))
                sys.exit(3)
        signal.signal(signal.SIGWINCH, told)
        print("ready", flush=True)
        signal.alarm(30)
        while True:
            signal.pause()
        """,
    )
    for watch in (False, True):
        words = ("--quiet", "--", PYTHON, "winch.py") if watch else (PYTHON, "winch.py")
        one = terminal(*words, watch=watch)
        one.wait_for(b"ready")
        one.resize(25, 132)
        assert one.finish() == 3
        assert b"told (132, 25)" in one.seen


def test_typed_lines_reach_the_job(terminal: Open, doctor: Doctor) -> None:
    doctor.write(
        "ask.py",
        """
        name = input("name? ")
        print("hello", name)
        import sys
        print("end", repr(sys.stdin.readline()))
        """,
    )
    ours = terminal("--quiet", "--", PYTHON, "ask.py")
    ours.wait_for(b"name? ")
    ours.type(b"you\n")
    ours.wait_for(b"hello you")
    ours.type(b"\x04")
    ours.wait_for(b"end ''")
    assert ours.finish() == 0


@pytest.mark.parametrize(("key", "name"), [(INTERRUPT, b"SIGINT"), (QUIT, b"SIGQUIT")])
def test_a_key_is_one_signal(key: bytes, name: bytes, terminal: Open, doctor: Doctor) -> None:
    doctor.write("count.py", COUNT)
    ours = terminal("--quiet", "--", PYTHON, "count.py")
    ours.wait_for(b"ready")
    ours.type(key)
    assert ours.finish() == 23
    assert re.findall(rb"got (.*)\r\n", ours.seen) == [name]


@pytest.mark.slow
def test_interrupt_ends_a_training_job(terminal: Open, doctor: Doctor) -> None:
    words = ("--nproc-per-node", "2", TRAIN, "--steps", "2000", "--pause", "0.05", "--print-losses")
    ours = terminal(*words)
    ours.wait_for(b"\n0.")
    ours.type(INTERRUPT)
    assert ours.finish() != 0
    assert b"after it was asked to stop" in ours.seen
    assert b"records in" in ours.seen


STUBBORN = """
import signal, time
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("no", signal.Signals(number).name, flush=1))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def was_recorded(run_dir: Path) -> bool:
    """Whether ddpdoctor has seen a signal that asks the job to end."""
    with contextlib.suppress(DoctorError):
        return RunReader(run_dir).snapshot().stopped_at is not None
    return False


def test_a_second_interrupt_ends_it_at_once(terminal: Open, doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    ours = terminal("--run-dir", "rd", "--grace", "1000", "--", PYTHON, "stubborn.py")
    ours.wait_for(b"ready")
    ours.type(INTERRUPT)
    # Two that come before ddpdoctor gets a core are one: the kernel does not count them.
    wait_until(lambda: was_recorded(doctor.directory / "rd"), "the first interrupt")
    ours.wait_for(b"no SIGINT")
    ours.type(INTERRUPT)
    assert ours.finish() == -signal.SIGKILL
    # The terminal sends each to the job itself, which may have heard the second one, too.
    assert ours.seen.count(b"no SIGINT") <= 2


@pytest.mark.parametrize(
    "job", ["stubborn", "writing", pytest.param("training", marks=pytest.mark.slow)]
)
def test_closing_the_terminal_ends_everything(job: str, terminal: Open, doctor: Doctor) -> None:
    # The fixture of all tests finds whoever is still there ten seconds later.
    if job == "training":
        ours = terminal("--nproc-per-node", "2", TRAIN, "--steps", "5000", "--print-losses")
        ours.wait_for(b"\n0.")
    else:
        writing = "while True:\n    print('x' * 100, flush=True)\n"
        source = STUBBORN if job == "stubborn" else STUBBORN.replace("while True:\n", writing)
        doctor.write("stubborn.py", source)
        ours = terminal("--", PYTHON, "stubborn.py")
        ours.wait_for(b"ready")
    ours.close()
    ours.process.wait(LIMIT)


def test_nohup_outlives_the_terminal(terminal: Open, doctor: Doctor) -> None:
    doctor.write(
        "survive.py",
        """
        import os, time
        open("ready", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.02)
        open("survived", "w").close()
        """,
    )
    ours = terminal(
        *("nohup", PYTHON, "-m", "ddpdoctor", "run", "--run-dir", "rd", "--", PYTHON, "survive.py"),
        watch=False,
    )
    wait_until((doctor.directory / "ready").exists, "the job")
    ours.close()
    with pytest.raises(subprocess.TimeoutExpired):
        ours.process.wait(1.5)
    doctor.write("go", "")
    assert ours.process.wait(LIMIT) == 0
    assert (doctor.directory / "survived").exists()


def test_the_exit_leaves_the_terminal_as_it_was(terminal: Open, doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    line = f"stty -g > before; {PYTHON} -m ddpdoctor run --grace 0.2 -- {PYTHON} stubborn.py; "
    ours = terminal("bash", "-c", f"trap : INT; {line}stty -g > after; echo over", watch=False)
    ours.wait_for(b"ready")
    ours.type(INTERRUPT)
    ours.wait_for(b"over")
    before, after = ((doctor.directory / name).read_text() for name in ("before", "after"))
    assert before == after != ""


# -- as a person sees it


@pytest.fixture
def screen(doctor: Doctor) -> Iterator[Callable[..., list[str]]]:
    """Runs a command in a tmux window of its own server; the lines on its screen at the end."""
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("tmux is not installed")
    server = [tmux, "-S", str(doctor.directory / "tmux"), "-f", "/dev/null"]

    def call(*words: str) -> str:
        done = subprocess.run(
            [*server, *words],
            env=doctor.environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        return done.stdout

    def show(command: str, columns: int = 220) -> list[str]:
        over = doctor.directory / "over"
        script = f"cd {shlex.quote(str(doctor.directory))}; {command}; touch over; sleep 600"
        call("new-session", "-d", "-x", str(columns), "-y", "50", "bash", "-c", script)
        wait_until(over.exists, command, 60)
        wait_until(lambda: "records in" in call("capture-pane", "-p", "-J"), "the summary")
        return call("capture-pane", "-p").splitlines()

    yield show
    call("kill-server")


def test_no_line_is_torn_on_the_screen(screen: Callable[..., list[str]], doctor: Doctor) -> None:
    # stdout and stderr both leave the cursor in the middle of a line.
    doctor.write(
        "bar.py",
        """
        import os, shutil, sys, time
        os.write(1, b"a line on stdout\\n" + b"left on stdout")
        shutil.rmtree(os.environ["DDPDOCTOR_RUN_DIR"])
        time.sleep(1.5)
        os.write(1, b"\\n")
        for number in range(0, 101, 10):
            os.write(2, b"\\rprogress %3d %%" % number)
            time.sleep(0.02)
        sys.exit(5)
        """,
    )
    doctor.write(
        "fine.py", "import os; os.write(1, b'half on stdout'); os.write(2, b' and stderr')"
    )
    run = f"{PYTHON} -m ddpdoctor run"
    lines = screen(f"{run} -- {PYTHON} bar.py; echo; {run} -- {PYTHON} fine.py")
    ours = [line for line in lines if "ddpdoctor: " in line]
    assert any("warning: cannot use the run directory" in line for line in ours), lines
    assert any("the job succeeded" in line for line in ours)
    assert all(line.startswith("ddpdoctor: ") for line in ours), lines
    shown = [line.strip() for line in lines]
    assert "a line on stdout" in shown
    assert "left on stdout" in shown
    assert "progress 100 %" in shown, shown
    assert "half on stdout and stderr" in shown or "and stderrhalf on stdout" in shown, shown
