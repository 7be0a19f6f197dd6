"""Follow what a loop counts until something combines it over the ranks."""

from __future__ import annotations

import ast
import re

from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import targets_of
from ddpdoctor.lint.code import Code

_REDUCES = re.compile(r"reduce|gather|sync(?!hronize$)|broadcast|aggregat|merge|average_", re.I)
_PLAIN = frozenset(
    ("numpy", "np", "torch", "sklearn", "scipy", "math", "logging", "wandb", "json", "os", "time")
)
"""Packages whose functions combine nothing over the ranks, except those of `_REDUCES`."""


def reduces(code: Code, call: ast.Call, depth: int = 2, known: bool = False) -> bool:
    """Return whether a call may combine its arguments over the ranks.

    Args:
        code: The file.
        call: The call.
        depth: How far calls are followed.
        known: Ignore functions of files that are not there.
    """
    name = last_name(call.func)
    if _REDUCES.search(name):
        return True
    targets = code.program.targets(code, call)
    if targets:
        return depth > 0 and any(
            isinstance(each, ast.Call) and reduces(other, each, depth - 1, known=True)
            for other, function in targets
            for each in other.within(function)
        )
    if known:
        return False
    full = code.imports.get(name, "") if isinstance(call.func, ast.Name) else ""
    return bool(full) and full.partition(".")[0] not in _PLAIN


def names_in(node: ast.AST) -> set[str]:
    """Return the names in an expression."""
    return {last_name(each) for each in ast.walk(node)} - {""}


def unreduced(code: Code, nodes: list[ast.AST], names: set[str]) -> set[str]:
    """Return some names and those computed from them, without what is reduced or made of it."""
    found = set(names)
    made: list[tuple[set[str], set[str]]] = []
    for each in nodes:
        value = getattr(each, "value", None) if targets_of(each) else None
        used = names_in(value) & found if value is not None else set()
        if used:
            parts = [
                part
                for target in targets_of(each)
                for part in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            made.append(({last_name(part) for part in parts}, used))
            found |= made[-1][0]
    reduced = {
        name
        for each in nodes
        if isinstance(each, ast.Call) and reduces(code, each)
        for name in names_in(each) & found
    }
    for targets, used in reversed(made):
        reduced |= used if targets & reduced else set()
    for targets, used in made:
        reduced |= targets if used & reduced else set()
    return found - reduced - {""}


_MEASURES = re.compile(r"loss|acc(uracy)?(_|\d|$)", re.IGNORECASE)
"""Names of values that a loop computes for each batch."""


def counted(code: Code, loop: ast.For) -> set[str]:
    """Return the names that a loop adds up, collects in a list, or averages by a meter."""
    found = set()
    for each in code.within(loop):
        if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add):
            target: ast.expr = each.target
            while isinstance(target, ast.Subscript):
                target = target.value
            found.add(last_name(target))
        elif isinstance(each, ast.Assign):
            found |= {name for name in map(last_name, each.targets) if _MEASURES.search(name)}
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            owner = each.func.value
            meter = each.func.attr == "update" and any(
                isinstance(made.node, ast.Call) and "AverageMeter" in last_name(made.node.func)
                for made in code.origins(owner)
            )
            if each.func.attr in ("append", "extend") or meter:
                found.add(last_name(owner))
    return found - {""}
