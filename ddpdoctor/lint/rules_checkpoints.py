"""Rules on checkpoints: who writes them, and where they are loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.syntax import last_name
from ddpdoctor.lint.calls import has_unpacked, keyword
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import guards, is_guarded, under
from ddpdoctor.lint.ranks import depends_on_rank, is_local_rank, mentions_rank
from ddpdoctor.lint.rules import TRAINERS, Hit, rule


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
        if _is_of_data(code, path) and "state_dict" not in code.mentioned(call):
            continue
        yield Hit(
            call,
            "every rank writes this checkpoint to the same file at the same time",
            "Save on one rank: if dist.get_rank() == 0: torch.save(...).",
        )


def _is_of_data(code: Code, path: ast.expr, depth: int = 4) -> bool:
    """Return whether a path comes with the items of a loop, which differ between ranks."""
    for name in (each for each in ast.walk(path) if isinstance(each, ast.Name)):
        for other, item in code.values(name):
            target = getattr(item.node, "target", None)
            if item.is_item and isinstance(target, ast.Tuple):
                counted = last_name(getattr(item.value, "func", item.value)) == "enumerate"
                if not counted or last_name(target.elts[0]) != name.id:
                    return True
            elif depth and not item.is_item and _is_of_data(other, item.value, depth - 1):
                return True
    return False


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
        if not _is_checkpoint(code, call) and not _feeds_model(code, call):
            continue
        if _is_published(call) or _is_saved_from_cpu(code, call):
            continue
        function = code.function(call)
        elsewhere = any(not each.only_defines for each in code.program.codes if each is not code)
        if function is not None and elsewhere and not _is_reached(code, function):
            continue
        yield Hit(
            call,
            "every rank loads this checkpoint to the GPU from which it was saved, which then holds "
            "all copies",
            'Pass map_location="cpu", or this rank\'s device.',
        )


def _is_published(load: ast.Call) -> bool:
    """Return whether others published the weights, which are usually on the CPU then."""
    return any(word in ast.unparse(load).lower() for word in _PUBLISHED)


def _is_saved_from_cpu(code: Code, load: ast.Call) -> bool:
    """Return whether the program moves what it saves to the CPU first: ``net.cpu()``."""
    names = _file_names(code, load.args[0]) if load.args else set()
    saves = [
        (each, save)
        for each in code.program.codes
        for save in each.calls_by_name.get("save", ())
        if each.dotted(save.func) == "torch.save" and len(save.args) > 1
    ]
    mine = [each for each in saves if names & _file_names(each[0], each[1].args[1])]
    return bool(mine) and all(_takes_from_cpu(*each) for each in mine)


def _file_names(code: Code, path: ast.expr) -> set[str]:
    """Return the names of files that a path may end with, as far as they are written out."""
    parts = [one for each in code.origins(path) for one in ast.walk(each.node)]
    texts = [str(one.value) for one in parts if isinstance(one, ast.Constant)]
    return {each.rpartition("/")[2] for each in texts if "." in each}


def _takes_from_cpu(code: Code, save: ast.Call) -> bool:
    """Return whether all states that a checkpoint holds are on the CPU.

    A comprehension does not reach the tensors of an optimizer's state, which are deeper.
    """
    made = [one for each in code.origins(save.args[0]) for one in ast.walk(each.node)]
    calls = [each for each in made if isinstance(each, ast.Call)]
    if any("optim" in last_name(each) for each in made):
        return False
    if any(last_name(each.func) == "cpu" for each in calls):
        return True
    moved = {
        ast.unparse(each.func)
        for each in code.called(code.function(save) or code.tree, "cpu")
        if each.lineno < save.lineno and not each.args
    }
    owners = [each.func for each in calls if last_name(each.func) == "state_dict"]
    texts = [ast.unparse(each).removesuffix(".state_dict") for each in owners]
    return bool(texts) and all(f"{each.removesuffix('.module')}.cpu" in moved for each in texts)


_PUBLISHED = ("imagenet", "initmodel", "zoo", "torchvision")
"""Parts of the names of files with weights that others published."""


def _is_checkpoint(code: Code, call: ast.Call) -> bool:
    """Return whether a path's name shows that a job resumes from it."""
    parts = [one for each in call.args[:1] for one in ast.walk(each)]
    keys = [one.slice for one in parts if isinstance(one, ast.Subscript)]
    words = [last_name(one).lower() for one in parts]
    words += [str(one.value).lower() for one in keys if isinstance(one, ast.Constant)]
    return any(word.startswith(("resume", "snapshot", "ckpt", "checkpoint")) for word in words)


def _uses_gpus(code: Code) -> bool:
    return code.program.uses("cuda", "set_device") or any(
        node.value in ("nccl", "cuda")
        for each in code.program.codes
        for node in each.of(ast.Constant)
    )


def _feeds_model(code: Code, call: ast.Call) -> bool:
    parent = code.parents[call]
    if isinstance(parent, ast.Call) and re.search(r"load.*(state|weight)", last_name(parent.func)):
        return True
    for each in code.program.codes:
        for load in each.calls_by_name.get("load_state_dict", ()):
            for argument in load.args[:1]:
                inner: ast.expr = argument
                made = [argument, *(one.node for one in each.origins(inner))]
                while isinstance(inner, (ast.Subscript, ast.Attribute)):
                    inner = inner.value
                    made += [one.node for one in each.origins(inner)]
                if any(call in ast.walk(one) for one in made):
                    return True
    # A loop may rename its keys.
    statement, function = code.statement(call), code.function(call)
    name = last_name(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    weights = any(word in name for word in ("state", "weight", "ckpt", "checkpoint", "pretrain"))
    return weights and bool(code.called(function or code.tree, "load_state_dict"))


_WAITS = ("barrier", "all_reduce", "broadcast", "synchronize", "wait", "wait_for_everyone")


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
    for load in loads if code.program.wraps else ():
        for save in saves:
            same = ast.dump(save.args[1]) == ast.dump(load.args[0])
            function = code.function(load)
            if not same or function is not code.function(save) or load.lineno < save.lineno:
                continue
            waits = (each for name in _WAITS for each in code.called(function or code.tree, name))
            if not any(save.lineno < each.lineno < load.lineno for each in waits):
                yield Hit(
                    load,
                    "every rank loads the file that one rank writes above, without waiting for it",
                    "Call dist.barrier() between torch.save and torch.load.",
                )


@rule("DDP507", Severity.INFO, "folder-made-twice", moot=TRAINERS)
def folder_made_twice(code: Code) -> Iterator[Hit]:
    """All ranks make a folder if it does not exist, and one comes second.

    What it finds
        ``os.makedirs`` or ``mkdir`` without ``exist_ok=True``, after a test for the folder.

    Why it is bad
        Another rank may make it between the test and the call, which then raises FileExistsError.

    How to fix it
        Pass ``exist_ok=True``, or make it on one rank.

    Example
        Wrong:
            if not os.path.exists(folder):
                os.makedirs(folder)
        Right:
            os.makedirs(folder, exist_ok=True)

    When it stays silent
        Under a condition on the rank, and in programs that start their ranks themselves.
    """
    if not code.program.wraps or code.program.uses("spawn", "Process"):
        return
    for name in ("makedirs", "mkdir"):
        for call in code.calls_by_name.get(name, ()):
            known = keyword(call, "exist_ok") is not None or has_unpacked(call)
            tried = any(isinstance(each, ast.Try) for each in code.above(call))
            if known or tried or is_guarded(code, call) or not under(code, call, "exist", "isdir"):
                continue
            if not any(depends_on_rank(code, each) for each in (call.func, *call.args[:1])):
                yield Hit(
                    call, "another rank may make this folder between the test and this call",
                    "Pass exist_ok=True.",
                )  # fmt: skip


@rule("DDP508", Severity.INFO, "save-on-each-node", moot=TRAINERS)
def save_on_each_node(code: Code) -> Iterator[Hit]:
    """One rank of each node saves the checkpoint.

    What it finds
        ``torch.save`` under a condition on the local rank.

    Why it is bad
        On several nodes with a shared file system, several ranks write the same file at the same
        time.

    How to fix it
        Ask for the rank among all: ``dist.get_rank() == 0``.

    Example
        Wrong:
            if local_rank == 0: torch.save(state, path)
        Right:
            if dist.get_rank() == 0: torch.save(state, path)

    When it stays silent
        Programs that start the ranks of one node themselves.
    """
    if not code.program.wraps or code.program.uses("spawn", "Process"):
        return
    for call in code.calls_by_name.get("save", ()):
        if code.dotted(call.func) != "torch.save" or len(call.args) < 2:
            continue
        tests = [
            one
            for each, _ in guards(code, call)
            if isinstance(each, ast.If)
            for one in ast.walk(each.test)
            if isinstance(one, ast.Compare)
        ]
        ranks = [each.left for each in tests if mentions_rank(code, each.left)]
        if ranks and all(is_local_rank(code, each) for each in ranks):
            yield Hit(
                call, "one rank of each node writes this file, on a shared disk at the same time",
                "Save where dist.get_rank() == 0.",
            )  # fmt: skip


@rule("DDP505", Severity.INFO, "loss-of-one-rank", moot=TRAINERS)
def loss_of_one_rank(code: Code) -> Iterator[Hit]:
    """Rank 0 logs its own loss as that of the training.

    What it finds
        ``loss.item()`` that one rank prints or logs, in a program that reduces nothing.

    Why it is bad
        It is the loss of one shard. It is noisier than that of the whole batch, and does not show
        what the other ranks see.

    How to fix it
        ``all_reduce`` it first, or label it as the loss of rank 0.

    Example
        Wrong:
            if rank == 0: print(loss.item())
        Right:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            if rank == 0: print(loss.item())

    When it stays silent
        If the text names the rank, or the program reduces anything.
    """
    if not code.program.wraps or code.program.uses(*_REDUCES):
        return
    for call in code.calls:
        if last_name(call.func) not in _LOGS or not guards(code, call):
            continue
        lost = any(
            isinstance(each, ast.Call)
            and last_name(each.func) == "item"
            and isinstance(each.func, ast.Attribute)
            and "loss" in last_name(each.func.value).lower()
            for each in ast.walk(call)
        )
        if lost and "rank" not in ast.unparse(call).lower():
            yield Hit(
                call, "this is the loss of one rank's shard, logged as that of the training",
                "all_reduce it first, or name the rank.",
            )  # fmt: skip
            return


_LOGS = ("print", "info", "log", "add_scalar", "write", "set_postfix", "set_description")
_REDUCES = ("all_reduce", "reduce", "all_gather", "gather", "reduce_tensor", "reduce_mean")
