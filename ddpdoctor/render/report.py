"""What the supervisor says to the person, and when: each finding once, a summary at the end."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.faults import Faults
from ddpdoctor.core.finding import RULES, Finding, examine
from ddpdoctor.core.job import OwnOptions
from ddpdoctor.core.working_directory import relative
from ddpdoctor.render import summary, terminal
from ddpdoctor.run import rundir
from ddpdoctor.run.reported import Event, FindingLog, Reported, Withdrawn, in_words

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

PREFIX = "ddpdoctor: "


class Reporter:
    """Says findings and notes on stderr, and writes findings to the JSON file if one was asked for.

    Args:
        say: Writes text between the job's lines.
        options: ``quiet``, ``json``, ``output`` and ``selection`` are used.
        keep: Puts the whole text of a finding's traceback into the run directory, and says where.

    Raises:
        DoctorError: The JSON file cannot be written.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        options: OwnOptions,
        keep: Callable[[Run, Finding], Path | None] | None = None,
    ) -> None:
        self._say = say
        self._keep = keep
        self._quiet = options.quiet
        self._json: int | None = None
        self._output = options.output
        self._selection = options.selection
        self._ignored = 0
        self._log = FindingLog()
        self._found: list[Finding] = []
        self._news: list[Event] = []
        self._warned = False
        self.faults = Faults(self.say)
        """What failed in ddpdoctor itself."""
        if options.json is not None:
            self._json = _opened(options.json)
        self._json_name = options.json

    @property
    def found(self) -> list[Finding]:
        """What the last examination found, selected or not."""
        return self._found

    @property
    def news(self) -> list[Event]:
        """What was said and withdrawn after the last examination."""
        return self._news

    @property
    def current(self) -> list[Finding]:
        """What was reported and not withdrawn."""
        return self._log.current

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

    def begin(self) -> None:
        """The job is about to start, and will be watched."""
        if terminal.width(2) is not None:
            self.note("watch it: `ddpdoctor top` in another terminal")

    def examine(self, run: Run) -> None:
        """Run the rules and say what is new, and what stands no more."""
        import ddpdoctor.rules  # noqa: F401 (registers the rules; not before they are needed)

        failed: list[tuple[str, Exception]] = []
        rules = [rule for rule in RULES.values() if rule.code not in self.faults]
        self._found = examine(
            run, rules, failed=lambda rule, error: failed.append((rule.code, error))
        )
        self.faults.failed(failed)
        # What a rule found before it failed still stands.
        unread = [code for code in RULES if code in self.faults]
        selected = self._selection.of(self._found)
        self._ignored = len(self._found) - len(selected)
        self._news = self._log.take(selected, run, unread=unread)
        for event in self._news:
            if isinstance(event, Reported):
                self._tell_guarded(run, event.finding)
            else:
                self._withdraw(run, event)

    def _tell_guarded(self, run: Run, finding: Finding) -> None:
        """Tell a finding; without what is around its message, if that cannot be rendered."""
        part = f"the text of {finding.code}"
        self.faults.guarded(part, self._tell, run, finding)
        if part in self.faults:
            self._say(_lines(f"{finding.severity.label} {finding.code}: {finding.message}"))

    def _withdraw(self, run: Run, withdrawn: Withdrawn) -> None:
        from ddpdoctor.render import json_lines

        one = single_lines(self._output)
        if one is not None:
            self._say(one.retraction(withdrawn, script(run)) + "\n")
        else:
            self._say(_lines(in_words(withdrawn)))
        self._write_json(json_lines.retraction(withdrawn, json_lines.head(run)))

    def _tell(self, run: Run, finding: Finding) -> None:
        from ddpdoctor.render import console, json_lines

        self._write_json(json_lines.line(finding, json_lines.head(run, finding.restart)))
        one = single_lines(self._output)
        if one is not None:
            self._say(one.line(finding, script(run)) + "\n")
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

    def summary(self, run: Run) -> None:
        """The last lines: what ran, how fast, what was found, where the records are."""
        if self._quiet:
            return
        for line in self.faults.guarded("the summary", lambda: list(summary.lines(run))) or ():
            self.note(line)
        self.note(f"{summary.count(self.current, self._ignored)}; records in {run.path}")
        if terminal.width(2) is not None:
            own = run.path.parent == rundir.base_directory()
            name = run.path.name if own else relative(str(run.path))
            self.note(f"see it again: `ddpdoctor report {name}`")


def _opened(name: str) -> int:
    """A file for lines of JSON. It may be a pipe of the shell's, `>(jq)`: it is opened once.

    Raises:
        DoctorError: It cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(name, flags, 0o666)
    except OSError as error:
        raise DoctorError(
            f"cannot write {name}: {error.strerror}", "choose another file for --json"
        ) from None


def single_lines(output: str) -> ModuleType | None:
    """The module that words a finding as one line, of a format of ``--output``; None for text."""
    if output == "text":
        return None
    from ddpdoctor.render import github, problems

    return {"problems": problems, "github": github}[output]


def script(run: Run) -> str:
    """The file that the job runs, in full."""
    command = run.manifest.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    script = next((word for word in words if word.endswith(".py")), words[-1] if words else "")
    return os.path.join(str(run.manifest.get("cwd", "")), script)


def _lines(text: str) -> str:
    """A sentence of ours, wrapped if it goes to a terminal."""
    width = terminal.width(2)
    text = shown(text)
    rows = [text]
    if width:
        # As findings: a path, or another long word, stays whole.
        rows = textwrap.wrap(
            text, width - len(PREFIX), break_long_words=False, break_on_hyphens=False
        )
    return "".join(f"{PREFIX}{row}\n" for row in rows)
