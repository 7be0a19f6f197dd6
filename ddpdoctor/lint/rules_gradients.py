"""Rules on gradients: when they are reduced, and what the optimizer makes of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import keyword, targets_of
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import (
    exclusive,
    under,
    without_gradients,
)
from ddpdoctor.lint.ranks import is_world_size
from ddpdoctor.lint.rules import TRAINERS, Hit, rule
from ddpdoctor.lint.wrapped import is_bare, is_wrapper


@rule("DDP304", Severity.INFO)
def finds_unused(code: Code) -> Iterator[Hit]:
    """Find DDP with ``find_unused_parameters=True``."""
    for wrap in code.wraps:
        value = keyword(wrap, "find_unused_parameters")
        static = keyword(wrap, "static_graph") or code.program.uses("_set_static_graph")
        if isinstance(value, ast.Constant) and value.value is True and not static:
            yield Hit(
                value,
                "find_unused_parameters=True walks the graph in every step",
                "Leave it out unless parameters are really unused in some steps.",
            )


@rule("DDP307", Severity.INFO)
def accumulates_without_no_sync(code: Code) -> Iterator[Hit]:
    """Find gradient accumulation that reduces in every backward."""
    if not any(each.wraps for each in code.program.codes):
        return
    if code.program.uses("no_sync", "require_backward_grad_sync", "accumulate"):
        return
    for step in code.calls_by_name.get("step", ()):
        loops = code.loops(step)
        if not loops or not code.called(loops[0], "backward"):
            continue
        for each in code.above(step):
            if each is loops[0]:
                break
            if isinstance(each, ast.If) and any(
                isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
                for one in ast.walk(each.test)
            ):
                if any("accum" in last_name(one).lower() for one in ast.walk(each.test)):
                    yield Hit(
                        each,
                        "gradients are accumulated, but reduced in every backward",
                        "Run all but the last micro-batch under model.no_sync().",
                    )
                break


@rule("DDP308", Severity.WARNING)
def no_sync_scope(code: Code) -> Iterator[Hit]:
    """Find ``no_sync`` around the backward only, and its flag set between forward and backward."""
    yield from _armed_late(code)
    for node in code.of(ast.With):
        if len(node.items) != 1:
            continue
        context = node.items[0].context_expr
        made = [context, *(each.node for each in code.origins(context))]
        if not any(
            isinstance(each, ast.Call) and last_name(each.func) == "no_sync" for each in made
        ):
            continue
        calls = [
            each for each in code.within(node) if isinstance(each, ast.Call) and each is not context
        ]
        names = {last_name(each.func) for each in calls}
        others = names - {
            "backward",
            "scale",
            "item",
            "step",
            "zero_grad",
            "unscale_",
            "append",
            "mean",
            "sum",
            "float",
        }
        if "backward" in names and not others:
            yield Hit(
                context,
                "no_sync() covers the backward alone and has no effect: what counts is the forward",
                "Put the forward into the same block.",
            )


def _armed_late(code: Code) -> Iterator[Hit]:
    """Yield where ``require_backward_grad_sync`` is set after the forward that reads it."""
    for node in code.of(ast.Assign):
        target, loops = node.targets[0], code.loops(node)
        if last_name(target) != "require_backward_grad_sync" or not loops:
            continue
        forwards = [
            each.lineno
            for each in code.within(loops[0])
            if isinstance(each, ast.Call)
            and isinstance(target, ast.Attribute)
            and ast.unparse(each.func) == ast.unparse(target.value)
        ]
        before = any(at < node.lineno for at in forwards) and not is_bare(code, target.value)
        ends = [each.lineno for each in code.called(loops[0], "backward")]
        if before and max(forwards) < node.lineno < max(ends, default=0) and len(forwards) == 1:
            yield Hit(
                node,
                "the forward reads this flag, and ran already: it decides on the next micro-batch",
                "Set it before the forward.",
            )


_OPTIMIZERS = frozenset(
    (
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "NAdam",
        "RAdam",
        "Adamax",
        "LBFGS",
        "SparseAdam",
    )
)


def _is_optimizer(code: Code, call: ast.AST) -> bool:
    if not isinstance(call, ast.Call):
        return False
    full = code.dotted(call.func)
    return last_name(call.func) in _OPTIMIZERS and (full.startswith(("torch.optim", "optim.")))


@rule("DDP311", Severity.WARNING)
def optimizer_in_loop(code: Code) -> Iterator[Hit]:
    """Find optimizers that are made in the loop over batches."""
    for call in (each for each in code.calls_named(*_OPTIMIZERS) if _is_optimizer(code, each)):
        loops = code.loops(call)
        if not loops or not isinstance(loops[0], ast.For) or last_name(call.func) == "LBFGS":
            continue
        own = [
            each for each in code.called(loops[0], "backward") if code.loops(each)[:1] == loops[:1]
        ]
        steps = [
            each for each in code.called(loops[0], "step") if code.loops(each)[:1] == loops[:1]
        ]
        made = code.origins(loops[0].iter)
        over = (
            any(each.code.is_torch(each.node, "DataLoader") for each in made)
            or "loader" in ast.unparse(loops[0].iter).lower()
        )
        if own and steps and over and not under(code, call, "epoch", "step", "stage", "none"):
            yield Hit(
                call,
                "a new optimizer is made for every batch, so momentum and other state is lost",
                "Make it once, above the loop.",
            )


@rule("DDP312", Severity.WARNING)
def zero_grad_missing(code: Code) -> Iterator[Hit]:
    """Find training loops that never set gradients to zero."""
    program = code.program
    zeroed = [
        (each, call) for each in program.codes for call in each.calls_by_name.get("zero_grad", ())
    ]
    steps = code.calls_by_name.get("step", ())
    if program.uses("closure") or any(
        # A call above the loop does not help.
        each.loops(call) or each.function(call) not in [code.function(step) for step in steps]
        for each, call in zeroed
    ):
        return
    if any(
        last_name(target) == "grad"
        for each in program.codes
        for node in each.of(ast.Assign, ast.AnnAssign, ast.AugAssign)
        for target in targets_of(node)
    ):
        return
    for step in steps:
        loops = code.loops(step)
        receiver = step.func.value if isinstance(step.func, ast.Attribute) else None
        if not loops or receiver is None or step.args or not code.called(loops[0], "backward"):
            continue
        if any(_is_optimizer(each.code, each.node) for each in code.origins(receiver)):
            yield Hit(
                step,
                "gradients are never set to zero, so each step adds those of all steps before",
                "Call optimizer.zero_grad() in each step.",
            )
            return


@rule("DDP316", Severity.WARNING)
def clip_too_early(code: Code) -> Iterator[Hit]:
    """Find clipping of gradients that are still scaled."""
    if code.program.uses("unscale_"):
        return
    for call in (
        *code.calls_by_name.get("clip_grad_norm_", ()),
        *code.calls_by_name.get("clip_grad_value_", ()),
    ):
        function = code.function(call)
        block: ast.AST = next(iter(code.loops(call)), function or code.tree)
        scaled = [
            each
            for each in code.called(block, "backward")
            if isinstance(each.func, ast.Attribute)
            and isinstance(each.func.value, ast.Call)
            and last_name(each.func.value.func) == "scale"
        ]
        steps = [
            each
            for each in code.called(block, "step")
            if isinstance(each.func, ast.Attribute)
            and "scaler" in last_name(each.func.value).lower()
        ]
        scaled = [each for each in scaled if not exclusive(code, each, call)]
        if scaled and steps and scaled[0].lineno < call.lineno:
            yield Hit(
                call,
                "gradients are clipped while they are still multiplied by the loss scale, so "
                "nearly all of them are cut",
                "Call scaler.unscale_(optimizer) before the clipping.",
            )


@rule("DDP320", Severity.INFO, "sum-of-losses", moot=TRAINERS)
def sum_of_losses(code: Code) -> Iterator[Hit]:
    """A loss is a sum over the batch, and DDP averages gradients over the ranks.

    What it finds
        ``reduction="sum"`` of a loss that is not divided by anything.

    Why it is bad
        The gradient is that of one rank's sum, not of the sum over all ranks: with more ranks
        and the same batch in total, steps are smaller.

    How to fix it
        Take the mean, or multiply the loss by the number of ranks.

    Example
        Wrong:
            loss = F.cross_entropy(y, t, reduction="sum")
        Right:
            loss = F.cross_entropy(y, t)

    When it stays silent
        Evaluations, and sums that are divided or multiplied.
    """
    if not code.program.wraps:
        return
    for call in code.calls:
        value = keyword(call, "reduction")
        if not isinstance(value, ast.Constant) or value.value != "sum":
            continue
        scaled = any(
            isinstance(each, ast.BinOp) and isinstance(each.op, (ast.Div, ast.Mult))
            for each in ast.walk(code.statement(call))
        )
        block: ast.AST = next(iter(code.loops(call)), code.function(call) or code.tree)
        if code.called(block, "backward") and not scaled and not without_gradients(code, call):
            yield Hit(
                call, "this loss is a sum, and DDP averages its gradients over the ranks",
                "Take the mean, or multiply by the number of ranks.",
            )  # fmt: skip


@rule("DDP323", Severity.WARNING)
def reentrant_checkpoint(code: Code) -> Iterator[Hit]:
    """Find reentrant checkpoints with a DDP that searches for unused parameters."""
    finds = any(
        isinstance(value := keyword(wrap, "find_unused_parameters"), ast.Constant) and value.value
        for each in code.program.codes
        for wrap in each.wraps
    )
    for call in code.calls_by_name.get("checkpoint", ()) if finds else ():
        value = keyword(call, "use_reentrant")
        if isinstance(value, ast.Constant) and value.value is True:
            yield Hit(
                call, "DDP cannot search for unused parameters in a graph that is recomputed",
                "Pass use_reentrant=False.",
            )  # fmt: skip


@rule("DDP322", Severity.ERROR)
def autograd_grad(code: Code) -> Iterator[Hit]:
    """Find ``torch.autograd.grad`` over the parameters of a DDP module."""
    for call in code.calls_by_name.get("grad", ()):
        if code.dotted(call.func) != "torch.autograd.grad":
            continue
        inputs = keyword(call, "inputs", 1)
        if inputs is None:
            continue
        for each in ast.walk(inputs):
            if (
                isinstance(each, ast.Call)
                and last_name(each.func) == "parameters"
                and isinstance(each.func, ast.Attribute)
                and is_wrapper(code, each.func.value)
                and not code.program.uses("all_reduce")
            ):
                yield Hit(
                    call,
                    "torch.autograd.grad does not run DDP's hooks, so these gradients are this "
                    "rank's alone",
                    "Use loss.backward(), or all_reduce the gradients.",
                )


@rule("DDP329", Severity.WARNING)
def divided_by_world_size(code: Code) -> Iterator[Hit]:
    """Find losses that are divided by the number of ranks, by which DDP divides gradients."""
    if not any(each.wraps for each in code.program.codes):
        return
    for call in code.calls_by_name.get("backward", ()):
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if isinstance(receiver, ast.Call) and last_name(receiver.func) == "scale" and receiver.args:
            receiver = receiver.args[0]
        # A loss of gathered outputs may be meant so.
        gathers = code.called(code.function(call) or code.tree, "all_gather", "gather")
        for made in code.origins(receiver) if receiver is not None and not gathers else ():
            node = made.node
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and isinstance(node.right, (ast.Name, ast.Attribute, ast.Call))
                and is_world_size(made.code, node.right)
                and made.code is code
            ):
                yield Hit(
                    node,
                    "DDP averages gradients over the ranks already, so this divides them by the "
                    "number of ranks twice",
                    "Leave the division out.",
                )
