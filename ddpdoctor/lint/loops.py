"""Recognize loops over epochs and batches."""

from __future__ import annotations

import ast

from ddpdoctor.core.syntax import Loop, last_name
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import without_gradients
from ddpdoctor.lint.program import Program


def runs_backward(code: Code, loop: Loop) -> bool:
    """Return whether a loop over batches runs a backward."""
    if code.called(loop, "backward"):
        return not without_gradients(code, loop)
    for call in (each for each in code.within(loop) if isinstance(each, ast.Call)):
        for other, function in code.program.targets(code, call):
            if other.called(function, "backward"):
                return True
    return False


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
