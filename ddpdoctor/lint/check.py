"""Apply the rules to some files."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ddpdoctor.lint.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.errors import Faults
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.formatting import shown
from ddpdoctor.lint import launch_files
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import runs_alone
from ddpdoctor.lint.files import SourceFile
from ddpdoctor.lint.fixes import FIXES, Edit
from ddpdoctor.lint.program import Program, programs
from ddpdoctor.lint.reach import Reach
from ddpdoctor.lint.rules import LINT_RULES, Hit, LintRule

UNREADABLE = "DDP016"
"""The code of a file that cannot be read or parsed, as in ``ddpdoctor check``."""

_ASIDE = re.compile(
    r"\.(LightningDataModule|seed_everything|DistributedSamplerWrapper)$"
    r"|^\w+\.(cnn|image|layers|losses|metrics|ops|structures)\b"
)
"""Parts of frameworks that do nothing for the loop of a program."""

MAX_ROUNDS = 8
"""How often a file is checked that several scripts import."""

_NOQA = re.compile(
    r"#\s*noqa(?::\s*(?P<codes>[A-Z]+[0-9]*(?:[\s,]+[A-Z]+[0-9]*)*))?", re.IGNORECASE
)


@dataclass(frozen=True)
class Problem:
    """A fault in a file.

    Attributes:
        path: The file as it was given.
        line: The first line, from 1. In a notebook, of its cell.
        column: The first column, from 1.
        end_line: The last line.
        end_column: The column after the last one.
        cell: The number of a notebook's code cell, from 1. 0 in other files.
        code: The rule's code.
        severity: See :class:`~ddpdoctor.core.finding.Severity`.
        message: One sentence.
        fix: What to change.
        source: The line's text.
        edits: A safe fix, if there is one.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    cell: int
    code: str
    severity: Severity
    message: str
    fix: str
    source: str = ""
    edits: tuple[Edit, ...] = ()

    @property
    def where(self) -> str:
        """The place as editors understand it: ``path:line:column``."""
        cell = f":cell {self.cell}" if self.cell else ""
        return f"{shown(self.path)}{cell}:{self.line}:{self.column}"

    def record(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        record = {
            "path": self.path, "line": self.line, "column": self.column,
            "end_line": self.end_line, "end_column": self.end_column, "code": self.code,
            "severity": self.severity.label, "message": self.message, "fix": self.fix,
        }  # fmt: skip
        return record | ({"cell": self.cell} if self.cell else {})


REST = "all other rules are applied"
"""What still works if a rule fails."""


def check(files: Sequence[SourceFile], faults: Faults | None = None) -> list[Problem]:
    """Return the problems in some files, in the order of files and lines.

    Args:
        files: The files.
        faults: Reports rules that fail. By default on stderr.
    """
    found = [_unreadable(each) for each in files if each.error is not None]
    failed: list[tuple[str, Exception]] = []
    rounds: dict[Code, int] = defaultdict(int)
    seen: set[tuple[str, ast.AST]] = set()
    for program in programs(files):
        codes = [code for code in program.codes if rounds[code] < MAX_ROUNDS]
        script = program.codes[0]
        if len(program.codes) > 1 and _is_aside(script):
            codes = [code for code in codes if code is not script]
        found += _of_program(program, codes, seen, failed)
        for code in codes:
            rounds[code] += 1
    (faults or Faults(_complain, REST)).failed(failed)
    for each in files:
        found += _of_launch(each) if each.launch else ()
    order = {each.path: number for number, each in enumerate(files)}
    return sorted(
        found, key=lambda each: (order[each.path], each.cell, each.line, each.column, each.code)
    )


_TRAINS = re.compile(r"train|main|run|tune|ddp|dist|__init__", re.IGNORECASE)


def _is_aside(script: Code) -> bool:
    """Return whether a script is a tool of one process beside a package that trains."""
    name = os.path.basename(script.file.path)
    return not (script.only_defines or script.is_parallel or _TRAINS.search(name))


def _complain(text: str) -> None:
    print(f"ddpdoctor: {text}", file=sys.stderr)


def _unreadable(file: SourceFile) -> Problem:
    assert file.error is not None
    said, line, column = file.error
    place = file.place(line)
    text = file.lines[line - 1] if 0 < line <= len(file.lines) else ""
    return Problem(
        file.path, place.line, column, place.line, column, place.cell, UNREADABLE, Severity.ERROR,
        said, "Run it with this Python first.", text,
    )  # fmt: skip


def _of_launch(file: SourceFile) -> Iterator[Problem]:
    for each in launch_files.faults(file.path, file.launch):
        text = file.lines[each.line - 1]
        if not _is_marked(text, each.code):
            start = len(text) - len(text.lstrip()) + 1
            yield Problem(
                file.path, each.line, start, each.line, len(text) + 1, 0, each.code,
                each.severity, each.message, each.fix, text,
            )  # fmt: skip


def _of_program(
    program: Program,
    codes: Sequence[Code],
    seen: set[tuple[str, ast.AST]],
    failed: list[tuple[str, Exception]],
) -> Iterator[Problem]:
    """Apply the rules to some files of a program.

    Args:
        program: The program.
        codes: The files.
        seen: Codes and nodes that were reported. New ones are added.
        failed: Gets the rules that fail, and why.
    """
    if not any(
        name.startswith("torch") for code in program.codes for name in code.imports.values()
    ):
        return
    frameworks = _frameworks(program)
    rules = [each for each in LINT_RULES.values() if not each.moot & frameworks]
    for code in codes:
        for rule in rules:
            try:
                problems = [
                    (hit.node, _problem(code, rule, hit))
                    for hit in rule.find(code)
                    if not _is_silenced(code, hit.node, rule.code)
                    and _is_run(program, code, rule.code, hit.node)
                    and not runs_alone(code, hit.node)
                ]
            except RecursionError:
                # Code that is nested a thousand levels deep.
                continue
            except Exception as error:
                failed.append((f"{rule.code} on {shown(code.file.path)}", error))
                continue
            for node, problem in problems:
                if (rule.code, node) not in seen:
                    seen.add((rule.code, node))
                    yield problem


def _frameworks(program: Program) -> set[str]:
    """Return the packages that a program imports, and their parts.

    In a program with DDP, what a function imports under a condition is for another launcher.
    """
    names = [
        each.name if isinstance(node, ast.Import) else f"{node.module or ''}.{each.name}"
        for code in program.codes
        for node in code.of(ast.Import, ast.ImportFrom)
        if code.function(node) is None or not program.wraps or _is_always_run(program, code, node)
        for each in node.names
    ]
    used = [each.lstrip(".") for each in names if not _ASIDE.search(each)]
    return {".".join(name.split(".")[:count]) for name in used for count in (1, 2)}


def _is_always_run(program: Program, code: Code, node: ast.AST) -> bool:
    """Return whether a function of the ranks runs a node under no condition."""
    held = any(isinstance(each, ast.If) for each in code.above(node))
    return not held and program.once("reach", lambda: Reach(program)).runs(code, node)


_OF_STARTS = re.compile(r"DDP2(?!03|04)")
"""Codes of rules on how ranks are started."""


def _is_run(program: Program, code: Code, of: str, node: ast.AST) -> bool:
    """Return whether ranks run a node, or the process that starts them, if the rule is on that."""
    reach = program.once("reach", lambda: Reach(program))
    return reach.runs(code, node) and (
        _OF_STARTS.match(of) is not None or not reach.only_starts(code, node)
    )


def _problem(code: Code, rule: LintRule, hit: Hit) -> Problem:
    node: Any = hit.node
    line, end = node.lineno, node.end_lineno or node.lineno
    lines = code.file.lines
    column, end_column = (
        len(lines[at - 1].encode()[:offset].decode("utf-8", "replace")) + 1
        for at, offset in ((line, node.col_offset), (end, node.end_col_offset or 0))
    )
    if isinstance(node, (ast.If, ast.ExceptHandler, ast.With, ast.For, ast.While)):
        # Of a block, its first line.
        end, end_column = line, len(lines[line - 1]) + 1
    first, last = code.file.place(line), code.file.place(end)
    return Problem(
        code.file.path, first.line, column, last.line, end_column, first.cell, rule.code,
        hit.severity or rule.severity, hit.message, hit.fix, lines[line - 1],
        tuple(FIXES[rule.code](code, hit)) if rule.code in FIXES else (),
    )  # fmt: skip


def _is_silenced(code: Code, node: ast.AST, of: str) -> bool:
    """Return whether a line of the node or the end of its statement has a ``# noqa``."""
    statement = code.statement(node) if isinstance(node, ast.expr) else node
    first = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or first
    is_block = isinstance(
        statement, (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.ExceptHandler)
    )
    end = first if is_block else getattr(statement, "end_lineno", None) or last
    for line in {first, min(last, end), end}:
        text = code.file.lines[line - 1] if 0 < line <= len(code.file.lines) else ""
        if _is_marked(text, of):
            return True
    return False


def _is_marked(text: str, of: str) -> bool:
    """Return whether a line has a ``# noqa`` for a code."""
    found = _NOQA.search(text) if "noqa" in text.lower() else None
    if found is None:
        return False
    codes = re.split(r"[\s,]+", found["codes"].upper()) if found["codes"] else []
    return not codes or any(of.startswith(each) for each in codes)
