"""Whether a loop over a loader goes on until the loader ends, as its source says."""

from __future__ import annotations

import ast
import functools

LARGEST = 300_000
"""Bytes of a source file that is read at most."""

_PLAIN = (ast.Name, ast.Attribute, ast.Subscript)
_THROUGH = ("enumerate", "tqdm")


@functools.lru_cache(maxsize=32)
def runs_to_end(path: str, line: int) -> bool:
    """Whether a ``for`` at that line takes every batch; False also where that is not known."""
    try:
        with open(path, "rb") as file:
            source = file.read(LARGEST + 1)
        tree = ast.parse(source) if len(source) <= LARGEST else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    if tree is None:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0):
            return _takes_all(node.iter) and not any(map(_leaves, node.body))
    return False


def _takes_all(iterated: ast.expr) -> bool:
    while isinstance(iterated, ast.Call):
        called = iterated.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in _THROUGH or not iterated.args:
            return False
        iterated = iterated.args[0]
    return isinstance(iterated, _PLAIN)


def _leaves(node: ast.AST, inner: bool = False) -> bool:
    """Whether a statement of the loop's body may leave it, or hand control to a caller."""
    if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)):
        return True
    if isinstance(node, ast.Break):
        return not inner
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    inner = inner or isinstance(node, (ast.For, ast.AsyncFor, ast.While))
    return any(_leaves(child, inner) for child in ast.iter_child_nodes(node))
