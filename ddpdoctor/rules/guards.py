"""Conditions on the rank in the user's source, around a line or before it."""

from __future__ import annotations

import ast
import functools
import os
import re

from ddpdoctor.rules.sources import LARGEST

_WORDS = re.compile(
    r"rank|is_(main|master|chief|zero|primary)|(main|master)_process|process_index", re.IGNORECASE
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)


def rank_guard(path: str, line: int) -> int | None:
    """The line of the condition on the rank that decides whether a line runs, or None.

    An ``if`` around the line, within its function, or one before it that returns or continues.
    """
    guards = _guards(path)
    found = [
        (start, guard) for start, end, guard in guards if start <= line <= end and guard != line
    ]
    return max(found)[1] if found else None


def statement(path: str, line: int) -> str:
    """The source of a line in short, empty if it cannot be read."""
    text = _lines(path, _changed(path))
    return text[line - 1].strip() if 0 < line <= len(text) else ""


def constant_while(path: str, line: int) -> int | None:
    """The line of the innermost ``while`` around a line that cannot end by its own test, or None.

    Its test is a constant, or reads only names that its body never sets; and no statement of its
    body leaves it.
    """
    best: int | None = None
    for start, end, head in _loops(path, _changed(path)):
        if start <= line <= end:
            best = head if best is None else max(best, head)
    return best


def only_sleeps(path: str, line: int) -> bool:
    """Whether a line calls ``sleep``, and not in a ``while``, which may wait for something."""
    tree = _tree(path, _changed(path))
    if tree is None:
        return False
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Call, ast.While))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    calls = [node.func for node in around if isinstance(node, ast.Call)]
    names = [call.attr if isinstance(call, ast.Attribute) else call for call in calls]
    sleeps = any(each == "sleep" or getattr(each, "id", "") == "sleep" for each in names)
    return sleeps and len(calls) == len(around)


def _guards(path: str) -> list[tuple[int, int, int]]:
    return _found(path, _changed(path))


def _changed(path: str) -> int:
    try:
        told = os.stat(path)
    except OSError:
        return 0
    return told.st_mtime_ns if told.st_size <= LARGEST else 0


@functools.lru_cache(maxsize=32)
def _lines(path: str, changed: int) -> tuple[str, ...]:
    if not changed:
        return ()
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return tuple(file.read().splitlines())
    except OSError:
        return ()


@functools.lru_cache(maxsize=32)
def _tree(path: str, changed: int) -> ast.Module | None:
    try:
        return ast.parse("\n".join(_lines(path, changed)) + "\n") if changed else None
    except (SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=32)
def _found(path: str, changed: int) -> list[tuple[int, int, int]]:
    """First and last line that a condition decides on, and its own line."""
    tree = _tree(path, changed)
    found: list[tuple[int, int, int]] = []
    if tree is None:
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _about_rank(node.test):
            for part in (node.body, node.orelse):
                if part:
                    found.append((part[0].lineno, part[-1].end_lineno or 0, node.lineno))
        elif isinstance(node, ast.IfExp) and _about_rank(node.test):
            found.append((node.lineno, node.end_lineno or 0, node.lineno))
        for block in _blocks(node):
            found += _leaves(block)
    return found


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    blocks = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [
        block
        for block in blocks
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt)
    ]


def _leaves(block: list[ast.stmt]) -> list[tuple[int, int, int]]:
    """What follows an ``if rank != 0: return`` in the same block."""
    return [
        (each.end_lineno + 1, block[-1].end_lineno or 0, each.lineno)
        for each in block[:-1]
        if isinstance(each, ast.If)
        and each.end_lineno is not None
        and _about_rank(each.test)
        and isinstance(each.body[-1], (ast.Return, ast.Continue, ast.Break))
    ]


def _about_rank(test: ast.expr) -> bool:
    for node in ast.walk(test):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
        if isinstance(name, str) and _WORDS.search(name):
            return True
        if isinstance(node, ast.Constant) and node.value in ("RANK", "LOCAL_RANK"):
            return True
    return False


@functools.lru_cache(maxsize=32)
def _loops(path: str, changed: int) -> list[tuple[int, int, int]]:
    tree = _tree(path, changed)
    if tree is None:
        return []
    return [
        (node.lineno, node.end_lineno or 0, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and _never_ends(node)
    ]


def _never_ends(loop: ast.While) -> bool:
    inside = [each for part in loop.body for each in ast.walk(part)]
    if any(isinstance(each, (ast.Break, ast.Return, ast.Raise, ast.Yield)) for each in inside):
        return False
    tested = list(ast.walk(loop.test))
    if any(isinstance(each, (ast.Call, ast.Attribute, ast.Subscript)) for each in tested):
        return False
    names = {each.id for each in tested if isinstance(each, ast.Name)}
    stored = {
        each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return not names & stored
