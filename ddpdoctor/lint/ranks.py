"""Distinguish ranks, local ranks and world sizes by where their values come from."""

from __future__ import annotations

import ast
import re

from ddpdoctor.core.syntax import last_name
from ddpdoctor.diagnose.rank_expressions import OTHER_RANK
from ddpdoctor.lint.calls import keyword
from ddpdoctor.lint.code import Code
from ddpdoctor.lint.conditions import runs_alone
from ddpdoctor.lint.program import Program

_WORLD = re.compile(r"world_?size|num_?(replicas|ranks|processes)|nprocs$", re.IGNORECASE)


def variable(code: Code, node: ast.AST) -> str:
    """Return the environment variable that an expression reads. Empty if it reads none."""
    key: ast.AST | None = None
    if isinstance(node, ast.Subscript) and "env" in last_name(node.value).lower():
        key = node.slice
    elif isinstance(node, ast.Call) and last_name(node.func) in ("get", "getenv") and node.args:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if last_name(node.func) == "getenv" or (
            owner is not None and last_name(owner) == "environ"
        ):
            key = node.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _made(code: Code, node: ast.expr) -> list[ast.expr]:
    """Return the origins of a number in a job of torchrun, without ``int()`` around them."""
    found: list[ast.expr] = []
    for each in code.origins(node):
        if runs_alone(each.code, each.node):
            continue
        inner = each.node
        while isinstance(inner, ast.Call) and last_name(inner.func) == "int" and inner.args:
            inner = inner.args[0]
        if inner is not each.node:
            found += [one.node for one in each.code.origins(inner)]
        else:
            found.append(inner)
    return found


def _name_of(code: Code, node: ast.expr) -> str:
    """Return the variable or function that gives a number."""
    said = variable(code, node)
    if said:
        return said
    return last_name(node.func) if isinstance(node, ast.Call) else last_name(node)


def is_local_rank(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is certainly a local rank."""
    made = [_name_of(code, each) for each in _made(code, node)]
    names = [each for each in made if each]
    if names:
        return all(re.search(r"local_?rank", each, re.IGNORECASE) for each in names)
    return re.search(r"local_?rank", last_name(node), re.IGNORECASE) is not None


def is_spawn_index(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is certainly the index that ``mp.spawn`` passes."""
    made = code.origins(node)
    return bool(made) and all(
        isinstance(each.node, ast.Name)
        and (function := each.code.function(each.node)) is not None
        and [one.arg for one in function.args.args][:1] == [each.node.id]
        and each.code.program.is_spawned(each.code, function)
        for each in made
    )


def spans_nodes(program: Program) -> bool:
    """Return whether a program counts its ranks over several nodes: ``node * gpus + index``."""
    return any(
        isinstance(made.node, ast.BinOp)
        for code in program.codes
        for call in code.calls_by_name.get("init_process_group", ())
        if (rank := keyword(call, "rank", 4)) is not None
        for made in code.origins(rank)
    )


def is_rank(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is certainly the global rank."""
    made = _made(code, node)
    if not made:
        return False
    for each in made:
        if isinstance(each, ast.Call) and last_name(each.func) == "get_rank":
            continue
        if variable(code, each) in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
            continue
        return False
    return True


def is_world_size(code: Code, node: ast.expr) -> bool:
    """Return whether an expression is the world size, by its origin or its name."""
    if _WORLD.search(last_name(node)):
        return True
    return any(
        _name_of(code, each) in ("get_world_size", "WORLD_SIZE", "SLURM_NTASKS")
        or _WORLD.search(_name_of(code, each))
        for each in _made(code, node)
    )


def counts_gpus(code: Code, node: ast.expr) -> bool:
    """Return whether a number may be the number of this machine's GPUs."""
    return any(
        isinstance(each.node, ast.Call) and last_name(each.node.func) == "device_count"
        for each in code.origins(node)
    )


def mentions_rank(code: Code, node: ast.AST) -> bool:
    """Return whether a part of an expression may be a rank, global or local."""
    for each in ast.walk(node):
        name = last_name(each)
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            name = each.value if each.value.upper() in ("RANK", "LOCAL_RANK") else ""
        if not name or OTHER_RANK.search(name):
            continue
        if "rank" in name.lower() or name in code.words.numbers:
            return True
    return False


def depends_on_rank(code: Code, node: ast.AST, depth: int = 6) -> bool:
    """Return whether a value may depend on the rank, by the names that make it."""
    return _depends(code, node, depth, set())


def _depends(code: Code, node: ast.AST, depth: int, seen: set[int]) -> bool:
    if id(node) in seen or depth < 0:
        return False
    seen.add(id(node))
    if mentions_rank(code, node):
        return True
    owners = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    for each in ast.walk(node):
        if isinstance(each, (ast.Name, ast.Attribute)) and id(each) not in owners:
            for other, item in code.values(each):
                if _depends(other, item.value, depth - 1, seen):
                    return True
        elif isinstance(each, ast.Call):
            for other, function in code.program.targets(code, each):
                if any(
                    isinstance(one, ast.expr) and mentions_rank(other, one)
                    for one in other.within(function)
                ):
                    return True
    return False
