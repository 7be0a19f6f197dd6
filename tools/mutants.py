"""Break rules on purpose, one small change at a time: does a test notice?

    python -m tools.mutants --count 50 --seed 1 -- tests/diagnose/test_finiteness_rules.py ...

Each mutant is one change of one expression in ``ddpdoctor/diagnose``: a
comparison, ``and`` for ``or``, a condition without its ``not``, a guard that never holds, a number,
a severity. It is made in a copy of the tracked files, and the tests run there with ``-x``: those
that run the changed lines (``tools.reached``), first those that run most of the module. One that no
test notices has survived, and is printed with its change. Options of pytest take their value with
``=``. (mutmut leaves decorated functions alone, and every rule is one.)
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.reached import FOLDERS, ROOT

Reached = Mapping[str, Mapping[str, Sequence[str]]]
"""Modules, their lines, and the tests that run them."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
SEVERITIES = {"ERROR": "WARNING", "WARNING": "ERROR", "INFO": "WARNING"}


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    path: Path
    """Relative to the repository."""
    node: ast.expr
    becomes: str
    lines: range
    """Of the statement, up to the change; empty outside of functions."""

    @property
    def title(self) -> str:
        """``ddpdoctor/diagnose/speed/rules.py:97: share > DATA_SHARE -> share >= DATA_SHARE``."""
        return f"{self.path}:{self.node.lineno}: {ast.unparse(self.node)} -> {self.becomes}"

    def apply(self, text: str) -> str:
        """The module's source with the change."""
        lines = text.splitlines(keepends=True)
        first, last = self.node.lineno - 1, (self.node.end_lineno or self.node.lineno) - 1
        head = lines[first].encode()[: self.node.col_offset].decode()
        tail = lines[last].encode()[self.node.end_col_offset or 0 :].decode()
        return "".join([*lines[:first], f"{head}({self.becomes}){tail}", *lines[last + 1 :]])


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a module."""
    tree = ast.parse((ROOT / path).read_text())
    hidden = {id(each) for node in ast.walk(tree) for each in _not_code(node)}
    lines = dict(_lines(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in hidden:
            for becomes in _changes(node):
                yield Mutant(path, node, becomes, lines.get(id(node), range(0)))
        if isinstance(node, ast.If) and _is_guard(node):
            yield Mutant(path, node.test, "False", lines[id(node.test)])


def _lines(tree: ast.AST) -> Iterator[tuple[int, range]]:
    """The expressions of functions, and the lines that run with each; the innermost comes last."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in (each for line in function.body for each in ast.walk(line)):
                if isinstance(statement, ast.stmt | ast.match_case | ast.ExceptHandler):
                    for each in ast.walk(statement):
                        if isinstance(each, ast.expr):
                            last = each.end_lineno or each.lineno
                            first = getattr(statement, "lineno", each.lineno)
                            yield id(each), range(first, last + 1)


def _not_code(node: ast.AST) -> Iterator[ast.AST]:
    """What says nothing when it runs, or cannot stand in brackets: annotations, texts, patterns."""
    roots: list[ast.AST | None] = []
    if isinstance(node, ast.arg | ast.AnnAssign):
        roots = [node.annotation]
    elif isinstance(node, ast.FunctionDef):
        roots = [node.returns, *node.decorator_list]
    elif isinstance(node, ast.JoinedStr | ast.Slice | ast.pattern):
        roots = [node]
    for root in roots:
        yield from ast.walk(root) if root is not None else ()


def _is_guard(node: ast.If) -> bool:
    return not node.orelse and isinstance(node.body[-1], ast.Return | ast.Continue | ast.Raise)


def _changes(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            other = COMPARISONS[type(operator)]()
            yield ast.unparse(ast.Compare(left, [other], [right]))
        case ast.BoolOp(op=operator, values=values):
            yield ast.unparse(
                ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            )
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield ast.unparse(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            if not any(
                isinstance(each, ast.Constant | ast.JoinedStr) and _is_text(each)
                for each in (left, right)
            ):
                yield ast.unparse(ast.BinOp(left, ARITHMETIC[type(operator)](), right))
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield repr(value + 1)
        case ast.Attribute(value=ast.Name(id="Severity"), attr=name):
            yield f"Severity.{SEVERITIES[name]}"


def _is_text(node: ast.Constant | ast.JoinedStr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(node.value, str)


def copy_of_the_tree(into: Path) -> None:
    """The tracked files, so that no change ever reaches the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, into / name)


def noticed(
    tree: Path, tests: Sequence[str], limit: float, *, shown: bool = False, **environment: str
) -> bool:
    """Whether a test fails in the tree; all run in one process, where their lines are seen."""
    output = None if shown else subprocess.DEVNULL
    plugins = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tools.reached")
    job = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", *plugins, *tests],
        cwd=tree,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": str(tree), **environment},
        start_new_session=True,
    )
    try:
        return job.wait(limit) != 0
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait()
        return True


def nearest(mutant: Mutant, reached: Reached) -> list[str]:
    """The tests that run the changed lines, first those that run most of the module.

    All tests, if the change is of what runs on import.
    """
    module = reached.get(str(mutant.path), {})
    amount = Counter(test for tests in module.values() for test in tests)
    found = {test for line in mutant.lines for test in module.get(str(line), ())}
    if not mutant.lines or "" in found:
        found = {test for lines in reached.values() for tests in lines.values() for test in tests}
    return sorted(found - {""}, key=lambda test: (-amount[test], test))


def main() -> int:
    """Run it; 1 if fewer than four of five mutants are noticed, 2 if the tests fail anyway."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=50, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: %(default)s)")
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--limit", type=float, default=900, help="seconds that the tests may take")
    parser.add_argument("pytest", nargs="+", metavar="ARG", help="arguments of pytest")
    asked = parser.parse_args()
    found = [
        mutant
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if asked.only in str(path)
        for mutant in mutants(path.relative_to(ROOT))
    ]
    chosen = random.Random(asked.seed).sample(found, min(asked.count, len(found)))
    killed = 0
    with tempfile.TemporaryDirectory(prefix="mutants") as directory:
        tree = Path(directory)
        copy_of_the_tree(tree)
        seen_lines, wanted = tree / "reached.json", tree / "wanted"
        if noticed(tree, asked.pytest, asked.limit, shown=True, REACHED_INTO=str(seen_lines)):
            print("the tests fail without any change", file=sys.stderr)
            return 2
        reached = json.loads(seen_lines.read_text())
        options = [each for each in asked.pytest if not (tree / each.split("::")[0]).exists()]
        for number, mutant in enumerate(chosen, 1):
            source = tree / mutant.path
            text = source.read_text()
            source.write_text(mutant.apply(text))
            tests = nearest(mutant, reached)
            wanted.write_text("\n".join(tests))
            files = dict.fromkeys(test.split("::")[0] for test in tests)
            arguments = [*options, *files]
            seen = bool(tests) and noticed(tree, arguments, asked.limit, REACHED_ONLY=str(wanted))
            source.write_text(text)
            killed += seen
            verdict = "killed" if seen else "SURVIVED" if tests else "SURVIVED (no test runs it)"
            print(f"{number}/{len(chosen)} {verdict} {mutant.title}", flush=True)
    print(f"{killed} of {len(chosen)} mutants are noticed, of {len(found)} that there are")
    return 0 if killed >= 0.8 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
