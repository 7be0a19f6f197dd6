"""The text output of ``ddpdoctor check``: the verdict, each cause, and passed checks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ddpdoctor.core.finding import Finding, Severity, worst_first
from ddpdoctor.core.formatting import count, listed, shown
from ddpdoctor.preflight.check import CHECKS, Outcome, Status
from ddpdoctor.render.terminal import UNWRAPPED, shortened, style_of

_STYLES = {
    Status.FAIL: "error",
    Status.COULD_NOT_RUN: "other",
    Status.WARN: "warning",
    Status.PASS: "ok",
    Status.SKIPPED: "dim",
}
"""Styles by status, the worst status first."""

_NAME, _STATUS, _MIN_DETAIL = 18, 7, 24
"""Columns of a check's name and status, and minimum columns of its details."""

_GROUP = 9  # Columns of a group's name

REDUCTIONS = ("collectives", "gloo-nodes")  # Checks that prove that a job can start


@dataclass(frozen=True)
class View:
    """The node that the output is for, and how to print it."""

    host: str  # This machine
    nproc: int  # Its ranks
    nnodes: int = 1  # The nodes of the job
    rank: int | None = None  # Its node rank. None if not known.
    met: bool = False  # Whether it met other nodes
    first: str = ""  # The host name of the node that shows all nodes. Empty if it is this one.
    nodes: Sequence[Mapping[str, Any]] = ()  # The findings of all nodes' own checks, as in the JSON
    seconds: float = 0.0  # Duration of the checks
    running: int = 0  # Number of interrupted checks
    verbose: bool = False  # Whether to print a row for each check
    colour: bool = False
    width: int | None = None  # Columns. None to wrap nothing, as for a pipe.

    def concerns(self, outcome: Outcome, finding: Finding) -> bool:
        """Return whether a finding is shown here. The first node shows all, others those to fix."""
        own = _of_machine(outcome) or not self.met
        return not self.first or own or self.host in finding.nodes


def screen(outcomes: Sequence[Outcome], view: View) -> str:
    """Return the whole output, the verdict first."""
    found = [
        finding
        for outcome in outcomes
        for finding in outcome.findings
        if view.concerns(outcome, finding)
    ]
    parts = [_verdict(outcomes, found, view)]
    if not view.first:
        parts.append(node_table(outcomes, view))
    parts.append(finding_blocks(found, colour=view.colour, width=view.width))
    if view.verbose:
        parts.append(result_table(outcomes, colour=view.colour, width=view.width))
    else:
        here = [each for each in outcomes if not view.first or _of_machine(each)]
        late = [each for each in here if each.status is Status.COULD_NOT_RUN]
        parts.append(result_table(late, colour=view.colour, width=view.width))
        parts.append("" if view.first else group_lines(outcomes, view))
    return "\n".join(part for part in parts if part)


def _of_machine(outcome: Outcome) -> bool:
    check = CHECKS.get(outcome.check)
    return check is None or check.scope == "machine"


# -- the verdict


def _verdict(outcomes: Sequence[Outcome], here: Sequence[Finding], view: View) -> str:
    """Return the first line: whether a job can start, where, the problems, and the duration."""
    word, style = _word(outcomes, view)
    rank = "" if view.rank is None else f" {view.rank}"
    if view.nnodes == 1:
        where = f"{view.host}, {count(view.nproc, 'rank')}"
    elif view.first or not view.met:
        where = f"{view.host} (node{rank} of {view.nnodes})"
    else:
        where = f"{view.nnodes} nodes, seen from {view.host}"
    counts = ", ".join(_counts(outcomes, here, view))
    see = f"see {view.first}" if view.first and style != "ok" else ""
    facts = "; ".join(filter(None, (counts, see)))
    line = shown(f": {where}{': ' if facts else ''}{facts} ({view.seconds:.1f} s)")
    rows = textwrap.wrap(word + line, view.width or UNWRAPPED, break_on_hyphens=False)
    painted = style_of(style).render(word) if view.colour else word
    return "\n".join([painted + rows[0].removeprefix(word), *rows[1:], ""])


def _word(outcomes: Sequence[Outcome], view: View) -> tuple[str, str]:
    statuses = {outcome.status for outcome in outcomes}
    if Status.FAIL in statuses or any(outcome.exclude for outcome in outcomes):
        return "not ready", "error"
    if view.running:
        return "interrupted", "warning"
    if Status.COULD_NOT_RUN in statuses:
        return "not all tested", "warning"
    reduced = any(
        outcome.check in REDUCTIONS and outcome.status in (Status.PASS, Status.WARN)
        for outcome in outcomes
    )
    if Status.WARN in statuses:
        return ("ready, with warnings" if reduced else "no error found"), "warning"
    return ("ready" if reduced else "no fault found"), "ok"


def _counts(outcomes: Sequence[Outcome], here: Sequence[Finding], view: View) -> Iterator[str]:
    found = [finding for outcome in outcomes for finding in outcome.findings]
    total = 0
    for severity in (Severity.ERROR, Severity.WARNING):
        # A finding of another machine's own checks is information here.
        alike = [each for each in found if severity in (each.severity, _there(each))]
        total += len(alike)
        if alike:
            yield count(len(alike), severity.label)
    if view.first and total:
        yield f"{sum(each.severity > Severity.INFO for each in here) or 'none'} to fix here"
    if view.running:
        yield f"{count(view.running, 'check')} interrupted"


def _there(finding: Finding) -> Severity | None:
    """Return the severity of a finding on the machine that found it, as information."""
    return next((each for each in Severity if each.label in finding.subjects), None)


# -- the nodes and their problems


TABLE_FROM = 3  # Minimum number of nodes with problems. Fewer are easy to see in the blocks.
MAX_PROBLEMS = 6  # Maximum number of problems that fit into 80 columns


def node_table(outcomes: Sequence[Outcome], view: View) -> str:
    """Return a table of nodes and problems. Empty for few nodes, or a single problem.

    Nodes with the same problems share a row.
    """
    found = [
        (host, finding.code, finding.severity.label)
        for outcome in outcomes
        for finding in outcome.findings
        if finding.severity > Severity.INFO
        for host in finding.nodes
    ]
    found += [
        (node["host"], said["code"], said["severity"])
        for node in view.nodes
        for said in node["findings"]
    ]
    problems: dict[str, dict[str, str]] = {}
    for host, code, label in found:
        cells = problems.setdefault(host, {})
        cells[code] = min(label, cells.get(code, label))  # "error" before "warning"
    columns = sorted({code for _, code, _ in found})
    if len(problems) < TABLE_FROM or len(columns) < 2:
        return ""
    more = columns[MAX_PROBLEMS:]
    del columns[MAX_PROBLEMS:]
    rows: dict[tuple[str, ...], list[str]] = {}
    for host, cells in problems.items():
        rows.setdefault(tuple(cells.get(code, "") for code in columns), []).append(host)
    named = {row: shortened(shown(listed(hosts, 2)), 24, "...") for row, hosts in rows.items()}
    room = max(map(len, named.values()))
    lines = [" " * room + "".join(f"  {code:<7}" for code in columns)]
    for row, hosts in named.items():
        lines.append(f"{hosts:<{room}}" + "".join(f"  {cell:<7}" for cell in row))
    if more:
        lines.append(f"and {', '.join(more[:8])}")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def finding_blocks(found: Iterable[Finding], *, colour: bool, width: int | None) -> str:
    """Return findings, the worst first, with an empty line between them."""
    ordered = worst_first(found)
    if not ordered:
        return ""
    # Imported here, because most checks find nothing.
    from ddpdoctor.render import console

    return "\n".join(console.render(each, colour=colour, width=width) for each in ordered)


# -- the tests and their results


def result_table(outcomes: Sequence[Outcome], *, colour: bool, width: int | None) -> str:
    """Return a line for each check: its name, its result, and details of the test."""
    lines = []
    room = max(_MIN_DETAIL, (width or UNWRAPPED) - _NAME - _STATUS - 2)
    for outcome in outcomes:
        status = _painted(outcome.status, colour=colour)
        details = textwrap.wrap(shown(outcome.detail, "\n\t"), room, break_on_hyphens=False) or [""]
        lines.append(f"{outcome.check:<{_NAME}} {status} {details[0]}".rstrip())
        lines += [f"{'':<{_NAME + _STATUS + 2}}{each}" for each in details[1:]]
    return "".join(f"{line}\n" for line in lines)


def _painted(status: Status, *, colour: bool) -> str:
    word = "unknown" if status is Status.COULD_NOT_RUN else status.value
    word = word.ljust(_STATUS)
    return style_of(_STYLES[status]).render(word) if colour else word


def group_lines(outcomes: Sequence[Outcome], view: View) -> str:
    """Return a line for each group of checks: the worst result, or details of the first check."""
    room = max(_MIN_DETAIL, (view.width or UNWRAPPED) - _GROUP - _STATUS - 2)
    lines = []
    for group, each in groupby(outcomes, lambda outcome: _group(outcome.check)):
        members = list(each)
        worst = next(status for status in _STYLES if status in {each.status for each in members})
        first = next(each for each in members if each.status is worst)
        text = first.detail
        if worst not in (Status.PASS, Status.SKIPPED):
            alike = [each.check for each in members if each.status is worst]
            only = len(alike) == 1 and worst is not Status.COULD_NOT_RUN  # which has a row above
            text = f"{first.check}: {text}" if only else ", ".join(alike)
        text = shortened(shown(text), room, "...")
        lines.append(f"{group:<{_GROUP}} {_painted(worst, colour=view.colour)} {text}".rstrip())
    passed = sum(outcome.status is Status.PASS for outcome in outcomes)
    skipped = sum(outcome.status is Status.SKIPPED for outcome in outcomes)
    total = count(len(outcomes), "check")
    lines.append(f"{passed} of {total} passed, {skipped} skipped (-v shows each)")
    return "".join(f"{line}\n" for line in lines)


def _group(name: str) -> str:
    return CHECKS[name].group if name in CHECKS else ""
