"""Rules on collectives, and on what only some ranks do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.source_files import FUNCTIONS, allowed, last_name
from ddpdoctor.lint.program import (
    LOOPS,
    Code,
    argument_of,
    calls_in,
    guards,
    is_guarded,
    keyword,
    under,
    without_gradients,
)
from ddpdoctor.lint.rules import Hit, rule

COLLECTIVES = (
    *(
        "barrier",
        "all_reduce",
        "broadcast",
        "all_gather",
        "gather",
        "scatter",
        "reduce",
        "all_to_all",
    ),
    *("reduce_scatter", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("new_group", "init_process_group", "monitored_barrier"),
)


@rule("DDP401", Severity.ERROR, moot=frozenset())
def collective_under_guard(code: Code) -> Iterator[Hit]:
    """Find collectives that only some ranks reach."""
    for call in code.calls:
        names = _collectives_of(code, call)
        if not names:
            continue
        held = guards(code, call)
        if not held or _in_group(call):
            continue
        condition, wanted = held[0]
        if _is_matched(code, call, condition, wanted, names):
            continue
        direct = code.is_dist(call, *COLLECTIVES)
        what = (
            f"{last_name(call.func)}()" if direct else f"{names[0]}() in {last_name(call.func)}()"
        )
        at = getattr(condition, "lineno", call.lineno)
        yield Hit(
            call,
            f"only some ranks reach {what}, by the condition in line {at}: they wait for the "
            "others for ever",
            "Call it on every rank, outside of the condition.",
        )


def _collectives_of(code: Code, call: ast.Call, depth: int = 2) -> list[str]:
    """Return the collectives that a call certainly runs, itself or through a function."""
    if code.is_dist(call, *COLLECTIVES):
        return [last_name(call.func)]
    found: list[str] = []
    if depth > 0:
        for other, function in code.program.targets(code, call):
            for each in other.within(function):
                if not isinstance(each, ast.Call) or guards(other, each) or _in_group(each):
                    continue
                if not under(other, each, "rank", "main", "gpu"):
                    found += _collectives_of(other, each, depth - 1)
    return found


def _in_group(call: ast.Call) -> bool:
    group = keyword(call, "group")
    return group is not None and not (isinstance(group, ast.Constant) and group.value is None)


def _is_matched(
    code: Code, call: ast.Call, condition: ast.AST, wanted: bool, names: list[str]
) -> bool:
    """Return whether the other ranks make such a call too: in the other branch, or elsewhere."""
    function = code.function(call)
    for each in code.within(function or code.tree):
        if not isinstance(each, ast.Call) or each is call:
            continue
        if not set(_collectives_of(code, each)) & set(names):
            continue
        held = guards(code, each)
        if held and _excludes(code, held[0], (condition, wanted)):
            return True
    # A with-statement that runs the ranks one after another has both halves in one function.
    return not isinstance(condition, (ast.If, ast.IfExp, ast.BoolOp)) and not hasattr(
        condition, "decorator_list"
    )


def _excludes(code: Code, one: tuple[ast.AST, bool], other: tuple[ast.AST, bool]) -> bool:
    """Return whether two conditions hold on different ranks."""
    if one[0] is other[0]:
        return one[1] is not other[1]
    if not isinstance(one[0], (ast.If, ast.IfExp)) or not isinstance(other[0], (ast.If, ast.IfExp)):
        return True
    for rank in range(8):
        first = allowed(one[0].test, code.words, rank)
        second = allowed(other[0].test, code.words, rank)
        if first == {one[1]} and second == {other[1]}:
            return False
    return True


@rule("DDP402", Severity.WARNING)
def forward_under_guard(code: Code) -> Iterator[Hit]:
    """Find evaluations through the DDP wrapper that only some ranks run."""
    if not any(each.wraps for each in code.program.codes):
        return
    for call in code.calls:
        if not _runs_wrapper(code, call):
            continue
        held = guards(code, call)
        condition = held[0][0] if held else None
        if not isinstance(condition, ast.If):
            continue
        parts = (condition.body, condition.orelse)
        both = all(
            any(
                isinstance(one, ast.Call) and last_name(one.func) == last_name(call.func)
                for s in part
                for one in ast.walk(s)
            )
            for part in parts
        )
        if both:
            continue
        if without_gradients(code, call) and not _may_have_buffers(code):
            continue
        yield Hit(
            call,
            "one rank alone runs the DDP wrapper, which synchronizes buffers with ranks that "
            "do not take part",
            "Evaluate model.module, or on every rank.",
        )


def _may_have_buffers(code: Code) -> bool:
    """Return whether the program names BatchNorm, or a model that has it."""
    names = {name for each in code.program.codes for name in (*each.calls_by_name, *each.imports)}
    return any(
        "BatchNorm" in each or each.startswith(("resnet", "densenet", "vgg")) for each in names
    )


_EVALUATES = (
    "evaluate",
    "validate",
    "eval",
    "test",
    "validation",
    "evaluation",
    "sample",
    "generate",
    "val",
    "infer",
)


def _runs_wrapper(code: Code, call: ast.Call) -> bool:
    if isinstance(call.func, (ast.Name, ast.Attribute)) and _certainly_ddp(code, call.func, call):
        return True
    name = last_name(call.func).lower()
    if not any(name == each or name.startswith(f"{each}_") for each in _EVALUATES):
        return False
    if not code.program.targets(code, call):
        return False
    for other, function in code.program.targets(code, call):
        unwraps = any(
            isinstance(each, ast.Attribute) and each.attr == "module"
            for each in other.within(function)
        )
        if unwraps:
            return False
    return any(_certainly_ddp(code, each, call) for each in call.args)


def _ddp_names(code: Code) -> set[str]:
    """Return the names that are bound to DDP in a file."""
    return {
        target.id
        for wrap in code.wraps
        if isinstance(statement := code.statement(wrap), ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _is_passed_ddp(code: Code, node: ast.Name, depth: int) -> bool:
    """Return whether a parameter is DDP in all calls of its function."""
    function = code.function(node)
    if (
        function is None
        or depth <= 0
        or not _is_parameter(function, node.id)
        or any(
            isinstance(each, ast.Assign) and node.id in {last_name(one) for one in each.targets}
            for each in code.within(function)
        )
    ):
        return False
    passed = [
        (other, argument_of(call, function, node.id, is_method=code.is_method(function)), call)
        for other, call in code.program.callers(code, function)
    ]
    return bool(passed) and all(
        given is not None and _certainly_ddp(other, given, call, depth - 1)
        for other, given, call in passed
    )


def _certainly_ddp(code: Code, node: ast.expr, at: ast.AST, depth: int = 2) -> bool:
    """Return whether an expression is DDP where it is used: what sets it last makes it so."""
    if isinstance(node, ast.Attribute) and last_name(node.value) == "self":
        owner = code.owner(node)
        items = [item for other, item in code.values(node) if code is other]
        own = [each for each in items if code.owner(each.node) is owner]
        last = max(own, key=lambda each: getattr(each.node, "lineno", 0), default=None)
        return last is not None and code.is_torch(last.value, "DistributedDataParallel")
    if not isinstance(node, ast.Name):
        return False
    made = code.origins(node)
    if made and all(each.code.is_torch(each.node, "DistributedDataParallel") for each in made):
        return True
    if node.id not in _ddp_names(code):
        return _is_passed_ddp(code, node, depth)
    line = getattr(at, "lineno", 0)
    bound = [
        (item.node.lineno, bool(calls_in([item.value], "DistributedDataParallel", *_aliases(code))))
        for other, item in code.values(node)
        if other is code and isinstance(item.node, ast.Assign) and item.node.lineno < line
    ]
    return bool(bound) and max(bound)[1]


def _aliases(code: Code) -> list[str]:
    """Return the names under which a file imports DDP."""
    full = "DistributedDataParallel"
    return [
        name
        for name, each in code.imports.items()
        if each.endswith(f".{full}") and each.startswith("torch")
    ]


@rule("DDP403", Severity.ERROR)
def skipped_on_one_rank(code: Code) -> Iterator[Hit]:
    """Find steps that a rank skips by its own loss."""
    if not any(each.wraps for each in code.program.codes):
        return
    for node in code.nodes:
        if isinstance(node, ast.Break):
            yield from _left(code, node)
        if not isinstance(node, ast.If):
            continue
        loops = code.loops(node)
        if not loops or not code.called(loops[0], "backward"):
            continue
        leaves = [each for each in node.body if isinstance(each, (ast.Continue, ast.Break))]
        if not leaves or not _is_about_loss(node.test) or _joins(code, node):
            continue
        if _is_reduced(code, loops[0], node):
            continue
        backward = min(each.lineno for each in code.called(loops[0], "backward"))
        leaves_loop = isinstance(leaves[0], ast.Break)
        if node.lineno < backward or leaves_loop:
            yield Hit(
                leaves[0],
                "a rank whose own loss is not finite skips the step, while the others wait for "
                "its gradients",
                "all_reduce the flag, so that all ranks skip together.",
            )


_AGREES = frozenset(
    (
        "broadcast",
        "all_reduce",
        "broadcast_object_list",
        "all_gather",
        "all_gather_object",
        "barrier",
    )
)


def _left(code: Code, node: ast.Break) -> Iterator[Hit]:
    """Yield a ``break`` that some ranks alone reach in a loop that trains."""
    loops, held = code.loops(node), guards(code, node)
    condition = held[0][0] if held else None
    if not loops or not isinstance(condition, ast.If) or condition not in code.within(loops[0]):
        return
    inside = code.within(loops[0])
    # A value that is sent may be the same on all ranks, and others may leave by a way of their own.
    agrees = any(isinstance(each, ast.Call) and last_name(each.func) in _AGREES for each in inside)
    ways = sum(isinstance(each, (ast.Break, ast.Return)) for each in inside)
    trains = _trains(code, loops[0]) or bool(code.called(loops[0], "set_epoch"))
    if agrees or ways > 1 or _joins(code, node) or not trains:
        return
    yield Hit(
        node,
        f"only some ranks leave the training loop, by the condition in line {condition.lineno}: "
        "the others wait for their gradients",
        "Broadcast the decision, so that all ranks leave together.",
    )


def _joins(code: Code, node: ast.AST) -> bool:
    """Return whether a node is in a block in which ranks may have different numbers of batches."""
    return any(
        isinstance(each, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call)
            and last_name(item.context_expr.func) in ("join", "Join")
            for item in each.items
        )
        for each in code.above(node)
    )


def _trains(code: Code, loop: ast.AST) -> bool:
    """Return whether a loop runs a backward, itself or in a function that it calls."""
    if code.called(loop, "backward"):
        return True
    return any(
        other.called(function, "backward")
        for each in code.within(loop)
        if isinstance(each, ast.Call)
        for other, function in code.program.targets(code, each)
    )


def _is_about_loss(test: ast.expr) -> bool:
    tested = ("isnan", "isinf", "isfinite")
    return any(
        isinstance(each, ast.Call)
        and last_name(each.func) in tested
        and any("loss" in last_name(one).lower() for one in ast.walk(each))
        for each in ast.walk(test)
    )


def _is_reduced(code: Code, loop: ast.AST, node: ast.If) -> bool:
    """Return whether what decides may be the same on all ranks, by a call that reduces above it."""
    for each in code.within(loop):
        if isinstance(each, ast.Call) and each.lineno <= node.lineno:
            name = last_name(each.func).lower()
            if any(word in name for word in ("reduce", "gather", "broadcast", "sync")):
                return True
    return False


@rule("DDP404", Severity.WARNING, "swallowed-exception")
def swallowed_exception(code: Code) -> Iterator[Hit]:
    """An exception of a training step is caught, and the rank goes on to the next batch.

    What it finds
        ``try`` around a backward with an ``except`` that passes or continues.

    Why it is bad
        This rank skips a backward, the others wait for its gradients, or pair it with the
        next one.

    How to fix it
        Let it fail on all ranks, or agree on it with ``all_reduce`` before the backward.

    Example
        Wrong:
            try:
                model(x).sum().backward()
            except RuntimeError:
                continue
        Right:
            model(x).sum().backward()

    When it stays silent
        Handlers that raise or leave the process.
    """
    if not any(each.wraps for each in code.program.codes):
        return
    for node in code.nodes:
        if not isinstance(node, ast.Try) or not code.loops(node):
            continue
        inside = [one for part in node.body for one in ast.walk(part)]
        if not calls_in(node.body, "backward") or any(isinstance(one, LOOPS) for one in inside):
            continue
        for handler in node.handlers:
            if not _ends(handler):
                yield Hit(
                    handler,
                    "a rank that fails in this step goes on to the next, while the others wait for "
                    "its gradients",
                    "Raise the exception, so that the job fails on all ranks.",
                )


def _ends(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler leaves the loop or the process, or is for Ctrl-C."""
    leaves = any(
        isinstance(one, (ast.Raise, ast.Return, ast.Break))
        for part in handler.body
        for one in ast.walk(part)
    )
    exits = calls_in(handler.body, "exit", "_exit", "abort", "destroy_process_group")
    caught = ast.unparse(handler.type) if handler.type is not None else ""
    return leaves or bool(exits) or "KeyboardInterrupt" in caught


@rule("DDP405", Severity.ERROR, "name-of-some-ranks")
def name_of_some_ranks(code: Code) -> Iterator[Hit]:
    """A name is set on some ranks only, and read on all.

    What it finds
        A variable of a function that is set under a condition on the rank alone, and read below
        without that condition.

    Why it is bad
        The other ranks raise UnboundLocalError or NameError, often late, at the end of the
        training. The ranks that go on wait for them.

    How to fix it
        Set it on all ranks, to None for instance, or read it under the same condition.

    Example
        Wrong:
            if rank == 0:
                writer = SummaryWriter()
            writer.close()
        Right:
            writer = SummaryWriter() if rank == 0 else None
            if writer is not None:
                writer.close()

    When it stays silent
        Names that another branch, a loop or an import sets, and reads under any condition that
        names the rank or the name itself.
    """
    for scope in (each for each in code.nodes if isinstance(each, (*FUNCTIONS, ast.Module))):
        stored: dict[str, list[ast.Name]] = {}
        for each in code.within(scope):
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                stored.setdefault(each.id, []).append(each)
        for name, targets in stored.items():
            known = name in code.imports or name in code.functions or _is_parameter(scope, name)
            condition = None if known else _only_condition(code, targets)
            if condition is None:
                continue
            loads = (one for one in code.loads.get(name, ()) if isinstance(one, ast.Name))
            load = next((one for one in loads if _is_read_by_all(code, one, targets[0])), None)
            if load is not None:
                yield Hit(
                    load,
                    f"{name} is set on some ranks only, by the condition in line "
                    f"{condition.lineno}: the others raise here",
                    "Set it on every rank, or read it under the same condition.",
                )


def _only_condition(code: Code, targets: list[ast.Name]) -> ast.If | None:
    """Return the one condition on the rank under which a name is set, or None."""
    if not all(isinstance(code.statement(each), ast.Assign) for each in targets):
        return None
    held = [next(iter(guards(code, each)), None) for each in targets]
    first = held[0]
    if first is None or not isinstance(first[0], ast.If) or any(each != first for each in held):
        return None
    return first[0]


def _is_read_by_all(code: Code, load: ast.Name, target: ast.Name) -> bool:
    """Return whether all ranks read a name, in the same scope and round, below where it is set."""
    loops = code.loops(target)
    return (
        load.lineno > target.lineno
        and code.scope(load) is code.scope(target)
        and code.loops(load)[len(code.loops(load)) - len(loops) :] == loops
        and not is_guarded(code, load, 0)
        and not under(code, load, "rank", "main", "master", load.id.lower())
        and not any(isinstance(each, ast.Try) for each in code.above(load))
    )


def _is_parameter(scope: ast.AST, name: str) -> bool:
    arguments = getattr(scope, "args", None)
    return isinstance(arguments, ast.arguments) and any(
        isinstance(each, ast.arg) and each.arg == name for each in ast.walk(arguments)
    )


@rule("DDP506", Severity.INFO, "unguarded-side-effect")
def unguarded_writer(code: Code) -> Iterator[Hit]:
    """Every rank opens a tracker or an event file in the same place.

    What it finds
        ``SummaryWriter`` or ``wandb.init`` without a condition on the rank.

    Why it is bad
        As many runs as ranks in the tracker, with mixed curves.

    How to fix it
        Open it on rank 0 alone.

    Example
        Wrong:
            writer = SummaryWriter("runs")
        Right:
            writer = SummaryWriter("runs") if dist.get_rank() == 0 else None

    When it stays silent
        Names with the rank in them.
    """
    if not any(each.wraps for each in code.program.codes):
        return
    for call in code.calls:
        full = code.dotted(call.func)
        if full == "wandb.init" or last_name(call.func) == "SummaryWriter":
            texts = ast.unparse(call).lower()
            if "rank" in texts or "disabled" in texts or is_guarded(code, call):
                continue
            yield Hit(
                call, "every rank opens this tracker, so there are as many runs as ranks",
                "Open it on rank 0 alone.",
            )  # fmt: skip
