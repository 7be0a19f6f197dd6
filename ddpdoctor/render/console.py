"""Print findings with the code around them, or as lines for editors and GitHub."""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import shown
from ddpdoctor.core.user_code import Location
from ddpdoctor.failures.lines import users_file
from ddpdoctor.render.terminal import UNWRAPPED, Line, folded, rendered, shortened
from ddpdoctor.run.reported import Withdrawn
from ddpdoctor.run.snapshot import Run

# -- the lines of code around a finding

CONTEXT = 2  # Number of code lines above and below the blamed one


class CodeRow(NamedTuple):
    """A line of source. Control characters except tabs are made visible."""

    number: int
    text: str
    guilty: bool


def code_frame(finding: Finding, written: float | None) -> list[CodeRow]:
    """Return the lines around a finding. Empty if the source cannot be read, or has changed.

    A file written after ``written`` (Unix seconds) is not shown, unless the traceback has the same
    line. With None, files count as unchanged since the job read them.
    """
    location = finding.location
    if location is None:
        return []
    try:
        data = opening.contents(location.path, opening.MOST_SOURCE, links=True)
    except (OSError, ValueError):
        return []
    # Split lines as Python does. str.splitlines splits at more characters.
    source = io.TextIOWrapper(io.BytesIO(data), "utf-8", "replace").read().split("\n")
    first = max(1, location.line - CONTEXT)
    rows = [
        CodeRow(number, shown(text.rstrip(), "\t"), number == location.line)
        for number, text in enumerate(source[first - 1 : location.line + CONTEXT], first)
    ]
    line = next((row.text for row in rows if row.guilty), "")
    return rows if line and _is_unchanged(finding, location, line, written) else []


def _is_unchanged(finding: Finding, location: Location, line: str, written: float | None) -> bool:
    """Return whether a line of a source file is unchanged since the job ran it."""
    head = re.compile(
        rf'^\s*File "{re.escape(location.path)}", line {location.line}(?:, in .*)?\n +(\S.*)$',
        re.MULTILINE,
    )
    reported = head.findall(finding.traceback)
    if reported:
        return line.strip() in (each.strip() for each in reported)
    if written is None:
        return True
    try:
        return opening.facts(location.path).st_mtime <= written
    except OSError:
        return False


# -- findings as text

_MAX_FRAMES = 6

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+)(?:,? in (?P<name>.*))?$')
_CAUSE = ("The above exception was the direct cause", "During handling of the above exception")


def render(
    finding: Finding,
    *,
    colour: bool,
    width: int | None,
    written: float | None = None,
    kept: Path | None = None,
) -> str:
    """Return a finding as text: headline, code frame, evidence, fix, a line to paste.

    Wrap at ``width`` columns. None wraps nothing, as for a pipe. ``written`` is passed to
    :func:`code_frame`. ``kept`` is the file with the whole traceback, if any.
    """
    room, label = width or UNWRAPPED, finding.severity.label
    rows = folded(f"{label} {shown(finding.code)}: {shown(finding.message)}", room)
    lines: list[Line] = [((label, label), (rows[0].removeprefix(label), "bold"))]
    lines += [((row, "bold"),) for row in rows[1:]]
    lines += _code_lines(finding, room, written)
    lines += [((f"  {shown(frame)}", "dim"),) for frame in user_calls(finding)]
    facts = [("evidence:", line, "") for line in finding.evidence]
    facts += [("in full:", shown_path(str(kept)), "")] if kept is not None else []
    facts += [("fix:", finding.fix, "ok")] if finding.fix else []
    for name, text, style in facts:
        shown_text = shown(text, "\n\t").expandtabs()
        for number, row in enumerate(folded(shown_text, max(20, room - 12))):
            head = " " * 12 if number else f"  {name:<10}"
            lines.append(((head, style), (row, "")) if row else ((head.rstrip(), style),))
    if finding.paste:
        # Never wrapped, so that it can be copied.
        lines.append(((f"  {'paste:':<10}{shown(finding.paste)}", ""),))
    return "".join(f"{rendered(line, colour)}\n" for line in lines)


def written_before(run: Run) -> float:
    """Return the Unix time before which files that the run has read were written.

    Return 0 on another machine than the run's, where no file is known to be the same.
    """
    here = run.manifest.get("host") == socket.gethostname()
    started = run.manifest.get("started")
    return started / 1e9 if here and isinstance(started, int) else 0.0


def _code_lines(finding: Finding, room: int, written: float | None) -> Iterator[Line]:
    location = finding.location
    if location is None:
        return
    yield ((f"  --> {shown_path(location.path)}:{location.line}", "info"),)
    digits = len(str(location.line + CONTEXT))
    for number, text, guilty in code_frame(finding, written):
        if text:
            head = f"  {'>' if guilty else ' '} {number:>{digits}} | "
            text = shortened(text.expandtabs(), max(20, room - len(head)), "...")
            yield (
                (head, finding.severity.label if guilty else "dim"),
                (text, "" if guilty else "dim"),
            )


def user_calls(finding: Finding) -> list[str]:
    """Return the traceback's calls in the user's code, outermost first, if there are several."""
    text = finding.traceback
    for marker in _CAUSE:
        # The last exception of a chain is the one that ended the process.
        text = text.rpartition(marker)[2]
    newest_first = "most recent call first" in text
    if newest_first:
        text = text.partition("Current thread")[2].split("\n\n")[0]
    frames = []
    for row in text.splitlines():
        match = _FRAME.match(row)
        if match and users_file(match["path"]):
            name = f" in {match['name']}" if match["name"] else ""
            frames.append(f"{shown_path(match['path'])}:{match['line']}{name}")
    if newest_first:
        frames.reverse()
    if len(frames) < 2:
        return []
    if len(frames) > _MAX_FRAMES:
        frames = [*frames[:2], f"... {len(frames) - 4} more calls", *frames[-2:]]
    return [f"{'called from ' if number == 0 else '  then '}{f}" for number, f in enumerate(frames)]


def shown_path(path: str) -> str:
    """Return a path as a user would type it: relative if below the working directory."""
    try:
        return shown(str(Path(path).relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shown(path)


# -- findings as lines for an editor's problem matcher


def problem_line(finding: Finding, script: str) -> str:
    """Return the line. Put a finding without a place at the top of the ``script``."""
    message, place = finding.message, finding.location
    # An editor shows the place already.
    for path in {place.path, shown_path(place.path)} if place is not None else ():
        own = rf"(?<![\w/.]){re.escape(path)}:{place.line}(?!\d)" if place is not None else ""
        message = re.sub(rf"\b(?:at|in) {own}", "here", message)
        message = re.sub(own, "this line", message)
    text = " ".join(f"{message}. {finding.fix}".split())
    return shown(
        f"{_problem_place(finding, script)}: {finding.severity.label} {finding.code} {text}"
    )


def problem_retraction(withdrawn: Withdrawn, script: str) -> str:
    """Return an info at the same place: editors keep the finding's line until the next run."""
    finding = withdrawn.reported.finding
    text = f"info {finding.code} {withdrawn.verb}: {withdrawn.reason}"
    return shown(f"{_problem_place(finding, script)}: {text}")


def _problem_place(finding: Finding, script: str) -> str:
    place = finding.location
    return f"{place.path}:{place.line}:1" if place is not None else f"{script}:1:1"


# -- findings as annotations of GitHub Actions, which are commands in the log of a step

_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def github_line(finding: Finding, script: str) -> str:
    """Return the annotation. Put a finding without a place at the top of the ``script``."""
    text = [finding.message, *finding.evidence]
    text += [f"fix: {finding.fix}"] if finding.fix else []
    text += [f"paste: {finding.paste}"] if finding.paste else []
    level = _GITHUB_LEVELS[finding.severity]
    return _workflow_command(level, finding, script, finding.code, "\n".join(text))


def github_retraction(withdrawn: Withdrawn, script: str) -> str:
    """Return a notice at the same place, since GitHub cannot withdraw an annotation."""
    finding = withdrawn.reported.finding
    title = f"{finding.code} {withdrawn.verb}"
    return _workflow_command("notice", finding, script, title, withdrawn.reason)


def _workflow_command(kind: str, finding: Finding, script: str, title: str, text: str) -> str:
    place = finding.location
    path, number = (script, 1) if place is None else (place.path, place.line)
    root = os.environ.get("GITHUB_WORKSPACE", "").rstrip("/")
    if root:
        path = path.removeprefix(f"{root}/")
    fields = {"file": path, "line": str(number), "title": title}
    properties = ",".join(
        f"{name}={_escaped_for_github(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in fields.items()
        if value
    )
    return f"::{kind} {properties}::{_escaped_for_github(text)}"


def _escaped_for_github(text: str) -> str:
    return shown(text, "\n").replace("%", "%25").replace("\n", "%0A")


class LineFormat(NamedTuple):
    """How findings and withdrawals become lines for another program."""

    line: Callable[[Finding, str], str]
    retraction: Callable[[Withdrawn, str], str]


LINE_FORMATS = {
    "problems": LineFormat(problem_line, problem_retraction),
    "github": LineFormat(github_line, github_retraction),
}
"""The formats by the values of ``--output``."""
