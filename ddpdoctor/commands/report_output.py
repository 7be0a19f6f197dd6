"""What ``ddpdoctor report`` prints of findings: text, or lines for tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import shown
from ddpdoctor.core.options import Given
from ddpdoctor.render import console, json_lines, terminal
from ddpdoctor.render.reporter import line_format


def print_for_tools(
    given: Given,
    found: Iterable[Finding],
    script: str,
    head: Callable[[Finding], dict[str, Any]],
) -> bool:
    """Print findings in the requested format, unless it is text. Returns whether it is not."""
    one = line_format(given.get("--output", "text"))
    if "--json" in given:
        print_lines(json_lines.line(finding, head(finding)) for finding in found)
    elif one is not None:
        print_lines(one.line(finding, script) for finding in found)
    return "--json" in given or one is not None


def print_lines(lines: Iterable[str]) -> None:
    """Print lines without control characters."""
    for line in lines:
        print(shown(line))


def complain(text: str) -> None:
    """Print a remark on standard error."""
    print(f"ddpdoctor: {shown(text)}", file=sys.stderr)


def text_of(finding: Finding, written: float, kept: Path | None) -> str:
    """Return a finding as a terminal shows it."""
    return console.render(
        finding,
        colour=terminal.wants_colour(1),
        width=terminal.width(1),
        written=written,
        kept=kept,
    )
