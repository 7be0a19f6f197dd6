"""Rules on forwards that go around DDP."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import FUNCTIONS, last_name, walk
from ddpdoctor.lint.calls import targets_of
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import guards, in_both_branches, under, without_gradients
from ddpdoctor.lint.rules import Hit, rule
from ddpdoctor.lint.wrapped import (
    TELLS_DDP,
    is_bare,
    is_ddp,
    is_wrapper,
    over_parameters,
    same,
    wrappings,
)

_QUIET = frozenset((
    "apply", "buffers", "children", "clip", "config", "cpu", "cuda", "eval", "extra_repr", "float",
    "get_parameter", "get_submodule", "half", "load_state_dict", "modules", "named_buffers",
    "named_children", "named_modules", "named_parameters", "no_sync", "parameters",
    "register_comm_hook", "register_forward_hook", "requires_grad_", "save", "save_pretrained",
    "set_epoch", "state_dict", "to", "train", "update", "zero_grad",
))  # fmt: skip
"""Methods of a module that are no forward."""


@rule("DDP301", Severity.ERROR)
def forward_around_ddp(code: Code) -> Iterator[Hit]:
    """Find training forwards that do not go through the wrapper."""
    if not code.program.wraps:
        return
    if _averages_by_hand(code) or code.program.uses("PeriodicModelAverager"):
        return
    for function in code.of(*FUNCTIONS, ast.Module):
        for loss in code.called(function, "backward"):
            block: ast.AST = next(iter(code.loops(loss)), function)
            calls = [each for each in code.within(block) if isinstance(each, ast.Call)]
            used = _made_of(code, block, loss)
            around = [
                each
                for each in calls
                if _goes_around(code, each) and (id(each) in used or not _is_helper(each))
            ]
            if around and not any(_goes_through(code, each) for each in calls):
                yield Hit(
                    around[0],
                    "this forward goes to the module inside of DDP, so the gradients of its "
                    "backward are not reduced and the ranks' models drift apart",
                    "Call the DDP object itself.",
                )

    yield from _trained_bare(code)


@rule("DDP302", Severity.ERROR)
def second_backward(code: Code) -> Iterator[Hit]:
    """Find a second backward without a forward of the DDP object before it."""
    if not code.program.wraps or _averages_by_hand(code):
        return
    if code.program.uses("no_sync", "require_backward_grad_sync"):
        return
    for first in code.calls_by_name.get("backward", ()):
        block: ast.AST = next(iter(code.loops(first)), code.function(first) or code.tree)
        calls = [each for each in code.within(block) if isinstance(each, ast.Call)]
        later = [
            each
            for each in calls
            if last_name(each.func) == "backward"
            and each.lineno > first.lineno
            and code.loops(each)[:1] == code.loops(first)[:1]
            and _follows(code, first, each)
        ]
        for second in later[:1]:
            # A forward between the two counts for the second.
            between = {
                ast.unparse(each.func)
                for each in calls
                if first.lineno <= each.lineno <= second.lineno and is_wrapper(code, each.func)
            }
            if (_wrappers_of(code, first) & _wrappers_of(code, second)) - between:
                yield Hit(
                    second,
                    f"DDP has reduced in the backward of line {first.lineno}, and no forward came "
                    "since: the gradients of this one stay on their rank",
                    "Add the losses, and call backward() once.",
                )


def _follows(code: Code, first: ast.Call, second: ast.Call) -> bool:
    """Return whether a backward always runs before another one, in the same block."""
    above = {id(each) for each in code.above(second)}
    inner: ast.AST = code.statement(first)
    for outer in code.above(inner):
        for name in ("body", "orelse"):
            block = getattr(outer, name, None)
            held = isinstance(block, list) and inner in block
            below = block[block.index(inner) + 1 :] if block and held else []
            if any(id(each) in above for each in below):
                return True
        if not isinstance(outer, ast.With) and not in_both_branches(outer, "backward"):
            return False
        inner = outer
    return False


_PASSES = re.compile(r"loss|crit|mean|sum|stack|cat|add|scale|entropy|mse|l1|nll", re.IGNORECASE)
"""Functions that compute a loss of all their arguments."""

_CUT = ("detach", "item")
"""Methods whose result has no gradient."""


def _wrappers_of(code: Code, loss: ast.Call) -> set[str]:
    """Return the names of the DDP objects whose forwards a loss is made of."""
    found: set[str] = set()
    seen: set[int] = set()
    queue: list[ast.expr] = [loss.func.value] if isinstance(loss.func, ast.Attribute) else []
    while queue:
        node = queue.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, ast.Call):
            if last_name(node.func) in _CUT:
                continue
            if is_wrapper(code, node.func) and not without_gradients(code, node):
                # What it gets of others may be detached in it.
                found.add(ast.unparse(node.func))
                continue
            # Further arguments of other functions may be indices, lengths or masks.
            passes = _PASSES.search(last_name(node.func)) is not None
            queue += [*node.args, *(each.value for each in node.keywords)][: None if passes else 1]
            queue += [node.func.value] if isinstance(node.func, ast.Attribute) else []
        elif made := [item.value for other, item in code.values(node) if other is code]:
            queue += made
        else:
            queue += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    return found


def _trained_bare(code: Code) -> Iterator[Hit]:
    """Yield calls of training functions that get ``model.module`` instead of the DDP object."""
    for call in code.calls:
        if not last_name(call.func).lower().startswith("train") or call.args == []:
            continue
        passed = [*call.args[1:], *(each.value for each in call.keywords)]
        known = code.program.targets(code, call) or code.program.class_named(
            code, last_name(call.func)
        )
        if known or any(is_wrapper(code, each) for each in passed):
            continue
        for each in call.args[:1]:
            made = code.origins(each)
            if any(
                isinstance(one.node, ast.Attribute)
                and one.node.attr == "module"
                and is_wrapper(one.code, one.node.value)
                for one in made
            ):
                yield Hit(
                    call,
                    "this trains the module inside of DDP, so its gradients are not reduced and "
                    "the ranks' models drift apart",
                    "Pass the DDP object itself.",
                    Severity.WARNING,
                )


def _goes_through(code: Code, call: ast.Call) -> bool:
    """Return whether a call runs a wrapper, or passes it to a function that may."""
    if is_wrapper(code, call.func):
        return True
    if last_name(call.func) == "forward" and isinstance(call.func, ast.Attribute):
        return is_wrapper(code, call.func.value)
    ignored = ("len", "print", "isinstance", "id", "hasattr", "getattr")
    return last_name(call.func) not in ignored and any(is_wrapper(code, each) for each in call.args)


def _averages_by_hand(code: Code) -> bool:
    """Return whether the ranks average gradients or parameters themselves."""
    return any(
        over_parameters(node)
        and any(
            each.is_dist(one, "all_reduce", "reduce", "broadcast", "all_gather")
            for one in each.within(node)
        )
        for each in code.program.codes
        for node in each.of(ast.For)
    )


def _is_helper(call: ast.Call) -> bool:
    """Return whether a method's name is that of a helper rather than of a forward."""
    helpers = ("get_", "set_", "load", "save", "reset", "init", "update", "step", "penalty")
    return last_name(call.func).startswith(helpers)


def _made_of(code: Code, block: ast.AST, loss: ast.Call) -> set[int]:
    """Return the ids of the calls in a block that compute a loss."""
    receiver = loss.func.value if isinstance(loss.func, ast.Attribute) else loss
    queue: list[ast.expr] = [receiver]
    found: set[int] = set()
    made: dict[str, list[ast.expr]] = defaultdict(list)
    for node in code.within(block):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            for target in targets_of(node):
                for one in walk(target):
                    if isinstance(one, ast.Name):
                        made[one.id].append(node.value)
    while queue:
        for each in walk(queue.pop()):
            if isinstance(each, ast.Call):
                found.add(id(each))
            elif isinstance(each, ast.Name):
                queue += made.pop(each.id, ())
    return found


def _goes_around(code: Code, call: ast.Call) -> bool:
    """Return whether a call runs the module inside of DDP on all ranks, with gradients."""
    return (
        _is_of_module(code, call) and not without_gradients(code, call) and not guards(code, call)
    )


def _is_of_module(code: Code, call: ast.Call) -> bool:
    """Return whether a call runs the module inside of DDP."""
    node: ast.expr = call.func
    if _is_alias(code, node, call) or _holds_bare(code, node) or is_bare(code, node):
        return True
    if not isinstance(node, ast.Attribute) or node.attr in _QUIET:
        return False
    used = not isinstance(code.parents[call], ast.Expr)
    return used and any(
        isinstance(each, ast.Attribute)
        and each.attr == "module"
        and is_wrapper(code, each.value)
        and not under(code, call, *TELLS_DDP)
        for each in {node.value, *_alternatives(code, node.value)}
    )


def _alternatives(code: Code, node: ast.expr) -> Iterator[ast.expr]:
    """Yield what an expression or a local name is: ``m.module if isinstance(m, DDP) else m``."""
    values = [node]
    if isinstance(node, ast.Name):
        values = [item.value for other, item in code.values(node) if other is code]
    for value in values:
        yield from (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)


def _is_alias(code: Code, node: ast.expr, call: ast.Call) -> bool:
    """Return whether a name is an alias of a module that is wrapped above.

    It is so after ``raw = model`` and ``model = DDP(model)``, or after ``wrapped = DDP(model)``.
    """
    named = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    if not named or under(code, call, *TELLS_DDP):
        return False
    made = {id(each.node) for each in code.origins(node)}
    if len(made) != 1:
        return False
    for wrap, inner, target, _, certain in wrappings(code):
        if inner is None or target is None or not certain or same(code, target, node):
            continue
        if _is_wrapped_before(code, wrap, call, isinstance(node, ast.Attribute)):
            inside = {
                id(each.node)
                for each in code.origins(inner)
                if isinstance(each.node, ast.Call) and not is_ddp(each)
            }
            if made == inside:
                return True
    return False


def _is_wrapped_before(code: Code, wrap: ast.Call, call: ast.Call, is_attribute: bool) -> bool:
    """Return whether a model is wrapped above a call, or its attribute in another method."""
    if any(isinstance(each, ast.If) for each in code.above(wrap)):
        return False
    if code.scope(wrap) is code.scope(call):
        return wrap.lineno < call.lineno
    return is_attribute and code.owner(wrap) is code.owner(call) is not None


def _holds_bare(code: Code, node: ast.expr) -> bool:
    """Return whether an object got the model before it was wrapped.

    It is so after ``self.loss = Loss(self.model)`` and ``self.model = DDP(self.model)``.
    """
    owner = getattr(node, "value", None)
    if not isinstance(owner, ast.Attribute) or last_name(owner.value) != "self":
        return False
    made = [item for other, item in code.values(owner) if other is code]
    value = made[0].value if len(made) == 1 else None
    place = code.function(value) if isinstance(value, ast.Call) else None
    if place is None or place.name != "__init__" or last_name(node) in _QUIET:
        return False
    if not isinstance(value, ast.Call) or _is_given_another(code, owner.attr):
        return False
    return any(
        (code.function(wrap) is not place or wrap.lineno > value.lineno)
        and code.owner(wrap) is code.owner(node)
        # It wraps one of the object's models in place.
        and isinstance(inner, ast.Attribute)
        and target is not None
        and same(code, target, inner)
        and any(same(code, each, inner) for each in value.args)
        for wrap, inner, target, _, _ in wrappings(code)
    )


def _is_given_another(code: Code, name: str) -> bool:
    """Return whether an attribute of an object is set from outside: ``self.loss.model = ...``."""
    return any(
        isinstance(target, ast.Attribute) and last_name(target.value) == name
        for each in code.of(ast.Assign, ast.AnnAssign, ast.AugAssign)
        for target in targets_of(each)
    )
