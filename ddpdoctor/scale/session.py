"""Make all runs of a plan, one after another, and keep their results whatever happens.

Each run is ``ddpdoctor run`` in a child process, watched until it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ddpdoctor
import ddpdoctor.diagnose.all_rules
from ddpdoctor.core import formatting, opening
from ddpdoctor.core.errors import HANG, DoctorError
from ddpdoctor.core.finding import RULES, Finding, Rule, Severity, examine
from ddpdoctor.diagnose.crashes.rank_endings import signal_name
from ddpdoctor.render.terminal import StatusLine
from ddpdoctor.run.overrides import VARIABLE
from ddpdoctor.run.reader import RunReader, glance
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.scale.plan import Planned, Size
from ddpdoctor.scale.results import Outcome, measure
from ddpdoctor.system import proc

# -- one run underneath: ``ddpdoctor run`` in a process below this one, watched until it ends


POLL_SECONDS = 0.5
"""Seconds between two looks at the steps of the run."""

END_TIMEOUT = 20.0
"""Seconds for a run to end that was asked to."""

RUN_OPTIONS = (
    "--quiet", "--no-debug", "--no-vscode", "--kill-on-hang", "--grace", "5",
    # What diagnosis costs is no part of what is measured.
    "--overhead-budget", "0",
)  # fmt: skip
"""What each run gets; those that a person gives stand behind them and count."""


THREADS_VARIABLE = "OMP_NUM_THREADS"
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


def run_once(
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
    environment.setdefault(THREADS_VARIABLE, "1")
    if overrides:
        environment[VARIABLE] = " ".join(f"{name}={value}" for name, value in overrides.items())
    here = str(Path(ddpdoctor.__file__).parents[1])
    command = [sys.executable, "-c", _ENTRY, here, "run", *RUN_OPTIONS, "--run-dir", str(directory)]
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
                return directory, log, process.wait(POLL_SECONDS)
            step(_steps_done(directory))
    finally:
        _end_run(process)


def _steps_done(directory: Path) -> int:
    with contextlib.suppress(DoctorError, OSError):
        ranks = glance(directory).ranks
        return max((rank.status.step for rank in ranks if rank.status is not None), default=0)
    return 0


def _end_run(process: subprocess.Popen[bytes]) -> None:
    """End a run that is still there: this command was asked to end."""
    deadline = time.monotonic() + END_TIMEOUT
    while process.poll() is None:
        # The second time, it does not wait for the job any longer.
        process.send_signal(signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT / 4)


# -- all runs of a command, one after another, and what is kept of them whatever happens


WEAK, STRONG = "weak", "strong"

_LOG_END = 4096


class Session:
    """The runs of one command.

    Args:
        folder: Where the run directories and logs are put.
        words: The command line of ``ddpdoctor run`` for a run.
        warmup: Steps at the beginning of each run that do not count.
        scaling: `WEAK` or `STRONG`: the batch of a rank is the one of the smallest size, or its
            part of that; empty: the script's own.
        keep: Called after each run with all that came so far.
    """

    def __init__(
        self,
        folder: Path,
        words: Callable[[Planned], list[str]],
        warmup: int,
        scaling: str,
        keep: Callable[[Sequence[Outcome]], None],
    ) -> None:
        self._folder = folder
        self._words = words
        self._warmup = warmup
        self._scaling = scaling
        self._keep = keep
        self._line = StatusLine()
        self._batch: tuple[Size, int] | None = None
        self.outcomes: list[Outcome] = []
        """What came so far."""

    def run(self, planned: Sequence[Planned]) -> None:
        """Make the runs; those of a size and variant that failed are not repeated.

        Raises:
            DoctorError: What came of a run shows that the job cannot be measured so.
        """
        began, of = time.monotonic(), planned[-1].number if planned else 0
        try:
            for done, each in enumerate(planned):
                if self._has_failed(each):
                    continue
                head = f"run {each.number} of {of}: {each.words}"
                left = (time.monotonic() - began) / done * (len(planned) - done) if done else None
                self._make(each, head, left)
        finally:
            self._line.close()

    def _has_failed(self, planned: Planned) -> bool:
        return any(
            each.failure
            and (each.planned.size, each.planned.variant) == (planned.size, planned.variant)
            for each in self.outcomes
        )

    def _make(self, planned: Planned, head: str, left: float | None) -> None:
        rest = f", about {formatting.duration(left)} left" if left is not None else ""
        self._line.show(f"{head}{rest}")
        overrides = {**planned.variant.overrides, **self._fixed_batch(planned)}

        def step(number: int) -> None:
            self._line.show(
                f"{head}: {formatting.count(number, 'step') if number else 'starts'}{rest}"
            )

        directory, log, status = run_once(
            planned, self._words(planned), overrides, self._folder, step
        )
        outcome = replace(
            judge_run(planned, directory, log, status, self._warmup), overrides=overrides
        )
        self._check_batch(outcome)
        self.outcomes.append(outcome)
        self._keep(self.outcomes)
        self._line.say(f"{head}: {outcome_text(outcome)}")

    # -- weak and strong scaling

    def _fixed_batch(self, planned: Planned) -> dict[str, str]:
        """The batch that weak or strong scaling asks for; none for the smallest size."""
        if not self._scaling or "batch_size" in planned.variant.overrides:
            return {}
        if self._batch is None:
            first = next((each for each in self.outcomes if each.measured is not None), None)
            if first is None:
                return {}
            measured = first.measured
            if measured is None or measured.samples is None:
                raise DoctorError(
                    f"--{self._scaling} needs the batch, and the records do not tell it",
                    "it is counted where batches come from a DataLoader, or are DDP's first input",
                )
            self._batch = first.planned.size, round(measured.samples / measured.backwards)
        size, batch = self._batch
        if planned.size == size:
            return {}
        if self._scaling == STRONG:
            whole = batch * size.ranks
            if whole % planned.size.ranks:
                raise DoctorError(
                    f"--strong: a batch of {whole} samples does not divide by "
                    f"{planned.size.ranks} ranks",
                    "let the script take a batch that does, or leave out that size",
                )
            batch = whole // planned.size.ranks
        return {"batch_size": str(batch)}

    def _check_batch(self, outcome: Outcome) -> None:
        """Whether the ranks really got the batch that they were to get."""
        wanted = self._fixed_batch(outcome.planned).get("batch_size")
        measured = outcome.measured
        if wanted is None or measured is None or measured.samples is None:
            return
        batch = round(measured.samples / measured.backwards)
        if batch != int(wanted):
            raise DoctorError(
                f"--{self._scaling} needs {wanted} samples a rank with {outcome.planned.words}, "
                f"and the job takes {batch}: its batches do not come from a "
                "DataLoader(batch_size=...)",
                "scale the script's own batch option instead, and leave this one out",
            )


def judge_run(planned: Planned, directory: Path, log: Path, status: int, warmup: int) -> Outcome:
    """What came of a run.

    Raises:
        DoctorError: It went through and recorded nothing that can be measured.
    """
    outcome = Outcome(planned, directory, log, status, None)
    try:
        run = RunReader(directory, lenient=True).snapshot()
    except (DoctorError, OSError):
        return replace(outcome, failure=_failure_text(status, log))
    # A rule that cannot read the run keeps no other from doing so.
    found = tuple(examine(run, RULES.values(), failed=_skipped))
    outcome = replace(outcome, findings=found)
    if status != 0 and not _went_through(run):
        return replace(outcome, failure=_diagnosis(status, found, log))
    measured = measure(run, warmup)
    if measured is not None:
        return replace(outcome, measured=measured)
    if not run.ranks and planned.size.ranks == 1:
        why = "it joins no process group with one rank, so that there are no records of it"
        return replace(outcome, failure=f"not measured: {why}")
    raise _unmeasured(run, planned, warmup)


def _skipped(rule: Rule, error: Exception) -> None:
    """A rule cannot read the run."""


def _unmeasured(run: Run, planned: Planned, warmup: int) -> DoctorError:
    """Why a job that went through says nothing."""
    if not run.ranks:
        return DoctorError(
            f"no rank joined a process group ({planned.words}), so there is nothing to measure",
            "scale is for jobs that call init_process_group and train",
        )
    steps = max((step.step + 1 for rank in run.last for step in rank.steps), default=0)
    if not steps:
        return DoctorError(
            f"the job made no training steps ({planned.words}), so there is nothing to measure",
            "a step ends with optimizer.step(), or with DDP's forward where there is no optimizer",
        )
    return DoctorError(
        f"the job made {formatting.count(steps, 'step')} ({planned.words}), and the first {warmup} "
        "are dropped as warm-up",
        "let it train for more steps, or drop fewer: --warmup N",
    )


def _went_through(run: Run) -> bool:
    """Whether training was over: torch itself can abort or hang while the interpreter exits."""
    ends = bool(run.last) and all(rank.ended for rank in run.last)
    broken = any(
        rank.records.of(ErrorRecord) or any(each.status for each in rank.records.of(ExitRecord))
        for rank in run.last
    )
    return ends and not broken


def _diagnosis(status: int, found: Sequence[Finding], log: Path) -> str:
    """How a run failed, in a clause, with what the rules say of it."""
    first = next((each for each in found if each.severity >= Severity.ERROR), None)
    if first is None:
        return "hung, and was ended" if status == HANG else _failure_text(status, log)
    how = "hung" if status == HANG else "crashed"
    where = f" ({first.location.path}:{first.location.line})" if first.location else ""
    return f"{how}: {first.code} {first.message}{where}"


def _failure_text(status: int, log: Path) -> str:
    try:
        text = opening.ending(log, _LOG_END).decode("utf-8", "replace")
    except OSError:
        text = ""
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    how = f"ended by {signal_name(-status)}" if status < 0 else f"failed with exit status {status}"
    return f"{how}: {last}" if last else how


def outcome_text(outcome: Outcome) -> str:
    """What came of a run, in a line."""
    measured = outcome.measured
    if measured is None:
        return outcome.failure
    what = "samples" if measured.samples is not None else "steps"
    rate = formatting.figures(measured.rate)
    return f"{formatting.time(measured.step)} an iteration, {rate} {what}/s"
