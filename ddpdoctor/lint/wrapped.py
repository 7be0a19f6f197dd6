"""Recognize DDP objects and their names."""

from __future__ import annotations

import ast
from typing import NamedTuple

from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import argument_of, keyword, parameters_of
from ddpdoctor.lint.code import Code, Origin
from ddpdoctor.lint.program import Program

TELLS_DDP = ("hasattr", "ddp", "distrib", "module", "parallel", "world", "gpu", "multi")
"""Words of conditions that tell a wrapped model from a bare one."""


def is_ddp(origin: Origin) -> bool:
    """Return whether a value is made by torch's DDP."""
    return origin.code.is_torch(origin.node, "DistributedDataParallel")


def is_wrapper(code: Code, node: ast.expr) -> bool:
    """Return whether an expression may be a DDP module."""
    named = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    return named and any(map(is_ddp, code.origins(node)))


class Wrapping(NamedTuple):
    """A place where a model is wrapped: by DDP itself, or by a function that returns it wrapped.

    Attributes:
        call: The call.
        inner: The model, if it is known here.
        target: The name or attribute that the wrapper is bound to.
        made: The call of DDP.
        is_certain: The function always returns it wrapped.
    """

    call: ast.Call
    inner: ast.expr | None
    target: ast.expr | None
    made: ast.Call
    is_certain: bool


def wrappings(code: Code) -> list[Wrapping]:
    """Return the places in a file where models are wrapped."""
    return code.program.once("wrappings", lambda: _wrappings(code.program)).get(code, [])


def apex_wrappings(code: Code) -> list[Wrapping]:
    """Return the places where models are wrapped with the DDP of apex."""
    return [
        Wrapping(each, keyword(each, "module", 0), _bound(code, each), each, True)
        for each in code.apex_wraps
    ]


def _wrappings(program: Program) -> dict[Code, list[Wrapping]]:
    found: dict[Code, list[Wrapping]] = {}
    queue = [(code, wrap, wrap, True) for code in program.codes for wrap in code.wraps]
    inside = {call: keyword(call, "module", 0) for _, call, _, _ in queue}
    for code, call, made, certain in queue:
        inner = inside[call]
        found.setdefault(code, []).append(Wrapping(call, inner, _bound(code, call), made, certain))
        function = code.function(call)
        results = [
            [each.node for each in code.origins(one.value)]
            for one in (code.within(function) if function is not None else ())
            if isinstance(one, ast.Return) and isinstance(one.value, (ast.Name, ast.Call))
        ]
        if function is None or not any(made in each for each in results):
            continue
        name = inner.id if isinstance(inner, ast.Name) else ""
        for other, site in program.callers(code, function):
            if site not in inside:
                inside[site] = argument_of(site, function, name, code.is_method(function))
                always = certain and all(each == [made] for each in results)
                queue.append((other, site, made, always))
    return found


def _bound(code: Code, wrap: ast.Call) -> ast.expr | None:
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
        if value is wrap and isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
            return target
    return None


def same(code: Code, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two expressions are the same name or attribute of one scope."""
    if isinstance(one, ast.Name) and isinstance(other, ast.Name):
        return one.id == other.id and code.scope(one) is code.scope(other)
    return (
        isinstance(one, (ast.Attribute, ast.Subscript))
        and type(one) is type(other)
        and ast.unparse(one) == ast.unparse(other)
    )


def over_parameters(loop: ast.AST) -> bool:
    """Return whether a node is a loop over the parameters or layers of a module."""
    made = getattr(loop, "iter", None)
    names = ("parameters", "children", "modules")
    return isinstance(made, ast.Call) and last_name(made.func).removeprefix("named_") in names


def is_bare(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is a module that a wrapper holds: ``model.module``."""
    named = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    made = code.origins(node) if named else []
    return not any(map(is_ddp, made)) and any(
        isinstance(each.node, ast.Attribute)
        and each.node.attr == "module"
        and is_wrapper(each.code, each.node.value)
        for each in made
    )


def is_passed_ddp(code: Code, node: ast.Name, depth: int = 2) -> bool:
    """Return whether a parameter is DDP in all calls of its function."""
    function = code.function(node)
    if (
        function is None
        or depth <= 0
        or node.id not in parameters_of(function)
        or code.binds(function, node.id)
    ):
        return False
    passed = [
        (other, argument_of(call, function, node.id, is_method=code.is_method(function)), call)
        for other, call in code.program.callers(code, function)
    ]
    return bool(passed) and all(
        given is not None and certainly_ddp(other, given, call, depth - 1)
        for other, given, call in passed
    )


def certainly_ddp(code: Code, node: ast.expr, at: ast.expr, depth: int = 2) -> bool:
    """Return whether an expression is certainly a DDP object where it is used."""
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return code.is_torch(node, "DistributedDataParallel")
    made = code.origins(node)
    if made and all(map(is_ddp, made)):
        return True
    bound = [
        (item.node.lineno, any(each in code.wraps for each in ast.walk(item.value)))
        for other, item in code.values(node)
        if other is code
        and isinstance(item.node, ast.Assign)
        # What a function reads of the scope around it is set by the time it is called.
        and (item.node.lineno < at.lineno or code.scope(item.node) is not code.scope(node))
    ]
    if any(is_ddp for _, is_ddp in bound):
        return max(bound)[1]
    return isinstance(node, ast.Name) and is_passed_ddp(code, node, depth)
