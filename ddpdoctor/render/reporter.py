"""Report each finding once while a job runs, and summarize the run at its end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.core import formatting, plugins
from ddpdoctor.core.errors import DoctorError, Faults
from ddpdoctor.core.finding import RULES, Finding, examine
from ddpdoctor.core.formatting import shown
from ddpdoctor.core.job import OwnOptions
from ddpdoctor.core.opening import relative_path
from ddpdoctor.lint.job import place_of
from ddpdoctor.render import terminal
from ddpdoctor.run import rundir
from ddpdoctor.run.records.process import OverrideRecord
from ddpdoctor.run.records.supervisor import HeadRecord, JobRecord, UnwatchedRecord
from ddpdoctor.run.records.training import CapsuleRecord
from ddpdoctor.run.reported import Event, FindingLog, Withdrawn, in_words
from ddpdoctor.run.status import PHASES

if TYPE_CHECKING:
    from ddpdoctor.lint.job import SourceCheck
    from ddpdoctor.render.console import LineFormat
    from ddpdoctor.run.snapshot import Rank, Run


# -- a run in a few lines


def _name(run: Run) -> str:
    """Return the name by which commands find a run."""
    own = run.path.parent == rundir.base_directory()
    return run.path.name if own else relative_path(str(run.path))


def _kept_lines(run: Run) -> Iterator[str]:
    """Yield a line for each step that a rank kept, or why it could not."""
    for rank in run.last:
        for record in rank.records.of(CapsuleRecord):
            what = f"rank {rank.rank} kept step {record.step}"
            if record.why_not:
                yield f"{what.replace('kept', 'could not keep')}: {record.why_not}"
            else:
                yield f"{what}: ddpdoctor replay {_name(run)} --rank {rank.rank}"


def summary_lines(run: Run) -> Iterator[str]:
    """Yield the command, its end, its speed, and unreadable parts."""
    for restart in run.restarts[:-1]:
        from ddpdoctor.diagnose.crashes.rank_endings import endings

        ended = next((each for each in endings(run, restart) if not each.victim), None)
        why = "" if ended is None else f"; {ended.name}: {ended.text}"
        ranks = run.attempt(restart)
        text = f"{formatting.count(len(ranks), 'rank')}, {_steps_text(ranks)}"
        yield f"attempt {restart + 1}: {text}{why}"
    again = f"attempt {run.restarts[-1] + 1}: " if len(run.restarts) > 1 else ""
    yield f"{again}{_size_text(run)}{_ending_text(run)}"
    yield from _judge_line(run)
    yield from _pace_lines(run)
    overridden = sorted(
        {
            f"{record.name}={record.value}"
            for rank in run.last
            for record in rank.records.of(OverrideRecord)
        }
    )
    if overridden:
        yield f"overridden by ddpdoctor: {', '.join(overridden)}"
    yield from _kept_lines(run)
    ends = [rank.ended for rank in run.last if rank.ended is not None]
    over = sum(end.over for end in ends)
    if over > 0:
        spent = 100 * sum(end.spent for end in ends) / over
        followed = 100 * sum(end.followed for end in ends) / over
        yield (
            f"ddpdoctor took {spent + followed:.2f} % of the ranks' time: "
            f"{followed:.2f} % to follow steps, {spent:.2f} % to examine more closely"
        )
    lost = sum(rank.status.dropped for rank in run.last if rank.status is not None)
    if lost:
        yield f"{lost} records could not be written and are missing"
    for line in run.unreadable[:3]:
        yield f"not read: {line}"


def _judge_line(run: Run) -> Iterator[str]:
    """Name the host that judged the ranks of all nodes, if it is another one."""
    for head in run.supervisor.of(HeadRecord)[-1:]:
        if head.state == "linked":
            yield f"{head.host} judged the ranks of all nodes; its records are in {head.directory}"


def findings_count(current: Sequence[Finding], ignored: int = 0) -> str:
    """Count findings: ``findings: 1 error, 2 warnings``, and those ignored."""
    counts = Counter(finding.severity.label for finding in current)
    texts = ", ".join(
        f"{counts[label]} info" if label == "info" else formatting.count(counts[label], label)
        for label in ("error", "warning", "info")
        if counts[label]
    )
    return f"findings: {texts or 'none'}{f' ({ignored} ignored)' if ignored else ''}"


def _size_text(run: Run) -> str:
    ranks = run.last
    if not ranks:
        unwatched = run.supervisor.first(UnwatchedRecord)
        why = unwatched.why if unwatched is not None else ""
        if why or run.late:
            return f"no rank was watched{why and f': {why}'}"
        return "no rank joined a process group"
    seen = {rank.rank for rank in ranks}
    world = max((rank.status.world_size for rank in ranks if rank.status is not None), default=0)
    of = f" of {world}" if world > len(seen) else ""
    return f"{len(seen)}{of} rank{'' if len(seen) == 1 and not of else 's'}, {_steps_text(ranks)}"


def _steps_text(ranks: Sequence[Rank]) -> str:
    steps = max((rank.status.step for rank in ranks if rank.status is not None), default=0)
    return formatting.count(steps, "step")


def _pace_lines(run: Run) -> Iterator[str]:
    """Yield the median step, and the share of each phase in all steps; nothing without steps."""
    from statistics import median

    from ddpdoctor.diagnose.speed.pace import WARM_UP
    from ddpdoctor.run.step_series import split_steps, unclocked

    timed = [step for steps in split_steps(run).values() for step in steps if step.total > 0]
    timed = [step for step in timed if step.split] or timed
    timed = [step for step in timed if step.step >= WARM_UP] or timed
    if not timed:
        return
    text = f"median step {formatting.time(median(step.total for step in timed) / 1e9)}"
    total = sum(step.total for step in timed)
    shares = []
    for name in (*PHASES, "wait"):
        share = sum(getattr(step, name) for step in timed) / total
        if share >= 0.01:
            shares.append(f"{name} {100 * share:.0f} %")
    yield f"{text}: {', '.join(shares)}" if shares else text
    for kind in sorted({unclocked(rank) for rank in run.last} - {""}):
        yield f"these are times of the hosts: what the {kind} device does meanwhile is not known"


def _ending_text(run: Run) -> str:
    status = run.exit_status
    if status is None:
        return ""
    if run.late:
        return " watched" if run.ranks else ""
    if status == 0:
        return "; the job succeeded"
    if run.ended_for_hang:
        return "; the job hung and was ended"
    if run.ended_by_debugger:
        return "; the job was ended by the debugger"
    from ddpdoctor.diagnose.crashes.rank_endings import signal_name

    how = f"ended by {signal_name(-status)}" if status < 0 else f"failed with exit status {status}"
    why = next((job.why for job in run.supervisor.of(JobRecord) if job.why), "")
    asked = " after it was asked to stop" if run.stopped_at is not None else ""
    return f"; the job {how}{asked}" + (f": {why}" if asked and why else "")


# -- the supervisor's output

PREFIX = "ddpdoctor: "


class Reporter:
    """Prints findings and notes on stderr, and writes findings to the JSON file, if any.

    Args:
        say: Writes text between the job's lines.
        options: ``quiet``, ``json``, ``output`` and ``selection`` are used.
        keep: Writes a finding's whole traceback into the run directory. Returns the path.
        source: The check of the job's code, if there is one.

    Raises:
        DoctorError: The JSON file cannot be written.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        options: OwnOptions,
        keep: Callable[[Run, Finding], Path | None] | None = None,
        source: SourceCheck | None = None,
    ) -> None:
        self._say = say
        self._keep = keep
        self._source = source
        self._quiet = options.quiet
        self._output = options.output
        self._selection = options.selection
        self._ignored = 0
        self._log = FindingLog()
        self.found: list[Finding] = []  # Findings of the last examination, selected or not
        self.in_code: list[Finding] = []  # Errors in the job's code that were printed
        self.news: list[Event] = []  # Findings reported and withdrawn after the last examination
        self._warned = False
        self.faults = Faults(self.say)  # Failures of ddpdoctor itself
        self._json_name = options.json
        self._json: int | None = None
        if options.json is not None:
            # It may be a pipe of the shell, `>(jq)`, so it is opened once.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            try:
                self._json = os.open(options.json, flags, 0o666)
            except OSError as error:
                raise DoctorError(
                    f"cannot write {options.json}: {error.strerror}",
                    "choose another file for --json",
                ) from None

    @property
    def current(self) -> list[Finding]:
        """The findings reported and not withdrawn."""
        return self._log.current

    def note(self, text: str) -> None:
        """Print a line about an action of ddpdoctor, unless ``--quiet``."""
        if not self._quiet:
            self._say(_prefixed(text))

    def say(self, text: str) -> None:
        """Print a line that requires action, even with ``--quiet``."""
        self._say(_prefixed(text))

    def warn(self, text: str) -> None:
        """Print a warning, but only the first one."""
        if not self._warned:
            self._warned = True
            self._say(_prefixed(f"warning: {text}"))

    def begin(self) -> None:
        """Print how to watch the job, which is about to start."""
        if terminal.width(2) is not None:
            self.note("watch it: `ddpdoctor top` in another terminal")

    def tell_source(self, timeout: float = 0.0) -> None:
        """Print the errors in the job's code, and wait at most ``timeout`` seconds for them."""
        if self._source is None:
            return
        errors = self._source.news(timeout)
        while self._source.remarks:
            self.say(self._source.remarks.popleft())
        for each in errors:
            if each.code in self._selection:
                self.in_code.append(each)
                one = line_format(self._output)
                if one is not None and each.location is not None:
                    self._say(one.line(each, each.location.path) + "\n")
                else:
                    self.say(f"{place_of(each)}: {each.severity.label} {each.code}: {each.message}")

    def examine(self, run: Run, *, left: bool = False) -> None:
        """Run the rules, and report new and withdrawn findings.

        With ``left``, new findings are left to another node, but earlier ones may be withdrawn.
        """
        import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules; not before they are needed)

        for line in plugins.take_failures():
            self.say(f"warning: {line}")
        failed: list[tuple[str, Exception]] = []
        rules = [rule for rule in RULES.values() if rule.code not in self.faults]
        self.found = examine(
            run, rules, failed=lambda rule, error: failed.append((rule.code, error))
        )
        self.faults.failed(failed)
        if self._source is not None:
            self.found = self._source.placed(self.found)
        # Earlier findings of a failed rule remain valid.
        unread = [code for code in RULES if code in self.faults]
        if left:
            known = {each.code for each in self.current}
            self.found = [each for each in self.found if each.code in known]
        selected = self._selection.of(self.found)
        self._ignored = len(self.found) - len(selected)
        self.news = self._log.take(selected, run, unread=unread)
        for event in self.news:
            if isinstance(event, Withdrawn):
                from ddpdoctor.render import json_lines

                one = line_format(self._output)
                if one is not None:
                    self._say(one.retraction(event, job_script(run)) + "\n")
                else:
                    self._say(_prefixed(in_words(event)))
                self._write_json(json_lines.retraction(event, json_lines.head(run)))
                continue
            finding = event.finding
            part = f"the text of {finding.code}"
            self.faults.guarded(part, self._report, run, finding)
            if part in self.faults:
                # Print only its message, because the rest cannot be rendered.
                self._say(_prefixed(f"{finding.severity.label} {finding.code}: {finding.message}"))

    def _report(self, run: Run, finding: Finding) -> None:
        from ddpdoctor.render import console, json_lines

        self._write_json(json_lines.line(finding, json_lines.head(run, finding.restart)))
        one = line_format(self._output)
        if one is not None:
            self._say(one.line(finding, job_script(run)) + "\n")
            return
        width = terminal.width(2)
        text = console.render(
            finding,
            colour=terminal.wants_colour(),
            width=None if width is None else width - len(PREFIX),
            written=console.written_before(run),
            kept=self._keep(run, finding) if self._keep is not None else None,
        )
        self._say("".join(f"{PREFIX}{line}\n" for line in text.splitlines()))

    def _write_json(self, line: str) -> None:
        if self._json is not None:
            try:
                os.write(self._json, f"{line}\n".encode())
            except OSError as error:
                self.warn(f"cannot write {self._json_name}: {error.strerror}")

    def finish(self, run: Run | None, status: int) -> None:
        """Write the last line of the JSON file. ``run`` is None if the job ran unwatched."""
        from ddpdoctor.render import json_lines

        self._write_json(json_lines.end(status, self.current, json_lines.head(run)))

    def summary(self, run: Run, judge: str = "") -> None:
        """Print the last lines: the command, its speed, the findings, and the records' directory.

        ``judge`` is the host that reports the findings of all nodes, empty if it is this one.
        """
        if self._quiet:
            return
        if judge and not self.current:
            # Under Slurm all nodes write into one log. Keep this node's part short.
            self.note(f"findings: see {judge}, which judged all ranks; records in {run.path}")
            return
        for line in self.faults.guarded("the summary", lambda: list(summary_lines(run))) or ():
            self.note(line)
        self.note(f"{findings_count(self.current, self._ignored)}; records in {run.path}")
        if terminal.width(2) is not None:
            self.note(f"see it again: `ddpdoctor report {_name(run)}`")


def line_format(output: str) -> LineFormat | None:
    """Return the format of ``--output`` for one-line findings. None for text."""
    if output == "text":
        return None
    from ddpdoctor.render import console

    return console.LINE_FORMATS[output]


def job_script(run: Run) -> str:
    """Return the full path of the file that the job runs."""
    words = run.command
    script = next((word for word in words if word.endswith(".py")), words[-1] if words else "")
    return os.path.join(str(run.manifest.get("cwd", "")), script)


def _prefixed(text: str) -> str:
    """Prefix one of our sentences, and wrap it for a terminal."""
    width = terminal.width(2)
    text = shown(text)
    rows = terminal.folded(text, width - len(PREFIX)) if width else [text]
    return "".join(f"{PREFIX}{row}\n" for row in rows)
