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
from ddpdoctor.run.records.model import UnreducedRecord
from ddpdoctor.run.records.replicas import FingerprintRecord, TogetherRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Rank, Run

_CARRY = re.compile(r"(all_reduce|broadcast|all_gather|reduce)(_|$)")
"""Collectives that averaging may be made of."""

_AVERAGERS = ("PostLocalSGDOptimizer", "LocalSGD", "DiLoCo")
"""Classes that average by themselves."""

_MODEL = re.compile(r"param|state_dict|weights?\b", re.IGNORECASE)
_GRADIENT = re.compile(r"grad", re.IGNORECASE)

Scope: TypeAlias = "ast.Module | ast.FunctionDef"

BEFORE = -1
"""Of a rank that has run a call, and has not been looked at since."""

_LOOKS = (UnreducedRecord, TogetherRecord, FingerprintRecord)
"""What ranks write of their parameters after a step."""

DEPTH = 4
"""Assignments that a collective's argument is followed through."""


def pending(run: Run) -> bool:
    """Whether a line of the job averages parameters and has not run, or what it did is not known.

    Of a job that came to a good end nothing is to come any more.
    """
    if run.exit_status == 0:
        return False
    return any(
        not _has_run(run, path, first, last)
        for path in files_of(run)
        for first, last in _averages(path, changed(path))
    )


def _has_run(run: Run, path: str, first: int, last: int) -> bool:
    """Whether some rank has run a call, and all of them have been looked at since.

    The ranks write at their own pace, and a call of a loop over parameters is seen when it begins.
    """
    looks = [_look_since(rank, path, range(first, last + 1)) for rank in run.last]
    since = max((step for step in looks if step is not None), default=None)
    if since is None or BEFORE in looks:
        return False
    return all(
        step is not None or any(each.step >= since for each in _looks(rank))
        for rank, step in zip(run.last, looks, strict=True)
    )


def _look_since(rank: Rank, path: str, lines: range) -> int | None:
    """The step of a rank's first look after it ran a call; None if it did not, or see `BEFORE`."""
    ran = False
    for record in rank.records:
        if isinstance(record, SiteRecord):
            here = record.path == path and record.line in lines
            ran = ran or (here and record.phase == "wait")
        elif ran and isinstance(record, _LOOKS):
            return record.step
    return BEFORE if ran else None


def _looks(rank: Rank) -> Iterator[UnreducedRecord | TogetherRecord | FingerprintRecord]:
    return (record for record in rank.records if isinstance(record, _LOOKS))


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
