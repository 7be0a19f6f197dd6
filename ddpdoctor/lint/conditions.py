"""Find the conditions that decide whether a rank runs a node, and blocks without gradients."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.syntax import FUNCTIONS, LEAVING, last_name
from ddpdoctor.diagnose.rank_expressions import by_rank_alone, runs_on_one_rank
from ddpdoctor.lint.branches import ifs_before, is_for_one_process
from ddpdoctor.lint.calls import argument_of, calls_in, has_unpacked, keyword, parameters_of
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.wrapped import wrappings

_COMPARISONS = frozenset(("main", "master", "chief", "primary", "verbose", "gpu", "device", "root"))


def guards(code: Code, node: ast.AST) -> list[tuple[ast.AST, bool]]:
    """Return the conditions on the rank that decide whether a node runs, innermost first.

    Each comes with whether the node runs if the condition is true. Conditions above the node that
    leave its block count as well.
    """
    if not code.rank_conditions:
        return []
    known = code.guards.get(node)
    if known is None:
        groups = code.program.once(f"groups of {code.file.path}", lambda: _groups(code))
        found = [each for each in _guards(code, node) if each not in groups]
        known = code.guards[node] = found
    return known


def _groups(code: Code) -> list[tuple[ast.AST, bool]]:
    """Return the conditions under which models are wrapped for a group of the ranks there."""
    wraps = [each for each in wrappings(code) if keyword(each.made, "process_group") is not None]
    return [guard for each in wraps for guard in _guards(code, each.call)]


def _guards(code: Code, node: ast.AST) -> list[tuple[ast.AST, bool]]:
    """Return the conditions on the rank of a node. They are its own step, then those above it."""
    steps: list[ast.AST] = []
    inner: ast.AST | None = node
    while inner is not None and inner not in code.steps:
        steps.append(inner)
        inner = code.parents.get(inner)
    found = code.steps[inner] if inner is not None else []
    for each in reversed(steps):
        parent = code.parents.get(each)
        if parent is not None:
            outer = [] if isinstance(parent, (*FUNCTIONS, ast.Lambda)) else found
            own = _step(code, parent, each)
            found = [*own, *outer] if own else outer
        code.steps[each] = found
    return found


def _step(code: Code, parent: ast.AST, inner: ast.AST) -> list[tuple[ast.AST, bool]]:
    """Return the conditions on the rank under which a node runs one of its parts."""
    found: list[tuple[ast.AST, bool]] = []
    if isinstance(parent, (ast.If, ast.IfExp)) and inner is not parent.test:
        body = parent.body if isinstance(parent.body, list) else [parent.body]
        if code.discerns(parent.test):
            found.append((parent, inner in body))
    elif isinstance(parent, ast.BoolOp) and inner in parent.values:
        before = parent.values[: parent.values.index(inner)]
        is_and = isinstance(parent.op, ast.And)
        found += [(parent, is_and) for test in before if code.discerns(test)]
    elif any(map(code.discerns, _other_tests(code, parent, inner))):
        found.append((parent, True))
    elif isinstance(parent, FUNCTIONS):
        found += [(parent, True) for one in parent.decorator_list if runs_on_one_rank(one)]
    if isinstance(inner, ast.stmt):
        found += _left_above(code, parent, inner)
    return found


def _other_tests(code: Code, node: ast.AST, inner: ast.AST) -> list[ast.expr]:
    """Return the conditions on a part of a ``match``, a ``while``, or a comprehension."""
    if isinstance(node, ast.match_case):
        above = code.parents[node]
        return [above.subject] if isinstance(above, ast.Match) else []
    if isinstance(node, ast.While) and inner in node.body:
        return [node.test] if by_rank_alone(code.condition(node.test), code.words) else []
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        generators: list[ast.comprehension] = node.generators
        return [] if inner in generators else [one for each in generators for one in each.ifs]
    return []


def _left_above(code: Code, parent: ast.AST, inner: ast.stmt) -> list[tuple[ast.AST, bool]]:
    """Return the conditions on the rank that leave a block before a statement.

    A rank that raises or exits ends the job, so that the others wait for nothing.
    """
    return [
        (each, False)
        for each in ifs_before(parent, inner)
        if isinstance(each.body[-1], LEAVING)
        and code.discerns(each.test)
        # A `continue` that depends on more than the rank may let a later round reach it.
        and (
            isinstance(each.body[-1], ast.Return)
            or by_rank_alone(code.condition(each.test), code.words)
        )
    ]


def _ended_above(code: Code, node: ast.AST) -> bool:
    """Return whether some ranks raise or exit before a node, so that it runs on the others."""
    return any(
        code.discerns(test.test) and _ends(test.body[-1])
        for inner in (node, *code.above(node))
        if isinstance(inner, ast.stmt)
        for test in ifs_before(code.parents[inner], inner)
    )


def _ends(statement: ast.stmt) -> bool:
    """Return whether a statement ends the process: ``raise``, ``sys.exit()``, ``assert False``."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    call = statement.value if isinstance(statement, ast.Expr) else None
    exits = isinstance(call, ast.Call) and last_name(call.func) in (
        "exit",
        "_exit",
        "quit",
        "abort",
    )
    return exits or isinstance(statement, ast.Raise)


def is_guarded(code: Code, node: ast.AST, depth: int = 4) -> bool:
    """Return whether some ranks may not run a node, by its own conditions or those of its callers.

    Conditions that only look like conditions on the rank count as well, to avoid false alarms.
    """
    if guards(code, node) or _seems_guarded(code, node) or _ended_above(code, node):
        return True
    if is_for_one_process(code, node):
        return True
    function = code.function(node)
    if function is None or depth <= 0:
        return False
    needed = _needed(code, node) & parameters_of(function)
    callers = [
        (each, call)
        for each, call in code.program.callers(code, function)
        if has_unpacked(call)
        or all(argument_of(call, function, name, code.is_method(function)) for name in needed)
    ]
    return bool(callers) and all(is_guarded(each, call, depth - 1) for each, call in callers)


def runs_alone(code: Code, node: ast.AST, depth: int = 2) -> bool:
    """Return whether only jobs of one process run a node, by its branch or those of its callers.

    Args:
        code: The file.
        node: The node.
        depth: How far the callers of its function are followed.
    """
    if is_for_one_process(code, node):
        return True
    function = code.function(node)
    if function is None or depth <= 0 or code.program.is_passed(function):
        return False
    callers = code.program.callers(code, function)
    return bool(callers) and all(runs_alone(each, call, depth - 1) for each, call in callers)


def _needed(code: Code, node: ast.AST) -> set[str]:
    """Return the names that have to be something else than None where a node runs."""
    found = set()
    inner = node
    for each in code.above(node):
        if isinstance(each, ast.If) and inner in each.body:
            test = each.test
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot):
                test = test.left
            if isinstance(test, ast.Name):
                found.add(test.id)
        inner = each
    return found


def _seems_guarded(code: Code, node: ast.AST) -> bool:
    inner = node
    for each in code.above(node):
        if isinstance(each, ast.If) and inner is not each.test:
            words = {last_name(one).lower() for one in ast.walk(each.test)}
            parts = {part for word in words for part in word.split("_")}
            if parts & _COMPARISONS or any("rank" in word for word in words):
                return True
            if inner in each.body and _is_from_one_rank(code, each.test):
                return True
        if isinstance(each, FUNCTIONS):
            name = each.name.lower()
            return any(
                word in name for word in ("master", "main_process", "rank0", "rank_zero", "rank_0")
            )
        inner = each
    return False


_FILLS = frozenset(("append", "extend", "add", "insert", "update", "put"))


def _is_from_one_rank(code: Code, test: ast.expr) -> bool:
    """Return whether a condition asks for data that only some ranks fill or set."""
    for each in ast.walk(test):
        if not isinstance(each, (ast.Name, ast.Attribute, ast.Subscript)):
            continue
        text = ast.unparse(each)
        made: list[ast.AST] = [
            call
            for name in _FILLS
            for call in code.calls_by_name.get(name, ())
            if isinstance(call.func, ast.Attribute)
            and last_name(call.func.value) == last_name(each)
            and ast.unparse(call.func.value) == text
        ]
        if isinstance(each, ast.Name):
            made += [
                item.node
                for _, item in code.values(each)
                if not isinstance(item.value, ast.Constant)
            ]
        if made and all(guards(code, one) for one in made):
            return True
    return False


def under(code: Code, node: ast.AST, *words: str) -> bool:
    """Return whether a condition around a node has one of these words in a name."""
    inner = node
    for each in code.above(node):
        if isinstance(each, (ast.If, ast.IfExp, ast.While)) and inner is not each.test:
            names = [last_name(one).lower() for one in ast.walk(each.test)]
            names += [
                one.value.lower()
                for one in ast.walk(each.test)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            if "__name__" in names:
                # The main guard is true in all ranks.
                names = ["__name__"]
            if any(word in name for name in names for word in words):
                return True
        inner = each
    return False


def exclusive(code: Code, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are in different branches of a condition."""
    branches = dict(_branches(code, one))
    return any(branches.get(node, name) != name for node, name in _branches(code, other))


def _branches(code: Code, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    inner = node
    for each in code.above(node):
        if isinstance(each, (ast.If, ast.IfExp)):
            for name in ("body", "orelse"):
                part = getattr(each, name)
                if inner is part or (isinstance(part, list) and inner in part):
                    yield each, name
        inner = each


def in_both_branches(condition: ast.AST, name: str) -> bool:
    """Return whether both branches of an ``if`` call a function of a name."""
    return isinstance(condition, ast.If) and all(
        calls_in(part, name) for part in (condition.body, condition.orelse)
    )


_QUIET = frozenset(("no_grad", "inference_mode", "set_grad_enabled"))


def is_quiet(node: ast.With | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a block or a function runs under ``no_grad`` or ``inference_mode``."""
    marks = (
        [each.context_expr for each in node.items]
        if isinstance(node, ast.With)
        else node.decorator_list
    )
    return any(last_name(one) in _QUIET for mark in marks for one in ast.walk(mark))


def without_gradients(code: Code, node: ast.AST) -> bool:
    """Return whether a block or function around a node switches gradients off."""
    for each in code.above(node):
        if isinstance(each, ast.With) and is_quiet(each):
            return True
        if isinstance(each, FUNCTIONS):
            return is_quiet(each)
    return False
