"""Options from pyproject.toml and ddpdoctor.toml."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.core import opening, options
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import rank_set
from ddpdoctor.core.job import OwnOptions
from ddpdoctor.core.opening import whose
from ddpdoctor.preflight import command_lines
from ddpdoctor.supervise import command
from tests.conftest import Doctor
from tests.support.launching import PYTHON

PROJECT = """
[project]
name = "trains"

[tool.ddpdoctor]
ignore = ["DDP309", "DDP61"]

[tool.ddpdoctor.run]
hang-after = 60
overhead_budget = 0.25
no-vscode = true
strict = false
notify = ["https://hooks.example/x", "mail me"]
wait-for-attach = "0,2-3"

[tool.ddpdoctor.report]
wait = 2.5

[tool.ddpdoctor.check]
timeout = 30
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    options._remarked.clear()
    return tmp_path


def own(*words: str) -> OwnOptions:
    built = command.build([*words, "--", "true"], {})
    assert built is not None
    return built.own


def test_each_command_has_its_options_and_what_is_typed_counts(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)
    options = own()
    assert (options.hang_after, options.overhead_budget, options.no_vscode) == (60, 0.25, True)
    assert not options.strict
    assert options.notify == ("https://hooks.example/x", "mail me")
    assert options.wait_for_attach == rank_set("0,2-3")
    assert options.selection.ignore == ("DDP309", "DDP61")
    typed = own("--hang-after", "5", "--notify", "x", "--ignore", "DDP1")
    assert (typed.hang_after, typed.notify, typed.selection.ignore) == (5, ("x",), ("DDP1",))
    assert report.PARSER.read([]).get("--wait") == 2.5
    checked = command_lines.parse([], {})
    assert (checked.options.timeout, checked.selection.ignore) == (30, ("DDP309", "DDP61"))


def test_the_nearest_file_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pyproject.toml").write_text(PROJECT)
    deep = folder / "a" / "b"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert own().hang_after == 60
    # One of a project that says nothing of ddpdoctor, or only depends on it, is passed over.
    (deep / "pyproject.toml").write_text('[project]\ndependencies = ["ddpdoctor"]\n')
    assert own().hang_after == 60
    (folder / "a" / "ddpdoctor.toml").write_text("[run]\nhang-after = 7\n")
    assert own().hang_after == 7


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[run]\nhang-aftr = 7", "ddpdoctor.toml: unknown option --hang-aftr"),
        ("[run]\nhang-after = 'soon'", "ddpdoctor.toml: hang-after needs a number of seconds"),
        ("[run]\nhang-after = true", "ddpdoctor.toml: hang-after needs a number of seconds"),
        ("[run]\nquiet = 1", "ddpdoctor.toml: quiet needs true or false, not 1"),
        ("[run]\nhelp = true", "ddpdoctor.toml: unknown option --help"),
        ("no-vscode = true", "ddpdoctor.toml: there is no no-vscode"),
        ("ignore = ['straggler']", "ddpdoctor.toml: ignore needs codes"),
        ("run = 7", "ddpdoctor.toml: run needs options, not 7"),
        ("[run", "ddpdoctor.toml is not valid TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: Path, text: str, error: str) -> None:
    (folder / "ddpdoctor.toml").write_text(text)
    with pytest.raises(DoctorError) as raised:
        own()
    assert raised.value.message.startswith(error)


def test_a_file_above_that_is_another_users_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ddpdoctor.toml").write_text("[run]\nnotify = 'rm -rf .'\n")
    here = folder / "mine"
    here.mkdir()
    monkeypatch.chdir(here)
    assert own().notify == ("rm -rf .",)
    mine = os.getuid()
    monkeypatch.setattr(options, "_trusted", lambda folder: {mine + 1})
    assert own().notify == ()
    assert own().notify == ()
    assert capsys.readouterr().err == (
        f"ddpdoctor: ../ddpdoctor.toml is not read: it belongs to {whose(mine)}\n"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_file_is_another_users_even_if_one_of_ours_takes_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = folder / "ddpdoctor.toml", folder / "ours.toml"
    theirs.write_text("[run]\nnotify = 'rm -rf .'\n")
    ours.write_text("")
    os.chown(theirs, 65533, 65533)
    read = opening.file

    def swapped(path: Path, *, links: bool) -> io.FileIO:
        file = read(path, links=links)
        ours.replace(path)
        return file

    monkeypatch.setattr(opening, "file", swapped)
    assert own().notify == ()
    assert "it belongs to another user (uid 65533)" in capsys.readouterr().err


def test_run_reads_it(doctor: Doctor) -> None:
    (doctor.directory / "ddpdoctor.toml").write_text("[run]\nquiet = true\nno-vscode = true\n")
    result = doctor.run("--", PYTHON, "-c", "pass")
    assert (result.status, result.ours) == (0, "")
    (doctor.directory / "ddpdoctor.toml").write_text("[run]\nquite = true\n")
    result = doctor.run("--", PYTHON, "-c", "pass")
    assert result.status == 2
    assert result.stderr == (
        "ddpdoctor: error: ddpdoctor.toml: unknown option --quite\n"
        "ddpdoctor: did you mean --quiet?\n"
    )
    # Help is there all the same.
    assert doctor.cli("run", "--help").status == 0
