"""Lines of the job that write gradients, weights or hyper-parameters on some ranks only."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddpdoctor.analysis.averaging import DEPTH, Scope, of_model
from ddpdoctor.analysis.guards import rank_guard, ranks_at
from ddpdoctor.analysis.programs import MOST_FILES, changed, files_of, tree_of
from ddpdoctor.core.finding import Location
from ddpdoctor.run.snapshot import Run

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
_HYPER = re.compile(r"param_groups\b|\b(param_)?group\[|\['(lr|momentum|betas|weight_decay)'\]$")

What = Literal["gradients", "weights", "hyper-parameters"]


@dataclass(frozen=True)
class Write:
    """A line that writes."""

    location: Location
    what: What
    function: str
    """The function that it stands in, empty at the top of a file."""


def on_some_ranks(run: Run, what: What) -> list[Location]:
    """The lines that write something where a condition on the rank decides."""
    paths = files_of(run)
    writes = [
        write for path in paths for write in _writes(path, changed(path)) if write.what == what
    ]
    return [
        write.location
        for write in writes
        if rank_guard(write.location.path, write.location.line) is not None
        or _called_on_some_ranks(write.function, paths)
    ]


def ranks_of(run: Run, lines: list[Location]) -> tuple[int, ...]:
    """The ranks that alone may run the only line; empty where that is not known."""
    ranks = run.last
    world = max((rank.status.world_size for rank in ranks if rank.status is not None), default=0)
    hosts = {rank.opened.host for rank in ranks}
    if len(lines) != 1:
        return ()
    return ranks_at(lines[0].path, lines[0].line, world, one_node=len(hosts) == 1)


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


def _kind(node: ast.AST, scope: Scope) -> What | None:
    """What a statement or a call writes."""
    if isinstance(node, ast.Assign):
        return next((kind for each in node.targets if (kind := _stored(each)) is not None), None)
    if isinstance(node, ast.AugAssign):
        return _stored(node.target)
    if isinstance(node, ast.Call):
        return _written(node, scope)
    return None


def _stored(target: ast.expr) -> What | None:
    """What an assignment writes: to an attribute, or to elements of a tensor."""
    if isinstance(target, ast.Attribute) and target.attr in ("grad", "data"):
        return "gradients" if target.attr == "grad" else _tensor(ast.unparse(target))
    text = ast.unparse(target)
    if isinstance(target, ast.Subscript) and _ELEMENTS.search(text):
        return _tensor(text)
    if isinstance(target, ast.Subscript) and _HYPER.search(text):
        return "hyper-parameters"
    return None


def _tensor(text: str) -> What:
    return "gradients" if _GRADIENT.search(text) else "weights"


def _written(call: ast.Call, scope: Scope) -> What | None:
    name = _name(call)
    if name in _WHOLE:
        return "weights"
    if name.startswith("_foreach_") and name.endswith("_") and call.args:
        return _tensor(ast.unparse(call.args[0]))
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = ast.unparse(call.func.value)
    if name == "apply" and _MODULE.search(owner):
        return "weights"
    if owner.rpartition(".")[2] == "init" and name.endswith("_"):
        return "weights"
    if not _IN_PLACE.match(name):
        return None
    if _GRADIENT.search(owner):
        return "gradients"
    weights = _WEIGHT.search(owner) or of_model(call.func.value, scope, DEPTH)
    return "weights" if weights else None


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
