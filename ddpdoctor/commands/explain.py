"""``ddpdoctor explain``: what the code of a finding means."""

from __future__ import annotations

import difflib
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ddpdoctor.preflight
import ddpdoctor.rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import RULES
from ddpdoctor.preflight.check import CHECKS

HELP = """\
Usage: ddpdoctor explain [CODE]

Explain the code of a finding, such as DDP901; without a code, list them all.
"""


@dataclass(frozen=True)
class _Entry:
    """A rule, or a check of ``ddpdoctor check``."""

    name: str
    kind: str
    """How much a finding of it matters usually; of a check that depends."""
    page: str

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0]


def entries() -> dict[str, _Entry]:
    """All that can be explained, by code, in order."""
    rules = {
        code: _Entry(rule.name, rule.severity.label, rule.page) for code, rule in RULES.items()
    }
    checks = {check.code: _Entry(check.name, "check", check.page) for check in CHECKS.values()}
    return dict(sorted((rules | checks).items()))


def main(words: Sequence[str]) -> int:
    """Print the page of a rule or a check, or the list of them all.

    Raises:
        DoctorError: There is no such code.
    """
    if any(word in ("-h", "--help") for word in words):
        sys.stdout.write(HELP)
        return 0
    if len(words) > 1:
        raise DoctorError("explain takes one code", "for example: ddpdoctor explain DDP901")
    known = entries()
    if not words:
        width = max(len(entry.name) for entry in known.values())
        for code, entry in known.items():
            print(f"{code}  {entry.kind:<7}  {entry.name:<{width}}  {entry.summary}")
        return 0
    code = words[0].upper()
    if code not in known:
        close = difflib.get_close_matches(code, known, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}? " if close else ""
        raise DoctorError(f"unknown code {words[0]}", f"{hint}`ddpdoctor explain` lists all codes")
    entry = known[code]
    print(f"{code} {entry.name} ({entry.kind})\n")
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    for line in reflow(entry.page, width):
        print(line)
    return 0


def reflow(page: str, width: int) -> Iterator[str]:
    """The lines of a page, wrapped for a terminal of ``width`` columns; code is left as it is."""
    text = margin = ""
    for line in (*page.splitlines(), ""):
        indent = line[: len(line) - len(line.lstrip())]
        code = len(indent) > 4
        starts = not line or indent != margin or line.lstrip().startswith(("Wrong", "Right"))
        if text and (code or starts):
            yield from textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin)
            text = ""
        if code or not line:
            yield line
        else:
            text, margin = f"{text} {line.strip()}".lstrip(), indent
