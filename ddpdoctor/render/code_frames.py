"""The lines around a finding's place, if they are still what the job ran."""

from __future__ import annotations

import io
import re
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.finding import Finding, Location

CONTEXT = 2
"""Lines of code shown above and below the guilty one."""


class CodeRow(NamedTuple):
    """A line of source; tabs stay, what would steer a terminal is shown."""

    number: int
    text: str
    guilty: bool


def code_frame(finding: Finding, written: float | None) -> list[CodeRow]:
    """The lines; none where the source cannot be read, or is not what the job ran.

    Args:
        finding: What they are about.
        written: Unix seconds; a source file that was written after it is not shown, unless the
            traceback has the same line. None: files are as the job read them.
    """
    location = finding.location
    if location is None:
        return []
    first = max(1, location.line - CONTEXT)
    source = _source(location.path)[first - 1 : location.line + CONTEXT]
    rows = [
        CodeRow(number, shown(text.rstrip(), "\t"), number == location.line)
        for number, text in enumerate(source, first)
    ]
    line = next((row.text for row in rows if row.guilty), "")
    return rows if line and _as_it_was(finding, location, line, written) else []


def _as_it_was(finding: Finding, location: Location, line: str, written: float | None) -> bool:
    """Whether a line of a source file is still what the job ran."""
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


def _source(path: str) -> list[str]:
    """The lines of a source file, as Python counts them; none if it cannot be read here."""
    try:
        text = opening.contents(path, opening.MOST_SOURCE, links=True)
    except (OSError, ValueError):
        return []
    return io.TextIOWrapper(io.BytesIO(text), "utf-8", "replace").read().split("\n")
