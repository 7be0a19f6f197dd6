"""The command line of ``top``: what it takes, what it refuses, and what it never imports."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddpdoctor import cli
from ddpdoctor.commands import top
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.render import terminal
from ddpdoctor.top import recording as recording_module
from ddpdoctor.top.recording import Recording

if TYPE_CHECKING:
    from tests.conftest import Doctor


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--onse"], "unknown option --onse"),
        (["--once=1"], "option --once takes no value"),
        (["--interval"], "option --interval needs a number of seconds, from 0.1 to 3600"),
        (["--interval", "--once"], "option --interval needs a number of seconds"),
        (
            ["--once", "--interval", "soon"],
            "from 0.1 to 3600, not 'soon'",
        ),
        (["--once", "--interval", "nan"], "needs a number of seconds"),
        (["--once", "--interval=0"], "needs a number of seconds"),
        (["one", "two"], "one run at a time"),
        (["one", "--demo"], "one thing at a time: --demo and one"),
        (["--replay", "file", "--demo"], "one thing at a time: --replay and --demo"),
        (["--once", "--json"], "choose one"),
        (["--watch"], "--watch is for --json"),
        (["--watch", "--once"], "--watch is for --json"),
        (["--json", "--prometheus", "0"], "not for one frame"),
        (["--once", "no-such-run"], "no run named no-such-run"),
        (["--once", "--replay", "/no/such/file"], "cannot read /no/such/file"),
        (["--json", "--watch", "--demo", "--prometheus", "70000"], "needs PORT or HOST:PORT"),
        (["--demo", "--once", "--record", "/no/such/place"], "cannot write /no/such/place"),
        (["--demo"], "top needs a terminal"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(DoctorError) as error:
        top.main(words)
    assert message in error.value.message
    assert error.value.status == 2


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in top.PARSER.options)
    assert max(map(len, shown.splitlines())) <= 80


def test_once_prints_a_frame_without_colour(doctor: Doctor) -> None:
    result = doctor.cli("top", "--demo", "--once", env={"COLUMNS": "120", "LINES": "30"})
    assert result.status == 0
    lines = result.stdout.splitlines()
    assert len(lines) == 30
    assert max(map(len, lines)) <= 120
    assert "\x1b" not in result.stdout
    assert lines[0].split()[0] == "train.py"
    assert "rank 5" in lines[1]
    assert lines[4].split()[:2] == ["!", "5"]


def test_once_in_the_locale_c_is_ascii(doctor: Doctor) -> None:
    result = doctor.cli("top", "--demo", "--once", env={"LC_ALL": "C"})
    assert result.status == 0
    assert result.stdout.isascii()


def test_a_closed_pipe_is_no_error(doctor: Doctor) -> None:
    command = f"{sys.executable} -m ddpdoctor top --demo --json --watch --interval 0.1 | head -n 2"
    result = doctor.run("bash", "-o", "pipefail", "-c", command, watch=False)
    assert result.status == 0, result.stderr
    assert [json.loads(line)["kind"] for line in result.stdout.splitlines()] == ["demo", "demo"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("how", ["--json", "--once"])
def test_a_full_disk_is_said(doctor: Doctor, how: str) -> None:
    command = f"{sys.executable} -m ddpdoctor top --demo {how} >/dev/full"
    result = doctor.run("bash", "-c", command, watch=False)
    assert result.status == 2
    assert "ddpdoctor: error: cannot write the output: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_is_recorded_is_replayed(doctor: Doctor) -> None:
    file = str(doctor.directory / "frames.jsonl")
    assert doctor.cli("top", "--demo", "--once", "--record", file).status == 0
    (frame,) = (json.loads(line) for line in gzip.decompress(Path(file).read_bytes()).splitlines())
    assert len(frame["ranks"]) == 8
    assert "exists already" in doctor.cli("top", "--demo", "--once", "--record", file).stderr
    result = doctor.cli("top", "--once", "--replay", file)
    assert result.status == 0
    assert "rank 5" in result.stdout.splitlines()[1]


def test_one_frame_of_a_recording_is_its_last(doctor: Doctor) -> None:
    file = str(doctor.directory / "frames")
    recording = Recording(file)
    for second in range(5):
        recording.add(recording_module.at(700 + second, 1000 + second))
    recording.close()
    assert "frame 5/5" in doctor.cli("top", "--once", "--replay", file).stdout


def test_torch_is_never_imported_and_textual_only_on_a_terminal(tmp_path: Path) -> None:
    code = """
import sys
from ddpdoctor.commands import top
assert not {"rich", "textual", "torch", "psutil", "asyncio"} & set(sys.modules), sys.modules.keys()
for words in (["--demo", "--once"], ["--demo", "--json"], ["--once"]):
    assert top.main(words) == 0
assert "textual" not in sys.modules
import ddpdoctor.top.app
import ddpdoctor.debug.attach_points, ddpdoctor.top.actions, ddpdoctor.top.actions
assert "torch" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )


class _Out(io.StringIO):
    def __init__(self, encoding: str, is_terminal: bool = True) -> None:
        super().__init__()
        self._encoding = encoding
        self._terminal = is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({"LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"LANG": "C.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, "utf-8", False),
        ({"LC_CTYPE": "de_DE.UTF-8", "LANG": "C"}, "utf-8", False),
        ({"LANG": "C"}, "utf-8", True),
        ({"LANG": "POSIX"}, "utf-8", True),
        ({}, "utf-8", True),
        ({"LC_CTYPE": "UTF-8"}, "utf-8", False),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, "utf-8", True),
        ({"LANG": "en_US.UTF-8"}, "ascii", True),
        ({"LANG": "en_US.ISO-8859-1"}, "iso8859-1", True),
        ({"LANG": "en_US.ISO-8859-1"}, "utf-8", True),
        ({"LANG": "de_DE.utf8@euro"}, "utf-8", False),
        ({"LANG": "en_US"}, "utf-8", False),
    ],
)
def test_what_can_be_drawn(environment: dict[str, str], encoding: str, expected: bool) -> None:
    assert terminal.only_ascii(_Out(encoding), environment) is expected


@pytest.mark.parametrize(
    ("environment", "is_terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour(
    environment: dict[str, str], is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.isatty", lambda descriptor: is_terminal and descriptor == 1)
    assert terminal.wants_colour(1) is expected
