"""Find lines of the user's source that seed random number generators equally on all ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddpdoctor.core.syntax import FUNCTIONS, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.rank_expressions import Words, words_of
from ddpdoctor.diagnose.source_files import (
    files_of,
    names_in,
    nodes_of,
    per_file,
    scopes_of,
    source_of,
    tree_of,
    values_of,
)
from ddpdoctor.run.snapshot import Run

_SEEDS = re.compile(
    r"manual_seed(_all)?|seed|default_rng|RandomState|Random|SeedSequence|PCG64"
    r"|((set|fix|setup|init|same)_)?(random_|all_|torch_|np_)?seeds?(_everything|_all)?$"
    r"|(seed|set)_(everything|all|everywhere|rng)$"
)
_OWN = ("default_rng", "RandomState", "Random", "Generator", "PCG64")
_DIFFERS = re.compile(
    r"rank|initial_seed|worker_info|urandom|getpid|time\b|time_ns|secrets|entropy|local_id"
)
"""Names in a seed's expression that may make it differ between ranks."""

_DRAWS = re.compile(
    r"(randn?|randint|normal_?|standard_normal|uniform_?|integers|choices?|bernoulli_?"
    r"|multinomial|poisson|exponential_?|beta|gamma|randn_like|rand_like|randint_like|random_?"
    r"|random_sample|sample|rollout|simulate\w*|generate\w*|synthe\w*|make_batch|draw\w*)$"
)
MAX_DEPTH = 3  # Maximum depth of calls to search for draws


@dataclass(frozen=True)
class Seed:
    """A call that seeds a generator with a value that is the same on all ranks."""

    location: Location
    library: str  # ``torch``, ``numpy``, ``python``, or empty if the call's name does not show it
    own: bool  # Whether it seeds a new generator instead of the process's global one
    function: str  # The function around the call. Empty at module level.
    passed: bool  # Whether the value is an argument of the function
    text: str


def seeds_of(run: Run) -> list[Seed]:
    """Return the calls in the user's files that seed equally on all ranks."""
    return [seed for path in files_of(run) for seed in _seeds(path)]


def worker_functions(run: Run) -> set[str]:
    """Return the names of functions passed to loaders as ``worker_init_fn``."""
    return {
        last_name(value)
        for path in files_of(run)
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        for value in (each.value for each in node.keywords if each.arg == "worker_init_fn")
    }


@per_file
def _seeds(path: str) -> list[Seed]:
    tree = tree_of(path)
    if tree is None:
        return []
    words = words_of(nodes_of(path))
    found = (
        _seed(path, scope, call) for scope in scopes_of(path) for call in _calls(scope, tree, words)
    )
    return sorted(found, key=lambda seed: seed.location)


def _seed(path: str, scope: ast.AST, call: ast.Call) -> Seed:
    text, name = ast.unparse(call), last_name(call.func)
    owner = text[: -len(ast.unparse(call.args[0])) - 1] if call.args else text
    library = ""
    if "torch" in owner or name.startswith("manual_seed"):
        library = "torch"
    elif re.search(r"\bnp\b|numpy", owner) or name in ("default_rng", "RandomState"):
        library = "numpy"
    elif re.search(r"\brandom\.", owner):
        library = "python"
    own = any(each in owner for each in _OWN)
    function, passed = getattr(scope, "name", ""), bool(names_in(call) & _arguments(scope))
    return Seed(Location(path, call.lineno), library, own, function, passed, text)


def _arguments(scope: ast.AST) -> set[str]:
    arguments = getattr(scope, "args", None)
    return {each.arg for each in arguments.args} if arguments is not None else set()


def _calls(scope: ast.AST, tree: ast.Module, words: Words) -> Iterator[ast.Call]:
    """Yield the calls of a scope that seed with a value shared by all ranks."""
    given = _arguments(scope)
    for call in _within(scope):
        if not isinstance(call, ast.Call) or not _SEEDS.match(last_name(call.func)):
            continue
        values = values_of(call)
        if not values or _may_differ(values[0], tree, words, MAX_DEPTH):
            continue
        # For a parameter, the callers' arguments decide.
        passed = [
            each
            for node in (ast.walk(tree) if names_in(values[0]) & given else ())
            if isinstance(node, ast.Call) and last_name(node.func) == getattr(scope, "name", "")
            for each in values_of(node)
        ]
        if not any(_may_differ(each, tree, words, MAX_DEPTH) for each in passed):
            yield call


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, except those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from _within(child)


def _may_differ(value: ast.expr, tree: ast.Module, words: Words, depth: int) -> bool:
    """Return whether a value may differ between ranks."""
    if _DIFFERS.search(ast.unparse(value)):
        return True
    names = {last_name(each) for each in ast.walk(value)} - {""}
    if any(words.know(name) for name in names):
        return True
    if not depth:
        return False
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        bound = set[str]().union(*map(_bound, targets))
        given = getattr(node, "value", None)
        if not bound & names or not isinstance(given, ast.expr) or given is value:
            continue
        if _may_differ(given, tree, words, depth - 1):
            return True
    return False


def _bound(target: ast.expr) -> set[str]:
    """Return the names that an assignment binds: for ``args.rank`` ``rank``, not ``args``."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return set[str]().union(*map(_bound, target.elts))
    if isinstance(target, ast.Attribute):
        return {target.attr}
    return {last_name(each) for each in ast.walk(target)} - {""}


def loop_of(at: Location | None) -> tuple[Location, bool] | None:
    """Return the innermost loop around a line, if any, and whether it draws random numbers."""
    source = source_of(at.path) if at is not None else None
    loops = source.around(at.line) if at is not None and source is not None else []
    if at is None or not loops:
        return None
    functions = {node.name: node for node in nodes_of(at.path) if isinstance(node, FUNCTIONS)}
    draws = any(_draws(each, functions, MAX_DEPTH) for each in loops[0].body)
    return Location(at.path, loops[0].lineno), draws


def _draws(node: ast.AST, functions: Mapping[str, ast.AST], depth: int) -> bool:
    names = {last_name(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return any(map(_DRAWS.match, names)) or (
        depth > 0
        and any(_draws(functions[name], functions, depth - 1) for name in names & set(functions))
    )


def mentions(run: Run, word: str) -> bool:
    """Return whether a name in the user's files contains a word."""
    return any(word in last_name(node).lower() for path in files_of(run) for node in nodes_of(path))
