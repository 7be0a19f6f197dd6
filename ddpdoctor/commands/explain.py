"""``ddpdoctor explain``: what a finding's code means."""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import ddpdoctor.rules  # noqa: F401 (registers the rules)
from ddpdoctor.errors import DoctorError
from ddpdoctor.finding import RULES

HELP = """\
Usage: ddpdoctor explain [CODE]

Explain the code of a finding, such as DDP901; without a code, list them all.
"""


def main(words: Sequence[str]) -> int:
    """Print the page of a rule, or the list of all rules.

    Raises:
        DoctorError: There is no such code.
    """
    if any(word in ("-h", "--help") for word in words):
        sys.stdout.write(HELP)
        return 0
    if len(words) > 1:
        raise DoctorError("explain takes one code", "for example: ddpdoctor explain DDP901")
    if not words:
        for code in sorted(RULES):
            rule = RULES[code]
            print(f"{code}  {rule.severity.label:<7}  {rule.name:<13}  {rule.summary}")
        return 0
    code = words[0].upper()
    if code not in RULES:
        close = difflib.get_close_matches(code, RULES, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}? " if close else ""
        raise DoctorError(f"unknown code {words[0]}", f"{hint}`ddpdoctor explain` lists all codes")
    rule = RULES[code]
    print(f"{code} {rule.name} ({rule.severity.label})\n")
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    for line in reflow(rule.page, width):
        print(line)
    return 0


def reflow(page: str, width: int) -> Iterator[str]:
    """The lines of a rule's page, wrapped anew for a terminal of ``width`` columns."""
    for paragraph in page.split("\n\n"):
        heading: list[str] = []
        body: list[str] = []
        for line in paragraph.splitlines():
            (body if line.startswith(" ") else heading).append(line.strip())
        yield from textwrap.wrap(" ".join(heading), width)
        # A right example under a wrong one keeps its line.
        text = " ".join(body).replace(" Right: ", "\nRight: ")
        for part in text.splitlines():
            yield from textwrap.wrap(part, width, initial_indent="    ", subsequent_indent="    ")
        yield ""
