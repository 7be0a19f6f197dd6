"""All runs of a command, one after another, and what is kept of them whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import ddpdoctor.rules  # noqa: F401 (registers the rules)
from ddpdoctor.analysis.exit_statuses import signal_name
from ddpdoctor.core import opening, units
from ddpdoctor.core.errors import HANG, DoctorError
from ddpdoctor.core.finding import RULES, Finding, Rule, Severity, examine
from ddpdoctor.render.status_line import StatusLine
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.process import ErrorRecord, ExitRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.scale import running
from ddpdoctor.scale.measured import measure
from ddpdoctor.scale.outcome import Outcome
from ddpdoctor.scale.plan import Planned, Size

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
        rest = f", about {units.duration(left)} left" if left is not None else ""
        self._line.show(f"{head}{rest}")
        overrides = {**planned.variant.overrides, **self._fixed_batch(planned)}

        def step(number: int) -> None:
            self._line.show(f"{head}: {units.count(number, 'step') if number else 'starts'}{rest}")

        directory, log, status = running.start(
            planned, self._words(planned), overrides, self._folder, step
        )
        outcome = replace(
            judged(planned, directory, log, status, self._warmup), overrides=overrides
        )
        self._check_batch(outcome)
        self.outcomes.append(outcome)
        self._keep(self.outcomes)
        self._line.say(f"{head}: {in_words(outcome)}")

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


def judged(planned: Planned, directory: Path, log: Path, status: int, warmup: int) -> Outcome:
    """What came of a run.

    Raises:
        DoctorError: It went through and recorded nothing that can be measured.
    """
    outcome = Outcome(planned, directory, log, status, None)
    try:
        run = RunReader(directory, lenient=True).snapshot()
    except (DoctorError, OSError):
        return replace(outcome, failure=_failed(status, log))
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
        f"the job made {units.count(steps, 'step')} ({planned.words}), and the first {warmup} are "
        "dropped as warm-up",
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
        return "hung, and was ended" if status == HANG else _failed(status, log)
    how = "hung" if status == HANG else "crashed"
    where = f" ({first.location.path}:{first.location.line})" if first.location else ""
    return f"{how}: {first.code} {first.message}{where}"


def _failed(status: int, log: Path) -> str:
    try:
        text = opening.ending(log, _LOG_END).decode("utf-8", "replace")
    except OSError:
        text = ""
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    how = f"ended by {signal_name(-status)}" if status < 0 else f"failed with exit status {status}"
    return f"{how}: {last}" if last else how


def in_words(outcome: Outcome) -> str:
    """What came of a run, in a line."""
    measured = outcome.measured
    if measured is None:
        return outcome.failure
    what = "samples" if measured.samples is not None else "steps"
    return f"{units.time(measured.step)} an iteration, {units.figures(measured.rate)} {what}/s"
