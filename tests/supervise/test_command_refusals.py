"""Command lines of `ddpdoctor run`: programs, and words that are refused."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import read_options
from tests.support.torchrun_words import doctor, torchrun_parser


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and an environment without torchrun's defaults."""
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").write_text("print('train')\n")
    (tmp_path / "my train.py").write_text("print('train')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- a command instead of a script


@pytest.mark.parametrize("separator", [["--"], []])
@pytest.mark.parametrize(
    "words",
    [
        [sys.executable, "train.py", "--nproc-per-node", "3"],
        ["bash", "-c", "exit 3"],
        ["sh", "--", "x"],
        ["/bin/sh", "-c", "true"],
    ],
    ids=" ".join,
)
def test_an_executable_is_the_child_itself(words: list[str], separator: list[str]) -> None:
    command = doctor([*separator, *words])
    assert list(command.argv) == words
    assert not command.through_torchrun
    assert command.note == ""


def test_torchrun_by_name_is_the_child_itself(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = work / "bin" / "torchrun"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    words = ["torchrun", "--nproc-per-node", "2", "train.py"]
    assert list(doctor(["--", *words]).argv) == words


def test_a_local_script_with_the_executable_bit(work: Path) -> None:
    script = work / "start.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert doctor(["--", "./start.sh", "x"]).argv == ("./start.sh", "x")


def test_an_executable_py_file_is_a_script(work: Path) -> None:
    (work / "train.py").chmod(0o755)
    assert doctor(["./train.py"]).through_torchrun
    assert doctor(["--", str(work / "train.py")]).through_torchrun


@pytest.mark.parametrize("name", ["bash", "sh"])
def test_a_folder_with_a_commands_name_is_in_nobodys_way(name: str, work: Path) -> None:
    # A repository with a folder `python/` beside `docs/` is nothing rare.
    (work / name).mkdir()
    command = doctor(["--", name, "-c", "true"])
    assert not command.through_torchrun
    assert command.argv == (name, "-c", "true")


def test_torchrun_options_before_a_command_are_refused() -> None:
    with pytest.raises(DoctorError, match="--nnodes") as caught:
        doctor(["--nnodes", "2", "--", "bash", "-c", "true"])
    assert "--no-python" in caught.value.hint


# -- what cannot work is said at once


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script"),
        (["--"], "no script"),
        (["--nproc-per-node", "2"], "no script"),
        (["missing.py"], "missing.py: no such file"),
        (["--", "tain.py"], "tain.py: no such file"),
        (["nowhere/train.py"], "no such file"),
        (["--nproc-per-nod", "--", "train.py"], "nproc-per-nod"),
        (["--nporc-per-node", "2", "train.py"], "unknown option --nporc-per-node"),
        (["--nporc-per-node=2", "train.py"], "unknown option --nporc-per-node"),
        (["-x", "train.py"], "unknown option -x"),
        (["-x3", "train.py"], "unknown option -x3"),
        (["--n", "2", "train.py"], "ambiguous"),
        (["--nproc-per-node"], "--nproc-per-node needs"),
        (["--nnodes"], "--nnodes needs"),
        (["--grace"], "--grace needs"),
        # torchrun would refuse the next four later, with a page of usage.
        (["--nnodes", "--standalone", "train.py"], "--nnodes needs"),
        (["--nnodes", "--", "train.py"], "--nnodes needs"),
        (["-r", "--standalone", "train.py"], "-r needs"),
        (["--standalone=1", "train.py"], "--standalone"),
        (["--grace", "abc", "train.py"], "--grace needs a number"),
        (["--grace", "nan", "train.py"], "--grace needs a number"),
        (["--grace", "inf", "train.py"], "--grace needs a number"),
        (["--grace=-1", "train.py"], "--grace needs a number"),
        (["--grace=", "train.py"], "--grace needs a number"),
        (["--journal-mb", "0", "train.py"], "--journal-mb needs"),
        (["--journal-mb", "1.5", "train.py"], "--journal-mb needs"),
        (["--quiet=yes", "train.py"], "--quiet takes no value"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node 0"),
        (["--nproc-per-node=0", "train.py"], "--nproc-per-node 0"),
        (["--nproc_per=0", "train.py"], "--nproc-per-node 0"),
        (["--nproc-per-node", "abc", "train.py"], "--nproc-per-node abc"),
        (["--nproc-per-node", "-1", "train.py"], "--nproc-per-node -1"),
        (["--nproc-per-node", "1.5", "train.py"], "--nproc-per-node 1.5"),
        (["--nproc-per-node", "", "train.py"], "--nproc-per-node"),
        (["--no-python", "no-such-program-here"], "no such program"),
        (["--", "no-such-program-here"], "no-such-program-here"),
        (["."], "__main__.py"),
        (["--", "-m"], "-m needs a module"),
        (["--", "-c", "print()"], "-c: torchrun starts a file or a module"),
        (["--", "-u", "train.py"], "-u: no such file"),
    ],
    ids=str,
)
def test_bad_words(words: list[str], said: str) -> None:
    with pytest.raises(DoctorError) as caught:
        doctor(words)
    assert said in caught.value.message
    assert "\n" not in str(caught.value)
    assert caught.value.status == 2


def test_a_typo_names_the_option_that_was_meant() -> None:
    with pytest.raises(DoctorError) as caught:
        doctor(["--nporc-per-node", "2", "train.py"])
    assert "--nproc-per-node" in caught.value.hint
    with pytest.raises(DoctorError) as caught:
        doctor(["tain.py"])
    assert "train.py" in caught.value.hint


@pytest.mark.parametrize(
    "source",
    [
        b"def f(:\n",
        b"x = 1\nif True:\nprint(x)\n",
        b"\x7fELF\x02\x01\x01" + bytes(64),
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        "x = 1\n".encode("utf-16"),
        b"# -*- coding: no-such-code -*-\n",
        b"x = " + b"(" * 500 + b")" * 500,
        b"x = " + b"-" * 200_000 + b"1\n",
        b"x = 1" + b" + 1" * 100_000 + b"\n",
        b"return 1\n",
    ],
    ids=["colon", "indent", "elf", "png", "utf-16", "coding", "nested", "minus", "plus", "return"],
)
def test_what_is_not_python_is_refused_or_left_to_python(source: bytes, work: Path) -> None:
    # Whether the compiler has a limit is its own affair; a traceback is not an answer.
    (work / "broken.py").write_bytes(source)
    try:
        compile(source, "broken.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        with pytest.raises(DoctorError, match=r"broken\.py"):
            doctor(["broken.py"])
        return
    except (RecursionError, MemoryError):
        pass
    with contextlib.suppress(DoctorError):
        doctor(["broken.py"])


def test_another_file_that_is_open_in_the_editor(work: Path) -> None:
    (work / "launch.json").write_text("{ // configurations\n}")
    with pytest.raises(DoctorError, match=r"launch.json:1 is not valid Python") as caught:
        doctor(["launch.json"])
    assert "open the training script" in caught.value.hint
    (work / "broken.py").write_text("def")
    with pytest.raises(DoctorError, match=r"broken.py:1 is not valid Python") as caught:
        doctor(["broken.py"])
    assert not caught.value.hint


def test_valid_python_of_every_sort_is_accepted(work: Path) -> None:
    (work / "a.py").write_bytes("\ufeffx = 'ä'\n".encode())
    (work / "b.py").write_bytes("# coding: latin-1\nx = 'ä'\n".encode("latin-1"))
    (work / "c.py").write_bytes(b"x = '\\d'\nassert (1, 'always')\r\n")
    (work / "d.py").write_bytes(b"")
    (work / "e").write_bytes(b"from __future__ import annotations\nx: Later\n")
    (work / "f").mkdir()
    (work / "f" / "__main__.py").write_bytes(b"")
    (work / "g.py").symlink_to("a.py")
    for name in "a.py", "b.py", "c.py", "d.py", "e", "f", "g.py":
        assert doctor([name]).through_torchrun


def test_the_check_does_not_eat_a_script_that_comes_through_a_pipe() -> None:
    # `ddpdoctor run --nproc-per-node 1 /dev/stdin < train.py` works with torchrun.
    reader, writer = os.pipe()
    os.write(writer, b"print(1)\n")
    os.close(writer)
    try:
        doctor(["--nproc-per-node", "1", f"/dev/fd/{reader}"])
        assert os.read(reader, 100) == b"print(1)\n"
    finally:
        os.close(reader)


# -- torchrun's options are read from its source


def test_the_options_are_those_of_the_parser() -> None:
    actions = torchrun_parser()._actions
    expected = {
        name: action.nargs != 0 for action in actions for name in action.option_strings if name
    }
    assert read_options().takes_value == expected
