"""Recognize loops over epochs and batches."""

from __future__ import annotations

import ast

from ddpdoctor.core.syntax import Function, Loop, last_name
from ddpdoctor.lint.calls import argument_of, default_of, has_unpacked, parameters_of
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import without_gradients
from ddpdoctor.lint.program import Program


def runs_backward(code: Code, loop: Loop) -> bool:
    """Return whether a loop over batches runs a backward."""
    if code.called(loop, "backward"):
        return not without_gradients(code, loop)
    for call in (each for each in code.within(loop) if isinstance(each, ast.Call)):
        for other, function in code.program.targets(code, call):
            found = other.called(function, "backward")
            if any(not _is_left_out(other, each, function, call) for each in found):
                return not without_gradients(code, call)
    return False


def _is_left_out(code: Code, node: ast.AST, function: Function, call: ast.Call) -> bool:
    """Return whether a call of a function never runs a node of it: ``update(training=False)``."""
    inner = node
    for each in code.above(node):
        if each is function or has_unpacked(call):
            break
        if isinstance(each, ast.If) and inner is not each.test:
            value = _result(code, each.test, function, call)
            if value is not None and value is not (inner in each.body):
                return True
        inner = each
    return False


def _result(code: Code, test: ast.expr, function: Function, call: ast.Call) -> bool | None:
    """Return what a condition on a parameter is in a call of its function. None if unknown."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _result(code, test.operand, function, call)
        return None if value is None else not value
    wanted = None
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        wanted = test.comparators[0]
        test = test.left
    name = last_name(test) if isinstance(test, ast.Name) else ""
    if name not in parameters_of(function) or (wanted and not isinstance(wanted, ast.Constant)):
        return None
    given = argument_of(call, function, name, code.is_method(function))
    given = given or default_of(function, name)
    if not isinstance(given, ast.Constant):
        return None
    return given.value == wanted.value if isinstance(wanted, ast.Constant) else bool(given.value)


def training_loops(program: Program) -> list[tuple[Code, ast.For | ast.AsyncFor]]:
    """Return the loops of a program whose iterations run a backward."""
    return program.once(
        "training loops",
        lambda: [
            (code, node)
            for code in program.codes
            for node in code.of(ast.For, ast.AsyncFor)
            if runs_backward(code, node)
        ],
    )


def repeats(code: Code, node: ast.AST, depth: int = 4) -> bool:
    """Return whether a node, such as a loop over batches, runs more than once."""
    if any(runs_often(code, outer) for outer in code.loops(node)):
        return True
    function = code.function(node)
    if function is None or depth <= 0:
        return False
    return any(
        repeats(each, call, depth - 1) for each, call in code.program.callers(code, function)
    )


def runs_often(code: Code, loop: Loop) -> bool:
    """Return whether a loop may have more than one iteration."""
    if isinstance(loop, ast.While):
        return True
    made = loop.iter
    if isinstance(made, ast.Call) and last_name(made.func) == "range" and len(made.args) == 1:
        values = [each.node for each in code.origins(made.args[0])]
        return not any(isinstance(each, ast.Constant) and each.value in (0, 1) for each in values)
    return not isinstance(made, (ast.List, ast.Tuple))
