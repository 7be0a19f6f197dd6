"""Recognize DDP objects and their names."""

from __future__ import annotations

import ast

from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.code import Code, Origin

TELLS_DDP = ("hasattr", "ddp", "distrib", "module", "parallel", "world", "gpu", "multi")
"""Words of conditions that tell a wrapped model from a bare one."""


def is_ddp(origin: Origin) -> bool:
    """Return whether a value is made by torch's DDP."""
    return origin.code.is_torch(origin.node, "DistributedDataParallel")


def is_wrapper(code: Code, node: ast.expr) -> bool:
    """Return whether an expression may be a DDP module."""
    return isinstance(node, (ast.Name, ast.Attribute)) and any(map(is_ddp, code.origins(node)))


def bound(code: Code, wrap: ast.Call) -> ast.expr | None:
    """Return the name or attribute that a wrapper is bound to in its own statement."""
    statement = code.statement(wrap)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        while isinstance(value, ast.Call) and value is not wrap:
            # DDP(...).to(device), torch.compile(DDP(...))
            value = (
                value.func.value
                if isinstance(value.func, ast.Attribute)
                else value.args[0]
                if value.args
                else value.func
            )
        if value is wrap and isinstance(target, (ast.Name, ast.Attribute)):
            return target
    return None


def same(code: Code, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two expressions are the same name or attribute of one scope."""
    if isinstance(one, ast.Name) and isinstance(other, ast.Name):
        return one.id == other.id and code.scope(one) is code.scope(other)
    return (
        isinstance(one, ast.Attribute)
        and isinstance(other, ast.Attribute)
        and ast.unparse(one) == ast.unparse(other)
    )


def over_parameters(loop: ast.AST) -> bool:
    """Return whether a node is a loop over the parameters or layers of a module."""
    made = getattr(loop, "iter", None)
    names = ("parameters", "children", "modules")
    return isinstance(made, ast.Call) and last_name(made.func).removeprefix("named_") in names
