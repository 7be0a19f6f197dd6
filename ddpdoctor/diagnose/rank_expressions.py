"""Recognize ranks, and conditions on them, in expressions of the user's source."""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.syntax import last_name, parts, walk

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
"""Names of matrix ranks and of ranks in search results."""

_ON_ONE = re.compile(
    r"(?!.*first)(.*rank_?(zero|0)|.*(main|master|chief|primary)(_process|_rank)?_only"
    r"|(run_)?on(ly)?_(on_)?(local_)?(main|master|chief|process|last_process)|only_(main|master))",
    re.IGNORECASE,
)

_TRIED_RANKS = range(8)  # Ranks for which conditions are evaluated

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

    numbers: frozenset[str] = frozenset()  # Names that hold a rank
    conditions: frozenset[str] = frozenset()  # Names of conditions that are true on some ranks only

    def __or__(self, other: Words) -> Words:
        return Words(self.numbers | other.numbers, self.conditions | other.conditions)

    def know(self, name: str) -> bool:
        """Return whether a name is one of these, or reads like a rank."""
        return says_rank(name) or name in self.numbers or name in self.conditions


def words_of(nodes: Iterable[ast.AST]) -> Words:
    """Return the names in a file that are always set to, or return, a rank or a condition on it."""
    given: dict[str, list[ast.expr]] = {}
    for name, value in assignments(nodes):
        # An initial `main = None` proves nothing.
        if name and not isinstance(value, ast.Constant):
            given.setdefault(name, []).append(value)
    named = {name: [_words_in(value) for value in values] for name, values in given.items()}
    words, before = Words(), None
    # Names may be set to other names that are found by then.
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
        str(each.value) if isinstance(each, ast.Constant) else last_name(each)
        for each in walk(value)
        if isinstance(each, (ast.Name, ast.Attribute))
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
    }


ASSIGNING = (
    ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.keyword, ast.FunctionDef
)  # fmt: skip
"""The nodes that `assignments` reads."""


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with the values that are assigned to them, passed for them, or returned."""
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
    calls = [last_name(node.func) for node in walk(test) if isinstance(node, ast.Call)]
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
    inner = [each for each in parts(test) if isinstance(each, ast.expr)]
    return bool(inner) and all(by_rank_alone(each, words) for each in inner)


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
    for child in parts(test):
        if isinstance(child, ast.Call) and last_name(child.func) == "len":
            continue
        if isinstance(child, ast.expr):
            yield from _without_len(child)
        else:
            yield child


def _about_rank(node: ast.AST, words: Words) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute)):
        return words.know(last_name(node))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and says_rank(node.value)


@functools.lru_cache(maxsize=1 << 12)
def says_rank(name: str) -> bool:
    """Return whether a name refers to the rank, or to a condition on it, by itself."""
    about = _CONDITION.search(name) or _NUMBER.search(name)
    return bool(about) and name.isidentifier() and not OTHER_RANK.search(name)


def _value_of_name(name: str, rank: int, words: Words) -> object:
    if name in words.numbers:
        return rank
    if name in words.conditions or not says_rank(name):
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
    if isinstance(node, (ast.BoolOp, ast.IfExp)):
        return _value_of_choice(node, rank, words)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _value_of_comparison(node, rank, words)
    return _UNKNOWN


def _value_of_choice(node: ast.BoolOp | ast.IfExp, rank: int, words: Words) -> object:
    if isinstance(node, ast.IfExp):
        test = _value(node.test, rank, words)
        return test if test is _UNKNOWN else _value(node.body if test else node.orelse, rank, words)
    values = [_value(each, rank, words) for each in node.values]
    decisive = isinstance(node.op, ast.Or)
    if any(each is not _UNKNOWN and bool(each) is decisive for each in values):
        return decisive
    return _UNKNOWN if any(each is _UNKNOWN for each in values) else not decisive


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
