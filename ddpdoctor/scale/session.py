"""Make all runs of a plan, one after another, and keep their results in any case.

Each run is ``ddpdoctor run`` in a child process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core import formatting, opening
from ddpdoctor.core.commands import in_own_process
from ddpdoctor.core.errors import HANG, DoctorError
from ddpdoctor.core.finding import RULES, Finding, Severity, examine
from ddpdoctor.diagnose.crashes.rank_endings import signal_name
from ddpdoctor.render.terminal import StatusLine
from ddpdoctor.run.overrides import VARIABLE
from ddpdoctor.run.reader import RunReader, glance
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.scale.results import Outcome, Planned, Size, measure
from ddpdoctor.system import proc

POLL_INTERVAL = 0.5  # Seconds between two checks of the number of steps
END_TIMEOUT = 20.0  # Seconds for a run to end after it was asked to

RUN_OPTIONS = (
    "--quiet", "--no-debug", "--no-vscode", "--kill-on-hang", "--grace", "5",
    # The cost of diagnosis must not be measured.
    "--overhead-budget", "0",
)  # fmt: skip
"""Options of each run. The user's options follow and override them."""

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Set to 1 in every run, as torchrun does with several ranks, unless a person has set it."""


class Stopped(BaseException):
    """A signal asked this command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop_at_signals() -> None:
    """Let SIGTERM and SIGHUP end the current run, and then this command."""

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
    variables: Mapping[str, str] | None = None,
) -> tuple[Path, Path, int]:
    """Make one run and wait for its end. Return its run directory, its log, and its exit status.

    ``step`` is called with the number of completed steps. An exception from it ends the run.

    Raises:
        DoctorError: It cannot be started.
    """
    directory = folder / planned.directory
    log = folder / f"{planned.directory}.log"
    environment = {**os.environ, **(variables or {})}
    environment.pop(VARIABLE, None)
    environment.setdefault(THREADS_VARIABLE, "1")
    if overrides:
        environment[VARIABLE] = " ".join(f"{name}={value}" for name, value in overrides.items())
    command = in_own_process("run", *RUN_OPTIONS, "--run-dir", str(directory), *words)
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
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
                return directory, log, process.wait(POLL_INTERVAL)
            steps = 0
            with contextlib.suppress(DoctorError, OSError):
                ranks = glance(directory).ranks
                known = (rank.status.step for rank in ranks if rank.status is not None)
                steps = max(known, default=0)
            step(steps)
    finally:
        # It still exists if this command was asked to end.
        deadline = time.monotonic() + END_TIMEOUT
        while process.poll() is None:
            # After the second SIGTERM it no longer waits for the job.
            process.send_signal(signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT / 4)


WEAK, STRONG = "weak", "strong"

_LOG_END = 4096


class Session:
    """The runs of one command.

    Args:
        folder: The directory for the run directories and logs.
        words: Returns the arguments of ``ddpdoctor run`` for a run.
        warmup: Steps at the beginning of each run that do not count.
        scaling: `WEAK` or `STRONG`: the batch of a rank is that of the smallest size, or its share
            of that. Empty: the script's own.
        keep: Called after each run with all outcomes so far.
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
        self.outcomes: list[Outcome] = []  # The outcomes so far

    def run(self, planned: Sequence[Planned]) -> None:
        """Make the runs. A size and variant that failed is not repeated.

        Raises:
            DoctorError: A run showed that the job cannot be measured this way.
        """
        began, of = time.monotonic(), planned[-1].number if planned else 0
        try:
            for done, each in enumerate(planned):
                if any(
                    other.failure
                    and (other.planned.size, other.planned.variant) == (each.size, each.variant)
                    for other in self.outcomes
                ):
                    continue
                head = f"run {each.number} of {of}: {each.words}"
                left = (time.monotonic() - began) / done * (len(planned) - done) if done else None
                self._make(each, head, left)
        finally:
            self._line.close()

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

    def _fixed_batch(self, planned: Planned) -> dict[str, str]:
        """Return the batch that weak or strong scaling needs. Empty for the smallest size."""
        if not self._scaling or "batch_size" in planned.variant.overrides:
            return {}
        if self._batch is None:
            first = next((each for each in self.outcomes if each.measured is not None), None)
            if first is None:
                return {}
            measured = first.measured
            if measured is None or measured.samples is None:
                raise DoctorError(
                    f"--{self._scaling} needs the batch, and the records do not show it",
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
        """Check that the ranks really got the requested batch."""
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
    """Return the outcome of a run.

    Raises:
        DoctorError: It succeeded, but recorded nothing that can be measured.
    """
    outcome = Outcome(planned, directory, log, status, None)
    try:
        run = RunReader(directory, lenient=True).snapshot()
    except (DoctorError, OSError):
        return replace(outcome, failure=_failure_text(status, log))
    # A rule that fails does not keep the others from running.
    found = tuple(examine(run, RULES.values(), failed=lambda *_: None))
    outcome = replace(outcome, findings=found)
    # Torch itself can abort or hang while the interpreter exits, after training is over.
    trained = bool(run.last) and all(rank.ended for rank in run.last)
    broken = any(
        rank.records.of(ErrorRecord) or any(each.status for each in rank.records.of(ExitRecord))
        for rank in run.last
    )
    if status != 0 and (broken or not trained):
        return replace(outcome, failure=_diagnosis(status, found, log))
    measured = measure(run, warmup)
    if measured is not None:
        return replace(outcome, measured=measured)
    if not run.ranks and planned.size.ranks == 1:
        why = "it joins no process group with one rank, so there are no records of it"
        return replace(outcome, failure=f"not measured: {why}")
    raise _unmeasured(run, planned, warmup)


def _unmeasured(run: Run, planned: Planned, warmup: int) -> DoctorError:
    """Return why a job that succeeded cannot be measured."""
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


def _diagnosis(status: int, found: Sequence[Finding], log: Path) -> str:
    """Say how a run failed, in a clause, with the worst finding."""
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
    """Summarize an outcome in a line."""
    measured = outcome.measured
    if measured is None:
        return outcome.failure
    what = "samples" if measured.samples is not None else "steps"
    rate = formatting.figures(measured.rate)
    return f"{formatting.time(measured.step)} an iteration, {rate} {what}/s"
