"""`ddpdoctor run`: bad input and help."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor
from tests.support.launching import PYTHON

# -- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu", "train.py"], "unknown command rnu"),
        (["--verion"], "--verion"),
        (["explain", "DDP99999"], "unknown code DDP99999"),
        (["explain", "DDP901", "DDP902"], "one code"),
        (["run"], "no script"),
        (["run", "missing.py"], "missing.py"),
        (["run", "--", "missing.py"], "missing.py"),
        (["run", "broken.py"], "broken.py:2"),
        (["run", "binary.py"], "binary.py"),
        (["run", "--nporc-per-node", "2", "good.py"], "--nporc-per-node"),
        (["run", "good.py-but-not"], "good.py-but-not"),
        (["run", "--nproc-per-node"], "--nproc-per-node needs"),
        (["run", "--nproc-per-node", "0", "good.py"], "--nproc-per-node 0"),
        (["run", "--nproc-per-node", "abc", "good.py"], "--nproc-per-node abc"),
        (["run", "--grace", "abc", "good.py"], "--grace needs"),
        (["run", "--journal-mb", "x", "good.py"], "--journal-mb needs"),
        (["run", "--json", "no/such/folder/f.json", "--", "true"], "no/such/folder/f.json"),
        (["run", "--json", ".", "--", "true"], "cannot write ."),
        (["run", "--run-dir", "full", "--", "true"], "full is not empty"),
        (["run", "--run-dir", "good.py", "--", "true"], "good.py"),
        (["run", "--", "./no-interpreter"], "no-interpreter"),
        (["run", "--", "./not-a-program"], "not-a-program"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_line(words: list[str], said: str, doctor: Doctor) -> None:
    doctor.write("good.py", "print('ran')")
    doctor.write("broken.py", "x = 1\nif True print(x)\n")
    (doctor.directory / "binary.py").write_bytes(b"\x7fELF" + bytes(range(256)) * 4)
    (doctor.directory / "full").mkdir()
    (doctor.directory / "full" / "file").touch()
    doctor.write("no-interpreter", "#!/no/such/interpreter\n").chmod(0o755)
    doctor.write("not-a-program", "\x7fELF nothing").chmod(0o755)
    result = doctor.cli(*words)
    assert result.status == 2, result.stderr
    assert result.stdout == ""
    first, *hint = result.stderr.splitlines()
    assert first.startswith("ddpdoctor: error: ")
    assert said in first
    assert len(hint) <= 1
    assert all(line.startswith("ddpdoctor: ") for line in hint)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["run", "missing.py"],
        ["run", "--json", "no/such/folder/f.json", "--", "true"],
        ["run", "--", "./no-interpreter"],
    ],
    ids=" ".join,
)
def test_bad_input_leaves_no_run_behind(words: list[str], doctor: Doctor) -> None:
    doctor.write("no-interpreter", "#!/no/such/interpreter\n").chmod(0o755)
    assert doctor.cli(*words).status == 2
    base = doctor.directory / f"ddpdoctor-{os.getuid()}"
    assert list(base.glob("*/run.json")) == []
    assert not os.path.lexists(base / "latest")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["run", "--help"], ["run", "--quiet", "--help"], ["run", "--standalone", "-h"]],
    ids=" ".join,
)
def test_help_wherever_it_is_asked_for(words: list[str], doctor: Doctor) -> None:
    # Fails for the last two: "no script to run".
    result = doctor.cli(*words)
    assert result.status == 0
    assert result.stdout.startswith("Usage: ddpdoctor")
    assert result.stderr == ""


@pytest.mark.parametrize("words", [["--help"], [], ["--version"], ["run", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(words: list[str], doctor: Doctor) -> None:
    code = (
        "import sys\nfrom ddpdoctor.cli import main\n"
        f"status = main({words!r})\n"
        "names = 'torch textual debugpy pynvml psutil rich numpy'.split()\n"
        "sys.exit(status or ' '.join(name for name in names if name in sys.modules) or 0)"
    )
    words_of_ours = ["run", "--help"]
    if words == words_of_ours:
        # `run` may know its processes; it never needs the rest.
        code = code.replace(" psutil", "")
    result = doctor.run(PYTHON, "-c", code, watch=False)
    assert (result.status, result.stderr) == (0, "")


@pytest.mark.parametrize("words", [["--help"], ["explain"], ["run", "--help"]], ids=" ".join)
def test_a_reader_that_has_seen_enough(words: list[str], doctor: Doctor) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.run(
            [PYTHON, "-m", "ddpdoctor", *words],
            env=doctor.environment(),
            stdout=writer,
            stderr=subprocess.PIPE,
            timeout=LIMIT,
        )
    finally:
        os.close(writer)
    assert process.stderr == b""
    assert process.returncode in (0, -signal.SIGPIPE)
