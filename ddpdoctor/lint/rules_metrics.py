"""Rules on evaluations: metrics of one shard, and samples that count twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import has_unpacked, keyword
from ddpdoctor.lint.code import Code, Origin
from ddpdoctor.lint.conditions import is_quiet, under, without_gradients
from ddpdoctor.lint.loaders import is_loader, is_none, is_sampler, samplers_of
from ddpdoctor.lint.loops import runs_backward
from ddpdoctor.lint.program import Program
from ddpdoctor.lint.reductions import counted, names_in, reduces, unreduced
from ddpdoctor.lint.rules import LOADERS, TRAINERS, Hit, rule

_ALL = TRAINERS | LOADERS


@rule("DDP106", Severity.WARNING, moot=_ALL)
def shard_not_reduced(code: Code) -> Iterator[Hit]:
    """Find metrics of one shard that are used as if they covered the whole data set."""
    for other, loop in _evaluations(code.program):
        names = counted(other, loop)
        function = other.function(loop)
        if other is code:
            hit = _used(code, function or code.tree, names, loop.end_lineno or loop.lineno)
            if hit is not None:
                yield hit
                continue
        if function is None:
            continue
        for caller, call in code.program.callers(other, function):
            given = _returned_to(caller, call, other, function, names)
            if caller is code and given:
                hit = _used(code, code.function(call) or code.tree, given, call.lineno)
                if hit is not None:
                    yield hit
                    break


def _evaluations(program: Program) -> list[tuple[Code, ast.For]]:
    """Return the loops that evaluate on one shard and reduce nothing in their rounds."""
    if program.uses("torchmetrics", "gather_for_metrics", "DistributedMetric"):
        return []
    return program.once(
        "evaluations",
        lambda: [
            (code, node)
            for code in program.codes
            for node in code.of(ast.For)
            if _evaluates_shard(code, node)
            and not any(
                isinstance(each, ast.Call) and reduces(code, each, known=True)
                for each in code.within(node)
            )
        ],
    )


def _used(code: Code, block: ast.AST, names: set[str], line: int) -> Hit | None:
    """Return where a block uses counts of one shard below a line, if nothing reduces them."""
    below = [each for each in code.within(block) if getattr(each, "lineno", 0) > line]
    names = unreduced(code, below, names)
    for each in below:
        if (
            isinstance(each, (ast.BinOp, ast.AugAssign))
            and isinstance(each.op, ast.Div)
            and names_in(each.left if isinstance(each, ast.BinOp) else each.target) & names
            and _is_length_of_data(code, each.right if isinstance(each, ast.BinOp) else each.value)
        ):
            return Hit(
                each,
                "a sum over this rank's shard is divided by the length of the whole data set, "
                "and never reduced over the ranks",
                "all_reduce the sum and the count, then divide.",
            )
        if isinstance(each, ast.Compare) and _picks_best(each, names):
            return Hit(
                each,
                "this decides by what one rank counted over its shard as if it were of the whole "
                "data set",
                "all_reduce the sum and the count first.",
            )
        if isinstance(each, ast.Call) and _shows(each, names):
            return Hit(
                each,
                "this shows what one rank counted over its shard as if it were of the whole "
                "data set",
                "all_reduce the sum and the count first.",
            )
    return None


def _returned_to(
    caller: Code, call: ast.Call, code: Code, function: ast.AST, own: set[str]
) -> set[str]:
    """Return the names to which a caller sets what a function counted."""
    inside = code.within(function)
    names = unreduced(code, inside, own)
    statement = caller.statement(call)
    if not isinstance(statement, ast.Assign) or statement.value is not call:
        return set()
    target = statement.targets[0]
    found: set[str] = set()
    for each in inside:
        value = each.value if isinstance(each, ast.Return) else None
        if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple):
            pairs = zip(target.elts, value.elts, strict=False)
            found |= {last_name(one) for one, part in pairs if names_in(part) & names}
        elif value is not None and names_in(value) & names and not isinstance(target, ast.Tuple):
            found.add(last_name(target))
    return found - {"", "_"}


_SHOWN = re.compile(r"\w*print\w*|(\w+_)?info|add_scalar|write|log(_\w+)?", re.IGNORECASE)


def _picks_best(test: ast.Compare, names: set[str]) -> bool:
    """Return whether a comparison looks for the best of some counts: ``loss < best_loss``."""
    sides = [test.left, test.comparators[0]]
    best = [any("best" in name.lower() for name in names_in(each)) for each in sides]
    return any(best) and any(
        not is_best and bool(names_in(each) & names)
        for each, is_best in zip(sides, best, strict=True)
    )


def _shows(call: ast.Call, names: set[str]) -> bool:
    """Return whether a call prints or logs some counts, and does not name the rank."""
    if not _SHOWN.fullmatch(last_name(call.func)):
        return False
    passed = {name for each in call.args for name in names_in(each)}
    texts = (ast.unparse(each).lower() for each in call.args)
    return not any("rank" in each for each in texts) and bool(passed & names)


_COMBINED = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "reduce_tensor")


@rule("DDP107", Severity.INFO, moot=_ALL)
def padded_evaluation(code: Code) -> Iterator[Hit]:
    """Find evaluations whose samplers repeat samples, and whose metrics are reduced."""
    if not code.program.uses(*_COMBINED) or code.program.uses("gather_for_metrics"):
        return
    for loop in code.of(ast.For):
        if not _evaluates_shard(code, loop):
            continue
        for loader in code.origins(loop.iter):
            samplers = (
                samplers_of(loader.code, loader.node) if isinstance(loader.node, ast.Call) else []
            )
            for each in samplers:
                call = each.node
                if not isinstance(call, ast.Call) or not is_sampler(each) or each.code is not code:
                    continue
                if keyword(call, "drop_last", 5) is None and not has_unpacked(call):
                    yield Hit(
                        call,
                        "this sampler repeats samples until all ranks have the same number, "
                        "and the reduced metric counts them twice",
                        "Cut off the repeated samples, or give each rank a Subset.",
                    )


def _evaluates_shard(code: Code, loop: ast.For) -> bool:
    """Return whether a loop evaluates on this rank's shard of the data."""
    quiet = (
        any(isinstance(each, ast.With) and is_quiet(each) for each in code.within(loop))
        or without_gradients(code, loop)
        or _is_after_eval(code, loop)
    )
    if runs_backward(code, loop) or not quiet:
        return False
    if _gets_epochs(code, loop.iter):
        return True
    made = [each for each in code.origins(loop.iter) if is_loader(each)]
    samplers = [
        samplers_of(each.code, each.node) for each in made if isinstance(each.node, ast.Call)
    ]
    return bool(samplers) and all(
        any(map(is_sampler, each))
        and (not any(map(_may_be_off, each)) or any(map(_is_of_job, each)))
        for each in samplers
    )


def _is_of_job(origin: Origin) -> bool:
    """Return whether a sampler is made under a condition on jobs of several ranks."""
    words = ("distributed", "ddp", "world_size", "parallel")
    return is_sampler(origin) and under(origin.code, origin.node, *words)


def _is_after_eval(code: Code, loop: ast.For) -> bool:
    """Return whether a model of a loop is in evaluation mode there, and nothing steps."""
    if code.called(loop, "step", "zero_grad", "train"):
        return False
    block = code.function(loop) or code.tree
    used = {ast.unparse(each.func) for each in code.within(loop) if isinstance(each, ast.Call)}
    modes = [
        (each.lineno, each)
        for each in code.called(block, "eval", "train")
        if isinstance(each.func, ast.Attribute)
        and each.lineno < loop.lineno
        and ast.unparse(each.func.value) in used
    ]
    return bool(modes) and _is_eval(modes[-1][1])


def _is_eval(call: ast.Call) -> bool:
    """Return whether a call is ``model.eval()`` or ``model.train(False)``."""
    mode = keyword(call, "mode", 0)
    return last_name(call.func) == "eval" or (
        isinstance(mode, ast.Constant) and mode.value is False
    )


_JOB = ("distributed", "ddp", "is_distributed", "is_ddp", "use_ddp", "is_dist", "world_size")
"""Names of flags that are true in each job of several ranks."""


def _may_be_off(origin: Origin) -> bool:
    """Return whether a sampler is None in jobs of several ranks."""
    above = origin.code.parents[origin.node]
    asks = last_name(above.test) if isinstance(above, ast.IfExp) else ""
    return is_none(origin) and not (isinstance(above, ast.IfExp) and asks in _JOB)


def _gets_epochs(code: Code, node: ast.expr) -> bool:
    """Return whether ``set_epoch`` shows that a loader has a distributed sampler."""
    names = {ast.dump(each) for each in ast.walk(node) if isinstance(each, ast.Name)}
    return any(
        isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Attribute)
        and call.func.value.attr == "sampler"
        and ast.dump(call.func.value.value) in names
        for call in code.calls_by_name.get("set_epoch", ())
        if code.function(call) is code.function(node)
    )


def _is_length_of_data(code: Code, node: ast.expr) -> bool:
    return any(
        isinstance(each.node, ast.Call)
        and last_name(each.node.func) == "len"
        and len(each.node.args) == 1
        and "dataset" in last_name(each.node.args[0]).lower()
        for each in code.origins(node)
    )
