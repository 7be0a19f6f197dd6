"""``ddpdoctor explain``: explain the code of a finding."""

from __future__ import annotations

import difflib
import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import ddpdoctor.diagnose.all_rules
import ddpdoctor.lint.all_rules  # noqa: F401 (registers the rules on source code)
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import RULES
from ddpdoctor.core.options import Parser
from ddpdoctor.failures import recognise, verdict
from ddpdoctor.failures.log import LogReader
from ddpdoctor.failures.table import TABLE
from ddpdoctor.lint.rules import LINT_RULES
from ddpdoctor.preflight.check import CHECKS
from ddpdoctor.render import terminal

PARSER = Parser(
    "explain",
    """\
Usage: ddpdoctor explain [CODE|NAME|TEXT]

Explain a finding by its code, by its name or a part of it, or by the text of an
error, whole or in part: DDP901, straggler, "unexpected pos". Without one, list
them all.
""",
)


@dataclass(frozen=True)
class _Entry:
    """A rule, or a check of ``ddpdoctor check``."""

    name: str
    kind: str  # The usual severity of a rule's findings, or ``check``
    page: str
    messages: tuple[str, ...] = ()  # Lines of logs and exceptions that show it, as printed

    @property
    def summary(self) -> str:
        return self.page.partition("\n")[0]


@functools.cache
def entries() -> Mapping[str, _Entry]:
    """Return all rules and checks by code, in order."""
    messages: dict[str, tuple[str, ...]] = {}
    for failure in TABLE:
        messages[failure.code] = messages.get(failure.code, ()) + failure.examples
    found = {rule.code: (rule.name, rule.severity.label, rule.page) for rule in RULES.values()}
    for static in LINT_RULES.values():
        if static.name:
            found[static.code] = (static.name, static.severity.label, static.page)
    found |= {check.code: (check.name, "check", check.page) for check in CHECKS.values()}
    return MappingProxyType(
        {code: _Entry(*found[code], messages.get(code, ())) for code in sorted(found)}
    )


def main(words: Sequence[str]) -> int:
    """Print the page of a rule or a check, or the list of all."""
    given = PARSER.read(words)
    if len(given.rest) > 1:
        raise DoctorError("explain takes one code", "for example: ddpdoctor explain DDP901")
    known = entries()
    codes = _meant(given.rest[0], known) if given.rest else list(known)
    if len(codes) > 1:
        width = max(len(known[code].name) for code in codes)
        for code in codes:
            entry = known[code]
            print(f"{code}  {entry.kind:<7}  {entry.name:<{width}}  {entry.summary}")
        return 0
    (code,) = codes
    entry = known[code]
    print(f"{code} {entry.name} ({entry.kind})\n")
    for line in reflow(entry.page, terminal.columns(100)):
        print(line)
    return 0


def _meant(word: str, known: Mapping[str, _Entry]) -> list[str]:
    """Return the codes for a word: a code, a name or a part of it, or text of a page or a log.

    Raises:
        DoctorError: There is no such code.
    """
    text = word.lower()
    by_name = {entry.name: code for code, entry in known.items()}
    code = by_name.get(text, word.upper())
    if code in known:
        return [code]
    found = [code for name, code in by_name.items() if text in name] or [
        code
        for code, entry in known.items()
        if any(text in " ".join(each.lower().split()) for each in (entry.page, *entry.messages))
    ]
    found = found if text.strip() else []
    if found or (found := [code for code in _printed(word) if code in known]):
        return found
    close = difflib.get_close_matches(code, known, n=1, cutoff=0.7)
    close = close or difflib.get_close_matches(text, by_name, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise DoctorError(f"unknown code {word}", f"{hint}`ddpdoctor explain` lists all codes")


def _printed(text: str) -> list[str]:
    """Return the codes of the failures that lines of a log show."""
    reader = LogReader("the text")
    reader.feed(f"{text}\n".encode(errors="replace"))
    codes = {finding.code for finding in verdict.findings(reader.close())}
    if seen := recognise(text):  # Also lines that are not reported alone, such as warnings
        codes.add(seen[0].code)
    return sorted(codes - {"DDP900"} or codes)


def reflow(page: str, width: int) -> Iterator[str]:
    """Yield the lines of a page, wrapped at ``width`` columns. Code is unchanged."""
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
