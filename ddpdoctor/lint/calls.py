"""Read the parts of calls, functions and assignments."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from ddpdoctor.core.syntax import last_name


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return an argument by its keyword or position. None if it is not passed."""
    for each in call.keywords:
        if each.arg == name:
            return each.value
    if position is not None and position < len(call.args):
        before = call.args[: position + 1]
        if not any(isinstance(each, ast.Starred) for each in before):
            return call.args[position]
    return None


def has_unpacked(call: ast.Call) -> bool:
    """Return whether arguments are passed by ``*`` or ``**``, so that others may be among them."""
    return any(isinstance(each, ast.Starred) for each in call.args) or any(
        each.arg is None for each in call.keywords
    )


def argument_of(
    call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, is_method: bool
) -> ast.expr | None:
    """Return the argument of a call for a parameter. None if that is not known."""
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    if is_method and names:
        names = names[1:]
    return keyword(call, name, names.index(name) if name in names else None)


def parameters_of(function: ast.AST) -> set[str]:
    """Return the names of a function's parameters. A module has none."""
    arguments = getattr(function, "args", None)
    if not isinstance(arguments, ast.arguments):
        return set()
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    extra = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return {each.arg for each in (*every, *extra)}


def default_of(function: ast.AST, name: str) -> ast.expr | None:
    """Return the default of a function's parameter. None without one."""
    arguments = getattr(function, "args", None)
    assert isinstance(arguments, ast.arguments)
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    with_default = names[len(names) - len(arguments.defaults) :]
    for each, value in zip(with_default, arguments.defaults, strict=True):
        if each == name:
            return value
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if argument.arg == name:
            return default
    return None


def returned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.expr | None:
    """Return what a function returns, if it computes nothing else: also under conditions."""
    return _returned(function.body)


def _returned(block: Sequence[ast.stmt]) -> ast.expr | None:
    first = block[0] if block else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return _returned(block[1:])
    if isinstance(first, ast.Return):
        return first.value
    if not isinstance(first, ast.If):
        return None
    body, orelse = _returned(first.body), _returned([*first.orelse, *block[1:]])
    return ast.IfExp(first.test, body, orelse) if body and orelse else None


def calls_in(nodes: Iterable[ast.AST], *names: str) -> list[ast.Call]:
    """Return the calls of some functions in some nodes, also in nested functions."""
    return [
        each
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and last_name(each.func) in names
    ]


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment. Empty for other nodes."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def is_below_a_number(test: ast.expr) -> bool:
    """Return whether a rank is compared with a variable: ``rank < num_gpus`` may hold on all."""
    if isinstance(test, ast.UnaryOp):
        return is_below_a_number(test.operand)
    if not isinstance(test, ast.Compare):
        return False
    other = test.comparators[0]
    if isinstance(test.ops[0], (ast.In, ast.NotIn)):
        return isinstance(other, ast.Call) and last_name(other.func) == "range"
    named = (ast.Name, ast.Attribute, ast.Call)
    ordered = isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
    return ordered and isinstance(test.left, named) and isinstance(other, named)
