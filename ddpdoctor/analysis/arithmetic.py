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
        constant: Whether what is looked for took in something that is not finite and no
            operation computed: a constant, perhaps.
    """
    found = _candidates(operations, forward, backward)
    if order is not None and order[1] == len(found):
        # All of them ran, and nothing else did the same: they ran in their order.
        return [found[order[0]][0]]
    lines = list(dict.fromkeys(place for place, _ in found))
    literal = [place for place, text in found if constant and _CONSTANT.search(text)]
    return literal if len(literal) == 1 and len(lines) > 1 else lines


def _candidates(
    operations: Collection[str], forward: Location | None, backward: Location | None
) -> list[tuple[Location, str]]:
    """The lines between the two, as often as they do one of the operations, with their text."""
    found: list[tuple[Location, str]] = []
    for site, other in ((forward, backward), (backward, forward)):
        tree = tree_of(site.path, changed(site.path)) if site is not None else None
        if site is None or tree is None:
            continue
        function = _around(tree, site.line)
        first = forward.line if forward and _stands_in(forward, function, site.path) else 0
        last = backward.line if backward and _stands_in(backward, function, site.path) else 1 << 62
        found += [
            (Location(site.path, line), text)
            for line, text in _lines(function, operations)
            if first <= line < last
        ]
        if other is not None and _stands_in(other, function, site.path):
            break
    return found


def _around(tree: ast.Module, line: int) -> Function:
    inner: Function = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _holds(node, line):
            inner = node
    return inner


def _holds(function: Function, line: int) -> bool:
    return isinstance(function, ast.Module) or function.lineno <= line <= (function.end_lineno or 0)


def _stands_in(place: Location, function: Function, path: str) -> bool:
    return place.path == path and _holds(function, place.line)


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
