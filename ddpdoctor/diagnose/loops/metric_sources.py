"""Find in the user's source how the result of an evaluation is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpdoctor.core.syntax import FUNCTIONS, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.rank_conditions import names_rank
from ddpdoctor.diagnose.source_files import (
    Scope,
    calls_at,
    files_of,
    names_in,
    nodes_of,
    scopes_of,
    source_of,
    statement,
    tree_of,
    values_of,
    walk_scope,
)
from ddpdoctor.diagnose.source_operations import scales_by_world
from ddpdoctor.run.snapshot import Run

_SHOWS = re.compile(
    r"(print|log|info|debug|warning|write|writerow|add_scalars?|log_metrics?|log_dict|save|dump|dumps"
    r"|savetxt|to_csv|open|set_postfix|set_description)$"
)
_OF_A_RANK = re.compile(r"loader|sampler|shard|subset|part|indices|batch|local|mine", re.IGNORECASE)
"""Names of a rank's share of the data."""

_RANK = re.compile(r"\brank\b|\bshard\b|\bpart\b", re.IGNORECASE)
_COMPARES = ("max", "min")
_RATIO = re.compile(
    r"f1|fbeta|precision|recall|auc|auroc|accuracy|score|iou|dice|bleu|rouge|wer$|kappa|mcc|mean$"
    r"|average",
    re.IGNORECASE,
)
"""Functions that compute a ratio."""

_NEVER_A_MEAN = re.compile(
    r"f1|fbeta|precision|recall|auc|auroc|iou|dice|bleu|wer$|kappa|mcc", re.IGNORECASE
)
"""Functions whose ratio over all samples is not the average of the ratios of the shards."""

_HOOKS = ("validation_step", "test_step", "on_validation_epoch_end", "on_test_epoch_end")
"""Methods of Lightning that log a rank's results."""

MAX_DEPTH = 5  # Maximum number of assignments through which to follow a value


class Shown(NamedTuple):
    """A line that shows or compares an evaluation's result."""

    at: Location
    labelled: bool
    """Whether it prints it with its rank, or writes it to a file of its rank."""
    call: ast.Call | None
    """The call that shows it. None if it is compared."""
    results: set[str]
    """Names with what the evaluation computed."""
    function: str
    """A function that returns it."""

    def holds(self, value: ast.AST) -> bool:
        """Return whether an expression is made of the result."""
        return bool(_names(value) & self.results) or _calls(value, self.function)


class Use(NamedTuple):
    """The use of an evaluation's result."""

    at: Location | None = None  # The first line that shows or compares it. None without one.
    labelled: bool = False
    """Whether a line prints it with its rank, or writes it to a file of its rank."""
    computed: Location | None = None  # The line that divides the loop's counts
    over_all: bool = False  # Whether that line divides by the length of the whole data set
    kept: bool = False
    """Whether the loop was found, but no line that shows or compares its result.

    It may belong to a library that combines results in its own way.
    """


def use_of(run: Run, at: Location) -> Use:
    """Return the use of an evaluation's result. The loop reads its loader at ``at``."""
    home = _scope(at)
    if home is None:
        return Use()
    results, end = _filled_at(home, at)
    quotients = [each for each in _quotients(home, results) if each.lineno > end]
    shown = list(shown_of(run, at))
    logged = _logged_by_hook(run) if not shown else None
    if logged is not None:
        return Use(logged)
    return Use(
        next((each.at for each in shown), None),
        any(each.labelled for each in shown),
        Location(at.path, quotients[0].lineno) if quotients else None,
        any(
            isinstance(each, ast.BinOp) and _is_length_of_all(each.right, home)
            for each in quotients
        ),
        not shown,
    )


def shown_of(run: Run, at: Location) -> Iterator[Shown]:
    """Yield the lines that show or compare the result of an evaluation."""
    home = _scope(at)
    if home is None:
        return
    name = getattr(home, "name", "")
    results, end = _filled_at(home, at)
    yield from _shown(at.path, home, results, end)
    for around in _functions_around(at.path, home):
        # The loop may fill an object of the enclosing function.
        results = _derived(around, results, name)
        yield from _shown(at.path, around, results, getattr(home, "end_lineno", 0), name)
        name = around.name
    for path, scope in _callers(run, name) if name else ():
        yield from _shown(path, scope, _derived(scope, set(), name), 0, name)


def _filled_at(home: Scope, at: Location) -> tuple[set[str], int]:
    """Return the names that the loop of an evaluation fills, and its last line."""
    loop = _loop_at(home, at.line)
    end = (loop.end_lineno or 0) if loop is not None else at.line
    return _derived(home, _filled(loop), ""), end


def _quotients(scope: Scope, results: set[str]) -> list[ast.BinOp | ast.Call]:
    """Return the divisions and means of results."""
    return [
        node
        for node in walk_scope(scope.body)
        if (
            isinstance(node, ast.Call) and last_name(node.func) == "mean" and _names(node) & results
        )
        or (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, (ast.Div, ast.FloorDiv))
            and _names(node.left) & results
        )
    ]


def indexed_by_rank(run: Run) -> Location | None:
    """Return the first line that selects part of the data by rank."""
    subscripts = (
        Location(path, node.lineno)
        for path in files_of(run)
        for node in nodes_of(path)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and names_rank(path, node.slice)
    )
    return next(subscripts, None)


def evaluated_by_hand(run: Run) -> Iterator[Location]:
    """Yield the loops without gradients that select their rank's samples."""
    for path in files_of(run):
        for scope in scopes_of(path):
            decorators = getattr(scope, "decorator_list", [])
            blocks: list[ast.AST] = [scope] if any(map(_without_gradients, decorators)) else []
            blocks += [
                node
                for node in walk_scope(scope.body)
                if isinstance(node, ast.With)
                and any(_without_gradients(each.context_expr) for each in node.items)
            ]
            yield from (
                Location(path, node.lineno)
                for block in blocks
                for node in walk_scope(getattr(block, "body", []))
                if isinstance(node, ast.For) and _takes_part(path, node.iter)
            )


def _takes_part(path: str, items: ast.expr) -> bool:
    """Return whether a loop iterates over ``range(rank, ...)`` or ``samples[rank::world]``."""
    return any(
        (isinstance(node, ast.Subscript) and names_rank(path, node.slice))
        or (
            isinstance(node, ast.Call)
            and last_name(node.func) in ("range", "islice")
            and any(names_rank(path, each) for each in node.args)
        )
        for node in ast.walk(items)
    )


def _without_gradients(node: ast.expr) -> bool:
    name = last_name(node.func if isinstance(node, ast.Call) else node)
    return name in ("no_grad", "inference_mode")


def _scope(at: Location) -> Scope | None:
    source = source_of(at.path)
    found = source.scope(at.line) if source is not None else None
    if source is not None and found is None:
        return tree_of(at.path)
    return found if isinstance(found, FUNCTIONS) else None


def _functions_around(path: str, inner: Scope) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions around a function, innermost first."""
    around = [
        node
        for node in nodes_of(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and isinstance(inner, FUNCTIONS)
        and node.lineno < inner.lineno <= (inner.end_lineno or 0) <= (node.end_lineno or 0)
    ]
    return sorted(around, key=lambda each: -each.lineno)


def _loop_at(scope: Scope, line: int) -> ast.For | ast.While | None:
    """Return the loop that reads its loader at a line."""
    return next(
        (
            node
            for node in walk_scope(scope.body)
            if (isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0))
            or (isinstance(node, ast.While) and node.lineno <= line <= (node.end_lineno or 0))
        ),
        None,
    )


def _filled(loop: ast.For | ast.While | None) -> set[str]:
    """Return the names that a loop assigns or adds to."""
    found: set[str] = set()
    for node in walk_scope(loop.body if loop is not None else ()):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.AugAssign):
            found |= _stored(node.target)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            # `predictions.append(...)`, `metric.update(...)`
            called = node.value.func
            found |= _names(called.value) - {"self"} if isinstance(called, ast.Attribute) else set()
    return found


def _derived(scope: Scope, names: set[str], function: str) -> set[str]:
    """Return the names, and those assigned a value computed from them or by the function."""
    found = set(names)
    for _ in range(3):
        for node in walk_scope(scope.body):
            value = getattr(node, "value", None)
            if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
                continue
            if value is None or not (_names(value) & found or _calls(value, function)):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found |= _stored(target)
    return found


def _stored(target: ast.AST) -> set[str]:
    return {
        last_name(node)
        for node in ast.walk(target)
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
    }


def _names(node: ast.AST) -> set[str]:
    attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return names_in(node) | attributes


def _calls(node: ast.AST, function: str) -> bool:
    return bool(function) and any(
        isinstance(each, ast.Call) and last_name(each.func) == function for each in ast.walk(node)
    )


def _is_length_of_all(node: ast.expr, scope: Scope) -> bool:
    """Return whether an expression is the length of a data set, ``len(loader.dataset)``."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "len" or not node.args:
        return False
    measured = ast.unparse(node.args[0])
    # What a loop reads is a loader, whatever its name is.
    read = (each.iter for each in walk_scope(scope.body) if isinstance(each, ast.For))
    loaders = {ast.unparse(part) for each in read for part in (each, *_first_argument(each))}
    return not _OF_A_RANK.search(last_name(node.args[0])) and measured not in loaders


def _first_argument(node: ast.expr) -> list[ast.expr]:
    return node.args[:1] if isinstance(node, ast.Call) else []


def _callers(run: Run, name: str) -> Iterator[tuple[str, Scope]]:
    """Yield the functions that call a function of that name, with their files."""
    for path in files_of(run):
        for scope in scopes_of(path):
            if any(
                isinstance(node, ast.Call) and last_name(node.func) == name
                for node in walk_scope(scope.body)
            ):
                yield path, scope


def _shown(
    path: str, scope: Scope, results: set[str], after: int, function: str = ""
) -> Iterator[Shown]:
    """Yield the lines that show or compare a result."""
    for node in walk_scope(scope.body):
        line = getattr(node, "lineno", 0)
        if line <= after:
            continue
        compared = Shown(Location(path, line), False, None, results, function)
        if isinstance(node, ast.Compare):
            if _names(node) & results:
                yield compared
        elif isinstance(node, ast.Call):
            called = last_name(node.func)
            values = values_of(node)
            if not any(map(compared.holds, values)):
                continue
            if called in _COMPARES:
                yield compared
            elif _SHOWS.match(called):
                labelled = any(_about(path, scope, each, results) for each in values)
                yield compared._replace(labelled=labelled, call=node)


def _about(path: str, scope: Scope, value: ast.expr, results: set[str]) -> bool:
    """Return whether a value, or the text of a name in it, mentions the rank."""
    if names_rank(path, value) or any(_RANK.search(text) for text in _texts(value)):
        return True
    return any(
        names_rank(path, source) and bool(_texts(source))
        for source in _sources(scope, names_in(value) - results)
    )


def _texts(value: ast.expr) -> list[str]:
    texts = (node.value for node in ast.walk(value) if isinstance(node, ast.Constant))
    return [text for text in texts if isinstance(text, str)]


def _sources(scope: Scope, names: set[str]) -> Iterator[ast.expr]:
    for node in walk_scope(scope.body):
        if isinstance(node, ast.Assign) and any(_stored(each) & names for each in node.targets):
            yield node.value


def _logged_by_hook(run: Run) -> Location | None:
    """Return the line of a Lightning module that logs a result without ``sync_dist``."""
    for path in files_of(run):
        for function in nodes_of(path):
            if not isinstance(function, FUNCTIONS) or function.name not in _HOOKS:
                continue
            for node in walk_scope(function.body):
                if isinstance(node, ast.Call) and last_name(node.func) in ("log", "log_dict"):
                    synced = any(each.arg in ("sync_dist", None) for each in node.keywords)
                    if not synced:
                        return Location(path, node.lineno)
    return None


# -- averages of ratios


class Averaged(NamedTuple):
    """A ratio of each rank that is reduced over the ranks."""

    at: Location  # The line that computes it
    never_a_mean: bool
    """Whether it is a metric such as F1 that is not the average of its values for the shards."""
    over_all: bool = False
    """Whether it is divided by the length of the whole data set, so that a sum is correct."""


def ratio_reduced(chain: Sequence[Location]) -> Averaged | None:
    """Return the reduced ratio. None if counts or sums are reduced, or if unknown.

    ``chain`` is the call's line and those that led to it, innermost first.
    """
    calls = calls_at(chain[0]) if chain else ()
    call = next((each for each in calls if last_name(each.func) in ("all_reduce", "reduce")), None)
    found = _ratio(chain, call.args[0], MAX_DEPTH) if call is not None and call.args else None
    if found is not None and found.over_all and not any(map(_averages, chain[:2])):
        return None
    return found


def _averages(at: Location) -> bool:
    """Return whether the function around a line averages over the ranks."""
    scope = _scope(at)
    nodes = walk_scope(scope.body if scope is not None else ())
    return any(
        scales_by_world(Location(at.path, line), "") or "ReduceOp.AVG" in statement(at.path, line)
        for line in {node.lineno for node in nodes if isinstance(node, ast.stmt)}
    )


_WRAPS = ("tensor", "as_tensor", "FloatTensor", "stack", "full", "float")
"""Functions that create a tensor from their first argument."""

_SAME = ("clone", "to", "detach", "cuda", "cpu", "double", "float", "unsqueeze", "item", "view")
"""Methods that keep the value of their tensor."""


def _ratio(chain: Sequence[Location], value: ast.expr, depth: int) -> Averaged | None:
    """Return the ratio that a value is made from."""
    at, scope = chain[0], _scope(chain[0])
    if scope is None or depth < 0:
        return None
    if isinstance(value, (ast.List, ast.Tuple)):
        found = [_ratio(chain, each, depth) for each in value.elts]
        # A count next to it is probably its divisor.
        return found[0] if found and all(found) else None
    if isinstance(value, ast.BinOp):
        divides = isinstance(value.op, (ast.Div, ast.FloorDiv))
        if divides and "world" not in ast.unparse(value.right).lower():
            over_all = _is_length_of_all(value.right, scope)
            return Averaged(Location(at.path, value.lineno), False, over_all)
        return None
    if isinstance(value, ast.Call):
        return _ratio_of_call(chain, value, depth)
    if isinstance(value, ast.Subscript):
        return _ratio_of_item(at, value)
    if not isinstance(value, ast.Name):
        return None
    sources = [each for each in _sources(scope, {value.id}) if each.lineno < at.line]
    if sources:
        return _ratio(chain, sources[-1], depth - 1)
    given = _given(chain, scope, value.id)
    return _ratio(chain[1:], given, depth - 1) if given is not None else None


def _ratio_of_item(at: Location, item: ast.Subscript) -> Averaged | None:
    """Return a ratio by its name in a dictionary of metrics: ``metrics["f1"]``."""
    name = item.slice.value if isinstance(item.slice, ast.Constant) else None
    if not isinstance(name, str) or not _RATIO.search(name):
        return None
    return Averaged(Location(at.path, item.lineno), bool(_NEVER_A_MEAN.search(name)))


def _ratio_of_call(chain: Sequence[Location], call: ast.Call, depth: int) -> Averaged | None:
    called, path = last_name(call.func), chain[0].path
    if called in _SAME and isinstance(call.func, ast.Attribute) and not call.args:
        return _ratio(chain, call.func.value, depth)
    if called in _WRAPS:
        return _ratio(chain, call.args[-1 if called == "full" else 0], depth) if call.args else None
    if _RATIO.search(called):
        return Averaged(Location(path, call.lineno), bool(_NEVER_A_MEAN.search(called)))
    return _returned_ratio(path, called, depth - 1)


def _given(chain: Sequence[Location], scope: Scope, name: str) -> ast.expr | None:
    """Return the argument that the caller of a function passes for a parameter."""
    if isinstance(scope, ast.Module) or len(chain) < 2:
        return None
    names = [each.arg for each in scope.args.args]
    names = names[names[:1] in (["self"], ["cls"]) :]
    calls = (each for each in calls_at(chain[1]) if last_name(each.func) == scope.name)
    call = next(calls, None)
    if call is None or name not in names:
        return None
    keywords = {each.arg: each.value for each in call.keywords}
    place = names.index(name)
    return call.args[place] if place < len(call.args) else keywords.get(name)


def _returned_ratio(path: str, name: str, depth: int) -> Averaged | None:
    """Return the ratio that a function of a file returns."""
    for function in nodes_of(path):
        if isinstance(function, FUNCTIONS) and function.name == name:
            for node in walk_scope(function.body):
                if isinstance(node, ast.Return) and node.value is not None:
                    return _ratio([Location(path, node.lineno)], node.value, depth)
    return None
