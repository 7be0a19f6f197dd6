"""Rules on samplers: which samples each rank reads, and in which order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import LOOPS, last_name
from ddpdoctor.lint.calls import has_unpacked, keyword, targets_of
from ddpdoctor.lint.code import Code, Origin
from ddpdoctor.lint.conditions import exclusive, under
from ddpdoctor.lint.loaders import is_loader, is_sampler, made_loader, sampler_of, samplers_of
from ddpdoctor.lint.loops import repeats, runs_backward, runs_often, training_loops
from ddpdoctor.lint.ranks import (
    counts_gpus,
    depends_on_rank,
    is_local_rank,
    is_spawn_index,
    is_world_size,
    mentions_rank,
    spans_nodes,
)
from ddpdoctor.lint.reductions import names_in
from ddpdoctor.lint.rules import LOADERS, TRAINERS, Hit, rule
from ddpdoctor.lint.wrapped import certainly_ddp

_ALL = TRAINERS | LOADERS


def _shuffles(code: Code, sampler: ast.Call) -> bool:
    """Return whether a sampler shuffles, at least where it is made for the training."""
    shuffle = keyword(sampler, "shuffle", 3)
    if shuffle is None:
        return not has_unpacked(sampler)
    values = [_or_default(each.node) for each in code.origins(shuffle)]
    known = all(isinstance(each, (ast.Constant, ast.Compare)) for each in values)
    return known and any(map(_is_for_training, values))


def _or_default(value: ast.expr) -> ast.expr:
    """Return the default of an option of a dictionary: ``options.pop("shuffle", True)``."""
    if isinstance(value, ast.Call) and last_name(value.func) in ("get", "pop"):
        return value.args[-1] if len(value.args) == 2 else value
    return value


def _is_for_training(shuffle: ast.expr) -> bool:
    """Return whether a value is True, or a test for training data: ``split == "train"``."""
    if isinstance(shuffle, ast.Compare) and isinstance(shuffle.ops[0], ast.Eq):
        shuffle = shuffle.comparators[0]
        return isinstance(shuffle, ast.Constant) and str(shuffle.value).startswith("train")
    return isinstance(shuffle, ast.Constant) and shuffle.value is True


@rule("DDP101", Severity.ERROR, moot=_ALL)
def sampler_not_used(code: Code) -> Iterator[Hit]:
    """Find samplers that reach no loader."""
    if not code.program.wraps or not any(
        each.calls_of("DataLoader") for each in code.program.codes
    ):
        return
    for call in code.calls_of("DistributedSampler"):
        if _is_dropped(code, call):
            yield Hit(
                call,
                "this DistributedSampler is never passed to a DataLoader, so every rank loads the "
                "whole data set",
                "Pass sampler=... to the training DataLoader, and drop its shuffle=True.",
            )


def _is_dropped(code: Code, call: ast.Call) -> bool:
    parent: ast.AST = code.parents[call]
    while isinstance(parent, (ast.IfExp, ast.BoolOp)):
        parent = code.parents[parent]
    if isinstance(parent, ast.Expr):
        # If a loader has another sampler, this one is only an experiment.
        loaders = code.calls_of("DataLoader")
        return code.program.uses("backward") and not any(sampler_of(each) for each in loaders)
    function = code.function(call)
    if isinstance(parent, ast.Return) and function is not None:
        callers = code.program.callers(code, function)
        return bool(callers) and all(_is_dropped(*each) for each in callers)
    targets = targets_of(parent) if isinstance(parent, (ast.Assign, ast.AnnAssign)) else []
    if len(targets) != 1 or not isinstance(targets[0], (ast.Name, ast.Attribute)):
        return False
    return _is_lost(code, targets[0])


def _is_lost(code: Code, target: ast.Name | ast.Attribute) -> bool:
    """Return whether a sampler that is bound to a name is passed to nothing."""
    name = last_name(target)
    codes = [code] if isinstance(target, ast.Name) else code.program.codes
    scope = code.scope(target) if isinstance(target, ast.Name) else None
    if isinstance(scope, ast.Module) or name in _outer_names(code, target):
        # Other files may import it.
        codes = code.program.codes
        scope = None
    for each in codes:
        for load in each.loads.get(name, ()):
            if (
                scope is not None
                and scope is not each.scope(load)
                and scope not in each.above(load)
            ):
                continue
            if not _only_asks(each, load):
                return False
    # If this file creates no loader, another file uses the sampler.
    return bool(code.calls_of("DataLoader"))


def _outer_names(code: Code, target: ast.AST) -> set[str]:
    function = code.function(target)
    inside = code.within(function) if function is not None else ()
    return {
        name
        for each in inside
        if isinstance(each, (ast.Global, ast.Nonlocal))
        for name in each.names
    }


def _only_asks(code: Code, load: ast.AST) -> bool:
    """Return whether a use of a sampler passes it to nothing: ``set_epoch``, ``is None``."""
    parent = code.parents[load]
    if isinstance(parent, (ast.Attribute, ast.Compare)):
        return True
    if isinstance(parent, (ast.If, ast.While)) or (
        isinstance(parent, ast.IfExp) and parent.test is load
    ):
        return True
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return True
    asks = ("len", "isinstance", "hasattr", "print")
    return isinstance(parent, ast.Call) and last_name(parent.func) in asks


@rule("DDP102", Severity.ERROR, moot=_ALL)
def unsharded_loader(code: Code) -> Iterator[Hit]:
    """Find training loops over a loader that gives every rank the whole data set."""
    if not code.program.wraps or _divides_by_hand(code):
        return
    if any(
        _is_dropped(each, call)
        for each in code.program.codes
        for call in each.calls_of("DistributedSampler")
    ):
        # DDP101 is the cause.
        return
    seen: set[ast.AST] = set()
    for other, loop in training_loops(code.program):
        made = [each for each in other.origins(loop.iter) if isinstance(each.node, ast.Call)]
        if all(map(is_loader, made)):
            seen.update(_unsharded(code, made))
    for call in code.calls:
        if _trains_elsewhere(code, call):
            for each in (*call.args, *(one.value for one in call.keywords)):
                made = code.origins(each)
                if made and all(is_loader(one) and _is_shuffled(one.node) for one in made):
                    seen.update(_unsharded(code, made))
    for node in seen:
        yield Hit(
            node,
            "this DataLoader feeds the training loop and has no DistributedSampler, so "
            "every rank trains on the whole data set",
            "Pass sampler=DistributedSampler(dataset), drop shuffle=True, and call "
            "sampler.set_epoch(epoch) in each epoch.",
        )


def _unsharded(code: Code, loaders: list[Origin]) -> list[ast.expr]:
    """Return the first of some loaders if all give each rank the whole data set of a file."""
    first = loaders[:1] if loaders and all(map(_is_unsharded, loaders)) else []
    return [each.node for each in first if each.code is code]


def _is_shuffled(loader: ast.expr) -> bool:
    shuffle = keyword(loader, "shuffle", 2) if isinstance(loader, ast.Call) else None
    return isinstance(shuffle, ast.Constant) and shuffle.value is True


def _trains_elsewhere(code: Code, call: ast.Call) -> bool:
    """Return whether a call passes a DDP object to a function of an unknown file that trains it."""
    return (
        last_name(call.func).lower().startswith(("train", "fit"))
        and not code.program.targets(code, call)
        and any(certainly_ddp(code, each, call) for each in call.args)
    )


def _divides_by_hand(code: Code) -> bool:
    """Return whether the program may divide the data itself, by slices, splits or streams."""
    for each in code.program.codes:
        if {"IterableDataset", "random_split", "split_dataset_by_node", "shard", "chunk"} & {
            *each.imports,
            *each.calls_by_name,
            *each.loads,
        }:
            return True
        for node in each.of(ast.Subscript, ast.Call, ast.BinOp):
            if isinstance(node, ast.Subscript) and mentions_rank(each, node.slice):
                if not isinstance(node.ctx, ast.Load) or last_name(node.value) != "environ":
                    return True
            elif isinstance(node, ast.Call) and last_name(node.func) == "range":
                if any(mentions_rank(each, arg) for arg in node.args):
                    return True
            elif (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Mod)
                and (mentions_rank(each, node.right) or is_world_size(each, node.right))
            ):
                return True
    return False


_SYNTHETIC = ("randn", "rand", "randint", "zeros", "ones", "full", "arange", "empty")


_ABOUT_RANKS = (
    "distrib", "ddp", "world", "gpu", "rank", "parallel", "sampler", "single", "multi", "debug",
)  # fmt: skip
"""Words of conditions that separate jobs of several ranks from others."""


def _is_unsharded(origin: Origin) -> bool:
    code, call = origin.code, origin.node
    assert isinstance(call, ast.Call)
    if sampler_of(call) is not None or (has_unpacked(call) and not _knows_options(code, call)):
        return False
    if under(code, call, *_ABOUT_RANKS):
        return False
    data = keyword(call, "dataset", 0)
    if data is None or depends_on_rank(code, data):
        return False
    for each in code.origins(data):
        node = each.node
        if isinstance(node, ast.Call):
            names = {last_name(one) for one in ast.walk(node)}
            if names & set(_SYNTHETIC) or "Fake" in last_name(node.func):
                return False
            made_up = each.code.program.class_named(each.code, last_name(node.func))
            if made_up is not None and not node.args and not node.keywords:
                # Synthetic data.
                return False
        elif isinstance(node, (ast.Subscript, ast.ListComp)):
            return False
    return True


def _knows_options(code: Code, call: ast.Call) -> bool:
    """Return whether what a loader gets by ``**`` is written out, in a file without samplers."""
    unpacked = [each.value for each in call.keywords if each.arg is None]
    made = [origin.node for each in unpacked for origin in code.origins(each)]
    return (
        not any(isinstance(each, ast.Starred) for each in call.args)
        and all(isinstance(each, ast.Dict) and None not in each.keys for each in made)
        and not any("sampler" in line.lower() for line in code.file.lines)
    )


_OWN_LOADERS = frozenset(
    ("deepspeed", "horovod", "colossalai", "megatron", "fairseq", "torch_geometric")
)
"""Frameworks that use the program's own loaders or samplers unchanged."""


@rule("DDP103", Severity.WARNING, moot=_ALL - _OWN_LOADERS)
def missing_set_epoch(code: Code) -> Iterator[Hit]:
    """Find samplers that shuffle without ``set_epoch``."""
    for call in code.calls_of("DistributedSampler"):
        if not _shuffles(code, call):
            continue
        places = [one for other in code.program.codes for one in _feeds_epochs(other, call)]
        never = not places and _trains_on_unknown(code, call)
        if never or any(not _has_epoch(code, call, place) for place in places):
            yield Hit(
                call,
                "set_epoch() is never called on this DistributedSampler, so every epoch has the "
                "same order",
                "Call sampler.set_epoch(epoch) at the top of the epoch loop.",
            )


_OTHER_DATA = re.compile(r"val|test|eval|dev|infer|predict", re.IGNORECASE)


def _trains_on_unknown(code: Code, sampler: ast.Call) -> bool:
    """Return whether a program without any ``set_epoch`` may train for epochs with a sampler.

    It does if it trains over something whose origin is unknown, and the sampler is of no other
    data.
    """
    statement, function = code.statement(sampler), code.function(sampler)
    around = [function.name] if function is not None else []
    around += [name for target in targets_of(statement) for name in names_in(target)]
    if code.program.uses("set_epoch") or any(map(_OTHER_DATA.search, around)):
        return False
    if any("set_epoch" in each.mentioned(each.tree) for each in code.program.codes):
        return False
    return any(
        repeats(other, loop)
        and not any(isinstance(each, LOOPS) for each in other.within(loop))
        and not any(map(is_loader, made := other.origins(loop.iter)))
        and all(isinstance(each.node, (ast.Name, ast.Attribute)) for each in made)
        for other, loop in training_loops(code.program)
    )


def _feeds_epochs(code: Code, sampler: ast.Call) -> Iterator[ast.AST]:
    """Yield where a file trains for several epochs over a loader with a sampler."""
    for node in code.of(ast.For, ast.AsyncFor):
        if _is_over(code, node.iter, sampler) and repeats(code, node):
            yields = any(isinstance(each, ast.Yield) for each in code.within(node))
            if runs_backward(code, node) or (yields and code.program.uses("backward")):
                yield node
    for name in ("iter", "cycle"):
        for call in code.calls_by_name.get(name, ()):
            if call.args and _takes_batches(code, call) and _is_over(code, call.args[0], sampler):
                yield call


def _takes_batches(code: Code, call: ast.Call) -> bool:
    """Return whether a loop that trains takes the batches of a call with ``next``."""
    restarts = any(
        isinstance(each, ast.ExceptHandler) and last_name(each.type or each) == "StopIteration"
        for each in code.above(call)
    )
    if restarts or last_name(call.func) == "cycle":
        return code.program.uses("backward")
    loops = code.loops(call)
    return bool(loops) and runs_often(code, loops[-1]) and runs_backward(code, loops[-1])


def _is_over(code: Code, node: ast.expr, sampler: ast.Call) -> bool:
    """Return whether an expression is a loader with a sampler."""
    return any(
        isinstance(made.node, ast.Call)
        and any(each.node is sampler for each in samplers_of(made.code, made.node))
        for made in map(made_loader, code.origins(node))
        if is_loader(made) or last_name(getattr(made.node, "func", made.node)) == "__init__"
    )


def _has_epoch(code: Code, sampler: ast.Call, place: ast.AST) -> bool:
    """Return whether a ``set_epoch`` of the program may be this sampler's at a training loop."""
    for each in code.program.codes:
        calls = each.calls_by_name.get("set_epoch", ())
        if any(_tells(each, call, sampler) and not exclusive(each, call, place) for call in calls):
            return True
        named = "set_epoch" in each.loads or any(
            node.value == "set_epoch" for node in each.of(ast.Constant)
        )
        if named and not calls:
            # The method is passed on, or found by `getattr`.
            return True
    return False


_SAMPLERS = ("sampler", "batch_sampler")


def _tells(code: Code, call: ast.Call, sampler: ast.Call) -> bool:
    """Return whether a ``set_epoch`` may be called on a sampler. True if that is not known."""
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    if receiver is None:
        return True
    made = code.origins(receiver)
    if isinstance(receiver, ast.Attribute) and receiver.attr in _SAMPLERS:
        while isinstance(receiver, ast.Attribute) and receiver.attr in _SAMPLERS:
            receiver = receiver.value
        loaders = [each for each in code.origins(receiver) if is_loader(each)]
        made = [
            one
            for each in loaders
            if isinstance(each.node, ast.Call)
            for one in samplers_of(each.code, each.node)
        ]
    return any(each.node is sampler for each in made) or not any(map(is_sampler, made))


@rule("DDP104", Severity.WARNING, "misplaced-set-epoch", moot=_ALL)
def misplaced_set_epoch(code: Code) -> Iterator[Hit]:
    """``set_epoch`` is called with a constant, outside of the epoch loop, or within a batch loop.

    What it finds
        ``sampler.set_epoch(x)`` where ``x`` never changes, or which runs once while the loader
        is iterated in several epochs, or which runs for each batch.

    Why it is bad
        All epochs have the same order, or the new order comes one epoch late.

    How to fix it
        Call it first in the epoch loop, with the loop's variable.

    Example
        Wrong:
            sampler.set_epoch(0)
            for epoch in range(epochs):
                for batch in loader: ...
        Right:
            for epoch in range(epochs):
                sampler.set_epoch(epoch)
                for batch in loader: ...

    When it stays silent
        A number that the loop counts up itself, and calls in functions whose callers
        are not in the files.
    """
    for call in code.calls_by_name.get("set_epoch", ()):
        argument = keyword(call, "epoch", 0)
        if argument is None:
            continue
        loops = code.loops(call)
        if _is_constant(code, argument) and any(runs_often(code, each) for each in loops):
            if any(_counts(code, each) for each in code.called(loops[-1], "set_epoch")):
                # It is reset for an evaluation.
                continue
            yield Hit(
                call,
                "set_epoch() gets a constant, so every epoch has the same order",
                "Pass the number of the epoch.",
            )
        elif (
            loops
            and isinstance(loops[0], (ast.For, ast.AsyncFor))
            and code.called(loops[0], "backward")
        ):
            made = code.origins(loops[0].iter)
            outer = len(loops) > 1 or repeats(code, loops[0])
            if any(map(is_loader, made)) and outer:
                yield Hit(
                    call,
                    "set_epoch() is called within the loop over batches, after the loader has "
                    "drawn this epoch's order",
                    "Move it before the loop over the loader.",
                )


def _counts(code: Code, call: ast.Call) -> bool:
    """Return whether a ``set_epoch`` gets a number that changes."""
    argument = keyword(call, "epoch", 0)
    return argument is not None and not _is_constant(code, argument)


def _is_constant(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is a number, or a name that is only ever set to one number."""
    if isinstance(node, ast.Constant):
        return True
    if not isinstance(node, ast.Name):
        return False
    changes = any(last_name(each.target) == node.id for each in code.of(ast.AugAssign))
    made = [item.value for _, item in code.values(node)]
    return not changes and len(made) == 1 and isinstance(made[0], ast.Constant)


@rule("DDP105", Severity.ERROR, moot=_ALL)
def wrong_rank(code: Code) -> Iterator[Hit]:
    """Find samplers that get the local rank together with the world size."""
    spawns = code.program.uses("spawn")
    if spawns and not spans_nodes(code.program):
        # On one node both are equal.
        return
    for call in code.calls_of("DistributedSampler"):
        rank, count = keyword(call, "rank", 2), keyword(call, "num_replicas", 1)
        if rank is None or not (
            is_spawn_index(code, rank) if spawns else is_local_rank(code, rank)
        ):
            continue
        fixed = isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value > 1
        if count is None or fixed or (is_world_size(code, count) and not counts_gpus(code, count)):
            yield Hit(
                rank,
                "this DistributedSampler gets the local rank, but the number of all ranks: on "
                "several nodes ranks share the same samples, and others are never read",
                "Leave out rank and num_replicas, or pass dist.get_rank().",
            )


@rule("DDP108", Severity.ERROR, "shuffle-and-sampler", moot=frozenset())
def shuffle_and_sampler(code: Code) -> Iterator[Hit]:
    """A DataLoader gets both a sampler and ``shuffle=True``, which raises ValueError.

    What it finds
        ``DataLoader(sampler=..., shuffle=True)`` where the sampler is never None.

    Why it is bad
        The DataLoader raises "sampler option is mutually exclusive with shuffle".

    How to fix it
        Drop ``shuffle=True``. The sampler shuffles.

    Example
        Wrong:
            DataLoader(data, shuffle=True, sampler=DistributedSampler(data))
        Right:
            DataLoader(data, sampler=DistributedSampler(data))

    When it stays silent
        ``shuffle=(sampler is None)``, and a sampler that may be None.
    """
    for call in code.calls_of("DataLoader"):
        shuffle, sampler = keyword(call, "shuffle", 2), keyword(call, "sampler", 3)
        if sampler is None or not (isinstance(shuffle, ast.Constant) and shuffle.value is True):
            continue
        made = code.origins(sampler)
        if made and all(isinstance(each.node, ast.Call) for each in made):
            yield Hit(
                shuffle,
                "a DataLoader with a sampler refuses shuffle=True with a ValueError",
                "Drop shuffle=True: the sampler shuffles.",
            )


@rule("DDP113", Severity.ERROR, moot=_ALL)
def seed_differs(code: Code) -> Iterator[Hit]:
    """Find samplers whose seed depends on the rank."""
    for call in code.calls_of("DistributedSampler"):
        seed = keyword(call, "seed", 4)
        if seed is not None and depends_on_rank(code, seed):
            yield Hit(
                seed,
                "the seed of this DistributedSampler depends on the rank, so the ranks' shards "
                "overlap",
                "Pass the same seed on every rank.",
            )
