"""Lines of the job's own arithmetic between its forward and its backward, by their operation."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from ddpdoctor.finding import Location
from ddpdoctor.rules.programs import changed, tree_of

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

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def lines_of(
    operations: Collection[str], forward: Location | None, backward: Location | None
) -> list[Location]:
    """The lines behind the forward and ahead of the backward that do one of some operations.

    Args:
        operations: Their names, as torch's graph has them: ``mul``, ``log``.
        forward: Where the model is called.
        backward: Where ``backward()`` is; both may be in one function, or in two.
    """
    found: dict[Location, None] = {}
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
        for line in _lines(function, operations):
            if first <= line <= last:
                found[Location(site.path, line)] = None
    return list(found)


def _around(tree: ast.Module, line: int) -> Function:
    inner: Function = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _holds(node, line):
            inner = node
    return inner


def _holds(function: Function, line: int) -> bool:
    return isinstance(function, ast.Module) or function.lineno <= line <= (function.end_lineno or 0)


def _lines(function: Function, operations: Collection[str]) -> Iterator[int]:
    for statement in _statements(function):
        if any(_does(node, operations) for node in _parts(statement)):
            yield statement.lineno


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
