"""Parameters that the job itself averages: which lines do, and whether they have run yet.

Replicas of a local SGD differ until they are averaged for the first time, which may be at the end
of an epoch. Until then only the source tells them from replicas that differ by mistake.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator

from ddpdoctor.record import integer
from ddpdoctor.rules.sources import LARGEST
from ddpdoctor.run import Run

_CARRY = re.compile(r"(all_reduce|broadcast|all_gather|reduce)(_|$)")
"""Collectives that averaging may be made of."""

_AVERAGERS = ("PostLocalSGDOptimizer", "LocalSGD", "DiLoCo")
"""Classes that average by themselves."""

_MODEL = re.compile(r"param|state_dict|weights?\b", re.IGNORECASE)
_GRADIENT = re.compile(r"grad", re.IGNORECASE)

DEPTH = 4
"""Assignments that a collective's argument is followed through."""

MOST_FILES = 64
"""Files of the user's that are read."""


def pending(run: Run) -> bool:
    """Whether a line of the job averages parameters and has not run.

    Of a job that came to a good end nothing is to come any more.
    """
    if run.exit_status == 0:
        return False
    ran = {
        (str(record.get("path")), integer(record, "line"))
        for rank in run.last
        for record in rank.of_kind("site")
        if record.get("phase") == "wait"
    }
    return any(
        not any((path, line) in ran for line in range(first, last + 1))
        for path in _files(run)
        for first, last in _averages(path, _changed(path))
    )


def _files(run: Run) -> list[str]:
    """The files of the user's that are known to have run, and what they import beside them."""
    found: dict[str, None] = {}
    for rank in run.last:
        for kind in ("site", "ddp"):
            for record in rank.of_kind(kind):
                if record.get("path"):
                    found[str(record["path"])] = None
    # The dictionary grows: an imported file may import others.
    queue = list(found)
    for path in queue:
        for each in _imports(path, _changed(path)):
            if each not in found and len(found) < MOST_FILES:
                found[each] = None
                queue.append(each)
    return list(found)


def _changed(path: str) -> int:
    try:
        told = os.stat(path)
    except OSError:
        return 0
    return told.st_mtime_ns if told.st_size <= LARGEST else 0


@functools.lru_cache(maxsize=MOST_FILES)
def _tree(path: str, changed: int) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read()) if changed else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=MOST_FILES)
def _imports(path: str, changed: int) -> tuple[str, ...]:
    """The files that a file imports, as far as they lie in its folder or below."""
    tree = _tree(path, changed)
    names: list[str] = []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{each.name}".lstrip(".") for each in node.names)]
    folder = os.path.dirname(path)
    found = []
    for name in dict.fromkeys(filter(None, names)):
        base = os.path.join(folder, *name.split("."))
        found += [each for each in (f"{base}.py", f"{base}/__init__.py") if os.path.isfile(each)]
    return tuple(found)


@functools.lru_cache(maxsize=MOST_FILES)
def _averages(path: str, changed: int) -> tuple[tuple[int, int], ...]:
    """The calls of a file that average or spread parameters: their first and last lines."""
    tree = _tree(path, changed)
    if tree is None:
        return ()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return tuple(
        (call.lineno, call.end_lineno or call.lineno)
        for scope in (tree, *functions)
        for call in _calls(scope)
        if _is_averaging(call, scope)
    )


def _calls(scope: ast.Module | ast.FunctionDef) -> Iterator[ast.Call]:
    """The calls of a scope, without those of the functions in it."""
    queue: list[ast.AST] = list(scope.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            queue += ast.iter_child_nodes(node)


def _is_averaging(call: ast.Call, scope: ast.Module | ast.FunctionDef) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "average_parameters" or name in _AVERAGERS:
        return True
    return bool(_CARRY.match(name)) and any(
        _of_model(argument, scope, DEPTH) for argument in call.args
    )


def _of_model(value: ast.expr, scope: ast.Module | ast.FunctionDef, depth: int) -> bool:
    """Whether a value is made of parameters, and not of their gradients."""
    text = ast.unparse(value)
    if _GRADIENT.search(text):
        return False
    if _MODEL.search(text):
        return True
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return depth > 0 and any(
        _of_model(source, scope, depth - 1) for source in _sources(names, scope)
    )


def _sources(names: set[str], scope: ast.Module | ast.FunctionDef) -> Iterator[ast.expr]:
    """What some names are bound to, by assignments and by loops."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value = [node.target], node.iter
        else:
            continue
        bound = {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
        if bound & names:
            yield value
