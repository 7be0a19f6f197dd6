"""Lines of the user's source that compute a loss, write to parameters, or average them.

Replicas of a local SGD differ until they are averaged for the first time, which may be at the end
of an epoch. Until then only the source distinguishes them from replicas that differ by mistake.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import (
    MOST_FILES,
    files_of,
    modified_at,
    rank_guard,
    ranks_at,
    tree_of,
)
from ddpdoctor.run.records.model import FingerprintRecord, TogetherRecord, UnreducedRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- lines of the job's own arithmetic between its forward and its backward, by their operation


_OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "rsub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "reciprocal": ast.Div,
    "pow": ast.Pow,
    "mm": ast.MatMult,
    "mv": ast.MatMult,
    "dot": ast.MatMult,
}
"""Python's operators by the name of torch's operation."""

_CONSTANT = re.compile(r"""\b(?:nan|inf|infinity)\b""", re.IGNORECASE)
"""A constant that is not finite: `float("nan")`, `math.inf`, `torch.nan`."""

MOST_CANDIDATES = 3
"""Lines that are named as candidates."""

FunctionOrModule = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


def operation_lines(
    operations: Collection[str],
    forward: Location | None,
    backward: Location | None,
    order: tuple[int, int] | None = None,
    *,
    constant: bool = False,
) -> list[Location]:
    """The lines behind the forward and ahead of the backward that do one of some operations.

    Args:
        operations: Their names, as torch's graph has them: ``mul``, ``log``.
        forward: Where the model is called.
        backward: Where ``backward()`` is; both may be in one function, or in two.
        order: Which one of how many operations of that name it is that is looked for.
        constant: Whether what is looked for took in something that is not finite and no
            operation computed: a constant, perhaps.
    """
    found = _candidates(operations, forward, backward)
    if order is not None and order[1] == len(found):
        # All of them ran, and nothing else did the same: they ran in their order.
        return [found[order[0]][0]]
    lines = list(dict.fromkeys(place for place, _ in found))
    literal = [place for place, text in found if constant and _CONSTANT.search(text)]
    return literal if len(literal) == 1 and len(lines) > 1 else lines


def _candidates(
    operations: Collection[str], forward: Location | None, backward: Location | None
) -> list[tuple[Location, str]]:
    """The lines between the two, as often as they do one of the operations, with their text."""
    found: list[tuple[Location, str]] = []
    for site, other in ((forward, backward), (backward, forward)):
        tree = tree_of(site.path, modified_at(site.path)) if site is not None else None
        if site is None or tree is None:
            continue
        function = _around(tree, site.line)
        first = forward.line if forward and _stands_in(forward, function, site.path) else 0
        last = backward.line if backward and _stands_in(backward, function, site.path) else 1 << 62
        found += [
            (Location(site.path, line), text)
            for line, text in _lines(function, operations)
            if first <= line < last
        ]
        if other is not None and _stands_in(other, function, site.path):
            break
    return found


def _around(tree: ast.Module, line: int) -> FunctionOrModule:
    inner: FunctionOrModule = tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _holds(node, line):
            inner = node
    return inner


def _holds(function: FunctionOrModule, line: int) -> bool:
    return isinstance(function, ast.Module) or function.lineno <= line <= (function.end_lineno or 0)


def _stands_in(place: Location, function: FunctionOrModule, path: str) -> bool:
    return place.path == path and _holds(function, place.line)


def _lines(function: FunctionOrModule, operations: Collection[str]) -> Iterator[tuple[int, str]]:
    """The lines that do one of some operations, as often as they do so, with their text."""
    for statement in _statements(function):
        for node in _parts(statement):
            if _does(node, operations):
                yield statement.lineno, ast.unparse(node)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


def _parts(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from ast.walk(child)
    if isinstance(statement, ast.AugAssign):
        yield statement


def _does(node: ast.AST, operations: Collection[str]) -> bool:
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return any(_OPERATORS.get(name) is type(node.op) for name in operations)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return str(name).rstrip("_") in operations
    return False


# -- parameters that the job itself averages: which lines do, and whether they have run yet


_CARRY = re.compile(r"(all_reduce|broadcast|all_gather|reduce)(_|$)")
"""Collectives that averaging may be made of."""

_AVERAGERS = ("PostLocalSGDOptimizer", "LocalSGD", "DiLoCo")
"""Classes that average by themselves."""

_MODEL = re.compile(r"param|state_dict|weights?\b", re.IGNORECASE)
_GRADIENT_WORD = re.compile(r"grad", re.IGNORECASE)

Scope: TypeAlias = "ast.Module | ast.FunctionDef"

BEFORE = -1
"""Of a rank that has run a call, and has not been looked at since."""

_LOOKS = (UnreducedRecord, TogetherRecord, FingerprintRecord)
"""What ranks write of their parameters after a step."""

DEPTH = 4
"""Assignments that a collective's argument is followed through."""


def averaging_pending(run: Run) -> bool:
    """Whether a line of the job averages parameters and has not run, or what it did is not known.

    Of a job that came to a good end nothing is to come any more.
    """
    if run.exit_status == 0:
        return False
    return any(
        not _has_run(run, path, first, last)
        for path in files_of(run)
        for first, last in _averages(path, modified_at(path))
    )


def _has_run(run: Run, path: str, first: int, last: int) -> bool:
    """Whether some rank has run a call, and all of them have been looked at since.

    The ranks write at their own pace, and a call of a loop over parameters is seen when it begins.
    """
    looks = [_look_since(rank, path, range(first, last + 1)) for rank in run.last]
    since = max((step for step in looks if step is not None), default=None)
    if since is None or BEFORE in looks:
        return False
    return all(
        step is not None or any(each.step >= since for each in _looks(rank))
        for rank, step in zip(run.last, looks, strict=True)
    )


def _look_since(rank: Rank, path: str, lines: range) -> int | None:
    """The step of a rank's first look after it ran a call; None if it did not, or see `BEFORE`."""
    ran = False
    for record in rank.records:
        if isinstance(record, SiteRecord):
            here = record.path == path and record.line in lines
            ran = ran or (here and record.phase == "wait")
        elif ran and isinstance(record, _LOOKS):
            return record.step
    return BEFORE if ran else None


def _looks(rank: Rank) -> Iterator[UnreducedRecord | TogetherRecord | FingerprintRecord]:
    return (record for record in rank.records if isinstance(record, _LOOKS))


@functools.lru_cache(maxsize=MOST_FILES)
def _averages(path: str, when: int) -> tuple[tuple[int, int], ...]:
    """The calls of a file that average or spread parameters: their first and last lines."""
    tree = tree_of(path, when)
    if tree is None:
        return ()
    scopes: list[Scope] = [tree]
    scopes += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return tuple(
        (call.lineno, call.end_lineno or call.lineno)
        for scope in scopes
        for call in _scope_calls(scope)
        if _is_averaging(call, scope)
    )


def _scope_calls(scope: Scope) -> Iterator[ast.Call]:
    """The calls of a scope, without those of the functions in it."""
    queue: list[ast.AST] = list(scope.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Call):
            yield node
        if not isinstance(node, ast.FunctionDef):
            queue += ast.iter_child_nodes(node)


def _is_averaging(call: ast.Call, scope: Scope) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "average_parameters" or name in _AVERAGERS:
        return True
    return bool(_CARRY.match(name)) and any(
        of_model(argument, scope, DEPTH) for argument in call.args
    )


def of_model(value: ast.expr, scope: Scope, depth: int) -> bool:
    """Whether a value is made of parameters, and not of their gradients."""
    text = ast.unparse(value)
    if _GRADIENT_WORD.search(text):
        return False
    if _MODEL.search(text):
        return True
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    return depth > 0 and any(
        of_model(source, scope, depth - 1) for source in _sources(names, scope)
    )


def _sources(names: set[str], scope: Scope) -> Iterator[ast.expr]:
    """What some names are bound to, by assignments and by loops."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value = [node.target], node.iter
        else:
            continue
        bound = {each.id for one in targets for each in ast.walk(one) if isinstance(each, ast.Name)}
        if bound & names:
            yield value


# -- lines of the job that write gradients, weights or hyper-parameters on some ranks only


_IN_PLACE = re.compile(
    r"(add|sub|mul|div|copy|zero|fill|normal|uniform|clamp|clip|lerp|addcmul|addcdiv|neg|round"
    r"|sign|bernoulli|trunc_normal|masked_fill|index_fill|index_copy|index_add|set)_$"
)
_WHOLE = ("reset_parameters", "vector_to_parameters")
"""Calls that write a module's weights; those of ``load_state_dict`` are seen where they run."""

_GRADIENT_OWNER = re.compile(r"\.grad\b|\bgrads\b")
_MODULE = re.compile(r"model|module|ddp|net|layer|head|encoder|decoder", re.IGNORECASE)
_WEIGHT = re.compile(r"\.(weight|bias)\b|param")
_ELEMENTS = re.compile(r"\.(data|grad|weight|bias)\b")
_HYPER = re.compile(r"param_groups\b|\b(param_)?group\[|\['(lr|momentum|betas|weight_decay)'\]$")

WriteTarget = Literal["gradients", "weights", "hyper-parameters"]


@dataclass(frozen=True)
class Write:
    """A line that writes."""

    location: Location
    what: WriteTarget
    function: str
    """The function that it stands in, empty at the top of a file."""


def written_on_some_ranks(run: Run, what: WriteTarget) -> list[Location]:
    """The lines that write something where a condition on the rank decides."""
    paths = files_of(run)
    writes = [
        write for path in paths for write in _writes(path, modified_at(path)) if write.what == what
    ]
    return [
        write.location
        for write in writes
        if rank_guard(write.location.path, write.location.line) is not None
        or _called_on_some_ranks(write.function, paths)
    ]


def ranks_that_write(run: Run, lines: list[Location]) -> tuple[int, ...]:
    """The ranks that alone may run the only line; empty where that is not known."""
    ranks = run.last
    world = max((rank.status.world_size for rank in ranks if rank.status is not None), default=0)
    hosts = {rank.opened.host for rank in ranks}
    if len(lines) != 1:
        return ()
    return ranks_at(lines[0].path, lines[0].line, world, one_node=len(hosts) == 1)


def likely_written(lines: list[Location], what: str) -> Iterator[str]:
    """What such lines say of a change that was seen, or whose effect was."""
    if len(lines) == 1:
        yield f"{lines[0]} is the only line that changes {what} under a condition on the rank"
    elif lines:
        listed = ", ".join(map(str, lines[:4]))
        yield f"lines that change {what} under a condition on the rank: {listed}"


def _called_on_some_ranks(function: str, paths: list[str]) -> bool:
    """Whether a function is called, and never but where a condition on the rank decides."""
    calls = [
        (path, line)
        for path in paths
        for name, line in _called_functions(path, modified_at(path))
        if function and name == function
    ]
    return bool(calls) and all(rank_guard(path, line) is not None for path, line in calls)


@functools.lru_cache(maxsize=MOST_FILES)
def _called_functions(path: str, when: int) -> tuple[tuple[str, int], ...]:
    """The names of the functions that a file calls, with the lines."""
    tree = tree_of(path, when)
    nodes = ast.walk(tree) if tree is not None else iter(())
    return tuple((_name(node), node.lineno) for node in nodes if isinstance(node, ast.Call))


@functools.lru_cache(maxsize=MOST_FILES)
def _writes(path: str, when: int) -> tuple[Write, ...]:
    tree = tree_of(path, when)
    if tree is None:
        return ()
    found: dict[int, Write] = {}
    for scope, node in _nodes(tree, tree):
        kind = _kind(node, scope)
        if kind is not None:
            line = getattr(node, "lineno", 0)
            function = scope.name if isinstance(scope, ast.FunctionDef) else ""
            found.setdefault(line, Write(Location(path, line), kind, function))
    return tuple(found.values())


def _nodes(node: ast.AST, scope: Scope) -> Iterator[tuple[Scope, ast.AST]]:
    """All nodes, each with the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        yield from _nodes(child, child if isinstance(child, ast.FunctionDef) else scope)


def _kind(node: ast.AST, scope: Scope) -> WriteTarget | None:
    """What a statement or a call writes."""
    if isinstance(node, ast.Assign):
        return next((kind for each in node.targets if (kind := _stored(each)) is not None), None)
    if isinstance(node, ast.AugAssign):
        return _stored(node.target)
    if isinstance(node, ast.Call):
        return _written(node, scope)
    return None


def _stored(target: ast.expr) -> WriteTarget | None:
    """What an assignment writes: to an attribute, or to elements of a tensor."""
    if isinstance(target, ast.Attribute) and target.attr in ("grad", "data"):
        return "gradients" if target.attr == "grad" else _tensor(ast.unparse(target))
    text = ast.unparse(target)
    if isinstance(target, ast.Subscript) and _ELEMENTS.search(text):
        return _tensor(text)
    if isinstance(target, ast.Subscript) and _HYPER.search(text):
        return "hyper-parameters"
    return None


def _tensor(text: str) -> WriteTarget:
    return "gradients" if _GRADIENT_OWNER.search(text) else "weights"


def _written(call: ast.Call, scope: Scope) -> WriteTarget | None:
    name = _name(call)
    if name in _WHOLE:
        return "weights"
    if name.startswith("_foreach_") and name.endswith("_") and call.args:
        return _tensor(ast.unparse(call.args[0]))
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = ast.unparse(call.func.value)
    if name == "apply" and _MODULE.search(owner):
        return "weights"
    if owner.rpartition(".")[2] == "init" and name.endswith("_"):
        return "weights"
    if not _IN_PLACE.match(name):
        return None
    if _GRADIENT_OWNER.search(owner):
        return "gradients"
    weights = _WEIGHT.search(owner) or of_model(call.func.value, scope, DEPTH)
    return "weights" if weights else None


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
