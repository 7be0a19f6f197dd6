"""`ddpdoctor run` is invisible: same bytes, same signals, same exit status as without it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor, Live, Result

TRAIN = str(Path(__file__).parent / "jobs" / "train.py")
PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")

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

COUNT_SIGNALS = """
import json, os, signal, sys, time

counts = {}
def count(number, frame):
    name = signal.Signals(number).name
    counts[name] = counts.get(name, 0) + 1

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, count)
mine = os.environ.get("RANK", "0")
open("ready" + mine, "w").close()
until = time.monotonic() + 60
while not counts and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(0.8)  # a second delivery would come now
with open("counts" + mine + ".tmp", "w") as file:
    json.dump(counts, file)
os.rename("counts" + mine + ".tmp", "counts" + mine)
sys.exit(9)
"""

STUBBORN = """
import os, signal, time

def note(number, frame):
    open(f"got-{signal.Signals(number).name}", "w").close()

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
open("ready0", "w").close()
while True:
    time.sleep(60)
"""


def wait_until(condition: Callable[[], bool], timeout: float = LIMIT) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)


def wait_for_files(live: Live, folder: Path, *names: str, timeout: float = LIMIT) -> None:
    def there() -> bool:
        if live.process.poll() is not None and not all((folder / n).exists() for n in names):
            raise AssertionError(f"ended too soon: {live.err.read_text('utf-8', 'replace')}")
        return all((folder / name).exists() for name in names)

    wait_until(there, timeout)


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


# -- our own lines


def test_all_our_lines_carry_our_name_and_quiet_leaves_findings_only(doctor: Doctor) -> None:
    doctor.write("fail.py", "raise SystemExit(1)")
    loud = doctor.run("--", PYTHON, "fail.py")
    assert loud.stdout == ""
    assert loud.ours == loud.stderr != ""
    quiet = doctor.run("--quiet", "--", PYTHON, "-c", "pass")
    assert quiet.stderr == quiet.stdout == ""


@pytest.mark.slow
def test_quiet_still_says_findings(doctor: Doctor) -> None:
    words = ("--nproc-per-node", "2", TRAIN, "--fail", "exception")
    result = doctor.run("--quiet", *words)
    assert result.status == 1
    assert result.codes
    assert "findings:" not in result.ours
    assert "records in" not in result.ours


def test_without_nproc_two_ranks_and_a_line(doctor: Doctor) -> None:
    doctor.write(
        "rank.py",
        """
        import os
        os.write(1, f"rank {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n".encode())
        """,
    )
    result = doctor.run("rank.py", env={"CUDA_VISIBLE_DEVICES": ""})
    result.check_success()
    assert sorted(result.stdout.splitlines()) == ["rank 0 2", "rank 1 2"]
    assert "starting 2 ranks" in result.ours.splitlines()[0]


# -- the same ranks


ENVIRONMENT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_NAME",
         "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
mine = {name: os.environ.get(name) for name in names}
mine["argv"] = sys.argv[1:]
mine["name"] = __name__
mine["argv0"] = os.path.basename(sys.argv[0])
sys.stdout.write(json.dumps(mine) + "\\n")
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone", "--nproc_per_node=2", "env.py", "--lr", "1", "--", "-x"],
        pytest.param(
            ["--nproc-per=1", "--role", "a b", "--max_res=3", "-m", "env", "--nproc-per-node", "5"],
            marks=pytest.mark.slow,
        ),
        ["--nproc-per-node", "1", "--no-python", "--", PYTHON, "-u", "env.py", "x"],
        [
            *("--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "localhost:0", "--rdzv-conf=last_call_timeout=1", "env.py"),
        ],
    ],
    ids=["standalone", "module", "no-python", "elastic"],
)
def test_torchruns_options_do_what_they_do(words: list[str], doctor: Doctor) -> None:
    doctor.write("env.py", ENVIRONMENT)

    def seen(result: Result) -> list[dict[str, object]]:
        assert result.status == 0, result.stderr
        found = [json.loads(line) for line in result.stdout.splitlines()]
        return sorted(found, key=lambda item: str(item["RANK"]))

    plain = doctor.start(*TORCHRUN, *words, watch=False)
    ours = doctor.start(*words)
    assert seen(ours.finish()) == seen(plain.finish()) != []


def test_pet_variables_and_tee(doctor: Doctor) -> None:
    doctor.write("hello.py", "print('hello')")
    environ = {"PET_NPROC_PER_NODE": "2", "PET_LOG_DIR": "logs"}
    result = doctor.run("-t", "3", "hello.py", env=environ)
    result.check_success()
    assert sorted(result.stdout.split()) == ["[default0]:hello", "[default1]:hello"]
    assert (doctor.directory / "logs").is_dir()


@pytest.mark.parametrize("script", ["train.py", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_command_that_starts_the_ranks_itself(script: str, doctor: Doctor) -> None:
    if script == "torchrun":
        words = ["torchrun", "--nproc-per-node", "2", TRAIN, "--steps", "3"]
        path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}"
        live = doctor.start("--", *words, env={"PATH": path})
        ranks = 2
    else:
        words = [PYTHON, TRAIN, "--steps", "3", "--my-rank", "0", "--world-size", "1"]
        words += ["--init", f"file://{doctor.directory}/store"]
        live = doctor.start("--", *words)
        ranks = 1
    result = live.finish()
    result.check_success()
    assert len(result.run.ranks) == ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_on_one_machine(doctor: Doctor) -> None:
    port = str(free_port())
    nodes = [
        doctor.start(
            *("--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1", "--master-port", port),
            *(TRAIN, "--steps", "4"),
        )
        for node in ("0", "1")
    ]
    results = [node.finish(90) for node in nodes]
    for number, result in enumerate(results):
        result.check_success()
        (rank,) = result.run.ranks
        assert rank.rank == number
        assert rank.status is not None
        assert rank.status.world_size == 2
        assert rank.status.step == 4


# -- the same exit status


@pytest.mark.parametrize("status", [0, 1, 2, 3, 5, 130, 255])
def test_exit_status_of_a_command(status: int, doctor: Doctor) -> None:
    assert doctor.run("--", PYTHON, "-c", f"raise SystemExit({status})").status == status


@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT),
        *(signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGALRM),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_that_ended_the_job_ends_us(number: signal.Signals, doctor: Doctor) -> None:
    result = doctor.run("--", "sh", "-c", f"kill -{number.name[3:]} $$")
    assert result.status == -number
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_exit_status_under_torchrun(doctor: Doctor) -> None:
    doctor.write("five.py", "raise SystemExit(5)")
    doctor.write("bare.py", "pass")
    for script in ("five.py", "bare.py"):
        plain = doctor.start(*TORCHRUN, "--nproc-per-node", "2", script, watch=False)
        ours = doctor.start("--nproc-per-node", "2", script)
        assert ours.finish().status == plain.finish().status


# -- signals reach the job, once


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_command_gets_a_signal_once(name: str, doctor: Doctor) -> None:
    doctor.write("count.py", COUNT_SIGNALS)
    live = doctor.start("--", PYTHON, "count.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.Signals[name])
    assert live.finish().status == 9
    assert json.loads((doctor.directory / "counts0").read_text()) == {name: 1}


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)]
)
def test_ranks_get_what_torchrun_would_give_them(name: str, doctor: Doctor) -> None:
    # Plain torchrun gets it as a terminal or a scheduler sends it; each in a folder of its own.
    lives: list[Live] = []
    folders: list[Path] = []
    for watch in (False, True):
        folder = doctor.directory / str(watch)
        folder.mkdir()
        doctor.write(f"{watch}/count.py", f"import os\nos.chdir({str(folder)!r})\n{COUNT_SIGNALS}")
        words = ("--nproc-per-node", "2", f"{watch}/count.py")
        lives.append(doctor.start(*words if watch else (*TORCHRUN, *words), watch=watch))
        folders.append(folder)
    for live, folder in zip(lives, folders, strict=True):
        wait_for_files(live, folder, "ready0", "ready1")
        live.process.send_signal(signal.Signals[name])
    statuses = [live.finish().status for live in lives]
    assert statuses[0] == statuses[1]
    counts = [
        [json.loads((folder / f"counts{rank}").read_text()) for rank in (0, 1)]
        for folder in folders
    ]
    assert counts[0] == counts[1]
    assert all(sum(one.values()) == 1 for one in counts[1])


def test_the_whole_foreground_group_of_a_shell_job(doctor: Doctor) -> None:
    # As a terminal does it: Ctrl-C reaches what a shell script runs, too.
    doctor.write("count.py", COUNT_SIGNALS)
    live = doctor.start("--", "bash", "-c", f"{PYTHON} count.py; exit 21")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    live.finish()
    assert json.loads((doctor.directory / "counts0").read_text()) == {"SIGINT": 1}


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_schedulers_warning_reaches_the_job(name: str, doctor: Doctor) -> None:
    doctor.write(
        "save.py",
        f"""
        import signal, sys
        signal.signal(signal.{name}, lambda *_: sys.exit(4))
        open("ready0", "w").close()
        while True:
            signal.pause()
        """,
    )
    live = doctor.start("--", PYTHON, "save.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.Signals[name])
    assert live.finish(20).status == 4


def test_an_ignored_signal_stays_ignored(doctor: Doctor) -> None:
    # As under nohup.
    doctor.write(
        "ignored.py",
        """
        import signal, sys
        open("ready0", "w").close()
        sys.exit(8 if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else 1)
        """,
    )
    command = f"trap '' HUP; exec {PYTHON} -m ddpdoctor run --run-dir rd -- {PYTHON} ignored.py"
    live = doctor.start("bash", "-c", command, watch=False)
    assert live.finish().status == 8


def test_a_signal_in_the_moment_of_the_start_is_not_lost(doctor: Doctor) -> None:
    code = """
import os, signal, sys
from ddpdoctor.cli import main
from ddpdoctor.supervise.supervisor import Supervisor

start = Supervisor._start
def late(self):
    os.kill(os.getpid(), signal.SIGTERM)
    start(self)
Supervisor._start = late
sys.exit(main(["run", "--run-dir", "rd", "--grace", "1000", "--", "sleep", "1000"]))
"""
    live = doctor.start(PYTHON, "-c", code, watch=False)
    try:
        assert live.process.wait(LIMIT) == -signal.SIGTERM
    finally:
        live.process.send_signal(signal.SIGINT)
        live.process.send_signal(signal.SIGINT)
        live.process.wait(LIMIT)


# -- the grace period


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)]
)
def test_after_the_grace_period_the_job_is_ended(name: str, doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "0.5", "--", PYTHON, "stubborn.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.Signals[name])
    assert live.finish(20).status == -signal.SIGKILL


def test_no_grace_at_all(doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "0", "--", "bash", "-c", f"{PYTHON} stubborn.py & wait; wait")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    live.finish(20)


def test_the_job_has_its_grace_period(doctor: Doctor) -> None:
    doctor.write(
        "slow.py",
        """
        import signal, sys, time
        def save(*_):
            time.sleep(2)
            sys.exit(17)
        signal.signal(signal.SIGTERM, save)
        open("ready0", "w").close()
        while True:
            time.sleep(60)
        """,
    )
    live = doctor.start("--grace", "20", "--", PYTHON, "slow.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGTERM)
    assert live.finish(30).status == 17


def test_a_second_interrupt_ends_at_once(doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "1000", "--", PYTHON, "stubborn.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGINT)
    wait_for_files(live, doctor.directory, "got-SIGINT")
    live.process.send_signal(signal.SIGINT)
    result = live.finish(20)
    assert result.status == -signal.SIGKILL
    assert "ending the job now" in result.ours


def test_an_interrupt_after_a_term_is_the_first_of_its_kind(doctor: Doctor) -> None:
    doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "1000", "--", PYTHON, "stubborn.py")
    wait_for_files(live, doctor.directory, "ready0")
    live.process.send_signal(signal.SIGTERM)
    wait_for_files(live, doctor.directory, "got-SIGTERM")
    live.process.send_signal(signal.SIGINT)
    wait_for_files(live, doctor.directory, "got-SIGINT")
    assert live.process.poll() is None
    live.process.send_signal(signal.SIGINT)
    assert live.finish(20).status == -signal.SIGKILL


def test_a_job_with_an_emptied_environment_can_be_stopped(doctor: Doctor) -> None:
    stubborn = doctor.write("stubborn.py", STUBBORN)
    live = doctor.start("--grace", "0.5", "--", "env", "-i", PYTHON, str(stubborn))
    wait_for_files(live, doctor.directory, "ready0")
    below = psutil.Process(live.process.pid).children(recursive=True)
    (job,) = (each for each in below if str(stubborn) in each.cmdline())
    live.process.send_signal(signal.SIGTERM)
    try:
        assert live.process.wait(LIMIT) == -signal.SIGKILL
        assert not job.is_running()
    finally:
        if job.is_running():
            job.kill()
        live.process.wait(LIMIT)


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
