"""Print the results of preflight checks for a person: progress, table, findings, summary."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from ddpdoctor.core import formatting
from ddpdoctor.core.formatting import json_text, shown
from ddpdoctor.preflight.check import Outcome, Status, outcome_record
from ddpdoctor.render.json_lines import FORMAT
from ddpdoctor.render.terminal import UNWRAPPED, StatusLine, style_of

_STYLES = {
    Status.PASS: "ok",
    Status.WARN: "warning",
    Status.FAIL: "error",
    Status.SKIPPED: "dim",
    Status.COULD_NOT_RUN: "other",
}
_NAME, _STATUS, _MIN_DETAIL = 18, 7, 24
"""Columns of a check's name, of its status, and of its details at least."""


def table(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """Return a line for each check: its name, how it ended, and what was really tested.

    Without a width, as in a pipe, nothing is wrapped.
    """
    lines = []
    room = max(_MIN_DETAIL, (width or UNWRAPPED) - _NAME - _STATUS - 2)
    for outcome in outcomes:
        status = outcome.status
        word = "unknown" if status is Status.COULD_NOT_RUN else status.value
        word = word.ljust(_STATUS)
        if colour:
            word = style_of(_STYLES[status]).render(word)
        details = textwrap.wrap(shown(outcome.detail, "\n\t"), room, break_on_hyphens=False) or [""]
        lines.append(f"{outcome.check:<{_NAME}} {word} {details[0]}".rstrip())
        lines += [f"{'':<{_NAME + _STATUS + 2}}{each}" for each in details[1:]]
    return "".join(f"{line}\n" for line in lines)


def findings(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """Return all findings, the worst first, with an empty line before each."""
    found = [finding for outcome in outcomes for finding in outcome.findings]
    found.sort(key=lambda finding: (-finding.severity, finding.code))
    if not found:
        return ""
    # Imported here, since most checks find nothing.
    from ddpdoctor.render import console

    return "".join("\n" + console.render(finding, colour=colour, width=width) for finding in found)


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Count how checks ended: ``12 checks in 1.4 s: 11 passed, 1 skipped``."""
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
    """Return all outcomes as one JSON object.

    Args:
        outcomes: Of the checks.
        host: This machine's name.
        exit_status: Of the command.
        seconds: How long all of it took.
        nodes: The nodes that met, with what their own checks found.
        exclude: The host names of nodes that a job should not use.
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
    """A line on a terminal with the checks that are still running. Elsewhere it shows nothing.

    Args:
        names: The checks that were started.
        row: Prints the result of a check that ended.
        stream: The output.
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
        """Note that a check ended."""
        if outcome.check in self._running:
            self._running.remove(outcome.check)
        row = self._row
        if row is not None:
            self.aside(lambda: row(outcome))
        self._count()

    def _count(self) -> None:
        done = self._total - len(self._running)
        self.show(f"{done} of {self._total} checks done; running: {', '.join(self._running)}")
