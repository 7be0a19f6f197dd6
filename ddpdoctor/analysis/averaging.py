"""Parameters that the job itself averages: which lines do, and whether they have run yet.

Replicas of a local SGD differ until they are averaged for the first time, which may be at the end
of an epoch. Until then only the source distinguishes them from replicas that differ by mistake.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import TypeAlias

from ddpdoctor.analysis.programs import MOST_FILES, changed, files_of, tree_of
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Run

_CARRY = re.compile(r"(all_reduce|broadcast|all_gather|reduce)(_|$)")
"""Collectives that averaging may be made of."""

_AVERAGERS = ("PostLocalSGDOptimizer", "LocalSGD", "DiLoCo")
"""Classes that average by themselves."""

_MODEL = re.compile(r"param|state_dict|weights?\b", re.IGNORECASE)
_GRADIENT = re.compile(r"grad", re.IGNORECASE)

Scope: TypeAlias = "ast.Module | ast.FunctionDef"

DEPTH = 4
"""Assignments that a collective's argument is followed through."""


def pending(run: Run) -> bool:
    """Whether a line of the job averages parameters and has not run.

    Of a job that came to a good end nothing is to come any more.
    """
    if run.exit_status == 0:
        return False
    ran = {
        (record.path, record.line)
        for rank in run.last
        for record in rank.records.of(SiteRecord)
        if record.phase == "wait"
    }
    return any(
        not any((path, line) in ran for line in range(first, last + 1))
        for path in files_of(run)
        for first, last in _averages(path, changed(path))
    )


@functools.lru_cache(maxsize=MOST_FILES)
def _averages(path: str, when: int) -> tuple[tuple[int, int], ...]:
    """The calls of a file that average or spread parameters: their first and last lines."""
    tree = tree_of(path, when)
    if tree is None:
        return ()
    scopes: list[Scope] = [tree]
    scopes += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return tuple(
        (call.lineno, call.end_lineno or call.lineno)
        for scope in scopes
        for call in _calls(scope)
        if _is_averaging(call, scope)
    )


def _calls(scope: Scope) -> Iterator[ast.Call]:
    """The calls of a scope, without those of the functions in it."""
    queue: list[ast.AST] = list(scope.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            queue += ast.iter_child_nodes(node)


def _is_averaging(call: ast.Call, scope: Scope) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "average_parameters" or name in _AVERAGERS:
        return True
    return bool(_CARRY.match(name)) and any(
        of_model(argument, scope, DEPTH) for argument in call.args
    )


def of_model(value: ast.expr, scope: Scope, depth: int) -> bool:
    """Whether a value is made of parameters, and not of their gradients."""
    text = ast.unparse(value)
    if _GRADIENT.search(text):
        return False
    if _MODEL.search(text):
        return True
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return depth > 0 and any(
        of_model(source, scope, depth - 1) for source in _sources(names, scope)
    )


def _sources(names: set[str], scope: Scope) -> Iterator[ast.expr]:
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
