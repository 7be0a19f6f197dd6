"""``ddpdoctor check`` as a whole: on a terminal, in a pipe, with torchrun's options."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys

import pytest

from ddpdoctor.core.errors import DoctorError, HelpRequest
from ddpdoctor.core.options import read_options
from ddpdoctor.preflight import command_lines
from tests.conftest import LIMIT, Doctor

# -- the whole, on a terminal and elsewhere


def test_on_a_terminal_it_shows_what_is_running_and_cleans_up_after(doctor: Doctor) -> None:
    head, tail = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "check", "--skip", "collectives,orphans"],
        env=doctor.environment({"TERM": "xterm", "LANG": "C", "LC_ALL": "C"}),
        stdin=tail,
        stdout=tail,
        stderr=tail,
        cwd=doctor.directory,
    )
    os.close(tail)
    shown = b""
    while True:
        try:
            chunk = os.read(head, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(head)
    assert process.wait(LIMIT) == 0, shown
    assert b"checks done; running: " in shown
    assert b"\x1b[32mpass" in shown
    assert b"Traceback" not in shown
    shown.decode("ascii")


def test_letters_that_the_encoding_has_not(doctor: Doctor) -> None:
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = doctor.cli("check", "--only", "script", "--", "tr\u00e4in.py", env=env)
    assert (result.status, result.stderr) == (2, "")
    assert "the script tr\\xe4in.py cannot be read" in result.stdout


def test_a_usual_machine_is_healthy_in_a_pipe(doctor: Doctor) -> None:
    """This one, with two ranks; what others leave on it is not looked at."""
    env = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = doctor.cli("check", "--skip", "collectives,orphans", env=env)
    assert (result.status, result.stderr) == (0, ""), result.stdout
    lines = result.stdout.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert result.stdout.isascii() and "\x1b" not in result.stdout
    assert lines[0].startswith("no fault found: ")
    assert "gpus      skipped no GPU" in lines or shutil.which("nvidia-smi")


@pytest.mark.parametrize("name", sorted(read_options().takes_value))
def test_each_option_of_this_torchrun_is_understood(name: str) -> None:
    if name.replace("_", "-") == "--print-completion":
        pytest.skip("it starts no job")
    takes_value = read_options().takes_value[name]
    said = ""
    try:
        command_lines.parse([name, "1"] if takes_value else [name], {})
    except HelpRequest:
        assert name in ("-h", "--help")
    except DoctorError as error:
        # What it says of the value is its own affair.
        said = error.message
    assert "option" not in said
