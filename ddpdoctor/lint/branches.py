"""Recognize branches that only jobs of one process take: the ``else`` of ``if distributed:``."""

from __future__ import annotations

import ast
import re

from ddpdoctor.core.syntax import LEAVING, Tree, last_name
from ddpdoctor.lint.names import ENVIRONMENT


def ifs_before(parent: ast.AST, inner: ast.AST) -> list[ast.If]:
    """Return the ``if`` statements before a statement in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and inner in block:
            return [each for each in block[: block.index(inner)] if isinstance(each, ast.If)]
    return []


def is_for_one_process(tree: Tree, node: ast.AST) -> bool:
    """Return whether a node is in a branch that no job of several ranks takes."""
    inner = node
    for each in tree.above(node):
        if isinstance(each, (ast.If, ast.IfExp)) and inner is not each.test:
            body = each.body if isinstance(each.body, list) else [each.body]
            if _of_several(each.test) is (inner not in body):
                return True
        if isinstance(inner, ast.stmt) and any(
            isinstance(test.body[-1], LEAVING) and _of_several(test.test)
            for test in ifs_before(each, inner)
        ):
            return True
        inner = each
    return False


_SEVERAL = re.compile(
    r"(is_|use_|using_|in_)?(distributed|ddp|dist)(_run|_mode|_training)?",
    re.IGNORECASE,
)
"""Names of conditions that hold in all ranks of a job of several ranks, and in no other job."""

_WORLD = re.compile(r"(.*_)?(world_?size|num_(replicas|ranks|processes)|nprocs)", re.IGNORECASE)


def _of_several(test: ast.expr) -> bool | None:
    """Return what a condition is in a job of several ranks, and not in another. None if unknown."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _of_several(test.operand)
        return None if value is None else not value
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compares_several(test.left, test.ops[0], test.comparators[0])
    name = last_name(test.func) if isinstance(test, ast.Call) else last_name(test)
    return True if _SEVERAL.fullmatch(name) else None


_COMPARED = {
    (ast.Gt, "1"): True, (ast.GtE, "2"): True, (ast.NotEq, "1"): True,
    (ast.Eq, "1"): False, (ast.LtE, "1"): False, (ast.Lt, "2"): False,
    (ast.NotEq, "-1"): True, (ast.Gt, "-1"): True, (ast.Eq, "-1"): False,
}  # fmt: skip


def _compares_several(left: ast.expr, how: ast.cmpop, right: ast.expr) -> bool | None:
    """Return what a comparison with 1 or -1 is in a job of several ranks, and not in another."""
    if isinstance(how, ast.In) and isinstance(left, ast.Constant) and left.value in ENVIRONMENT:
        return True
    name = last_name(left.func) if isinstance(left, ast.Call) else last_name(left)
    number = ast.unparse(right)
    is_rank = number == "-1" and name.endswith("rank")
    return _COMPARED.get((type(how), number)) if is_rank or _WORLD.fullmatch(name) else None
