"""One run underneath: ``ddpdoctor run`` in a process below this one, watched until it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ddpdoctor
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.overrides import VARIABLE
from ddpdoctor.run.reader import glance
from ddpdoctor.scale.plan import Planned
from ddpdoctor.system import proc

POLL = 0.5
"""Seconds between two looks at the steps of the run."""

PATIENCE = 20.0
"""Seconds for a run to end that was asked to."""

OPTIONS = (
    "--quiet", "--no-debug", "--no-vscode", "--kill-on-hang", "--grace", "5",
    # What diagnosis costs is no part of what is measured.
    "--overhead-budget", "0",
)  # fmt: skip
"""What each run gets; those that a person gives stand behind them and count."""


THREADS = "OMP_NUM_THREADS"
"""torchrun sets it to 1 from two ranks on; so does every run here, one rank too, to compare like
with like. One that a person has set stays."""


_ENTRY = (
    "import sys; sys.path = [each for each in sys.path if each]; sys.path.append(sys.argv.pop(1)); "
    "from ddpdoctor.cli import main; sys.exit(main())"
)
"""``python -m ddpdoctor`` without the working directory in the path: a script's ``json.py`` may be
there. What ``python -m`` finds there, this finds behind everything else."""


class Stopped(BaseException):
    """A signal asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_at_signals() -> None:
    """Let SIGTERM and SIGHUP end the run under way, and this command behind it."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def start(
    planned: Planned,
    words: Sequence[str],
    overrides: dict[str, str],
    folder: Path,
    step: Callable[[int], None],
) -> tuple[Path, Path, int]:
    """Make one run and wait for its end.

    Args:
        planned: Which.
        words: What stands behind ``ddpdoctor run`` and the options above.
        overrides: Arguments of torch's to override.
        folder: Where its directory and its log are put.
        step: Called now and then with how many steps it has made.

    Returns:
        Its run directory, what the job printed, and the exit status.

    Raises:
        DoctorError: It cannot be started.
    """
    directory = folder / planned.directory
    log = folder / f"{planned.directory}.log"
    environment = dict(os.environ)
    environment.pop(VARIABLE, None)
    environment.setdefault(THREADS, "1")
    if overrides:
        environment[VARIABLE] = " ".join(f"{name}={value}" for name, value in overrides.items())
    here = str(Path(ddpdoctor.__file__).parents[1])
    command = [sys.executable, "-c", _ENTRY, here, "run", *OPTIONS, "--run-dir", str(directory)]
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                preexec_fn=proc.end_with_parent,
            )
    except OSError as error:
        raise DoctorError(f"cannot write {log}: {error.strerror}") from None
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return directory, log, process.wait(POLL)
            step(_steps(directory))
    finally:
        _end(process)


def _steps(directory: Path) -> int:
    with contextlib.suppress(DoctorError, OSError):
        ranks = glance(directory).ranks
        return max((rank.status.step for rank in ranks if rank.status is not None), default=0)
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that is still there: this command was asked to end."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        # The second time, it does not wait for the job any longer.
        process.send_signal(signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE / 4)
