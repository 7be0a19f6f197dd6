"""Rules on samplers, loaders and data sets."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.source_files import last_name
from ddpdoctor.lint.program import (
    Code,
    Loop,
    Origin,
    guards,
    has_unpacked,
    is_guarded,
    is_quiet,
    keyword,
    targets_of,
    under,
    without_gradients,
)
from ddpdoctor.lint.ranks import depends_on_rank, is_local_rank, is_world_size, mentions_rank
from ddpdoctor.lint.rules import LOADERS, TRAINERS, Hit, rule

_ALL = TRAINERS | LOADERS


def _is_sampler(origin: Origin) -> bool:
    return origin.code.is_torch(origin.node, "DistributedSampler")


def _is_loader(origin: Origin) -> bool:
    return origin.code.is_torch(origin.node, "DataLoader")


def _is_none(origin: Origin) -> bool:
    return isinstance(origin.node, ast.Constant) and origin.node.value is None


def _sampler_of(code: Code, loader: ast.Call) -> ast.expr | None:
    return keyword(loader, "sampler", 3) or keyword(loader, "batch_sampler", 4)


def _samplers_of(code: Code, loader: ast.Call) -> list[Origin]:
    """Return what the sampler of a loader may be, also inside of a batch sampler."""
    given = _sampler_of(code, loader)
    if given is None:
        return []
    found: list[Origin] = []
    for each in code.origins(given):
        node = each.node
        if isinstance(node, ast.Call) and last_name(node.func) == "BatchSampler" and node.args:
            found += each.code.origins(keyword(node, "sampler", 0) or node.args[0])
        else:
            found.append(each)
    return found


def _shuffles(code: Code, sampler: ast.Call) -> bool:
    shuffle = keyword(sampler, "shuffle", 3)
    if shuffle is None:
        return not has_unpacked(sampler)
    values = [each.node for each in code.origins(shuffle)]
    return all(isinstance(each, ast.Constant) and each.value is True for each in values)


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
        return code.program.uses("backward") and not any(
            _sampler_of(code, each) for each in loaders
        )
    if not isinstance(parent, (ast.Assign, ast.AnnAssign)):
        return False
    targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
    if len(targets) != 1 or not isinstance(targets[0], (ast.Name, ast.Attribute)):
        return False
    target = targets[0]
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
    if isinstance(parent, ast.Attribute):
        return True
    if isinstance(parent, ast.Compare):
        return True
    if isinstance(parent, (ast.If, ast.While)) or (
        isinstance(parent, ast.IfExp) and parent.test is load
    ):
        return True
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
        return True
    return isinstance(parent, ast.Call) and last_name(parent.func) in (
        "len",
        "isinstance",
        "hasattr",
        "print",
    )


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
    for loop in (node for node in code.nodes if isinstance(node, (ast.For, ast.AsyncFor))):
        if not _trains(code, loop):
            continue
        made = [each for each in code.origins(loop.iter) if isinstance(each.node, ast.Call)]
        loaders = [each for each in made if _is_loader(each)]
        if not loaders or len(loaders) != len(made):
            continue
        if all(_is_unsharded(each) for each in loaders):
            call = loaders[0]
            if call.code is code or call.code not in code.program.codes:
                yield Hit(
                    call.node,
                    "this DataLoader feeds the training loop and has no DistributedSampler, so "
                    "every rank trains on the whole data set",
                    "Pass sampler=DistributedSampler(dataset), drop shuffle=True, and call "
                    "sampler.set_epoch(epoch) in each epoch.",
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
        for node in each.nodes:
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


def _trains(code: Code, loop: Loop) -> bool:
    """Return whether a loop over batches runs a backward."""
    if code.called(loop, "backward"):
        return not without_gradients(code, loop)
    for call in (each for each in code.within(loop) if isinstance(each, ast.Call)):
        for other, function in code.program.targets(code, call):
            if other.called(function, "backward"):
                return True
    return False


_SYNTHETIC = ("randn", "rand", "randint", "zeros", "ones", "full", "arange", "empty")


def _is_unsharded(origin: Origin) -> bool:
    code, call = origin.code, origin.node
    assert isinstance(call, ast.Call)
    if has_unpacked(call) or _sampler_of(code, call) is not None:
        return False
    if under(
        code,
        call,
        "distrib",
        "ddp",
        "world",
        "gpu",
        "rank",
        "parallel",
        "sampler",
        "single",
        "multi",
        "debug",
    ):
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
            if last_name(node.func) in each.code.classes and not node.args and not node.keywords:
                # Synthetic data.
                return False
        elif isinstance(node, (ast.Subscript, ast.ListComp)):
            return False
    return True


_OWN_LOADERS = frozenset(("deepspeed", "horovod", "colossalai", "megatron", "fairseq"))
"""Frameworks that use the program's own loaders unchanged."""


@rule("DDP103", Severity.WARNING, moot=_ALL - _OWN_LOADERS)
def missing_set_epoch(code: Code) -> Iterator[Hit]:
    """Find samplers that shuffle without ``set_epoch``."""
    for call in code.calls_of("DistributedSampler"):
        if not _shuffles(code, call) or _has_epoch(code, call):
            continue
        if any(_feeds_epochs(other, call) for other in code.program.codes):
            yield Hit(
                call,
                "set_epoch() is never called on this DistributedSampler, so every epoch has the "
                "same order",
                "Call sampler.set_epoch(epoch) at the top of the epoch loop.",
            )


def _feeds_epochs(code: Code, sampler: ast.Call) -> bool:
    """Return whether a file trains for several epochs over a loader with a sampler."""
    for node in code.nodes:
        if isinstance(node, (ast.For, ast.AsyncFor)):
            if _is_over(code, node.iter, sampler) and _repeats(code, node):
                yields = any(isinstance(each, ast.Yield) for each in code.within(node))
                if _trains(code, node) or (yields and code.program.uses("backward")):
                    return True
        elif isinstance(node, ast.Call) and last_name(node.func) == "iter" and node.args:
            # An inner loop takes the batches with `next`.
            loops = code.loops(node)
            trains = bool(loops) and _many(code, loops[-1]) and _trains(code, loops[-1])
            if trains and _is_over(code, node.args[0], sampler):
                return True
    return False


def _is_over(code: Code, node: ast.expr, sampler: ast.Call) -> bool:
    """Return whether an expression is a loader with a sampler."""
    return any(
        _is_loader(made)
        and isinstance(made.node, ast.Call)
        and any(each.node is sampler for each in _samplers_of(made.code, made.node))
        for made in code.origins(node)
    )


def _has_epoch(code: Code, sampler: ast.Call) -> bool:
    """Return whether a ``set_epoch`` of the program may be this sampler's."""
    for each in code.program.codes:
        calls = each.calls_by_name.get("set_epoch", ())
        if any(_tells(each, call, sampler) for call in calls):
            return True
        named = "set_epoch" in each.loads or any(
            isinstance(node, ast.Constant) and node.value == "set_epoch" for node in each.nodes
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
        loaders = [each for each in code.origins(receiver) if _is_loader(each)]
        made = [
            one
            for each in loaders
            if isinstance(each.node, ast.Call)
            for one in _samplers_of(each.code, each.node)
        ]
    return any(each.node is sampler for each in made) or not any(map(_is_sampler, made))


def _repeats(code: Code, loop: Loop, depth: int = 4) -> bool:
    """Return whether a loop over batches runs more than once."""
    for outer in code.loops(loop):
        if _many(code, outer):
            return True
    function = code.function(loop)
    if function is None or depth <= 0:
        return False
    return any(
        any(_many(each, outer) for outer in each.loops(call)) or _repeats(each, call, depth - 1)  # type: ignore[arg-type]
        for each, call in code.program.callers(code, function)
    )


def _many(code: Code, loop: Loop) -> bool:
    if isinstance(loop, ast.While):
        return True
    made = loop.iter
    if isinstance(made, ast.Call) and last_name(made.func) == "range" and len(made.args) == 1:
        values = [each.node for each in code.origins(made.args[0])]
        return not any(isinstance(each, ast.Constant) and each.value in (0, 1) for each in values)
    return not isinstance(made, (ast.List, ast.Tuple))


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
        if _is_constant(code, argument) and any(_many(code, each) for each in loops):
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
            outer = len(loops) > 1 or _repeats(code, loops[0])
            if any(map(_is_loader, made)) and outer:
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
    changes = any(
        isinstance(each, ast.AugAssign) and last_name(each.target) == node.id for each in code.nodes
    )
    made = [item.value for _, item in code.values(node)]
    return not changes and len(made) == 1 and isinstance(made[0], ast.Constant)


@rule("DDP105", Severity.ERROR, moot=_ALL)
def wrong_rank(code: Code) -> Iterator[Hit]:
    """Find samplers that get the local rank together with the world size."""
    if code.program.uses("spawn"):
        # On one node both are equal.
        return
    for call in code.calls_of("DistributedSampler"):
        rank, count = keyword(call, "rank", 2), keyword(call, "num_replicas", 1)
        if rank is None or not is_local_rank(code, rank):
            continue
        fixed = isinstance(count, ast.Constant) and isinstance(count.value, int) and count.value > 1
        if count is None or fixed or (is_world_size(code, count) and not _counts_gpus(code, count)):
            yield Hit(
                rank,
                "this DistributedSampler gets the local rank, but the number of all ranks: on "
                "several nodes ranks share the same samples, and others are never read",
                "Leave out rank and num_replicas, or pass dist.get_rank().",
            )


def _counts_gpus(code: Code, node: ast.expr) -> bool:
    return any(
        isinstance(each.node, ast.Call) and last_name(each.node.func) == "device_count"
        for each in code.origins(node)
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


@rule("DDP110", Severity.ERROR, moot=TRAINERS)
def unseeded_split(code: Code) -> Iterator[Hit]:
    """Find random splits that differ between ranks."""
    if not code.program.wraps:
        return
    for call in (
        ()
        if _is_seeded(code)
        else (
            *code.calls_by_name.get("random_split", ()),
            *code.calls_by_name.get("train_test_split", ()),
        )
    ):
        name = last_name(call.func)
        option = {"random_split": ("generator", 2), "train_test_split": ("random_state", None)}[
            name
        ]
        given = keyword(call, *option)
        unseeded = given is None or (isinstance(given, ast.Constant) and given.value is None)
        if unseeded and not has_unpacked(call) and not is_guarded(code, call):
            seed = (
                "generator=torch.Generator().manual_seed(0)"
                if name == "random_split"
                else "random_state=0"
            )
            yield Hit(
                call,
                "each rank splits the data at random by another seed, so some ranks train on "
                "what others validate on",
                f"Pass {seed}.",
            )

    yield from _unseeded_shuffle(code)


_SHUFFLES = ("random.shuffle", "numpy.random.shuffle", "numpy.random.permutation")


def _unseeded_shuffle(code: Code) -> Iterator[Hit]:
    """Yield unseeded shuffles of a list that is then split."""
    for name in ("shuffle", "permutation"):
        for call in code.calls_by_name.get(name, ()):
            full = code.dotted(call.func).replace("np.", "numpy.")
            shuffled = last_name(call.args[0]) if call.args else ""
            if full not in _SHUFFLES or not shuffled or is_guarded(code, call):
                continue
            function = code.function(call)
            parts = sum(
                isinstance(each, ast.Subscript)
                and isinstance(each.slice, ast.Slice)
                and last_name(each.value) == shuffled
                for each in code.within(function or code.tree)
            )
            if parts > 1 and not _seeds(code, full.rpartition(".")[0]):
                yield Hit(
                    call,
                    "each rank shuffles by another seed before the data is split, so some ranks "
                    "train on what others validate on",
                    "Shuffle with random.Random(0).shuffle(...).",
                )


def _seeds(code: Code, module: str) -> bool:
    """Return whether the program may seed the generator of a module."""
    for each in code.program.codes:
        for name, calls in each.calls_by_name.items():
            for call in calls if "seed" in name.lower() else ():
                full = each.dotted(call.func).replace("np.", "numpy.")
                if full == f"{module}.seed":
                    return True
                known = full.startswith(("torch.", "numpy.", "random."))
                if not known and not each.program.targets(each, call):
                    return True
    return False


def _is_seeded(code: Code) -> bool:
    """Return whether the program may use the same seed on all ranks."""
    return any(
        not call.args or not mentions_rank(each, call.args[0])
        for each in code.program.codes
        for name, calls in each.calls_by_name.items()
        if "seed" in name.lower()
        for call in calls
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


@rule("DDP111", Severity.INFO, "download-race", moot=TRAINERS)
def download_race(code: Code) -> Iterator[Hit]:
    """All ranks download the same files at once.

    What it finds
        ``download=True`` of a data set that every rank reaches.

    Why it is bad
        The ranks of a node write the same files at the same time. One may read what
        another has not finished.

    How to fix it
        Let one rank of each node download, wait for it at a barrier, and pass ``download=False``
        on the others.

    Example
        Wrong:
            data = CIFAR10(root, download=True)
        Right:
            if local_rank == 0:
                CIFAR10(root, download=True)
            dist.barrier()
            data = CIFAR10(root, download=False)

    When it stays silent
        Downloads under a condition on the rank, or before the processes are started.
    """
    if not code.program.wraps:
        return
    for call in code.calls:
        value = keyword(call, "download")
        if isinstance(value, ast.Constant) and value.value is True and not is_guarded(code, call):
            barriers = code.program.uses("barrier", "wait_for_everyone", "main_process_first")
            if not barriers and not code.program.uses("spawn"):
                yield Hit(
                    value,
                    "every rank downloads these files at the same time",
                    "Download on one rank of each node, then wait at a barrier.",
                )


@rule("DDP106", Severity.WARNING, moot=_ALL)
def shard_not_reduced(code: Code) -> Iterator[Hit]:
    """Find metrics of one shard that are used as if they covered the whole data set."""
    if code.program.uses(*_REDUCES):
        return
    for loop in (node for node in code.nodes if isinstance(node, ast.For)):
        if not _evaluates_shard(code, loop):
            continue
        counted = _counted(code, loop)
        for node in code.within(code.function(loop) or code.tree):
            if getattr(node, "lineno", 0) <= (loop.end_lineno or loop.lineno):
                continue
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and {last_name(one) for one in ast.walk(node.left)} & counted
                and _is_length_of_data(node.right)
            ):
                yield Hit(
                    node,
                    "a sum over this rank's shard is divided by the length of the whole data set, "
                    "and never reduced over the ranks",
                    "all_reduce the sum and the count, then divide.",
                )
                break
            if isinstance(node, ast.Call) and _shows(code, node, counted):
                yield Hit(
                    node,
                    "this shows what one rank counted over its shard as if it were of the whole "
                    "data set",
                    "all_reduce the sum and the count first.",
                )
                break


_SHOWN = ("print", "info", "add_scalar", "write", "log", "log_metrics", "print_rank0")


def _shows(code: Code, call: ast.Call, counted: set[str]) -> bool:
    """Return whether a call prints or logs some counts, and does not name the rank."""
    if last_name(call.func) not in _SHOWN or mentions_rank(code, call):
        return False
    text = ast.unparse(call).lower()
    names = {last_name(one) for each in call.args for one in ast.walk(each)}
    derived = {
        last_name(target)
        for node in code.within(code.function(call) or code.tree)
        for target in targets_of(node)
        if {last_name(one) for one in ast.walk(getattr(node, "value", node))} & counted
    }
    return "rank" not in text and bool(names & (counted | derived))


_REDUCES = (
    *("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object"),
    *("all_gather_into_tensor", "reduce_tensor", "reduce_dict", "reduce_mean", "torchmetrics"),
    *("synchronize_between_processes", "gather_for_metrics", "DistributedMetric"),
)


def _evaluates_shard(code: Code, loop: ast.For) -> bool:
    """Return whether a loop evaluates on this rank's shard of the data."""
    quiet = any(
        isinstance(each, ast.With) and is_quiet(each) for each in code.within(loop)
    ) or without_gradients(code, loop)
    if _trains(code, loop) or not quiet:
        return False
    if _gets_epochs(code, loop.iter):
        return True
    made = [each for each in code.origins(loop.iter) if _is_loader(each)]
    samplers = [
        _samplers_of(each.code, each.node) for each in made if isinstance(each.node, ast.Call)
    ]
    return bool(samplers) and all(
        any(map(_is_sampler, each)) and not any(map(_is_none, each)) for each in samplers
    )


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


def _counted(code: Code, loop: Loop) -> set[str]:
    return {
        last_name(each.target)
        for each in code.within(loop)
        if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add)
    }


def _is_length_of_data(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) == "len"
        and len(node.args) == 1
        and (last_name(node.args[0]) == "dataset" or "dataset" in last_name(node.args[0]).lower())
    )


@rule("DDP501", Severity.WARNING, moot=TRAINERS)
def save_on_every_rank(code: Code) -> Iterator[Hit]:
    """Find checkpoints that every rank writes to the same file."""
    if not code.program.wraps:
        return
    for call in code.calls_by_name.get("save", ()):
        if code.dotted(call.func) != "torch.save" or len(call.args) < 2:
            continue
        path = call.args[1]
        if _is_buffer(code, path) or is_guarded(code, call):
            continue
        function = code.function(call)
        if depends_on_rank(code, path) or (
            function is not None and not _is_reached(code, function)
        ):
            continue
        yield Hit(
            call,
            "every rank writes this checkpoint to the same file at the same time",
            "Save on one rank: if dist.get_rank() == 0: torch.save(...).",
        )


def _is_buffer(code: Code, path: ast.expr) -> bool:
    return any(
        isinstance(each.node, ast.Call)
        and last_name(each.node.func) in ("BytesIO", "open", "NamedTemporaryFile")
        for each in code.origins(path)
    )


def _is_reached(
    code: Code, function: ast.FunctionDef | ast.AsyncFunctionDef, depth: int = 4
) -> bool:
    """Return whether calls lead from module level to a function."""
    callers = code.program.callers(code, function)
    spawned = any(
        any(
            last_name(arg) == function.name
            for arg in (*call.args, *(k.value for k in call.keywords))
        )
        for each in code.program.codes
        for call in (*each.calls_by_name.get("spawn", ()), *each.calls_by_name.get("Process", ()))
    )
    if spawned:
        return True
    for each, call in callers:
        outer = each.function(call)
        if outer is None or (depth > 0 and _is_reached(each, outer, depth - 1)):
            return True
    return False


@rule("DDP503", Severity.WARNING, moot=TRAINERS)
def load_without_map_location(code: Code) -> Iterator[Hit]:
    """Find checkpoints that every rank loads to the GPU that wrote them."""
    if not code.program.wraps or not _uses_gpus(code):
        return
    for call in code.calls_by_name.get("load", ()):
        if code.dotted(call.func) != "torch.load" or has_unpacked(call):
            continue
        if keyword(call, "map_location", 1) is not None or is_guarded(code, call):
            continue
        if any(depends_on_rank(code, each) for each in call.args[:1]):
            continue
        if under(code, call, "gpu", "device", "cuda", "cpu"):
            continue
        if not _is_checkpoint(call.args[:1]) and not _feeds_model(code, call):
            continue
        yield Hit(
            call,
            "every rank loads this checkpoint to the GPU from which it was saved, which then holds "
            "all copies",
            'Pass map_location="cpu", or this rank\'s device.',
        )


def _is_checkpoint(path: list[ast.expr]) -> bool:
    """Return whether a path's name shows that a job resumes from it."""
    words = (last_name(one).lower() for each in path for one in ast.walk(each))
    return any(word.startswith(("resume", "snapshot")) for word in words)


def _uses_gpus(code: Code) -> bool:
    return code.program.uses("cuda", "set_device") or any(
        isinstance(node, ast.Constant) and node.value in ("nccl", "cuda")
        for each in code.program.codes
        for node in each.nodes
    )


def _feeds_model(code: Code, call: ast.Call) -> bool:
    for each in code.program.codes:
        for load in each.calls_by_name.get("load_state_dict", ()):
            for argument in load.args[:1]:
                inner: ast.expr = argument
                while isinstance(inner, (ast.Subscript, ast.Attribute)):
                    inner = inner.value
                made = [one.node for one in each.origins(inner)] + [argument]
                if any(call in ast.walk(one) for one in made):
                    return True
    # A loop may rename its keys.
    statement, function = code.statement(call), code.function(call)
    name = last_name(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    weights = any(word in name for word in ("state", "weight", "ckpt", "checkpoint", "pretrain"))
    return weights and bool(code.called(function or code.tree, "load_state_dict"))


@rule("DDP504", Severity.WARNING, "load-before-barrier", moot=TRAINERS)
def load_before_barrier(code: Code) -> Iterator[Hit]:
    """All ranks load a file that one rank has just written, without waiting for it.

    What it finds
        ``torch.save`` on one rank, then ``torch.load`` of the same path on all ranks in the
        same function, and no barrier or other collective between them.

    Why it is bad
        The other ranks read the file before it exists, or while it is incomplete.

    How to fix it
        Call ``dist.barrier()`` between them.

    Example
        Wrong:
            if rank == 0:
                torch.save(model.state_dict(), path)
            model.load_state_dict(torch.load(path))
        Right:
            if rank == 0:
                torch.save(model.state_dict(), path)
            dist.barrier()
            model.load_state_dict(torch.load(path))

    When it stays silent
        If the two calls write the path differently.
    """
    saves = [
        each
        for each in code.calls_by_name.get("save", ())
        if code.dotted(each.func) == "torch.save" and len(each.args) > 1 and guards(code, each)
    ]
    loads = [
        each
        for each in code.calls_by_name.get("load", ())
        if code.dotted(each.func) == "torch.load" and each.args and not guards(code, each)
    ]
    for load in loads:
        for save in saves:
            same = ast.dump(save.args[1]) == ast.dump(load.args[0])
            function = code.function(load)
            if not same or function is not code.function(save) or load.lineno < save.lineno:
                continue
            between = (
                each
                for each in code.within(function or code.tree)
                if isinstance(each, ast.Call) and save.lineno < each.lineno < load.lineno
            )
            waits = any(
                last_name(each.func)
                in (
                    "barrier",
                    "all_reduce",
                    "broadcast",
                    "synchronize",
                    "wait",
                    "wait_for_everyone",
                )
                for each in between
            )
            if not waits:
                yield Hit(
                    load,
                    "every rank loads the file that one rank writes above, without waiting for it",
                    "Call dist.barrier() between torch.save and torch.load.",
                )
