"""Print the results of preflight checks for a person: progress, table, findings, summary."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from ddpdoctor.core import formatting
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.preflight.check import Outcome, Status, outcome_record
from ddpdoctor.render.json_lines import FORMAT
from ddpdoctor.render.terminal import StatusLine

_STYLE = {
    Status.PASS: "32",
    Status.WARN: "1;33",
    Status.FAIL: "1;31",
    Status.SKIPPED: "2",
    Status.COULD_NOT_RUN: "1;35",
}
_NAME = 18
"""Columns of a check's name."""

_WORD = 7
"""Columns of how it ended."""

_UNBOUNDED = 1 << 20

_SHORT = {Status.COULD_NOT_RUN: "unknown"}
"""What the table has no room for."""

_LEAST = 24
"""Columns that the details get at least."""


def table(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """A line for each check: its name, how it ended, and what was really tested.

    Without a width, as in a pipe, nothing is wrapped.
    """
    lines = []
    room = max(_LEAST, width - _NAME - _WORD - 2) if width is not None else _UNBOUNDED
    for outcome in outcomes:
        word = _SHORT.get(outcome.status, outcome.status.value).ljust(_WORD)
        if colour:
            word = f"\x1b[{_STYLE[outcome.status]}m{word}\x1b[0m"
        details = textwrap.wrap(shown(outcome.detail, "\n\t"), room, break_on_hyphens=False) or [""]
        lines.append(f"{outcome.check:<{_NAME}} {word} {details[0]}".rstrip())
        lines += [f"{'':<{_NAME + _WORD + 2}}{each}" for each in details[1:]]
    return "".join(f"{line}\n" for line in lines)


def findings(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """All findings, the worst first, with an empty line before each."""
    found = [finding for outcome in outcomes for finding in outcome.findings]
    found.sort(key=lambda finding: (-finding.severity, finding.code))
    if not found:
        return ""
    # Rich takes a third of the time that the program takes to start.
    from ddpdoctor.render import console

    return "".join("\n" + console.render(finding, colour=colour, width=width) for finding in found)


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """How many checks ended how, in a line: ``12 checks in 1.4 s: 11 passed, 1 skipped``."""
    words = {
        Status.FAIL: "failed",
        Status.WARN: "warned",
        Status.COULD_NOT_RUN: "could not run",
        Status.SKIPPED: "skipped",
        Status.PASS: "passed",
    }
    counts = [
        f"{count} {word}"
        for status, word in words.items()
        if (count := sum(outcome.status is status for outcome in outcomes))
    ]
    return f"{formatting.count(len(outcomes), 'check')} in {seconds:.1f} s: {', '.join(counts)}"


def document(
    outcomes: Sequence[Outcome],
    host: str,
    exit_status: int,
    seconds: float,
    *,
    nodes: Sequence[Mapping[str, Any]] = (),
    exclude: Sequence[str] = (),
) -> str:
    """All outcomes as one JSON object.

    Args:
        outcomes: Of the checks.
        host: This machine's name.
        exit_status: Of the command.
        seconds: That all of it took.
        nodes: The nodes that met, with what their own checks found.
        exclude: The host names of those that a job has to do without.
    """
    return json_text(
        {
            "format": FORMAT,
            "host": host,
            "exit_status": exit_status,
            "seconds": round(seconds, 3),
            "nodes": list(nodes),
            "exclude": list(exclude),
            "checks": [outcome_record(outcome) for outcome in outcomes],
        },
        indent=2,
    )


class Progress(StatusLine):
    """A line on a terminal that says what is still running; nothing anywhere else.

    Args:
        names: The checks that were started.
        row: Prints what is known of a check that ended.
        stream: Where the line stands.
    """

    def __init__(
        self,
        names: Sequence[str],
        row: Callable[[Outcome], None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__(stream)
        self._row = row
        self._running = list(names)
        self._total = len(self._running)
        self._count()

    def seen(self, outcome: Outcome) -> None:
        """A check ended."""
        if outcome.check in self._running:
            self._running.remove(outcome.check)
        row = self._row
        if row is not None:
            self.aside(lambda: row(outcome))
        self._count()

    def _count(self) -> None:
        done = self._total - len(self._running)
        self.show(f"{done} of {self._total} checks done; running: {', '.join(self._running)}")
