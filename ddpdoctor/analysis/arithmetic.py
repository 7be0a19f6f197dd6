"""Lines of the job's own arithmetic between its forward and its backward, by their operation."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from ddpdoctor.analysis.programs import changed, tree_of
from ddpdoctor.core.finding import Location

_OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "reciprocal": ast.Div,
    "pow": ast.Pow,
    "mm": ast.MatMult,
    "mv": ast.MatMult,
    "dot": ast.MatMult,
}
"""Python's operators by the name of torch's operation."""

_CONSTANT = re.compile(r"""\b(?:nan|inf|infinity)\b""", re.IGNORECASE)
"""A constant that is not finite: `float("nan")`, `math.inf`, `torch.nan`."""

MOST = 3
"""Lines that are named as candidates."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def lines_of(
    operations: Collection[str],
    forward: Location | None,
    backward: Location | None,
    order: tuple[int, int] | None = None,
    *,
    constant: bool = False,
) -> list[Location]:
    """The lines behind the forward and ahead of the backward that do one of some operations.

    Args:
        operations: Their names, as torch's graph has them: ``mul``, ``log``.
        forward: Where the model is called.
        backward: Where ``backward()`` is; both may be in one function, or in two.
        order: Which one of how many operations of that name it is that is looked for.
        constant: Whether what is looked for took in something that is not finite and was computed
            by nobody: a constant, perhaps.
    """
    found: list[tuple[Location, str]] = []
    for site, before in ((forward, False), (backward, True)):
        if site is None:
            continue
        tree = tree_of(site.path, changed(site.path))
        function = _around(tree, site.line) if tree is not None else None
        if function is None:
            continue
        other = backward if site is forward else forward
        together = other is not None and other.path == site.path
        together = together and other is not None and _holds(function, other.line)
        first = site.line if not before else 0
        last = site.line - 1 if before else 1 << 62
        if together and other is not None:
            first, last = (first, other.line - 1) if not before else (other.line, last)
        for line, text in _lines(function, operations):
            place = Location(site.path, line), text
            if first <= line <= last:
                found.append(place)
        if together:
            break
    if order is not None and order[1] == len(found):
        # All of them ran, and nothing else did the same: they ran in their order.
        return [found[order[0]][0]]
    lines = list(dict.fromkeys(place for place, _ in found))
    literal = [place for place, text in found if constant and _CONSTANT.search(text)]
    return literal if len(literal) == 1 and len(lines) > 1 else lines


def _around(tree: ast.Module, line: int) -> Function:
    inner: Function = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _holds(node, line):
            inner = node
    return inner


def _holds(function: Function, line: int) -> bool:
    return isinstance(function, ast.Module) or function.lineno <= line <= (function.end_lineno or 0)


def _lines(function: Function, operations: Collection[str]) -> Iterator[tuple[int, str]]:
    """The lines that do one of some operations, as often as they do so, with their text."""
    for statement in _statements(function):
        for node in _parts(statement):
            if _does(node, operations):
                yield statement.lineno, ast.unparse(node)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)
    if isinstance(statement, ast.AugAssign):
        yield statement


def _does(node: ast.AST, operations: Collection[str]) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return any(_OPERATORS.get(name) is type(node.op) for name in operations)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return str(name).rstrip("_") in operations
    return False
