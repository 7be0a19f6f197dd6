"""What all tests share: running real jobs, and the proof that nothing of them is left."""

from __future__ import annotations

import compileall
import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.typed_json import RANK_RECORDS, SUPERVISOR_RECORDS
from ddpdoctor.run.snapshot import Run
from tests.support.written import Written

if TYPE_CHECKING:
    from tests.support.candidates import Candidates
    from tests.support.pseudo_terminal import Open, Terminal

ROOT = Path(__file__).parent.parent
JOBS = Path(__file__).parent / "jobs"
TOKEN = "DDPDOCTOR_TEST_TOKEN"

LIMIT = 300.0
"""Seconds after which what is awaited will never happen, also beside thirty busy processes."""

SPURIOUS_ABORT = "terminate called without an active exception"
"""gloo's threads race with the interpreter's exit in torch 2.13, with and without ddpdoctor."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        # Where nothing is cached, each of hundreds of processes would compile all that it imports.
        compileall.compile_dir(ROOT / "ddpdoctor", quiet=2)
    _heed_signals()


def _heed_signals() -> None:
    """Signals that whoever started the tests ignores, as `nohup` and `&` do, reach the jobs.

    A handler that does nothing spares the tests themselves, and a started program does not inherit
    it as it would SIG_IGN.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@dataclass
class Result:
    """A finished command."""

    status: int
    stdout: str
    stderr: str
    run_dir: Path
    seconds: float

    @property
    def run(self) -> Run:
        return RunReader(self.run_dir, window=100_000).snapshot()

    @property
    def ours(self) -> str:
        """ddpdoctor's own lines."""
        return "".join(
            line for line in self.stderr.splitlines(True) if line.startswith("ddpdoctor: ")
        )

    @property
    def codes(self) -> list[str]:
        """The codes of the findings that were printed, in order."""
        heads = [line.split() for line in self.ours.splitlines()]
        return [
            words[2].rstrip(":")
            for words in heads
            if len(words) > 2
            and words[2].startswith("DDP")
            and words[2].endswith(":")
            and words[1] not in ("withdrawn", "over")
        ]

    @property
    def withdrawn(self) -> list[str]:
        """What was said and stands no more: each line without its first word."""
        lines = [line.removeprefix("ddpdoctor: ") for line in self.ours.splitlines()]
        return [line for line in lines if line.startswith(("withdrawn DDP", "over DDP"))]

    def check_success(self) -> None:
        """The job succeeded, or fell into the abort at exit that is torch's own."""
        if self.status != 0:
            assert SPURIOUS_ABORT in self.stderr, self.stderr


@dataclass
class Live:
    """A command that runs, in a process group of its own."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    out: Path
    err: Path
    started: float = field(default_factory=time.monotonic)

    def snapshot(self) -> Run:
        return RunReader(self.run_dir, window=100_000).snapshot()

    def wait_for(self, condition: Callable[[Run], bool], timeout: float = LIMIT) -> Run:
        """The first snapshot for which the condition holds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if (self.run_dir / "run.json").exists():
                with contextlib.suppress(Exception):
                    run = self.snapshot()
                    if condition(run):
                        return run
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(f"never happened; stderr: {self.err.read_text()}")

    def wait_for_steps(self, steps: int, ranks: int = 2) -> Run:
        """Wait until ``ranks`` ranks have closed ``steps`` steps each."""
        return self.wait_for(
            lambda run: (
                len(run.ranks) >= ranks
                and all(rank.status is not None and rank.status.step >= steps for rank in run.ranks)
            )
        )

    def finish(self, timeout: float = LIMIT) -> Result:
        status = self.process.wait(timeout)
        return Result(
            status,
            self.out.read_text(),
            self.err.read_text(),
            self.run_dir,
            time.monotonic() - self.started,
        )


def marked(token: str) -> list[psutil.Process]:
    """All live processes that a test started, or that those started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(TOKEN) == token
            ):
                found.append(process)
    return found


@pytest.fixture
def token() -> Iterator[str]:
    """Marks the environment of every process that a test starts; none is left in the end."""
    token = uuid.uuid4().hex
    yield token
    deadline = time.monotonic() + 60
    while marked(token) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = marked(token)
    words = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            words.append(f"{process.pid}: {' '.join(process.cmdline())}")
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not left, f"still running: {words}"


Environment = Mapping[str, str]


@functools.cache
def _fixed_port() -> bool:
    """Whether torchrun takes port 29500 for one node, too, as it does before torch 2.13."""
    from torch.distributed.run import get_args_parser

    return get_args_parser().get_default("master_port") is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Doctor:
    """Runs commands the way a person would, each in a directory of its own."""

    def __init__(self, directory: Path, token: str) -> None:
        self.directory = directory
        self.token = token
        self.started: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def environment(self, extra: Environment | None = None) -> dict[str, str]:
        keep = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
        if _fixed_port():
            # Another job on this machine may have that one.
            keep["PET_MASTER_PORT"] = str(_free_port())
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            keep.pop(name, None)
        return {
            **keep,
            TOKEN: self.token,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.directory),
            "PYTHONWARNINGS": "ignore",
            # A job under a file size limit would leave half a .pyc to the next one.
            "PYTHONDONTWRITEBYTECODE": "1",
            **(extra or {}),
        }

    def write(self, name: str, source: str) -> Path:
        """Write a script into the working directory."""
        path = self.directory / name
        path.write_text(textwrap.dedent(source))
        return path

    def start(
        self,
        *words: str,
        env: Environment | None = None,
        stdin: int | None = subprocess.DEVNULL,
        watch: bool = True,
    ) -> Live:
        """Start ``ddpdoctor run --run-dir ... WORDS``, or just ``WORDS`` without ``watch``."""
        self._count += 1
        run_dir = self.directory / f"run{self._count}"
        out, err = self.directory / f"out{self._count}", self.directory / f"err{self._count}"
        command = list(words)
        if watch:
            options = ["--run-dir", str(run_dir), "--debug-port", "0"]
            command = [sys.executable, "-m", "ddpdoctor", "run", *options, *words]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=self.environment(env),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.started.append(process)
        return Live(process, run_dir, out, err)

    def run(
        self,
        *words: str,
        env: Environment | None = None,
        timeout: float = LIMIT,
        watch: bool = True,
    ) -> Result:
        """Start a command and wait for its end."""
        live = self.start(*words, env=env, watch=watch)
        try:
            return live.finish(timeout)
        except subprocess.TimeoutExpired:
            live.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                live.process.wait(15)
            live.process.kill()
            raise AssertionError(f"took over {timeout} s; stderr: {live.err.read_text()}") from None

    def run_to_its_end(self, *words: str) -> Result:
        """A job that many tests read: once more if torch itself kept it from ending (DDP815).

        With gloo, torch 2.13 waits forever now and then while the interpreter is taken down.
        """
        result = self.run("--kill-on-hang", *words)
        return self.run("--kill-on-hang", *words) if "DDP815" in result.codes else result

    def torchrun(self, *words: str, env: Environment | None = None) -> Result:
        """The same job without ddpdoctor."""
        return self.run(sys.executable, "-m", "torch.distributed.run", *words, env=env, watch=False)

    def cli(self, *words: str, env: Environment | None = None) -> Result:
        """``ddpdoctor WORDS``, any command."""
        return self.run(sys.executable, "-m", "ddpdoctor", *words, env=env, watch=False)


@pytest.fixture
def doctor(tmp_path: Path, token: str) -> Iterator[Doctor]:
    doctor = Doctor(tmp_path, token)
    yield doctor
    for process in doctor.started:
        # A test that failed on the way; what its job leaves is asserted elsewhere.
        if process.poll() is None:
            process.kill()
            process.wait()
    undeclared = {
        kind.decode()
        for journal in tmp_path.glob("run*/*.jsonl*")
        for kind in re.findall(rb'^\{"kind":"(\w+)"', journal.read_bytes(), re.MULTILINE)
    } - {*RANK_RECORDS, *SUPERVISOR_RECORDS, "segment"}
    assert not undeclared, (
        f"kinds of records that ddpdoctor.run.records does not declare: {undeclared}"
    )


@pytest.fixture
def candidates(doctor: Doctor) -> Iterator[Candidates]:
    """Processes that are to become ranks."""
    from tests.support.candidates import Candidates

    made = Candidates(doctor)
    yield made
    made.end()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A run directory to write by hand."""
    return Written(tmp_path)


@pytest.fixture
def bystanders(tmp_path: Path) -> Iterator[None]:
    """Processes that are not of the job, and look as much like it as they can."""
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=tmp_path)
    daemon = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "torch.distributed.run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "DDPDOCTOR_RUN_ID": "1700000000-of-another-run"},
        start_new_session=True,
    )
    try:
        yield
        assert ours.poll() is None, "a process that is not of the job was ended"
        assert daemon.poll() is None, "a process of another run was ended"
    finally:
        for process in (ours, daemon):
            process.kill()
            process.wait()


@pytest.fixture
def terminal(doctor: Doctor) -> Iterator[Open]:
    """Opens terminals with ``ddpdoctor run WORDS``, or with WORDS alone (``watch=False``)."""
    from tests.support.pseudo_terminal import Terminal

    opened: list[Terminal] = []

    def start(*words: str, watch: bool = True, rows: int = 30, columns: int = 100) -> Terminal:
        ours = (sys.executable, "-m", "ddpdoctor", "run") if watch else ()
        opened.append(Terminal(doctor, *ours, *words, rows=rows, columns=columns))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(15)
        one.process.kill()
        one.process.wait()
