"""Write problems: for people, for editors, and for other programs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from ddpdoctor import __version__
from ddpdoctor.core.finding import RULES, Severity
from ddpdoctor.core.formatting import count, shown
from ddpdoctor.lint.check import Problem
from ddpdoctor.lint.launch_files import NAMES
from ddpdoctor.lint.rules import LINT_RULES

MAX_WIDTH = 200
"""The longest line of code that is printed, in characters."""

_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def text(problems: Sequence[Problem], files: int) -> str:
    """Write problems with their lines of code, and a summary."""
    parts = []
    for each in problems:
        parts.append(f"{each.where}: {each.severity.label} {each.code} {each.message}")
        source = shown(each.source.rstrip(), "\t").replace("\t", " ")
        if source.strip() and len(source) <= MAX_WIDTH:
            edge = " " * len(str(each.line))
            same = each.end_line == each.line and each.end_column > each.column
            width = min(each.end_column if same else len(source) + 1, len(source) + 1) - each.column
            parts += [
                f"{edge} |",
                f"{each.line} | {source}",
                f"{edge} | {' ' * (each.column - 1)}{'^' * max(width, 1)}",
            ]
        parts += [f"  fix: {each.fix}", ""]
    return "\n".join([*parts, summary(problems, files)]) + "\n"


def summary(problems: Sequence[Problem], files: int) -> str:
    """Return one sentence about all problems."""
    counts = Counter(each.severity for each in problems)
    said = [count(counts[each], each.label) for each in reversed(Severity) if counts[each]]
    safe = sum(bool(each.edits) for each in problems)
    more = f", {safe} of them fixable with --fix" if safe else ""
    return f"{', '.join(said) or 'no problems'} in {count(files, 'file')}{more}"


def statistics(problems: Iterable[Problem]) -> str:
    """Write how often each rule found something."""
    counts = Counter(each.code for each in problems)
    rows = (f"{number:>5}  {code}  {name_of(code)}" for code, number in counts.most_common())
    return "".join(f"{row}\n" for row in rows)


def problems_lines(problems: Iterable[Problem]) -> str:
    """Write each problem as a line that an editor's problem matcher understands."""
    return "".join(
        f"{each.where}: {each.severity.label} {each.code} {each.message}\n" for each in problems
    )


def json_lines(problems: Iterable[Problem]) -> str:
    """Write each problem as a JSON object on its own line."""
    return "".join(f"{json.dumps(each.record())}\n" for each in problems)


def github(problems: Iterable[Problem]) -> str:
    """Write annotations of GitHub Actions."""
    lines = []
    for each in problems:
        said = f"{each.message}. {each.fix}".replace("%", "%25").replace("\n", "%0A")
        path = each.path.replace("%", "%25").replace(",", "%2C").replace(":", "%3A")
        lines.append(
            f"::{_GITHUB_LEVELS[each.severity]} file={path},line={each.line},col={each.column},"
            f"endLine={each.end_line},title={each.code}::{said}\n"
        )
    return "".join(lines)


def sarif(problems: Sequence[Problem]) -> str:
    """Write a SARIF 2.1.0 log."""
    codes = sorted({each.code for each in problems})
    rules = [
        {
            "id": code,
            "name": name_of(code),
            "shortDescription": {"text": page_of(code).partition("\n")[0] or name_of(code)},
            "help": {"text": page_of(code) or name_of(code)},
        }
        for code in codes
    ]
    results = [
        {
            "ruleId": each.code,
            "ruleIndex": codes.index(each.code),
            "level": _SARIF_LEVELS[each.severity],
            "message": {"text": f"{each.message}. {each.fix}"},
            "locations": [{"physicalLocation": _place(each)}],
        }
        for each in problems
    ]
    run = {
        "tool": {"driver": {"name": "ddpdoctor", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json.dumps(log, indent=2) + "\n"


def _place(problem: Problem) -> dict[str, Any]:
    return {
        "artifactLocation": {"uri": quote(problem.path.replace(os.sep, "/"))},
        "region": {
            "startLine": problem.line,
            "startColumn": problem.column,
            "endLine": problem.end_line,
            "endColumn": problem.end_column,
        },
    }


def name_of(code: str) -> str:
    """Return a rule's name."""
    own = LINT_RULES.get(code)
    if own is not None and own.name:
        return own.name
    if code in NAMES:
        return NAMES[code]
    _load_pages()
    return RULES[code].name if code in RULES else "unreadable"


def page_of(code: str) -> str:
    """Return a rule's page."""
    own = LINT_RULES.get(code)
    if own is not None and own.page:
        return own.page
    _load_pages()
    return RULES[code].page if code in RULES else ""


def _load_pages() -> None:
    # Half a second that only these formats need.
    import ddpdoctor.diagnose.all_rules  # noqa: F401
