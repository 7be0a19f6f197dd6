"""`ddpdoctor run` is invisible: the same bytes in and out as without it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor, Live
from tests.support.launching import PYTHON, STUBBORN, TORCHRUN, wait_until

JUNK = """
import os, random, sys

junk = random.Random(7)
for number in range(400):
    for stream in (1, 2):
        chunk = junk.randbytes(junk.choice([1, 3, 80, 4096, 9000]))
        chunk += junk.choice([b"", b"\\n", b"\\r", b"\\r\\n", b"\\x00", b"half a line"])
        os.write(stream, chunk)
os.write(1, b"x" * 3_000_000)
os.write(2, b"y" * 3_000_000 + b"no newline at the end")
"""


def bytes_of(live: Live, timeout: float = LIMIT) -> tuple[int, bytes, bytes]:
    status = live.process.wait(timeout)
    return status, live.out.read_bytes(), live.err.read_bytes()


def without_ours(stderr: bytes) -> bytes:
    return b"".join(line for line in stderr.splitlines(True) if not line.startswith(b"ddpdoctor: "))


# -- the same bytes


def test_every_byte_of_a_command(doctor: Doctor) -> None:
    doctor.write("junk.py", JUNK)
    expected = bytes_of(doctor.start(PYTHON, "junk.py", watch=False))
    assert expected[0] == 0
    assert len(expected[2]) > 3_000_000
    assert bytes_of(doctor.start("--quiet", "--", PYTHON, "junk.py")) == expected
    status, stdout, stderr = bytes_of(doctor.start("--", PYTHON, "junk.py"))
    assert (status, stdout) == expected[:2]
    # Our summary starts on a line of its own behind the job's torn one.
    body, ours = stderr[: len(expected[2])], stderr[len(expected[2]) :]
    assert body == expected[2]
    assert ours.startswith(b"\nddpdoctor: ")
    assert without_ours(ours) == b"\n"


@pytest.mark.slow
def test_every_byte_under_torchrun(doctor: Doctor) -> None:
    doctor.write("junk.py", JUNK)
    words = ("--nproc-per-node", "1", "junk.py")
    plain = doctor.start(*TORCHRUN, *words, watch=False)
    ours = doctor.start("--quiet", *words)
    expected = bytes_of(plain)
    assert expected[0] == 0
    assert len(expected[1]) > 3_000_000
    assert bytes_of(ours) == expected


def test_the_jobs_stderr_arrives_when_it_was_written(doctor: Doctor) -> None:
    doctor.write(
        "talk.py",
        """
        import os, sys
        os.write(2, b"50 %\\r")
        sys.stdin.readline()
        os.write(2, b"done\\n")
        """,
    )
    live = doctor.start("--quiet", "--", PYTHON, "talk.py", stdin=subprocess.PIPE)
    assert live.process.stdin is not None
    wait_until(lambda: live.err.read_bytes() == b"50 %\r")
    live.process.stdin.write(b"\n")
    live.process.stdin.close()
    assert bytes_of(live) == (0, b"", b"50 %\rdone\n")


def test_a_line_written_in_pieces_is_not_torn(doctor: Doctor) -> None:
    # Removing the run directory makes ddpdoctor speak while the job is in the middle of a line.
    doctor.write(
        "pieces.py",
        """
        import os, shutil, time
        for number in range(60):
            os.write(2, b"the left half, ")
            time.sleep(0.05)
            os.write(2, b"the right half\\n")
            if number == 5:
                shutil.rmtree(os.environ["DDPDOCTOR_RUN_DIR"])
        """,
    )
    status, _, stderr = bytes_of(doctor.start("--", PYTHON, "pieces.py"))
    assert status == 0
    assert b"ddpdoctor: warning: " in stderr
    assert without_ours(stderr) == b"the left half, the right half\n" * 60


@pytest.mark.slow
def test_stdin_from_a_pipe(doctor: Doctor) -> None:
    doctor.write(
        "echo.py",
        """
        import os, sys
        data = sys.stdin.buffer.read()
        sys.stdout.buffer.write(data[::-1])
        """,
    )
    data = os.urandom(300_000)
    for words in (("--", PYTHON, "echo.py"), ("--nproc-per-node", "1", "echo.py")):
        live = doctor.start(*words, stdin=subprocess.PIPE)
        live.process.communicate(data, timeout=LIMIT)
        assert live.process.returncode == 0
        assert live.out.read_bytes() == data[::-1]


def test_a_closed_stdin_is_the_jobs_end_of_file(doctor: Doctor) -> None:
    result = doctor.run("--", PYTHON, "-c", "import sys; print(repr(sys.stdin.read()))")
    assert result.stdout == "''\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed(closed: str, doctor: Doctor) -> None:
    # Fails for stderr: a traceback (to nowhere) and exit status 1 instead of a job.
    doctor.write("job.py", "open('ran', 'w').write('x'); raise SystemExit(6)")
    command = f"{PYTHON} -m ddpdoctor run --run-dir rd -- {PYTHON} job.py {closed}"
    result = doctor.run("bash", "-c", command, watch=False)
    assert (doctor.directory / "ran").exists()
    assert result.status == 6


def test_a_slow_reader_gets_every_byte(doctor: Doctor) -> None:
    # What is still in the pipe when the job ends is not ours to lose: a reader may pause for longer
    # than any patience of ours.
    doctor.write("talk.py", "import os; os.write(2, b'z' * 120_000); open('done', 'w').close()")
    process = subprocess.Popen(
        [PYTHON, "-m", "ddpdoctor", "run", "--quiet", "--run-dir", "rd", "--", PYTHON, "talk.py"],
        cwd=doctor.directory,
        env=doctor.environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stderr is not None
        wait_until(lambda: (doctor.directory / "done").exists())
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(4)  # it waits for the reader, as the job itself would
        assert len(process.stderr.read()) == 120_000
        assert process.wait(LIMIT) == 0


def test_a_reader_that_stopped_reading_cannot_hold_up_the_end(doctor: Doctor) -> None:
    doctor.write(
        "talk.py", STUBBORN.replace("while True:", "os.write(2, b'z' * 400_000)\nwhile 1:")
    )
    process = subprocess.Popen(
        [PYTHON, "-m", "ddpdoctor", "run", "--grace", "0.5", "--", PYTHON, "talk.py"],
        cwd=doctor.directory,
        env=doctor.environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: (doctor.directory / "ready0").exists())
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == -signal.SIGKILL
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()
        process.wait()


def test_a_reader_that_went_away(doctor: Doctor) -> None:
    # Without ddpdoctor the job would get SIGPIPE or EPIPE at its next write.
    doctor.write(
        "talk.py",
        """
        import os, sys
        open("ready0", "w").close()
        try:
            while True:
                os.write(2, b"z" * 1000)
        except BrokenPipeError:
            sys.exit(13)
        """,
    )
    process = subprocess.Popen(
        [PYTHON, "-m", "ddpdoctor", "run", "--", PYTHON, "talk.py"],
        cwd=doctor.directory,
        env=doctor.environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stderr is not None
        wait_until(lambda: (doctor.directory / "ready0").exists())
        process.stderr.close()
        assert process.wait(LIMIT) == 13
