"""Find lines of the user's source that compute a loss, or that write or average parameters.

Replicas of local SGD differ until they are first averaged, perhaps at the end of an epoch. Until
then only the source distinguishes them from replicas that differ by mistake.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from ddpdoctor.core.syntax import FUNCTIONS, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.rank_conditions import rank_guard, ranks_at
from ddpdoctor.diagnose.source_files import (
    Scope,
    calls_at,
    covers,
    files_of,
    holds,
    location,
    names_in,
    nodes_of,
    per_file,
    quoted,
    scopes_of,
    source_of,
    tree_of,
    values_of,
    walk_scope,
)
from ddpdoctor.run.records.model import FingerprintRecord, TogetherRecord, UnreducedRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Rank, Run


def _around(at: Location) -> list[Scope]:
    """Return a file's module, and the functions around a line in it, outer ones first."""
    return [
        each for each in scopes_of(at.path) if isinstance(each, ast.Module) or covers(each, at.line)
    ]


# -- lines between the forward and the backward that perform an operation

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

MAX_CANDIDATES = 3  # Maximum number of candidate lines to name


def operation_lines(
    operations: Collection[str],
    forward: Location | None,
    backward: Location | None,
    order: tuple[int, int] | None = None,
    *,
    constant: bool = False,
) -> list[Location]:
    """Return the lines between a forward and its backward that perform one of the operations.

    Operations are named as in torch's graph: ``mul``. ``order`` is the operation's index among
    those of its name, and their number. ``constant`` if a non-finite constant was an input.
    """
    found = _candidates(operations, forward, backward)
    if order is not None and order[1] == len(found):
        # All of these lines ran, and no other code ran that operation, so the order is theirs.
        return [found[order[0]][0]]
    lines = list(dict.fromkeys(place for place, _ in found))
    literal = [place for place, text in found if constant and _CONSTANT.search(text)]
    return literal if len(literal) == 1 and len(lines) > 1 else lines


def _candidates(
    operations: Collection[str], forward: Location | None, backward: Location | None
) -> list[tuple[Location, str]]:
    """Return each line and its text once for each of the operations on it."""
    found: list[tuple[Location, str]] = []
    for site, other in ((forward, backward), (backward, forward)):
        if site is None or tree_of(site.path) is None:
            continue
        path = site.path
        function = _around(site)[-1]

        def inside(at: Location | None, path: str = path, function: Scope = function) -> bool:
            if at is None or at.path != path:
                return False
            return isinstance(function, ast.Module) or covers(function, at.line)

        first = forward.line if forward and inside(forward) else 0
        last = backward.line if backward and inside(backward) else 1 << 62
        found += [
            (Location(path, line), text)
            for line, text in _operations(function, operations)
            if first <= line < last
        ]
        if inside(other):
            break
    return found


def _operations(function: Scope, operations: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each operation in a function."""
    for statement in walk_scope(function.body):
        if not isinstance(statement, ast.stmt) or isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        # Nested statements are visited on their own.
        parts = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.expr)]
        nodes: list[ast.AST] = [node for part in parts for node in ast.walk(part)]
        for node in (*nodes, statement):
            if isinstance(node, (ast.BinOp, ast.AugAssign)):
                does = any(_OPERATORS.get(name) is type(node.op) for name in operations)
            else:
                called = last_name(node.func) if isinstance(node, ast.Call) else ""
                does = called.rstrip("_") in operations
            if does:
                yield statement.lineno, ast.unparse(node)


# -- parameters that the job averages itself

_COLLECTIVE = re.compile(r"(all_reduce|broadcast|all_gather|reduce)(_|$)")
"""Collectives that can average parameters."""

_AVERAGERS = ("PostLocalSGDOptimizer", "LocalSGD", "DiLoCo")  # Classes that average parameters

_MODEL = re.compile(r"param|state_dict|weights?\b", re.IGNORECASE)
_GRADIENT_WORD = re.compile(r"grad", re.IGNORECASE)

BEFORE = -1  # Stands for the step if a rank has run a call and recorded no parameters since
_STATES = (UnreducedRecord, TogetherRecord, FingerprintRecord)  # Records of parameters after a step
MAX_DEPTH = 4  # Maximum number of assignments through which a collective's argument is followed


def averaging_pending(run: Run) -> bool:
    """Return whether a line averages parameters, and did not run or its effect is still unknown.

    Nothing is pending in a job that ended well.
    """
    return run.exit_status != 0 and any(
        not _has_run(run, path, lines) for path in files_of(run) for lines in _averaging(path)
    )


def _has_run(run: Run, path: str, lines: range) -> bool:
    """Return whether a rank has run a call, and all ranks have recorded their state since.

    Ranks write at different times, and a call in a loop over parameters is recorded at its start.
    """
    steps = [_state_since(rank, path, lines) for rank in run.last]
    since = max((step for step in steps if step is not None), default=None)
    if since is None or BEFORE in steps:
        return False
    return all(
        step is not None
        or any(each.step >= since for each in rank.records if isinstance(each, _STATES))
        for rank, step in zip(run.last, steps, strict=True)
    )


def _state_since(rank: Rank, path: str, lines: range) -> int | None:
    """Return the step of a rank's first state after a call, or `BEFORE`. None if it did not run."""
    ran = False
    for record in rank.records:
        if isinstance(record, SiteRecord):
            here = record.path == path and record.line in lines
            ran = ran or (here and record.phase == "wait")
        elif ran and isinstance(record, _STATES):
            return record.step
    return BEFORE if ran else None


@per_file
def _averaging(path: str) -> list[range]:
    """Return the lines of each call of a file that averages or broadcasts parameters."""
    return [
        range(call.lineno, (call.end_lineno or call.lineno) + 1)
        for scope in scopes_of(path)
        for call in walk_scope(scope.body)
        if isinstance(call, ast.Call) and _is_averaging(call, scope)
    ]


def _is_averaging(call: ast.Call, scope: Scope) -> bool:
    name = last_name(call.func)
    if name == "average_parameters" or name in _AVERAGERS:
        return True
    return bool(_COLLECTIVE.match(name)) and any(
        of_model(argument, scope, MAX_DEPTH) for argument in call.args
    )


def of_model(value: ast.expr, scope: Scope, depth: int) -> bool:
    """Return whether a value is computed from parameters and not from their gradients."""
    text = ast.unparse(value)
    if _GRADIENT_WORD.search(text):
        return False
    if _MODEL.search(text):
        return True
    return depth > 0 and any(
        of_model(source, scope, depth - 1) for source in _sources(names_in(value), scope)
    )


def _sources(names: set[str], scope: Scope) -> Iterator[ast.expr]:
    """Yield the values that assignments and loops bind to the names."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value = [node.target], node.iter
        else:
            continue
        if names_in(*targets) & names:
            yield value


_WORLD = re.compile(r"world|num_replicas|num_process|n_?gpus?\b|num_gpus|nprocs|num_ranks", re.I)
"""Names of the world size."""


@per_file
def _world_names(path: str) -> frozenset[str]:
    """Return the names that a file sets to the world size."""
    return frozenset(
        last_name(target)
        for node in nodes_of(path)
        if isinstance(node, ast.Assign)
        for target, value in _parts_of(node)
        if len(text := ast.unparse(value)) < 60
        and re.search(r"world_size\(\)|WORLD_SIZE|\bworld_size$", text)
    )


def _parts_of(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets and values of an assignment, including each of ``a, b = c, d``."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def of_world(path: str, node: ast.AST) -> bool:
    """Return whether an expression contains the world size."""
    names = _world_names(path)
    return any(
        _WORLD.search(last_name(each)) is not None or last_name(each) in names
        for each in ast.walk(node)
        if isinstance(each, (ast.Name, ast.Attribute))
    )


def scaled_by_world(run: Run, what: str) -> Location | None:
    """Return the first line that scales an expression that contains a word by the world size."""
    lines = (
        Location(path, getattr(node, "lineno", 0))
        for path in files_of(run)
        for node in nodes_of(path)
        if _scales_by_world(path, node, what)
    )
    return next(lines, None)


def names_world_factor(run: Run) -> bool:
    """Return whether any line divides or multiplies by the world size, or averages."""
    return scaled_by_world(run, "") is not None or any(
        isinstance(node, ast.Attribute) and node.attr in ("AVG", "PREMUL_SUM")
        for path in files_of(run)
        for node in nodes_of(path)
    )


def scales_by_world(at: Location, what: str) -> bool:
    """Return whether a line scales an expression that contains a word by the world size."""
    return any(
        _scales_by_world(at.path, node, what)
        for node in nodes_of(at.path)
        if getattr(node, "lineno", 0) == at.line
    )


def _scales_by_world(path: str, node: ast.AST, what: str) -> bool:
    value, factor = _scaled(node)
    if value is None or factor is None or not of_world(path, factor):
        return False
    # Dividing a reduced value is correct.
    text = ast.unparse(value).lower()
    return what in text and "reduce(" not in text


_SCALES = (ast.Div, ast.FloorDiv, ast.Mult)


def _scaled(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the operand and the factor of a division or multiplication."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _SCALES):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, _SCALES):
        return node.target, node.value
    method = node.func if isinstance(node, ast.Call) else None
    if isinstance(node, ast.Call) and isinstance(method, ast.Attribute) and node.args:
        scales = method.attr.rstrip("_") in ("div", "mul")
        return (method.value, node.args[0]) if scales else (None, None)
    return None, None


def reduces_gradients(run: Run) -> Location | None:
    """Return the first line that all-reduces gradients."""
    calls = (
        Location(path, node.lineno)
        for path in files_of(run)
        for scope in scopes_of(path)
        for node in walk_scope(scope.body)
        if isinstance(node, ast.Call)
        and last_name(node.func) == "all_reduce"
        and any(_of_gradients(each, scope, MAX_DEPTH) for each in node.args[:1])
    )
    return next(calls, None)


def _of_gradients(value: ast.expr, scope: Scope, depth: int) -> bool:
    """Return whether a value is computed from gradients, and is not their norm."""
    text = ast.unparse(value)
    if "norm" in text or not depth:
        return False
    return _GRADIENT_WORD.search(text) is not None or any(
        _of_gradients(source, scope, depth - 1) for source in _sources(names_in(value), scope)
    )


def scales_near(at: Location) -> bool:
    """Return whether the function around a line divides or multiplies by a variable."""
    factors = (_scaled(node)[1] for scope in _around(at)[-1:] for node in walk_scope(scope.body))
    return any(each is not None and not isinstance(each, ast.Constant) for each in factors)


def returned_gradients(run: Run) -> Location | None:
    """Return the first line that calls ``autograd.grad``, which sets no parameter's gradient."""
    calls = (
        Location(path, node.lineno)
        for path in files_of(run)
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func).endswith("autograd.grad") or ast.unparse(node.func) == "grad")
    )
    return next(calls, None)


_LENGTH = re.compile(r"total|steps|iter|t_?max|decay|horizon", re.IGNORECASE)
"""Names of the length of a schedule."""


_GLOBAL = re.compile(r"global|effective|total_batch", re.IGNORECASE)  # Names of a global batch size


def steps_of_all_data(run: Run) -> Location | None:
    """Return the line that computes a number of steps from the length of sharded data.

    ``epochs * len(data) // batch``, where ``DistributedSampler(data)`` gives each rank a part.
    """
    for path in files_of(run):
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call) and node.args]
        sharded = {
            ast.unparse(call.args[0])
            for call in calls
            if last_name(call.func) == "DistributedSampler"
        }
        assigned = [node for node in nodes_of(path) if isinstance(node, ast.Assign)]
        # `batch = per_rank * world_size`
        of_all = {
            last_name(target)
            for node in assigned
            if of_world(path, node.value)
            for target in node.targets
        }
        for node in assigned:
            named = any(_LENGTH.search(last_name(each)) for each in node.targets)
            names = {last_name(each) for each in ast.walk(node.value)}
            by_world = names & (of_all - {""}) or any(map(_GLOBAL.search, names))
            if by_world or not named or of_world(path, node.value):
                continue
            if _divides_length(node.value, sharded):
                return Location(path, node.lineno)
    return None


def _divides_length(value: ast.expr, sharded: set[str]) -> bool:
    """Return whether an expression divides the length of sharded data."""
    inside = list(ast.walk(value))
    divides = any(
        isinstance(each, ast.BinOp) and isinstance(each.op, (ast.Div, ast.FloorDiv))
        for each in inside
    )
    return divides and any(
        isinstance(each, ast.Call)
        and last_name(each.func) == "len"
        and bool(each.args)
        and ast.unparse(each.args[0]) in sharded
        for each in inside
    )


_BATCH = re.compile(r"batch|\bbs\b", re.IGNORECASE)
_RATE = re.compile(r"(^|_)lr($|_)|learning_rate", re.IGNORECASE)


def rate_by_batch(run: Run) -> Location | None:
    """Return the first line that computes a learning rate from a batch size without world size."""
    for path in files_of(run):
        for node in nodes_of(path):
            if isinstance(node, ast.Assign):
                named, value = (
                    any(_RATE.search(last_name(each)) for each in node.targets),
                    node.value,
                )
            elif isinstance(node, ast.keyword):
                named, value = bool(_RATE.search(node.arg or "")), node.value
            else:
                continue
            divides = any(
                isinstance(each, ast.BinOp)
                and isinstance(each.op, ast.Div)
                and isinstance(each.right, ast.Constant)
                for each in ast.walk(value)
            )
            if (
                named
                and divides
                and _BATCH.search(ast.unparse(value))
                and not of_world(path, value)
            ):
                return Location(path, value.lineno)
    return None


def no_sync_lines(at: Location) -> list[Location]:
    """Return the lines that use ``no_sync``, in the function around a line or else in its file."""
    inside = _around(at)
    for scope in reversed(inside):
        lines = {
            node.lineno
            for node in ast.walk(scope)
            if isinstance(node, ast.Attribute)
            and node.attr in ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync")
        }
        if lines:
            return [Location(at.path, line) for line in sorted(lines)]
    return []


def mentions(at: Location, word: str) -> bool:
    """Return whether an argument's name of a call at a line contains a word.

    A name that was assigned such a value counts as well.
    """
    inside = _around(at)
    for node in walk_scope(inside[-1].body if inside else ()):
        if isinstance(node, ast.Call) and covers(node, at.line):
            values = values_of(node)
            values += [each for scope in inside for each in _sources(names_in(*values), scope)]
            if any(word in ast.unparse(each).lower() for each in values):
                return True
    return False


JOIN = ", or wrap the loop in `with model.join():`"
"""The last part of a fix for loops of unequal length."""


def without_join(run: Run, at: Location | None, fix: str) -> str:
    """Return a fix, without `JOIN` if the loop at a line calls other collectives than DDP's.

    ``join()`` only matches DDP's own collectives.
    """
    source = source_of(at.path) if at is not None else None
    loop = source.loop_at(at.line) if at is not None and source is not None else None
    if at is None or loop is None:
        return fix
    calls = (call for rank in run.last if rank.ring is not None for call in rank.ring.collectives)
    lines = (location(text) for call in calls for text in (call.site, *call.callers))
    inside = any(
        each is not None and each.path == at.path and holds(loop, each.line) for each in lines
    )
    return fix.replace(JOIN, "") if inside else fix


def takes_batch_sampler(at: Location) -> bool:
    """Return whether the call at a line passes ``batch_sampler`` by keyword."""
    return any(each.arg == "batch_sampler" for call in calls_at(at) for each in call.keywords)


# -- lines that write gradients, weights or hyper-parameters on some ranks only

_IN_PLACE = re.compile(
    r"(add|sub|mul|div|copy|zero|fill|normal|uniform|clamp|clip|lerp|addcmul|addcdiv|neg|round"
    r"|sign|bernoulli|trunc_normal|masked_fill|index_fill|index_copy|index_add|set)_$"
)
_WHOLE = ("reset_parameters", "vector_to_parameters")
"""Calls that write a module's weights. The probe observes ``load_state_dict`` itself."""

_GRADIENT_OWNER = re.compile(r"\.grad\b|\bgrads\b")
_MODULE = re.compile(r"model|module|ddp|net|layer|head|encoder|decoder", re.IGNORECASE)
_WEIGHT = re.compile(r"\.(weight|bias)\b|param")
_ELEMENTS = re.compile(r"\.(data|grad|weight|bias)\b")
_HYPER = re.compile(r"param_groups\b|\b(param_)?group\[|\['(lr|momentum|betas|weight_decay)'\]$")

WriteTarget = Literal["gradients", "weights", "hyper-parameters"]


@dataclass(frozen=True)
class Write:
    """A line that writes gradients, weights or hyper-parameters."""

    location: Location
    what: WriteTarget
    function: str  # The function around the line. Empty at module level.


def written_on_some_ranks(run: Run, what: WriteTarget) -> list[Location]:
    """Return the lines under a condition on the rank that write the target, or call a writer."""
    writes = (each for path in files_of(run) for each in _writes(path) if each.what == what)
    chains = (guarded_calls(run, each.location) for each in writes)
    return list(dict.fromkeys(chain[-1] for chain in chains if chain))


def written_after(built: Location | None) -> Location | None:
    """Return the only line after a model is wrapped, in that function, that initializes weights."""
    source = source_of(built.path) if built is not None else None
    if built is None or source is None:
        return None
    writes = _writes(built.path)
    writers = {each.function for each in writes if each.what == "weights"} - {""}
    lines = {each.location.line for each in writes if each.what == "weights"}
    scope = source.scope(built.line)
    body = getattr(scope, "body", None) or getattr(tree_of(built.path), "body", [])
    for node in walk_scope(body):
        if isinstance(node, ast.Call) and (names_in(*node.args) | {last_name(node.func)}) & writers:
            lines.add(node.lineno)
    inside = {getattr(node, "lineno", 0) for node in walk_scope(body)}
    after = sorted(line for line in lines & inside if line > built.line)
    return Location(built.path, after[0]) if len(after) == 1 else None


def guarded_calls(run: Run, at: Location) -> list[Location]:
    """Return a line and the calls that lead to it, up to one under a condition on the rank.

    Return an empty list if a rank may reach the line without such a condition.
    """
    chain = [at]
    while rank_guard(*chain[-1]) is None:
        calls = callers(run, chain[-1])
        guarded = [each for each in calls if rank_guard(*each) is not None]
        if calls and len(guarded) == len(calls) > 1:
            return chain
        if len(calls) != 1 or len(chain) > MAX_DEPTH:
            return []
        chain += calls
    return chain


def guarded_call(run: Run, at: Location | None) -> tuple[Location | None, tuple[str, ...]]:
    """Return the call under a condition on the rank that led to a line, with the evidence.

    Return the line itself without evidence if no such call is known.
    """
    chain = guarded_calls(run, at) if at is not None else []
    if len(chain) < 2:
        return at, ()
    return chain[-1], (f"{quoted(at)} is called from {quoted(chain[-1])}",)


def callers(run: Run, at: Location) -> list[Location]:
    """Return the lines of the user's files that call the function around a line, by its name."""
    source = source_of(at.path)
    name = getattr(source.scope(at.line), "name", "") if source is not None else ""
    return [
        Location(path, line)
        for path in (files_of(run) if name else ())
        if (source := source_of(path)) is not None
        for line in source.calls(name)
    ]


def loop_around(run: Run, at: Location | None) -> Location | None:
    """Return the innermost loop around a line, or around the only call to its function."""
    for _ in range(MAX_DEPTH):
        source = source_of(at.path) if at is not None else None
        if at is None or source is None:
            break
        loop = source.driven_at(at.line) or next(iter(source.around(at.line)), None)
        if loop is not None:
            return Location(at.path, loop.lineno)
        calls = callers(run, at)
        at = calls[0] if len(calls) == 1 else None
    return None


_UPDATES = re.compile(r"(ema_|momentum_)?(update|step)(_parameters|_ema|_average|_teacher)?$")
"""Methods that update a moving average of a model's weights."""

_AVERAGE = re.compile(r"ema|avg|average|teacher|shadow|swa|momentum|target", re.IGNORECASE)
_NO_USE = ("state_dict", "load_state_dict", "to", "cuda", "eval", "train", "parameters", "buffers")


_AVERAGED = re.compile(r"ema|shadow|swa|teacher|update_parameters|average[dr]?_model", re.I)
_BLENDS = ("lerp_", "add_", "_foreach_lerp_", "_foreach_add_")
"""Functions that move one tensor towards another."""


def averaged_at(run: Run) -> Location | None:
    """Return the first line of the job that updates an average of a model's weights."""
    for path in files_of(run):
        for node in nodes_of(path):
            if not isinstance(node, ast.Call):
                continue
            name, text = last_name(node.func), ast.unparse(node)
            blends = name in _BLENDS and ("lerp" in name or "mul_" in text)
            if blends or (_UPDATES.match(name) and _AVERAGED.search(text)):
                return Location(path, node.lineno)
    return None


def updated_on_some_ranks(run: Run) -> tuple[Location, Location] | None:
    """Return the line where only some ranks update averaged weights, and one where all use them."""
    paths = files_of(run)
    writers = {each.function for path in paths for each in _writes(path) if each.what == "weights"}
    for path in paths:
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or rank_guard(path, node.lineno) is None:
                continue
            name = last_name(node.func)
            owner: ast.AST | None = node.args[0] if node.args else None
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value
            named = last_name(owner) if owner is not None else ""
            if not named or not (name in writers - {""} or _UPDATES.match(name)):
                continue
            if name not in writers and not _AVERAGE.search(named):
                continue
            use = _unguarded_use(path, named, name)
            if use is not None:
                return Location(path, node.lineno), use
    return None


def _unguarded_use(path: str, named: str, update: str) -> Location | None:
    """Return the first line at which every rank calls or passes on an object of that name."""
    for node in nodes_of(path):
        if not isinstance(node, ast.Call) or rank_guard(path, node.lineno) is not None:
            continue
        if last_name(node.func) in (update, *_NO_USE):
            continue
        parts = [node.func, *node.args]
        if any(
            last_name(each) == named
            for part in parts
            for each in ast.walk(part)
            if isinstance(getattr(each, "ctx", None), ast.Load)
        ):
            return Location(path, node.lineno)
    return None


def ranks_that_write(run: Run, lines: list[Location]) -> tuple[int, ...]:
    """Return the ranks that may run the line. Empty if unknown or if there are several lines."""
    world = max((rank.status.world_size for rank in run.last if rank.status is not None), default=0)
    hosts = {rank.opened.host for rank in run.last}
    return ranks_at(*lines[0], world, one_node=len(hosts) == 1) if len(lines) == 1 else ()


def likely_written(lines: list[Location], what: str) -> Iterator[str]:
    """Yield evidence that these lines caused an observed change."""
    if len(lines) == 1:
        yield f"{lines[0]} is the only line that changes {what} under a condition on the rank"
    elif lines:
        listed = ", ".join(map(str, lines[:4]))
        yield f"lines that change {what} under a condition on the rank: {listed}"


@per_file
def _writes(path: str) -> list[Write]:
    """Return the lines of a file that write, in order."""
    found: dict[int, Write] = {}
    for scope in scopes_of(path):
        function = "" if isinstance(scope, ast.Module) else scope.name
        for node in walk_scope(scope.body):
            what: WriteTarget | None = None
            if isinstance(node, ast.Assign):
                what = next(filter(None, map(_stored, node.targets)), None)
            elif isinstance(node, ast.AugAssign):
                what = _stored(node.target)
            elif isinstance(node, ast.Call):
                what = _written_by(node, scope)
            if what is not None:
                line = getattr(node, "lineno", 0)
                found.setdefault(line, Write(Location(path, line), what, function))
    return [found[line] for line in sorted(found)]


def _stored(target: ast.expr) -> WriteTarget | None:
    """Return the kind of value that an assignment to an attribute or to elements writes."""
    text = ast.unparse(target)
    if isinstance(target, ast.Attribute) and target.attr in ("grad", "data"):
        return "gradients" if target.attr == "grad" else _tensor(text)
    if isinstance(target, ast.Subscript) and _ELEMENTS.search(text):
        return _tensor(text)
    if isinstance(target, ast.Subscript) and _HYPER.search(text):
        return "hyper-parameters"
    return None


def _tensor(text: str) -> WriteTarget:
    return "gradients" if _GRADIENT_OWNER.search(text) else "weights"


def _written_by(call: ast.Call, scope: Scope) -> WriteTarget | None:
    name = last_name(call.func)
    if name in _WHOLE:
        return "weights"
    if name.startswith("_foreach_") and name.endswith("_") and call.args:
        return _tensor(ast.unparse(call.args[0]))
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = ast.unparse(call.func.value)
    if name == "apply" and _MODULE.search(owner):
        return "weights"
    if name == "step" and "sched" in owner.lower():
        return "hyper-parameters"
    if owner.rpartition(".")[2] == "init" and name.endswith("_"):
        return "weights"
    if not _IN_PLACE.match(name):
        return None
    if _GRADIENT_OWNER.search(owner):
        return "gradients"
    weights = _WEIGHT.search(owner) or of_model(call.func.value, scope, MAX_DEPTH)
    return "weights" if weights else None
