"""Rules on collectives, and on what only some ranks do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import FUNCTIONS, LOOPS, Loop, last_name, walk
from ddpdoctor.diagnose.rank_expressions import allowed
from ddpdoctor.lint.calls import argument_of, calls_in, keyword, parameters_of, targets_of
from ddpdoctor.lint.code import Code, Origin
from ddpdoctor.lint.conditions import guards, in_both_branches, is_guarded, under, without_gradients
from ddpdoctor.lint.loops import runs_backward
from ddpdoctor.lint.ranks import depends_on_rank
from ddpdoctor.lint.reductions import names_in, unreduced
from ddpdoctor.lint.rules import Hit, rule
from ddpdoctor.lint.wrapped import certainly_ddp

COLLECTIVES = (
    "barrier", "all_reduce", "broadcast", "all_gather", "gather", "scatter", "reduce", "all_to_all",
    "reduce_scatter", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "new_group", "init_process_group", "monitored_barrier",
)  # fmt: skip


@rule("DDP401", Severity.ERROR, moot=frozenset())
def collective_under_guard(code: Code) -> Iterator[Hit]:
    """Find collectives that only some ranks reach."""
    for call in code.calls:
        held = guards(code, call) if code.program.may_run(call, COLLECTIVES) else []
        names = _collectives_of(code, call) if held and not _in_group(call) else []
        if names == ["init_process_group"] and keyword(call, "world_size", 3) is not None:
            # The group may be one of these ranks alone.
            continue
        if not names:
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
            f"only some ranks reach {what}, by the condition in line {at}: they wait "
            "forever for the others",
            "Call it on every rank, outside of the condition.",
        )


def _collectives_of(code: Code, call: ast.Call, depth: int = 2) -> list[str]:
    """Return the collectives that a call certainly runs, directly or in a function."""
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
    """Return whether the other ranks run the same collective under the opposite condition."""
    function = code.function(call)
    block = getattr(code.parents[code.statement(call)], "body", None)
    leaves = isinstance(block, list) and isinstance(block[-1], (ast.Continue, ast.Return))
    for each in code.within(function or code.tree):
        if not isinstance(each, ast.Call) or each is call:
            continue
        if leaves and each.lineno > call.lineno and last_name(each.func) in names:
            # The other ranks go on to it.
            return True
        if not code.program.may_run(each, COLLECTIVES):
            continue
        held = guards(code, each)
        if not held or not _excludes(code, held[0], (condition, wanted)):
            continue
        if set(_collectives_of(code, each)) & set(names):
            return True
    # A function beside this one may be for the other ranks.
    return any(
        other.function(each) is not function
        and other.is_dist(each, name)
        and any(_excludes(other, one, (condition, wanted)) for one in guards(other, each)[:1])
        for other in code.program.codes
        for name in names
        for each in other.calls_by_name.get(name, ())
    )


def _excludes(code: Code, one: tuple[ast.AST, bool], other: tuple[ast.AST, bool]) -> bool:
    """Return whether two conditions hold on different ranks."""
    if one[0] is other[0]:
        return one[1] is not other[1]
    if not isinstance(one[0], (ast.If, ast.IfExp)) or not isinstance(other[0], (ast.If, ast.IfExp)):
        return True
    for rank in range(8):
        first = allowed(code.condition(one[0].test), code.words, rank)
        second = allowed(code.condition(other[0].test), code.words, rank)
        if first == {one[1]} and second == {other[1]}:
            return False
    return True


@rule("DDP402", Severity.WARNING)
def forward_under_guard(code: Code) -> Iterator[Hit]:
    """Find evaluations through the DDP wrapper that only some ranks run."""
    if not code.program.wraps:
        return
    for call in code.calls:
        condition = next((each for each, _ in guards(code, call)), None)
        if not isinstance(condition, ast.If):
            continue
        forward = _forward_of(code, call)
        if forward is None and not _evaluates_elsewhere(code, call):
            continue
        if in_both_branches(condition, last_name(call.func)):
            continue
        severity: Severity | None = Severity.WARNING
        if forward is None:
            severity = Severity.INFO
        elif without_gradients(*forward):
            severity = _buffers(code)
        if severity is not None:
            yield Hit(
                call,
                "one rank alone runs the DDP wrapper, which synchronizes buffers with ranks that "
                "do not take part",
                "Evaluate model.module, or on every rank.",
                severity,
            )


_WITH_BUFFERS = ("torchvision.models", "transformers", "timm", "segmentation_models_pytorch")
"""Packages whose models have buffers: of BatchNorm, or of positions."""


def _buffers(code: Code) -> Severity | None:
    """Return the severity of a forward without gradients on one rank alone.

    Returns:
        A warning if the program uses modules with buffers, an info if its models are unknown, and
        None if all modules are known and have no buffers.
    """
    program = code.program
    wraps = [(each, wrap) for each in program.codes for wrap in each.wraps]
    if all(_keeps_buffers(wrap) for _, wrap in wraps):
        return None
    models = [made for each, wrap in wraps if wrap.args for made in each.origins(wrap.args[0])]
    models += [made for each in models for made in _modules_given(each)]
    classes = [
        program.class_named(made.code, last_name(getattr(made.node, "func", made.node)))
        for made in models
    ]
    known = [each for each in classes if each is not None]
    if classes and len(known) == len(classes):
        return _of_classes(known)
    has = any(_makes_buffers(each, each.tree) for each in program.codes)
    return Severity.WARNING if has else Severity.INFO


def _modules_given(model: Origin) -> list[Origin]:
    """Return the objects of classes that the constructor of a model gets."""
    call = model.node if isinstance(model.node, ast.Call) else None
    made = (
        [
            origin
            for each in (*call.args, *(one.value for one in call.keywords))
            for origin in model.code.origins(each)
        ]
        if call
        else []
    )
    calls = [(each, each.node.func) for each in made if isinstance(each.node, ast.Call)]
    return [
        each
        for each, func in calls
        if isinstance(func, ast.Subscript) or last_name(func)[:1].isupper()
    ]


def _of_classes(classes: list[tuple[Code, ast.ClassDef]]) -> Severity | None:
    """Return the severity for modules of some classes of the program, with those they mention."""
    queue = list(dict.fromkeys(classes))
    known = True
    for code, one in queue:
        if _makes_buffers(code, one):
            return Severity.WARNING
        for name in names_in(one):
            found = code.program.class_named(code, name)
            queue += [found] if found is not None and found not in queue else []
            # A class of another package may have buffers.
            other = code.imports.get(name, "torch")
            known = known and (found is not None or name.islower() or other.startswith("torch"))
    return None if known else Severity.INFO


def _makes_buffers(code: Code, block: ast.AST) -> bool:
    """Return whether a part of a file mentions modules with buffers."""
    return any(
        "BatchNorm" in name
        or name == "register_buffer"
        or code.imports.get(name, "").startswith(_WITH_BUFFERS)
        for name in names_in(block)
    )


def _forward_of(code: Code, call: ast.Call) -> tuple[Code, ast.Call] | None:
    """Return the forward of a DDP object that a call runs, itself or in a function."""
    if isinstance(call.func, (ast.Name, ast.Attribute)) and certainly_ddp(code, call.func, call):
        return code, call
    if isinstance(call.func, ast.Attribute) and certainly_ddp(code, call.func.value, call):
        # A method of the module itself.
        return None
    for other, function in code.program.targets(code, call):
        passed = {
            name
            for name in parameters_of(function)
            if (given := argument_of(call, function, name, other.is_method(function))) is not None
            and certainly_ddp(code, given, call)
        }
        for each in (one for one in other.within(function) if isinstance(one, ast.Call)):
            if not _runs_ddp(other, function, each, passed):
                continue
            # A function may unwrap the module first.
            if not guards(other, each) and not other.binds(function, last_name(each.func)):
                quiet = without_gradients(code, call)
                return (code, call) if quiet else (other, each)
    return None


def _runs_ddp(code: Code, function: ast.AST, call: ast.Call, passed: set[str]) -> bool:
    """Return whether a call in a function runs a DDP object.

    Args:
        code: The file.
        function: The function.
        call: The call.
        passed: The function's parameters that are DDP objects.
    """
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name in parameters_of(function) or code.binds(function, name):
        return name in passed
    return isinstance(call.func, (ast.Name, ast.Attribute)) and certainly_ddp(code, call.func, call)


def _keeps_buffers(wrap: ast.Call) -> bool:
    """Return whether a DDP object may never synchronize buffers, by an option or a constant."""
    given = keyword(wrap, "broadcast_buffers", 4) or keyword(wrap, "forward_sync_buffers")
    return given is not None and getattr(given, "value", False) is not True


_EVALUATES = re.compile(r"(eval|validat|test|val(_|$)|sample|generat|infer)", re.IGNORECASE)


def _evaluates_elsewhere(code: Code, call: ast.Call) -> bool:
    """Return whether a call passes a DDP object to a function of another file that evaluates it."""
    return (
        _EVALUATES.match(last_name(call.func)) is not None
        and not code.program.targets(code, call)
        and any(certainly_ddp(code, each, call) for each in call.args)
    )


@rule("DDP403", Severity.ERROR)
def skipped_on_one_rank(code: Code) -> Iterator[Hit]:
    """Find steps that one rank skips because of the loss or batch that it has."""
    if not code.program.wraps:
        return
    yield from _stepped_alone(code)
    yield from _stepped_by_own_loss(code)
    for each in code.of(ast.Break):
        yield from _left(code, each)
    for node in code.of(ast.If):
        leaves = [each for each in node.body if isinstance(each, (ast.Continue, ast.Break))]
        loop = next(iter(code.loops(node)), None) if leaves else None
        if loop is None or _joins(code, node) or _is_reduced(code, loop, node):
            continue
        together = code.called(loop, "backward") or [
            each for each in code.calls_of_dist(loop, *_AGREES) if not guards(code, each)
        ]
        if not together or not _is_of_one_rank(code, loop, node.test) or _counts(code, loop, node):
            continue
        if node.lineno < together[0].lineno or isinstance(leaves[0], ast.Break):
            yield Hit(
                leaves[0],
                "a rank whose own loss or batch is bad skips the step, while the others wait for "
                "it",
                "all_reduce the flag, so that all ranks skip together.",
            )


def _stepped_alone(code: Code) -> Iterator[Hit]:
    """Yield steps of a scheduler or an optimizer that only some ranks make."""
    for call in code.calls_by_name.get("step", ()):
        owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        what = next((word for word in _STEPPED if word in owner.lower()), "")
        held = guards(code, call) if what else []
        condition = held[0][0] if held else None
        if not isinstance(condition, ast.If) or in_both_branches(condition, "step"):
            continue
        block = code.function(call) or code.tree
        if not code.calls_of_dist(block, *_AGREES - {"barrier"}):
            yield Hit(
                call,
                f"only some ranks step this {_STEPPED[what]}, by the condition in line "
                f"{condition.lineno}: the ranks' models drift apart",
                "Step it on every rank, with a value that is equal on all ranks.",
            )


def _stepped_by_own_loss(code: Code) -> Iterator[Hit]:
    """Yield steps of a scheduler by a loss that a loop of the same function added up."""
    for call in code.calls_by_name.get("step", ()):
        given = call.args[0] if len(call.args) == 1 else None
        owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if given is None or "sched" not in owner.lower() or guards(code, call):
            continue
        inside = [
            each
            for each in code.within(code.function(call) or code.tree)
            if getattr(each, "lineno", call.lineno) < call.lineno
        ]
        loops = [each for each in inside if isinstance(each, ast.For) and runs_backward(code, each)]
        added = {
            last_name(each.target)
            for loop in loops
            for each in code.within(loop)
            if isinstance(each, ast.AugAssign)
            and any(isinstance(one, ast.Call) and last_name(one.func) == "item"
                    for one in ast.walk(each.value))
        }  # fmt: skip
        if names_in(given) & unreduced(code, inside, added):
            yield Hit(
                call,
                "each rank steps this scheduler by its own loss, so that learning rates differ "
                "and the ranks' models drift apart",
                "all_reduce the loss first.",
            )


_STEPPED = {"sched": "scheduler", "optim": "optimizer", "scaler": "optimizer"}
"""Parts of the names of objects that all ranks have to step, and what they are."""


def _counts(code: Code, loop: ast.AST, node: ast.If) -> bool:
    """Return whether a loop counts its steps and ends after a number of them."""
    counted = {
        last_name(each.target)
        for each in code.within(loop)
        if isinstance(each, ast.AugAssign) and each.lineno > node.lineno
    }
    return any(
        isinstance(each, ast.If)
        and isinstance(each.body[-1], ast.Break)
        and counted & {last_name(one) for one in ast.walk(each.test)}
        for each in code.within(loop)
    )


_SIZES = {"len", "size", "numel", "shape"}
_TESTED = frozenset(("isnan", "isinf", "isfinite", "any", "all", "sum"))


def _is_of_one_rank(code: Code, loop: ast.AST, test: ast.expr) -> bool:
    """Return whether a condition depends on the values of a loss or a batch."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_of_one_rank(code, loop, each) for each in test.values)
    mine = _of_batch(code, loop)
    words = [each for each in ast.walk(test) if isinstance(each, (ast.Name, ast.Attribute))]
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is):
        return last_name(test.left) in mine
    if _asks_if_empty(test) and any(last_name(each) in mine for each in words):
        return True
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in _TESTED for each in ast.walk(test)
    ) and any(last_name(each) in mine or "loss" in last_name(each).lower() for each in words)


def _asks_if_empty(test: ast.expr) -> bool:
    """Return whether a condition compares a size with 0."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Eq, ast.LtE)):
        return False
    other = test.comparators[0]
    sized = bool({last_name(each) for each in walk(test.left)} & _SIZES)
    return sized and isinstance(other, ast.Constant) and other.value == 0


def _of_batch(code: Code, loop: ast.AST) -> set[str]:
    """Return the names in a loop over batches that hold a part of the batch."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return set()
    target, text = loop.target, ast.unparse(loop.iter)
    made = code.origins(loop.iter)
    if "loader" not in text and not any(
        each.code.is_torch(each.node, "DataLoader") for each in made
    ):
        return set()
    if isinstance(target, ast.Tuple) and "enumerate" in text:
        target = target.elts[-1]
    found = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    for each in code.within(loop):
        value = getattr(each, "value", None) if targets_of(each) else None
        names = ast.walk(value) if value is not None else ()
        if any(isinstance(one, ast.Name) and one.id in found for one in names):
            found |= {last_name(one) for one in targets_of(each)}
    return found


_AGREES = frozenset((
    "broadcast", "all_reduce", "broadcast_object_list", "all_gather", "all_gather_object",
    "barrier",
))  # fmt: skip


def _left(code: Code, node: ast.Break) -> Iterator[Hit]:
    """Yield a ``break`` of a training loop that only some ranks reach."""
    loops, held = code.loops(node), guards(code, node)
    condition = held[0][0] if held else None
    if not loops or not isinstance(condition, ast.If) or condition not in code.within(loops[0]):
        return
    inside = code.within(loops[0])
    # A communicated value may be equal on all ranks, and other ranks may leave elsewhere.
    agrees = any(
        isinstance(each, ast.Call) and last_name(each.func) in _AGREES - {"barrier"}
        for each in inside
    )
    ways = sum(isinstance(each, (ast.Break, ast.Return)) for each in inside)
    trains = runs_backward(code, loops[0]) or bool(code.called(loops[0], "set_epoch"))
    # On some rank the condition is certainly the opposite.
    certain = any(
        allowed(code.condition(condition.test), code.words, rank) == {not held[0][1]}
        for rank in range(1, 8)
    )
    if (agrees and not certain) or ways > 1 or _joins(code, node) or not trains:
        return
    yield Hit(
        node,
        f"only some ranks leave the training loop, by the condition in line {condition.lineno}: "
        "the others wait for their gradients",
        "Broadcast the decision, so that all ranks leave together.",
    )


def _joins(code: Code, node: ast.AST) -> bool:
    """Return whether a node is inside of ``join()``, which allows uneven numbers of batches."""
    return any(
        isinstance(each, ast.With)
        and any(
            isinstance(item.context_expr, ast.Call)
            and last_name(item.context_expr.func) in ("join", "Join")
            for item in each.items
        )
        for each in code.above(node)
    )


def _is_reduced(code: Code, loop: ast.AST, node: ast.If) -> bool:
    """Return whether a call above a condition may make its result equal on all ranks."""
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
        This rank skips a backward. The others wait for its gradients, or pair it with its next one.

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
    if not code.program.wraps:
        return
    for node in code.of(ast.Try):
        if not code.loops(node):
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
    """Return whether a handler leaves the loop or the process, or handles Ctrl-C."""
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
        If another branch, a loop or an import sets the name, and for reads under a condition that
        mentions the rank or the name itself.
    """
    yield from _none_elsewhere(code)
    yield from _globals(code)
    for scope in code.of(*FUNCTIONS, ast.Module):
        stored: dict[str, list[ast.Name]] = {}
        for each in code.within(scope):
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
                stored.setdefault(each.id, []).append(each)
        for name, targets in stored.items():
            known = name in code.imports or name in code.functions or name in parameters_of(scope)
            condition = None if known else _only_condition(code, targets)
            if condition is None:
                continue
            loads = (one for one in code.loads.get(name, ()) if isinstance(one, ast.Name))
            load = next((one for one in loads if _is_read_by_all(code, one, targets[0])), None)
            if load is not None and not is_guarded(code, load):
                yield _unset(name, condition, load)


def _unset(name: str, condition: ast.If, load: ast.expr) -> Hit:
    return Hit(
        load,
        f"{name} is set on some ranks only, by the condition in line {condition.lineno}: the "
        "others raise here",
        "Set it on every rank, or read it under the same condition.",
    )


def _only_condition(code: Code, targets: list[ast.Name]) -> ast.If | None:
    """Return the one condition on the rank under which a name is set, or None."""
    first = next(iter(guards(code, targets[0])), None)
    if first is None or not isinstance(first[0], ast.If):
        return None
    if not all(isinstance(code.statement(each), ast.Assign) for each in targets):
        return None
    held = [next(iter(guards(code, each)), None) for each in targets]
    # Under several conditions, there has to be a rank where none of them holds.
    if any(each != first for each in held) and not any(
        all(
            each is not None
            and isinstance(each[0], ast.If)
            and allowed(code.condition(each[0].test), code.words, rank) == {not each[1]}
            for each in held
        )
        for rank in range(8)
    ):
        return None
    return first[0]


def _globals(code: Code) -> Iterator[Hit]:
    """Yield reads of names of the module that a function sets on some ranks."""
    for node in code.of(ast.Global):
        scope = code.scope(node)
        for name in node.names:
            sets = [item for _, item in code.values(ast.Name(name, ast.Load()))]
            stored = [
                each
                for each in code.of(ast.Name)
                if each.id == name and not isinstance(each.ctx, ast.Load)
            ]
            known = name in code.imports or name in code.functions or sets or not stored
            if known or any(code.scope(each) is not scope for each in stored):
                continue
            condition = _only_condition(code, stored)
            for load in code.loads.get(name, ()):
                if condition is not None and _is_read_elsewhere(code, load, scope):
                    yield _unset(name, condition, load)
                    break


def _is_read_elsewhere(code: Code, load: ast.Name | ast.Attribute, scope: ast.AST) -> bool:
    """Return whether all ranks read a name of the module in a function other than ``scope``."""
    inner = code.scope(load)
    return (
        isinstance(load, ast.Name)
        and isinstance(inner, FUNCTIONS)
        and inner is not scope
        and bool(code.program.callers(code, inner))
        and not is_guarded(code, load)
        and not under(code, load, "rank", "main", "master", load.id.lower())
        and not any(isinstance(each, ast.Try) for each in code.above(load))
    )


def _none_elsewhere(code: Code) -> Iterator[Hit]:
    """Yield uses of a name that is None on some ranks."""
    for node in code.of(ast.Assign, ast.If):
        value, targets = _chosen(node)
        if value is None or not code.discerns(value.test):
            continue
        for target in targets:
            uses = [
                each
                for each in code.loads.get(last_name(target), ())
                if isinstance(each, ast.Name)
                and isinstance(code.parents.get(each), ast.Attribute)
                and isinstance(target, ast.Name)
                and len(list(code.values(each))) == (2 if value is node else 1)
                and _is_read_by_all(code, each, target)
                and not _asks_first(code, each)
            ]
            for each in uses[:1]:
                yield Hit(
                    each,
                    f"{each.id} is None on some ranks, by the condition in line {value.lineno}: "
                    "they raise here",
                    "Use it under the same condition.",
                )


def _chosen(node: ast.AST) -> tuple[ast.If | ast.IfExp | None, list[ast.expr]]:
    """Return a condition that decides whether names are None, and the names."""

    def is_none(value: ast.expr) -> bool:
        return isinstance(value, ast.Constant) and value.value is None

    value = node.value if isinstance(node, ast.Assign) else None
    if isinstance(value, ast.IfExp) and (is_none(value.body) or is_none(value.orelse)):
        return value, targets_of(node)
    if isinstance(node, ast.If):
        one, other = (
            {
                each.targets[0].id: each
                for each in block
                if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
            }
            for block in (node.body, node.orelse)
        )
        both = [name for name in one if name in other]
        return node, [
            other[name].targets[0]
            for name in both
            if is_none(one[name].value) is not is_none(other[name].value)
        ]
    return None, []


def _asks_first(code: Code, load: ast.Name) -> bool:
    """Return whether an expression around a name tests it first: ``x and x.close()``."""
    statement = code.statement(load)
    above = code.within(code.function(load) or code.tree)
    return sum(
        isinstance(each, ast.Name) and each.id == load.id for each in ast.walk(statement)
    ) > 1 or any(
        isinstance(each, (ast.If, ast.Assert))
        and load.id in {last_name(one) for one in ast.walk(each.test)}
        for each in above
        if getattr(each, "lineno", load.lineno) < load.lineno
    )


def _is_read_by_all(code: Code, load: ast.Name, target: ast.Name) -> bool:
    """Return whether all ranks read a name after it is set, in the same scope and iteration.

    A function reads what the module sets, if all ranks call it at the module's level.
    """
    loops = code.loops(target)
    scope = code.scope(load)
    if scope is not code.scope(target):
        if not isinstance(code.scope(target), ast.Module) or not isinstance(scope, FUNCTIONS):
            return False
        if len(list(code.values(load))) > 1 or not code.program.callers(code, scope):
            return False
    elif not _in_round(code.loops(load), loops):
        return False
    return (
        load.lineno > target.lineno
        and not is_guarded(code, load, 0 if scope is code.scope(target) else 4)
        and not under(code, load, "rank", "main", "master", load.id.lower())
        and not any(isinstance(each, ast.Try) for each in code.above(load))
    )


def _in_round(of_load: list[Loop], of_target: list[Loop]) -> bool:
    """Return whether a load comes after a target in its round of all loops, or behind them."""
    shared = min(len(of_load), len(of_target))
    return of_load[len(of_load) - shared :] == of_target[len(of_target) - shared :]


_TRACKERS = ("wandb.init", "mlflow.start_run", "logging.FileHandler")
_OPENING = ("SummaryWriter", *(each.rpartition(".")[2] for each in _TRACKERS))


@rule("DDP506", Severity.INFO, "unguarded-side-effect")
def unguarded_writer(code: Code) -> Iterator[Hit]:
    """Every rank opens a tracker or a log file in the same place.

    What it finds
        ``SummaryWriter``, ``wandb.init``, ``FileHandler`` or ``open`` of a log to write, without a
        condition on the rank.

    Why it is bad
        The tracker shows as many runs as there are ranks, with mixed curves, and lines of a file
        are lost or repeated.

    How to fix it
        Open it on rank 0 alone.

    Example
        Wrong:
            writer = SummaryWriter("runs")
        Right:
            writer = SummaryWriter("runs") if dist.get_rank() == 0 else None

    When it stays silent
        If the call mentions the rank.
    """
    if not code.program.wraps:
        return
    for call in code.calls_named(*_OPENING):
        if code.dotted(call.func) in _TRACKERS or last_name(call.func) == "SummaryWriter":
            texts = ast.unparse(call).lower()
            if "rank" in texts or "disabled" in texts or is_guarded(code, call):
                continue
            if code.called(code.function(call) or code.tree, "spawn"):
                # This is the process that starts the ranks.
                continue
            yield Hit(
                call, "every rank opens this tracker, so there are as many runs as ranks",
                "Open it on rank 0 alone.",
            )  # fmt: skip
    for call in code.calls_by_name.get("open", ()):
        if _writes_log(code, call) and not is_guarded(code, call):
            yield Hit(
                call, "every rank writes this file, over what the others write",
                "Open it on rank 0 alone.",
            )  # fmt: skip


def _writes_log(code: Code, call: ast.Call) -> bool:
    """Return whether a call opens the same file for writing on all ranks."""
    mode = keyword(call, "mode", 1)
    return (
        isinstance(call.func, ast.Name)
        and isinstance(mode, ast.Constant)
        and str(mode.value)[:1] in ("w", "a")
        and "b" not in str(mode.value)
        and bool(call.args)
        and not depends_on_rank(code, call.args[0])
        and not any(isinstance(each, (ast.Try, ast.While)) for each in code.above(call))
    )
