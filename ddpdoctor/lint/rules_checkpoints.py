"""Rules on checkpoints: who writes them, and where they are loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.source_files import last_name
from ddpdoctor.lint.calls import has_unpacked, keyword
from ddpdoctor.lint.conditions import guards, is_guarded, under
from ddpdoctor.lint.program import Code
from ddpdoctor.lint.ranks import depends_on_rank
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
            if not any(last_name(each.func) in _WAITS for each in between):
                yield Hit(
                    load,
                    "every rank loads the file that one rank writes above, without waiting for it",
                    "Call dist.barrier() between torch.save and torch.load.",
                )
