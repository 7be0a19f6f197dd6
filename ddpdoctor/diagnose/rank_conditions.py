"""Read conditions on the rank in the user's source, and find the lines that they decide on."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import (
    FUNCTIONS,
    LEAVING,
    imported_files,
    in_block,
    last_name,
    nodes_of,
    per_file,
)
from ddpdoctor.run.names import MAX_WORLD_SIZE

_CONDITION = re.compile(
    r"is_?(main|master|chief|zero|primary|lead|leader|root|rank)|(main|master|chief)_(process|rank)"
    r"|rank_?(zero|0)|is_global_zero",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"rank|process_index|procid", re.IGNORECASE)
OTHER_RANK = re.compile(
    r"(lora|low|full|matrix|max|min|tensor|num|page|all)_?rank|ranking|ranked|ranker|rank_?(loss|ratio)",
    re.IGNORECASE,
)
"""Ranks of matrices and of search results."""

_ON_ONE = re.compile(
    r"(?!.*first)(.*rank_?(zero|0)|.*(main|master|chief|primary)(_process|_rank)?_only"
    r"|(run_)?on(ly)?_(on_)?(local_)?(main|master|chief|process|last_process)|only_(main|master))",
    re.IGNORECASE,
)

_TRIED_RANKS = range(8)
"""Ranks for which a condition is evaluated."""

_UNKNOWN = object()
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_PLAIN_CALLS = (
    "int", "str", "bool", "get", "getenv", "len", "getattr", "hasattr",
    "is_initialized", "is_available", "get_world_size",
)  # fmt: skip


@dataclass(frozen=True)
class Words:
    """Names of variables, attributes and functions that a file uses for the rank."""

    numbers: frozenset[str] = frozenset()
    """Names of a rank."""
    conditions: frozenset[str] = frozenset()
    """Names of conditions that are true on some ranks only."""

    def __or__(self, other: Words) -> Words:
        return Words(self.numbers | other.numbers, self.conditions | other.conditions)

    def know(self, name: str) -> bool:
        """Return whether a name is one of them, or refers to the rank by itself."""
        return _says_rank(name) or name in self.numbers or name in self.conditions


def words_of(nodes: Iterable[ast.AST]) -> Words:
    """Return the names in a file that are set only to a rank or a condition on it, or return it."""
    given: dict[str, list[ast.expr]] = {}
    for name, value in _assignments(nodes):
        # A first `main = None` says nothing.
        if name and not isinstance(value, ast.Constant):
            given.setdefault(name, []).append(value)
    named = {name: [_words_in(value) for value in values] for name, values in given.items()}
    words, before = Words(), None
    # Repeat for names that are set to another such name.
    for _ in range(3):
        if words == before:
            break
        before = words
        about = {
            name: given[name]
            for name, several in named.items()
            if all(any(map(words.know, each)) for each in several)
        }
        numbers = {
            name
            for name, each in about.items()
            if all(_value(value, 3, words) in (3, "3") for value in each)
        }
        conditions = {
            name
            for name, each in about.items()
            if all(_is_condition(value) and discerns(value, words) for value in each)
        }
        words |= Words(frozenset(numbers), frozenset(conditions - numbers))
    return words


def _words_in(value: ast.expr) -> set[str]:
    """Return the names and texts in an expression."""
    return {
        each.value if isinstance(each, ast.Constant) else last_name(each)
        for each in ast.walk(value)
        if isinstance(each, (ast.Name, ast.Attribute))
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
    }


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with the values that they are set to, passed as, or return."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield last_name(target), node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr, ast.AugAssign)):
            if node.value is not None:
                yield last_name(node.target), node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
        elif isinstance(node, ast.FunctionDef):
            for each in _statements(node):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield node.name, each.value


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, including nested ones."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, name, None)
        for each in block if isinstance(block, list) else ():
            yield each
            yield from _statements(each)


def _is_condition(value: ast.expr) -> bool:
    negated = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return negated or isinstance(
        value, (ast.Compare, ast.BoolOp, ast.Name, ast.Attribute, ast.Call)
    )


def discerns(test: ast.expr, words: Words) -> bool:
    """Return whether a condition, unlike ``rank is not None``, visibly differs between ranks."""
    if not any(_about_rank(node, words) for node in _without_len(test)):
        return False
    values = [_value(test, rank, words) for rank in _TRIED_RANKS]
    return any(each is _UNKNOWN for each in values) or len({bool(each) for each in values}) > 1


def allowed(test: ast.expr, words: Words, rank: int) -> set[bool]:
    """Return the possible values of a condition on a rank: both if unknown."""
    value = _value(test, rank, words)
    return {True, False} if value is _UNKNOWN else {bool(value)}


def is_plain(test: ast.expr, words: Words) -> bool:
    """Return whether a condition calls nothing that may itself be a collective."""
    calls = [last_name(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)]
    return all(name in _PLAIN_CALLS or words.know(name) for name in calls)


def by_rank_alone(test: ast.expr, words: Words) -> bool:
    """Return whether a condition depends on the rank only, so that it never changes on a rank."""
    if isinstance(test, ast.Constant) or _about_rank(test, words):
        return True
    if isinstance(test, ast.Subscript):
        return by_rank_alone(test.slice, words)
    if isinstance(test, ast.Call):
        name = last_name(test.func)
        return words.know(name) or (
            name in _PLAIN_CALLS and all(by_rank_alone(each, words) for each in test.args)
        )
    parts = [each for each in ast.iter_child_nodes(test) if isinstance(each, ast.expr)]
    return bool(parts) and all(by_rank_alone(each, words) for each in parts)


def runs_on_one_rank(decorator: ast.expr) -> bool:
    """Return whether a decorator lets only some ranks run a function."""
    name = last_name(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return _ON_ONE.match(name) is not None


def says_condition(name: str) -> bool:
    """Return whether the name of a function says that it is true on one rank only."""
    return _CONDITION.search(name) is not None and "rank" not in name.lower()


def _without_len(test: ast.expr) -> Iterator[ast.AST]:
    """Yield the nodes of a condition except arguments of ``len``."""
    yield test
    for child in ast.iter_child_nodes(test):
        if isinstance(child, ast.Call) and last_name(child.func) == "len":
            continue
        if isinstance(child, ast.expr):
            yield from _without_len(child)
        else:
            yield child


def _about_rank(node: ast.AST, words: Words) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute)):
        return words.know(last_name(node))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _says_rank(node.value)


@functools.lru_cache(maxsize=1 << 12)
def _says_rank(name: str) -> bool:
    about = _CONDITION.search(name) or _NUMBER.search(name)
    return bool(about) and name.isidentifier() and not OTHER_RANK.search(name)


def _value_of_name(name: str, rank: int, words: Words) -> object:
    if name in words.numbers:
        return rank
    if name in words.conditions or not _says_rank(name):
        return _UNKNOWN
    if _CONDITION.search(name):
        return rank == 0
    return rank if name.lower() != "ranks" else _UNKNOWN


def _value(node: ast.expr, rank: int, words: Words) -> object:
    """Evaluate an expression on a rank. Return `_UNKNOWN` if it depends on anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _value_of_name(last_name(node), rank, words)
    if isinstance(node, ast.Subscript):
        return _value_of_name(_text(node.slice), rank, words)
    if isinstance(node, ast.Call):
        return _value_of_call(node, rank, words)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, rank, words)
        if value is not _UNKNOWN and isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int) else _UNKNOWN
    if isinstance(node, ast.BoolOp):
        values = [_value(each, rank, words) for each in node.values]
        decisive = isinstance(node.op, ast.Or)
        if any(each is not _UNKNOWN and bool(each) is decisive for each in values):
            return decisive
        return _UNKNOWN if any(each is _UNKNOWN for each in values) else not decisive
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _value_of_comparison(node, rank, words)
    return _UNKNOWN


def _value_of_comparison(node: ast.Compare, rank: int, words: Words) -> object:
    operation, other = node.ops[0], node.comparators[0]
    left = _value(node.left, rank, words)
    if isinstance(operation, (ast.In, ast.NotIn)):
        inside = isinstance(operation, ast.In)
        if isinstance(node.left, ast.Constant):
            # `"RANK" in os.environ` is true on all ranks.
            return inside
        if left is _UNKNOWN or not isinstance(other, (ast.Tuple, ast.List, ast.Set)):
            return _UNKNOWN
        values = [_value(each, rank, words) for each in other.elts]
        return _UNKNOWN if _UNKNOWN in values else (left in values) is inside
    right, compare = _value(other, rank, words), _COMPARED.get(type(operation))
    if left is _UNKNOWN or right is _UNKNOWN or compare is None:
        return _UNKNOWN
    try:
        return compare(left, right)
    except TypeError:
        return _UNKNOWN


def _value_of_call(node: ast.Call, rank: int, words: Words) -> object:
    name = last_name(node.func)
    if name in ("int", "str") and len(node.args) == 1:
        value = _value(node.args[0], rank, words)
        if not isinstance(value, (int, str)):
            return _UNKNOWN
        try:
            return str(value) if name == "str" else int(value)
        except ValueError:
            return _UNKNOWN
    if name in ("get", "getenv") and node.args:
        # Environment variables are strings, so "0" is true.
        value = _value_of_name(_text(node.args[0]), rank, words)
        return str(value) if isinstance(value, int) else value
    return True if name == "hasattr" else _value_of_name(name, rank, words)


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@dataclass(frozen=True)
class Guard:
    """A condition on the rank, and the lines that it decides on."""

    path: str
    line: int
    """The line of the condition."""
    start: int
    end: int
    way: str = ""
    """``return``, ``break`` or ``continue`` if it decides on the following lines by leaving
    them."""

    @property
    def location(self) -> Location:
        """The condition's location."""
        return Location(self.path, self.line)

    def holds(self, lines: Iterable[Location]) -> bool:
        """Return whether the condition decides on one of some lines."""
        return any(at.path == self.path and self.start <= at.line <= self.end for at in lines)


def guards_of(chain: Sequence[Location]) -> list[tuple[Guard, Location]]:
    """Return the conditions on the rank that led to a call, innermost first, with their lines.

    ``chain`` is the call's line and those that led to it, innermost first.
    """
    makers = list(dict.fromkeys(at.path for at in chain))
    return [
        (guard, at)
        for at in chain
        for guard in sorted(
            {*_guards(at.path), *_object_guards(at.path, makers)},
            key=lambda each: (-each.start, -each.line),
        )
        if guard.holds([at])
    ]


def _object_guards(path: str, makers: Sequence[str]) -> Iterator[Guard]:
    """Yield conditions that ask for an object only some ranks make: ``writer is not None``."""
    for node in nodes_of(path):
        if isinstance(node, ast.If):
            test = node.test
            values = [test]
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
                values = test.values
            names = {
                last_name(each.left)
                for each in values
                if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.IsNot)
            }
            if any(_made_by_some(name, makers) for name in names - {""}):
                yield Guard(path, node.lineno, node.lineno, node.body[-1].end_lineno or 0)


def _made_by_some(name: str, makers: Sequence[str], depth: int = 2) -> bool:
    """Return whether a name gets a value in some files only under conditions on the rank.

    A value that is another name is followed ``depth`` times.
    """
    made = [
        any(guard.holds([Location(path, value.lineno)]) for guard in _guards(path))
        or (
            depth > 0
            and last_name(value) not in ("", name)
            and isinstance(value, _NAMES)
            and _made_by_some(last_name(value), makers, depth - 1)
        )
        for path in makers
        for given, value in _assignments(nodes_of(path))
        if given == name
        and not (isinstance(value, ast.Constant) and value.value is None)
        and last_name(value) != name
    ]
    return bool(made) and all(made)


_NAMES = (ast.Name, ast.Attribute)


def rank_guard(path: str, line: int) -> int | None:
    """Return the line of the innermost condition on the rank that decides whether a line runs.

    It is an ``if`` around the line, within its function, or one above it that returns or continues.
    """
    found = guards_of([Location(path, line)])
    return found[0][0].line if found else None


def ranks_at(path: str, line: int, world_size: int, *, one_node: bool) -> tuple[int, ...]:
    """Return the ranks that may run a line by the conditions around it; empty if all may.

    On ``one_node``, rank and local rank are the same.
    """
    words = _words(path)
    world_size = min(world_size, MAX_WORLD_SIZE)
    found = set(range(world_size))
    for node in nodes_of(path):
        if not isinstance(node, ast.If) or not discerns(node.test, words):
            continue
        if not one_node and "local" in ast.unparse(node.test).lower():
            continue
        for part, wanted in ((node.body, True), (node.orelse, False)):
            if in_block(part, line):
                found = {rank for rank in found if wanted in allowed(node.test, words, rank)}
    return tuple(sorted(found)) if len(found) < world_size else ()


def outcomes(guard: Guard, at: Location, ranks: Iterable[int]) -> dict[int, set[bool]]:
    """Return whether each rank reaches a line that a condition decides on; both if it may.

    The result is empty if the condition is not an ``if``.
    """
    words = _words(guard.path)
    for node in nodes_of(guard.path):
        if isinstance(node, ast.If) and node.lineno == guard.line:
            # Code after an `if` that leaves runs where its test is false.
            leaves = isinstance(node.body[-1], LEAVING)
            wanted = in_block(node.body, at.line) or (bool(guard.way) and not leaves)
            return {
                rank: {each is wanted for each in allowed(node.test, words, rank)} for rank in ranks
            }
    return {}


@per_file
def _words(path: str) -> Words:
    """Return the names for the rank of a file and of the files beside it that it imports."""
    words = (words_of(nodes_of(each)) for each in (path, *imported_files(path)))
    return functools.reduce(operator.or_, words, Words())


def names_rank(path: str, node: ast.AST) -> bool:
    """Return whether an expression of a file holds the number of a rank."""
    numbers = _words(path).numbers
    names = (each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))
    return any(_says_rank(last_name(each)) or last_name(each) in numbers for each in names)


@per_file
def _guards(path: str) -> tuple[Guard, ...]:
    words = _words(path)
    return tuple(
        guard
        for node in nodes_of(path)
        for guard in (*_guarded_blocks(path, node, words), *_guarded_rests(path, node, words))
    )


_WITH_VALUE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)


def _guarded_blocks(path: str, node: ast.AST, words: Words) -> Iterator[Guard]:
    """Yield a condition with each block that it decides on."""
    if isinstance(node, ast.If) and discerns(node.test, words):
        # A test with a call may do more than decide.
        least = node.lineno if is_plain(node.test, words) else node.lineno + 1
        for part in filter(None, (node.body, node.orelse)):
            yield Guard(path, node.lineno, max(least, part[0].lineno), part[-1].end_lineno or 0)
    elif isinstance(node, _WITH_VALUE):
        # `rank == 0 and barrier()`, or `x = gather(x) if rank == 0 else x`
        value = node.value
        test = value.values[0] if isinstance(value, ast.BoolOp) else getattr(value, "test", None)
        if test is not None and discerns(test, words) and is_plain(test, words):
            yield Guard(path, node.lineno, node.lineno, node.end_lineno or 0)
    elif isinstance(node, ast.Match) and discerns(node.subject, words):
        for case in node.cases:
            last = case.body[-1].end_lineno or 0
            yield Guard(path, case.pattern.lineno, case.body[0].lineno, last)
    elif isinstance(node, FUNCTIONS):
        for each in filter(runs_on_one_rank, node.decorator_list):
            yield Guard(path, each.lineno, node.body[0].lineno, node.end_lineno or 0)


_WAYS = {ast.Return: "return", ast.Break: "break", ast.Continue: "continue"}


def _guarded_rests(path: str, node: ast.AST, words: Words) -> Iterator[Guard]:
    """Yield what follows an ``if rank != 0: return`` in the same block."""
    for name in ("body", "orelse", "finalbody"):
        block: Any = getattr(node, name, None)
        # A lambda's body is an expression.
        for each in block[:-1] if isinstance(block, list) else ():
            if not isinstance(each, ast.If) or not discerns(each.test, words):
                continue
            last = [part[-1] for part in (each.body, each.orelse) if part]
            way = next((_WAYS[type(end)] for end in last if isinstance(end, LEAVING)), "")
            # A `continue` that depends on more than the rank may let a later iteration reach it.
            if way and (way != "continue" or by_rank_alone(each.test, words)):
                start = (each.end_lineno or each.lineno) + 1
                yield Guard(path, each.lineno, start, block[-1].end_lineno or 0, way)
