"""Break rules on purpose, one small change at a time: does a test notice?

    python -m tools.mutants --count 50 --seed 1 -- -n 2 tests/test_finiteness_rules.py ...

Each mutant is one change of one expression in ``ddpdoctor/rules`` or ``ddpdoctor/analysis``: a
comparison, ``and`` for ``or``, a condition without its ``not``, a guard that never holds, a number,
a severity. It is made in a copy of the tracked files, and the tests run there with ``-x``. One that
no test notices has survived, and is printed with its change. (mutmut leaves decorated functions
alone, and every rule is one.)
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("ddpdoctor/rules", "ddpdoctor/analysis")

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

    @property
    def title(self) -> str:
        """``ddpdoctor/rules/speed.py:97: share > DATA_SHARE -> share >= DATA_SHARE``."""
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
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and id(node) not in hidden:
            for becomes in _changes(node):
                yield Mutant(path, node, becomes)
        if isinstance(node, ast.If) and _is_guard(node):
            yield Mutant(path, node.test, "False")


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


def noticed(tree: Path, tests: Sequence[str], limit: float) -> bool:
    """Whether a test fails in the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    job = subprocess.Popen(
        command,
        cwd=tree,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tree)},
        start_new_session=True,
    )
    try:
        return job.wait(limit) != 0
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait()
        return True


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
        if noticed(tree, asked.pytest, asked.limit):
            print("the tests fail without any change", file=sys.stderr)
            return 2
        for number, mutant in enumerate(chosen, 1):
            source = tree / mutant.path
            text = source.read_text()
            source.write_text(mutant.apply(text))
            seen = noticed(tree, asked.pytest, asked.limit)
            source.write_text(text)
            killed += seen
            print(
                f"{number}/{len(chosen)} {'killed' if seen else 'SURVIVED'} {mutant.title}",
                flush=True,
            )
    print(f"{killed} of {len(chosen)} mutants are noticed, of {len(found)} that there are")
    return 0 if killed >= 0.8 * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
