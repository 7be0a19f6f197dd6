"""What the supervisor says to the person, and when: each finding once, a summary at the end."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Callable
from statistics import median

from ddpdoctor.errors import DoctorError
from ddpdoctor.finding import RULES, Finding, examine
from ddpdoctor.launch.command import OwnOptions
from ddpdoctor.run import PHASES, Run

PREFIX = "ddpdoctor: "


class Reporter:
    """Says findings and notes on stderr, and writes findings to the JSON file if one was asked for.

    Args:
        say: Writes text between the job's lines.
        options: ``quiet``, ``json`` and ``output`` are used.

    Raises:
        DoctorError: The JSON file cannot be written.
    """

    def __init__(self, say: Callable[[str], None], options: OwnOptions) -> None:
        self._say = say
        self._quiet = options.quiet
        self._json = options.json
        self._output = options.output
        self._said: set[object] = set()
        self._standing: list[Finding] = []
        self._warned = False
        if self._json is not None:
            try:
                open(self._json, "w").close()
            except OSError as error:
                raise DoctorError(
                    f"cannot write {self._json}: {error.strerror}", "choose another file for --json"
                ) from None

    @property
    def standing(self) -> list[Finding]:
        """What the last examination found; what was said before may hold no more."""
        return self._standing

    def note(self, text: str) -> None:
        """A line about what ddpdoctor does; not with ``--quiet``."""
        if not self._quiet:
            self._say(_lines(text))

    def say(self, text: str) -> None:
        """A line that somebody has to act on; with ``--quiet``, too."""
        self._say(_lines(text))

    def warn(self, text: str) -> None:
        """A line that has to be seen, at most one of its kind."""
        if not self._warned:
            self._warned = True
            self._say(_lines(f"warning: {text}"))

    def examine(self, run: Run) -> None:
        """Run the rules and say what is new."""
        import ddpdoctor.rules  # noqa: F401 (registers the rules; not before they are needed)

        self._standing = examine(run, RULES.values())
        for finding in self._standing:
            if finding.identity not in self._said:
                self._said.add(finding.identity)
                self._tell(run, finding)

    def _tell(self, run: Run, finding: Finding) -> None:
        from ddpdoctor.render import console, json_lines, problems

        if self._output == "problems":
            self._say(problems.line(finding, _script(run)) + "\n")
            self._write_json(json_lines.line(finding))
            return
        colour = console.wants_colour()
        width = (terminal_width(2) or 100) - len(PREFIX)
        text = console.render(finding, colour=colour, width=width)
        self._say("".join(f"{PREFIX}{line}\n" for line in text.splitlines()))
        self._write_json(json_lines.line(finding))

    def _write_json(self, line: str) -> None:
        if self._json is not None:
            try:
                with open(self._json, "a") as file:
                    file.write(line + "\n")
            except OSError as error:
                self.warn(f"cannot write {self._json}: {error.strerror}")

    def summary(self, run: Run) -> None:
        """The last lines: what ran, how fast, what was found, where the records are."""
        if self._quiet:
            return
        self.note(f"{_size(run)}{_ending(run)}")
        pace = _pace(run)
        if pace:
            self.note(pace)
        lost = sum(rank.status.dropped for rank in run.last if rank.status is not None)
        if lost:
            self.note(f"{lost} records could not be written and are missing")
        for line in run.unreadable[:3]:
            self.note(f"not read: {line}")
        counts = Counter(finding.severity.label for finding in self._standing)
        said = ", ".join(
            f"{counts[label]} {label}{'s' if counts[label] > 1 and label != 'info' else ''}"
            for label in ("error", "warning", "info")
            if counts[label]
        )
        self.note(f"findings: {said or 'none'}; records in {run.path}")


def _script(run: Run) -> str:
    """The file that the job runs, in full."""
    words = [str(word) for word in run.manifest.get("command", ())]
    script = next((word for word in words if word.endswith(".py")), words[-1] if words else "")
    return os.path.join(str(run.manifest.get("cwd", "")), script)


def _lines(text: str) -> str:
    """A sentence of ours, wrapped if it goes to a terminal."""
    width = terminal_width(2)
    rows = textwrap.wrap(text, width - len(PREFIX)) if width else [text]
    return "".join(f"{PREFIX}{row}\n" for row in rows)


def terminal_width(descriptor: int) -> int | None:
    """Columns to write for, from 40 to 100; None if it is no terminal."""
    try:
        return max(40, min(os.get_terminal_size(descriptor).columns, 100))
    except OSError:
        return None


def _size(run: Run) -> str:
    ranks = run.last
    if not ranks:
        return "no rank joined a process group"
    seen = {rank.rank for rank in ranks}
    world = max((rank.status.world_size for rank in ranks if rank.status is not None), default=0)
    of = f" of {world}" if world > len(seen) else ""
    text = f"{len(seen)}{of} rank{'' if len(seen) == 1 and not of else 's'}"
    steps = max((rank.status.step for rank in ranks if rank.status is not None), default=0)
    return f"{text}, {steps} step{'' if steps == 1 else 's'}"


def _pace(run: Run) -> str:
    """The median step and its parts, empty without steps."""
    timed = [step for rank in run.last for step in rank.steps if step.total > 0]
    timed = [step for step in timed if step.split] or timed
    if not timed:
        return ""
    text = f"median step {_duration(median(step.total for step in timed))}"
    shares = []
    for name in (*PHASES, "wait"):
        share = median(getattr(step, name) / step.total for step in timed)
        if share >= 0.01:
            shares.append(f"{name} {100 * share:.0f} %")
    return f"{text}: {', '.join(shares)}" if shares else text


def _ending(run: Run) -> str:
    status = run.exit_status
    if status is None:
        return ""
    if status == 0:
        return "; the job succeeded"
    from ddpdoctor.rules.endings import signal_name

    how = f"ended by {signal_name(-status)}" if status < 0 else f"failed with exit status {status}"
    asked = " after it was asked to stop" if run.stopped_at is not None else ""
    return f"; the job {how}{asked}"


def _duration(nanoseconds: float) -> str:
    seconds = nanoseconds / 1e9
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"
