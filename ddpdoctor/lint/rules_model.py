"""Rules on the wrapped model, its layers and its state."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import FUNCTIONS, LOOPS, last_name
from ddpdoctor.lint.calls import calls_in, keyword, parameters_of, targets_of
from ddpdoctor.lint.code import Code, key_of
from ddpdoctor.lint.conditions import (
    exclusive,
    guards,
    in_both_branches,
    under,
)
from ddpdoctor.lint.loaders import sampler_of
from ddpdoctor.lint.names import WRAPPER
from ddpdoctor.lint.program import Program
from ddpdoctor.lint.rules import Hit, rule
from ddpdoctor.lint.wrapped import (
    TELLS_DDP,
    apex_wrappings,
    is_ddp,
    is_passed_ddp,
    is_wrapper,
    over_parameters,
    same,
    wrappings,
)


def _after(code: Code, wrap: ast.Call) -> Iterator[ast.AST]:
    """Yield the nodes of the wrapping function below the wrapper's statement."""
    function = code.function(wrap)
    end = code.statement(wrap).end_lineno or 0
    for each in code.within(function or code.tree):
        if getattr(each, "lineno", 0) > end:
            yield each


@rule("DDP303", Severity.ERROR)
def changed_after_wrap(code: Code) -> Iterator[Hit]:
    """Find parameters that are frozen, unfrozen or replaced after the model was wrapped."""
    for wrap, inner, target, _, _ in wrappings(code):
        models = [each for each in (target, inner) if isinstance(each, (ast.Name, ast.Attribute))]
        if not models or code.loops(wrap):
            continue
        for node in _after(code, wrap):
            changed = _changes(node)
            if changed is None or exclusive(code, wrap, node) or not _is_once(code, node):
                continue
            owner = _root(changed)
            mine = any(same(code, owner, each) for each in models) or _item_of(code, node, models)
            again = any(
                each.lineno > getattr(node, "lineno", 0) and code.scope(each) is code.scope(wrap)
                for each, *_ in wrappings(code)
            )
            if mine and not again:
                yield Hit(
                    node,
                    "parameters change after the model was wrapped, which DDP does not notice: it "
                    "reduces those that it saw when it was made",
                    "Freeze, unfreeze or replace layers first, and wrap the model last.",
                )
                break


def _is_once(code: Code, node: ast.AST) -> bool:
    """Return whether a change is made once, on all ranks, and not to a whole module.

    A loop toggles and resets. A frozen whole module is a teacher that is never trained.
    """
    over = [each for each in code.loops(node) if over_parameters(each)]
    if len(over) < len(code.loops(node)) or guards(code, node):
        return False
    return not over or any(isinstance(each, ast.If) for each in code.within(over[0]))


def _changes(node: ast.AST) -> ast.expr | None:
    """Return the module or parameter that a statement freezes, unfreezes or changes."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            return target.value
        made = node.value
        if isinstance(target, ast.Attribute) and isinstance(made, ast.Call):
            named = isinstance(made.func, ast.Attribute) and last_name(made.func.value) == "nn"
            if named and target.attr != "module" and last_name(target) != "criterion":
                return target.value if last_name(target.value) != "self" else None
    if (
        isinstance(node, ast.Call)
        and last_name(node.func) == "requires_grad_"
        and isinstance(node.func, ast.Attribute)
    ):
        return node.func.value
    return None


def _root(node: ast.expr) -> ast.expr:
    """Return the module at the beginning of a chain of attributes."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Attribute) and last_name(node.value) == "self":
            return node
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _item_of(code: Code, node: ast.AST, models: Sequence[ast.expr]) -> bool:
    """Return whether a node is in a loop over the parameters of one of some models."""
    return any(
        over_parameters(loop)
        and isinstance(loop, ast.For)
        and any(
            same(code, _root(each.func), model)
            for each in ast.walk(loop.iter)
            if isinstance(each, ast.Call)
            for model in models
        )
        for loop in code.loops(node)
    )


@rule("DDP309", Severity.INFO)
def unsynchronized_batch_norm(code: Code) -> Iterator[Hit]:
    """Find BatchNorm layers that see the batch of their own rank only."""
    program = code.program
    if program.uses("SyncBatchNorm", "convert_sync_batchnorm", "FrozenBatchNorm2d"):
        return
    known = any(
        program.uses(name) for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    ) or any(
        each.dotted(call.func).startswith("torchvision.models")
        for each in program.codes
        for name in filter(_WITH_NORM.match, each.calls_by_name)
        for call in each.calls_by_name[name]
    )
    sizes = program.once("batch sizes", lambda: list(_batch_sizes(program)))
    if sizes and min(sizes) > SMALL_BATCH:
        return
    for wrap in code.wraps[:1] if known else ():
        yield Hit(
            wrap, "each rank's BatchNorm layers see the batch of that rank only",
            "For small batches, convert the model with SyncBatchNorm.convert_sync_batchnorm first.",
        )  # fmt: skip


SMALL_BATCH = 16
"""The most samples on each rank with poor statistics."""


def _batch_sizes(program: Program) -> Iterator[int]:
    """Yield the sizes of batches for the training, as far as the code says them."""
    loaders = [(code, each) for code in program.codes for each in code.calls_of("DataLoader")]
    sharded = [(code, each) for code, each in loaders if sampler_of(each) is not None]
    options = [
        (code, each) for code in program.codes for each in code.calls_by_name.get("dict", ())
    ]
    for code, each in (*(sharded or loaders), *options):
        size = keyword(each, "batch_size", 1)
        yield from _numbers(code, size) if size is not None else ()


def _numbers(code: Code, node: ast.expr) -> Iterator[int]:
    """Yield the numbers that an expression may be, also as a part of a batch for eight ranks."""
    for origin in code.origins(node):
        each = origin.node
        if isinstance(each, ast.Call) and last_name(each.func) == "int" and each.args:
            yield from _numbers(origin.code, each.args[0])
        elif isinstance(each, ast.BinOp) and isinstance(each.op, (ast.Div, ast.FloorDiv)):
            yield from (number // 8 for number in _numbers(origin.code, each.left))
        else:
            for default in code.program.option_defaults(each):
                yield from _numbers(code, default)
            if isinstance(each, ast.Constant) and isinstance(each.value, int):
                yield each.value


_WITH_NORM = re.compile(
    r"(wide_)?res|dense|mobile|efficient|google|incep|shuffle|mnas|regnet|vgg.*_bn"
)
"""Models of torchvision with BatchNorm layers."""


@rule("DDP310", Severity.WARNING, "sync-batch-norm-after-wrap")
def syncbn_after_wrap(code: Code) -> Iterator[Hit]:
    """BatchNorm layers are replaced by SyncBatchNorm after the model was wrapped.

    What it finds
        ``convert_sync_batchnorm`` of a DDP module.

    Why it is bad
        DDP still holds the parameters and buffers of the layers that are replaced.

    How to fix it
        Convert first, then wrap.

    Example
        Wrong:
            model = DDP(model)
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        Right:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            model = DDP(model)

    When it stays silent
        A model that is wrapped again below.
    """
    for call in code.calls_by_name.get("convert_sync_batchnorm", ()):
        argument = keyword(call, "module", 0)
        if argument is None:
            continue
        for wrap, _, target, _, _ in wrappings(code):
            above = wrap.lineno < call.lineno and code.function(wrap) is code.function(call)
            again = any(each.lineno > call.lineno for each, *_ in wrappings(code))
            if target is not None and above and not again and same(code, target, argument):
                yield Hit(
                    call,
                    "the model is wrapped already, so DDP holds the layers that this replaces",
                    "Convert the model first, then wrap it.",
                )


@rule("DDP314", Severity.ERROR, "wrap-before-move")
def wrap_before_move(code: Code) -> Iterator[Hit]:
    """The model is moved to its device after it was wrapped.

    What it finds
        ``DDP(model)`` of a model that was not moved, then ``.to(device)`` or ``.cuda()`` on
        the result.

    Why it is bad
        DDP's buckets and hooks belong to the parameters on the CPU. Gradients may no longer be
        reduced, without an error.

    How to fix it
        Move, then wrap.

    Example
        Wrong:
            model = DDP(Net())
            model.to(device)
        Right:
            model = DDP(Net().to(device))

    When it stays silent
        A model that was already on the device.
    """
    for wrap, inner, target, made_by, _ in wrappings(code):
        if target is None or inner is None:
            continue
        yield from _sent_away(code, target)
        if keyword(made_by, "device_ids", 1) is not None:
            continue
        made = code.origins(inner)
        if calls_in([inner, *(each.node for each in made)], *_MOVES) or not _is_local(code, inner):
            continue
        moved = _moves(code, wrap, (target, inner))
        after = [each for each in moved if each.lineno > wrap.lineno and not guards(code, each)]
        if after and not any(each.lineno < wrap.lineno for each in moved):
            yield Hit(
                after[0],
                "the model is moved after it was wrapped, so DDP may not reduce its gradients",
                "Move the model to its device first, and wrap it last.",
            )


def _sent_away(code: Code, target: ast.expr) -> Iterator[Hit]:
    """Yield ``.cpu()`` of a DDP object in its training loop."""
    for call in code.calls_by_name.get("cpu", ()):
        loops = code.loops(call)
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        mine = owner is not None and same(code, owner, target)
        if mine and loops and code.called(loops[-1], "backward") and not guards(code, call):
            yield Hit(
                call,
                "the wrapped model is moved to the CPU and back, and DDP's buckets stay",
                "Copy the state instead: {k: v.cpu() for k, v in model.state_dict().items()}.",
            )


_MOVES = ("to", "cuda")


def _moves(code: Code, wrap: ast.Call, models: Sequence[ast.expr]) -> list[ast.Call]:
    """Return the calls in a wrapper's function that move one of some models to a device."""
    return [
        each
        for each in calls_in([code.function(wrap) or code.tree], *_MOVES)
        if isinstance(each.func, ast.Attribute)
        and any(same(code, each.func.value, model) for model in models)
    ]


def _is_local(code: Code, inner: ast.expr) -> bool:
    """Return whether the program creates the wrapped model."""
    made = code.origins(inner)
    return bool(made) and all(isinstance(each.node, ast.Call) for each in made)


@rule("DDP315", Severity.ERROR, "wrapper-discarded")
def wrapper_discarded(code: Code) -> Iterator[Hit]:
    """The DDP object is not used.

    What it finds
        ``DDP(model)`` as a whole statement, or bound to a name that is never read.

    Why it is bad
        The training continues with the bare model, and every rank trains a separate one.

    How to fix it
        Train with the object that ``DDP()`` returns.

    Example
        Wrong:
            DDP(model)
            loss = model(x).sum()
        Right:
            model = DDP(model)
            loss = model(x).sum()

    When it stays silent
        Attributes and names that other files may read.
    """
    for wrap, _, target, made, _ in wrappings(code):
        statement = code.statement(wrap)
        if isinstance(statement, ast.Expr) and statement.value is made:
            lost = True
        elif isinstance(target, ast.Name):
            scope = code.scope(target)
            shared = isinstance(scope, (ast.Module, ast.ClassDef))
            reads = [
                each
                for each in code.loads.get(target.id, ())
                if isinstance(each, ast.Name)
                and (code.scope(each) is scope or scope in code.above(each))
                # A read above sees another value, except in a loop or in a nested function.
                and (
                    code.scope(each) is not scope
                    or code.loops(wrap)
                    or each.lineno > (statement.end_lineno or 0)
                )
            ]
            names = {
                one
                for each in code.within(scope)
                if isinstance(each, (ast.Global, ast.Nonlocal))
                for one in each.names
            }
            lost = (
                not reads
                and not (shared and len(code.program.codes) > 1)
                and target.id not in names
            )
        else:
            lost = False
        if lost:
            yield Hit(
                wrap,
                "nothing uses this DDP object, so the ranks train separate models",
                "Train with the object that DDP() returns.",
            )


@rule("DDP319", Severity.ERROR)
def rank_only_weights(code: Code) -> Iterator[Hit]:
    """Find weights that only one rank loads after the model was wrapped."""
    for wrap, inner, target, _, _ in (*wrappings(code), *apex_wrappings(code)):
        models = [each for each in (target, inner) if isinstance(each, (ast.Name, ast.Attribute))]
        below = list(_after(code, wrap))
        for node in below:
            if not isinstance(node, ast.Call) or last_name(node.func) not in _SETS_WEIGHTS:
                continue
            if exclusive(code, wrap, node):
                continue
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if owner is None or not any(same(code, _root(owner), each) for each in models):
                continue
            condition = next((each for each, _ in guards(code, node)), None)
            if condition is None or _is_final(code, node, below):
                continue
            if not _made_up_for(code, node, condition, below):
                yield Hit(
                    node,
                    "one rank alone sets the weights of the wrapped model, and DDP never sends "
                    "them to the others",
                    "Set them on every rank, or before the model is wrapped.",
                )


def _is_final(code: Code, load: ast.Call, below: Sequence[ast.AST]) -> bool:
    """Return whether weights are loaded after the training, only to evaluate them."""
    loops = [each.lineno for each in below if isinstance(each, LOOPS)]
    return bool(loops) and not code.loops(load) and max(loops) < load.lineno


_SETS_WEIGHTS = ("load_state_dict", "apply")


def _made_up_for(code: Code, load: ast.Call, condition: ast.AST, below: Sequence[ast.AST]) -> bool:
    """Return whether the program makes weights equal again after a change on one rank."""
    name = last_name(load.func)
    if in_both_branches(condition, name):
        return True
    models = ast.unparse(load.func)
    if isinstance(condition, ast.If) and name == "load_state_dict":
        again = code.called(condition, name)
        if sum(ast.unparse(each.func) == models for each in again) > 1:
            return True
    return any(
        each.lineno > load.lineno
        and (
            last_name(each.func) in ("broadcast", "broadcast_object_list")
            or code.is_torch(each, "DistributedDataParallel")
        )
        for each in below
        if isinstance(each, ast.Call)
    )


@rule("DDP502", Severity.WARNING)
def state_of_other_kind(code: Code) -> Iterator[Hit]:
    """Find state dicts without the prefix ``module.`` that are loaded into DDP, and saved ones."""
    yield from _saves_wrapper(code)
    for load in code.calls_by_name.get("load_state_dict", ()):
        model = load.func.value if isinstance(load.func, ast.Attribute) else None
        state = keyword(load, "state_dict", 0)
        if model is None or state is None or keyword(load, "strict", 1) is not None:
            continue
        wrap = _only_wrapper(code, model)
        if wrap is None or under(code, load, *TELLS_DDP):
            continue
        if any(isinstance(each, ast.Try) for each in code.above(load)):
            continue
        made = [each.node for each in code.origins(state)]
        if any(map(_strips_prefix, made)) or _is_saved_bare(code, state):
            yield Hit(
                load,
                'the names of this state have no "module.", and those of the DDP object begin '
                "with it: the load fails",
                f"Load it into {ast.unparse(model)}.module, or before the model is wrapped.",
            )


def _saves_wrapper(code: Code) -> Iterator[Hit]:
    """Yield checkpoints whose names begin with ``module.``."""
    if code.program.once("loads wrapper", lambda: _loads_wrapper(code.program)):
        return
    for save in code.calls_by_name.get("save", ()):
        if code.dotted(save.func) != "torch.save" or not save.args:
            continue
        owners = [
            each.func.value
            for made in code.origins(save.args[0])
            for each in calls_in([made.node], "state_dict")
            if isinstance(each.func, ast.Attribute) and made.code is code
        ]
        # One of two branches may take the module inside: x.module if is_parallel(x) else x
        bare = {ast.unparse(each.value) for each in owners if isinstance(each, ast.Attribute)}
        if any(
            is_wrapper(code, each)
            and not _is_unwrapped(code, each)
            and ast.unparse(each) not in bare
            for each in owners
        ):
            yield Hit(
                save, 'the names in this checkpoint begin with "module.", and a bare model '
                "refuses them", "Save model.module.state_dict().", Severity.INFO,
            )  # fmt: skip


def _loads_wrapper(program: Program) -> bool:
    """Return whether a program loads a state into a DDP object, also in a function that gets it."""
    loads = [(code, each) for code in program.codes for each in code.calls_named("load_state_dict")]
    functions = {function.name for code, load in loads if (function := code.function(load))}
    return any(
        isinstance(load.func, ast.Attribute) and is_wrapper(code, load.func.value)
        for code, load in loads
    ) or any(
        is_wrapper(code, value)
        for code in program.codes
        for call in code.calls_named(*functions)
        for value in (*call.args, *(each.value for each in call.keywords))
    )


def _is_unwrapped(code: Code, node: ast.expr, depth: int = 3) -> bool:
    """Return whether a name may be the module inside of DDP: ``m.module if ddp else m``."""
    for other, item in code.values(node):
        if any(
            (isinstance(each, ast.Attribute) and each.attr == "module")
            or (isinstance(each, ast.Constant) and each.value == "module")
            or (isinstance(each, ast.Call) and "unwrap" in last_name(each.func))
            for each in ast.walk(item.value)
        ):
            return True
        named = isinstance(item.value, (ast.Name, ast.Attribute))
        if named and depth > 0 and _is_unwrapped(other, item.value, depth - 1):
            return True
    return False


def _strips_prefix(node: ast.AST) -> bool:
    """Return whether a comprehension removes the prefix ``module.`` from the keys."""
    if not isinstance(node, ast.DictComp):
        return False
    key = node.key
    if isinstance(key, ast.Call) and last_name(key.func) in ("replace", "removeprefix"):
        first = key.args[0] if key.args else None
        return isinstance(first, ast.Constant) and first.value == "module."
    return (
        isinstance(key, ast.Subscript)
        and isinstance(key.slice, ast.Slice)
        and ast.unparse(key.slice) == "7:"
    )


def _is_saved_bare(code: Code, state: ast.expr) -> bool:
    """Return whether a state is loaded from a file and the program saves ``model.module``."""
    inner = state
    while isinstance(inner, ast.Subscript):
        inner = inner.value
    made = [each.node for each in code.origins(inner)]
    if not made or not all(
        isinstance(each, ast.Call) and code.dotted(each.func) == "torch.load" for each in made
    ):
        return False
    key = ast.dump(state.slice) if isinstance(state, ast.Subscript) else ""
    saved = [
        value
        for each in code.program.codes
        for call in each.calls_by_name.get("save", ())
        if each.dotted(call.func) == "torch.save" and call.args
        for one in each.origins(call.args[0])
        for value in _under_key(one.node, key)
    ]
    bare = [
        isinstance(each, ast.Call)
        and last_name(each.func) == "state_dict"
        and isinstance(each.func, ast.Attribute)
        and last_name(each.func.value) == "module"
        for each in saved
    ]
    return bool(bare) and all(bare)


def _under_key(node: ast.expr, key: str) -> list[ast.expr]:
    """Return the value under a key of a checkpoint, or the checkpoint itself without a key."""
    if not key:
        return [node]
    if not isinstance(node, ast.Dict):
        return []
    pairs = zip(node.keys, node.values, strict=True)
    return [value for name, value in pairs if name is not None and ast.dump(name) == key]


@rule("DDP321", Severity.INFO, "deprecated-argument", moot=frozenset())
def deprecated_argument(code: Code) -> Iterator[Hit]:
    """DDP gets an argument that torch 2.13 deprecates.

    What it finds
        ``broadcast_buffers=`` or ``check_reduction=``.

    Why it is bad
        Each rank prints a FutureWarning, and later versions raise an error.

    How to fix it
        ``forward_sync_buffers=`` from torch 2.13 on.

    Example
        Wrong:
            DDP(model, broadcast_buffers=False)
        Right:
            DDP(model, forward_sync_buffers=False)

    When it stays silent
        Other arguments.
    """
    for wrap in code.wraps:
        for each in wrap.keywords:
            if each.arg == "check_reduction":
                yield Hit(each.value, "torch ignores check_reduction", "Leave it out.")
            elif each.arg == "broadcast_buffers":
                yield Hit(
                    each.value,
                    "torch 2.13 deprecates broadcast_buffers",
                    "Use forward_sync_buffers from torch 2.13 on.",
                )


@rule("DDP962", Severity.ERROR)
def wrapper_attribute(code: Code) -> Iterator[Hit]:
    """Find attributes of the model that are read from its wrapper."""
    targets = {
        last_name(target)
        for wrap, *_ in wrappings(code)
        for target in targets_of(code.statement(wrap))
    }
    keys = {
        key_of(each.target)
        for other in code.program.codes
        for each in wrappings(other)
        if each.target is not None
    }
    for name, loads in code.loads.items() if code.program.wraps else ():
        if name in WRAPPER or name.startswith("_"):
            continue
        for load in loads:
            if not isinstance(load, ast.Attribute):
                continue
            named = isinstance(load.value, ast.Name) or key_of(load.value) in keys
            wrap = _passed_wrapper(code, load.value) if named else None
            if wrap is None and last_name(load.value) in targets:
                wrap = _only_wrapper(code, load.value)
            if wrap is None or under(code, load, *TELLS_DDP):
                continue
            if not _is_set_on_wrapper(code, load, wrap):
                yield Hit(
                    load,
                    f"the DDP object has no {name}: it is its module's",
                    f"Use .module.{name}.",
                )
                break


def _passed_wrapper(code: Code, node: ast.expr) -> ast.Call | None:
    """Return the DDP call that a parameter or an attribute of another object certainly is."""
    own = isinstance(node, ast.Attribute) and last_name(node.value) == "self"
    if isinstance(node, ast.Name) and node.id in parameters_of(code.scope(node)):
        find = functools.partial(is_passed_ddp, code, node)
        if not code.program.once(f"{code.file.path} {id(code.scope(node))} {node.id}", find):
            return None
    elif own or not isinstance(node, (ast.Attribute, ast.Subscript)):
        return None
    made = code.origins(node)
    wrap = made[0].node if made and all(map(is_ddp, made)) else None
    return wrap if isinstance(wrap, ast.Call) else None


def _only_wrapper(code: Code, node: ast.expr) -> ast.Call | None:
    """Return the DDP call that a name is bound to. None if it may be anything else."""
    own = isinstance(node, ast.Attribute) and last_name(node.value) == "self"
    if not own and not isinstance(node, ast.Name):
        return None
    items = [
        item
        for other, item in code.values(node)
        if other is code and (not own or code.owner(item.node) is code.owner(node))
    ]
    last = max(items, key=lambda item: getattr(item.node, "lineno", 0), default=None)
    if last is None or last.position is not None or last.is_item:
        return None
    wrap = next((each for each in wrappings(code) if each.call is last.value), None)
    if wrap is None or not wrap.is_certain:
        return None
    return wrap.call if _is_wrapped_at(code, last.node, node) else None


def _is_wrapped_at(code: Code, place: ast.AST, node: ast.expr) -> bool:
    """Return whether an assignment has run where a name is read, if the job uses DDP."""
    if code.scope(place) is not code.scope(node):
        if not _is_made_first(code, place, node):
            return False
    elif node.lineno <= getattr(place, "lineno", 0) or exclusive(code, place, node):
        return False
    inside = itertools.takewhile(lambda each: not isinstance(each, FUNCTIONS), code.above(place))
    held = any(isinstance(each, (ast.If, ast.For, ast.While)) for each in inside)
    if not held:
        return True
    return under(code, place, "ddp", "dist", "world", "gpu", "rank") and (
        code.function(place) is code.function(node) or _is_called(code, node)
    )


def _is_called(code: Code, node: ast.AST) -> bool:
    """Return whether the program calls the method around a node.

    Other programs may call it on an object whose model is not wrapped.
    """
    around = [each for each in code.above(node) if isinstance(each, FUNCTIONS)]
    methods = [each for each in around if code.is_method(each) and each.name != "forward"]
    return all(code.program.callers(code, each) for each in methods)


def _is_made_first(code: Code, place: ast.AST, node: ast.AST) -> bool:
    """Return whether ``__init__`` sets an attribute before it calls the method that reads it."""
    first, method = code.function(place), code.function(node)
    if first is None or method is None or first.name != "__init__" or method.name == "__init__":
        return False
    return not any(
        other.function(call) is first and call.lineno < getattr(place, "lineno", 0)
        for other, call in code.program.callers(code, method)
    )


def _is_set_on_wrapper(code: Code, load: ast.Attribute, wrap: ast.Call) -> bool:
    """Return whether the program may set an attribute on the wrapper, or handles its absence."""
    stores = (
        target
        for each in code.program.codes
        for node in each.of(ast.Assign, ast.AnnAssign, ast.AugAssign)
        for target in targets_of(node)
        if isinstance(target, ast.Attribute)
        and target.attr == load.attr
        and last_name(target.value) != "self"
        and (each is not code or target.lineno > wrap.lineno)
    )
    return next(stores, None) is not None or any(
        isinstance(each, ast.Try) for each in code.above(load)
    )
