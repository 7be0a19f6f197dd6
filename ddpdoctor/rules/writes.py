"""Lines of the job that write gradients or weights in place on some ranks only, read from it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.finding import Location
from ddpdoctor.rules.averaging import DEPTH, Scope, of_model
from ddpdoctor.rules.guards import rank_guard
from ddpdoctor.rules.programs import MOST_FILES, changed, files_of, tree_of
from ddpdoctor.run import Run

_IN_PLACE = re.compile(
    r"(add|sub|mul|div|copy|zero|fill|normal|uniform|clamp|clip|lerp|addcmul|addcdiv|neg|round"
    r"|sign|bernoulli|trunc_normal|masked_fill|index_fill|index_copy|index_add|set)_$"
)
_WHOLE = ("reset_parameters", "vector_to_parameters")
"""Calls that write a module's weights; those of ``load_state_dict`` are seen where they run."""

_GRADIENT = re.compile(r"\.grad\b|\bgrads\b")
_MODULE = re.compile(r"model|module|ddp|net|layer|head|encoder|decoder", re.IGNORECASE)
_WEIGHT = re.compile(r"\.(weight|bias)\b|param")
_ELEMENTS = re.compile(r"\.(data|grad|weight|bias)\b")


@dataclass(frozen=True)
class Write:
    """A line that writes."""

    location: Location
    gradients: bool
    """Gradients, and not weights."""
    function: str
    """The function that it stands in, empty at the top of a file."""


def on_some_ranks(run: Run, gradients: bool) -> list[Location]:
    """The lines that write gradients, or else weights, where a condition on the rank decides."""
    paths = files_of(run)
    writes = [
        write
        for path in paths
        for write in _writes(path, changed(path))
        if write.gradients is gradients
    ]
    return [
        write.location
        for write in writes
        if rank_guard(write.location.path, write.location.line) is not None
        or _called_on_some_ranks(write.function, paths)
    ]


def likely(lines: list[Location], what: str) -> Iterator[str]:
    """What such lines say of a change that was seen, or whose effect was."""
    if len(lines) == 1:
        yield f"{lines[0]} is the only line that changes {what} under a condition on the rank"
    elif lines:
        listed = ", ".join(map(str, lines[:4]))
        yield f"lines that change {what} under a condition on the rank: {listed}"


def _called_on_some_ranks(function: str, paths: list[str]) -> bool:
    """Whether a function is called, and never but where a condition on the rank decides."""
    calls = [
        (path, line)
        for path in paths
        for name, line in _calls(path, changed(path))
        if function and name == function
    ]
    return bool(calls) and all(rank_guard(path, line) is not None for path, line in calls)


@functools.lru_cache(maxsize=MOST_FILES)
def _calls(path: str, when: int) -> tuple[tuple[str, int], ...]:
    """The names of the functions that a file calls, with the lines."""
    tree = tree_of(path, when)
    nodes = ast.walk(tree) if tree is not None else iter(())
    return tuple((_name(node), node.lineno) for node in nodes if isinstance(node, ast.Call))


@functools.lru_cache(maxsize=MOST_FILES)
def _writes(path: str, when: int) -> tuple[Write, ...]:
    tree = tree_of(path, when)
    if tree is None:
        return ()
    found: dict[int, Write] = {}
    for scope, node in _nodes(tree, tree):
        kind = _kind(node, scope)
        if kind is not None:
            line = getattr(node, "lineno", 0)
            function = scope.name if isinstance(scope, ast.FunctionDef) else ""
            found.setdefault(line, Write(Location(path, line), kind, function))
    return tuple(found.values())


def _nodes(node: ast.AST, scope: Scope) -> Iterator[tuple[Scope, ast.AST]]:
    """All nodes, each with the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        yield from _nodes(child, child if isinstance(child, ast.FunctionDef) else scope)


def _kind(node: ast.AST, scope: Scope) -> bool | None:
    """Whether a statement or a call writes gradients; False for weights, None for neither."""
    if isinstance(node, ast.Assign):
        return next((kind for each in node.targets if (kind := _stored(each)) is not None), None)
    if isinstance(node, ast.AugAssign):
        return _stored(node.target)
    if isinstance(node, ast.Call):
        return _written(node, scope)
    return None


def _stored(target: ast.expr) -> bool | None:
    """What an assignment writes: to an attribute, or to elements of a tensor."""
    if isinstance(target, ast.Attribute) and target.attr in ("grad", "data"):
        return target.attr == "grad" or bool(_GRADIENT.search(ast.unparse(target)))
    text = ast.unparse(target)
    if isinstance(target, ast.Subscript) and _ELEMENTS.search(text):
        return bool(_GRADIENT.search(text))
    return None


def _written(call: ast.Call, scope: Scope) -> bool | None:
    name = _name(call)
    if name in _WHOLE:
        return False
    if name.startswith("_foreach_") and name.endswith("_") and call.args:
        return bool(_GRADIENT.search(ast.unparse(call.args[0])))
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = ast.unparse(call.func.value)
    if name == "apply" and _MODULE.search(owner):
        return False
    if owner.rpartition(".")[2] == "init" and name.endswith("_"):
        return False
    if not _IN_PLACE.match(name):
        return None
    if _GRADIENT.search(owner):
        return True
    weights = _WEIGHT.search(owner) or of_model(call.func.value, scope, DEPTH)
    return False if weights else None


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
