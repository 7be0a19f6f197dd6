"""What in the user's source is a rank, or a condition on it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_CONDITION = re.compile(
    r"is_?(main|master|chief|zero|primary|lead|leader|root|rank)|(main|master|chief)_(process|rank)"
    r"|rank_?(zero|0)|is_global_zero",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"rank|process_index|procid", re.IGNORECASE)
_OTHER = re.compile(
    r"(lora|low|full|matrix|max|min|tensor|num|page)_?rank|ranking|ranked|ranker|rank_?(loss|ratio)",
    re.IGNORECASE,
)
"""Ranks of matrices and of answers."""

_ON_ONE = re.compile(
    r"(?!.*first)(.*rank_?(zero|0)|.*(main|master|chief|primary)(_process|_rank)?_only"
    r"|(run_)?on(ly)?_(on_)?(local_)?(main|master|chief|process|last_process)|only_(main|master))",
    re.IGNORECASE,
)

_TRIED = range(8)
"""Ranks for which a condition is worked out."""

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
    """Names of a file, of variables, attributes and functions, besides those that say it."""

    numbers: frozenset[str] = frozenset()
    """They are a rank."""
    conditions: frozenset[str] = frozenset()
    """They are true on some ranks."""

    def __or__(self, other: Words) -> Words:
        return Words(self.numbers | other.numbers, self.conditions | other.conditions)


def words_of(tree: ast.Module) -> Words:
    """The names that are set to nothing but a rank, or a condition on it, or return one."""
    given: dict[str, list[ast.expr]] = {}
    for name, value in _given(tree):
        # `main = None` in front of it says nothing.
        if name and not isinstance(value, ast.Constant):
            given.setdefault(name, []).append(value)
    words = Words()
    # Once more for what is set to another such name, and so on.
    for _ in range(3):
        numbers = {n for n, each in given.items() if all(_is_rank(v, words) for v in each)}
        conditions = {
            name
            for name, each in given.items()
            if all(_is_condition(value) and discerns(value, words) for value in each)
        }
        words |= Words(frozenset(numbers), frozenset(conditions - numbers))
    return words


def _given(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield _name(target), node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr, ast.AugAssign)):
            if node.value is not None:
                yield _name(node.target), node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
        elif isinstance(node, ast.FunctionDef):
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield node.name, each.value


def _is_condition(value: ast.expr) -> bool:
    negated = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return negated or isinstance(
        value, (ast.Compare, ast.BoolOp, ast.Name, ast.Attribute, ast.Call)
    )


def _is_rank(value: ast.expr, words: Words) -> bool:
    return _value(value, 3, words) in (3, "3")


def discerns(test: ast.expr, words: Words) -> bool:
    """Whether a condition is about the rank and differs between ranks, as far as can be seen.

    ``rank is not None`` and ``local_rank != -1`` do not.
    """
    if not any(_about_rank(node, words) for node in _walk(test)):
        return False
    values = [_value(test, rank, words) for rank in _TRIED]
    return any(each is _UNKNOWN for each in values) or len({bool(each) for each in values}) > 1


def allowed(test: ast.expr, words: Words, rank: int) -> set[bool]:
    """What a condition may be on a rank: one of both, or both where that is not known."""
    value = _value(test, rank, words)
    return {True, False} if value is _UNKNOWN else {bool(value)}


def is_plain(test: ast.expr, words: Words) -> bool:
    """Whether a condition calls nothing that may itself be a collective."""
    calls = [_name(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)]
    known = words.numbers | words.conditions
    return all(name in _PLAIN_CALLS or name in known or _said(name) for name in calls)


def by_rank_alone(test: ast.expr, words: Words) -> bool:
    """Whether a condition is about nothing but the rank: on a rank it is always the same."""
    if isinstance(test, ast.Constant) or _about_rank(test, words):
        return True
    if isinstance(test, ast.Subscript):
        return by_rank_alone(test.slice, words)
    if isinstance(test, ast.Call):
        name = _name(test.func)
        known = _said(name) or name in words.numbers | words.conditions
        return known or (
            name in _PLAIN_CALLS and all(by_rank_alone(each, words) for each in test.args)
        )
    parts = [each for each in ast.iter_child_nodes(test) if isinstance(each, ast.expr)]
    return bool(parts) and all(by_rank_alone(each, words) for each in parts)


def runs_on_one_rank(decorator: ast.expr) -> bool:
    """Whether a decorator is one of those after which only some ranks run a function."""
    name = _name(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return _ON_ONE.match(name) is not None


def _walk(test: ast.expr) -> Iterator[ast.AST]:
    """The nodes of a condition, without what is only counted."""
    yield test
    for child in ast.iter_child_nodes(test):
        if isinstance(child, ast.Call) and _name(child.func) == "len":
            continue
        if isinstance(child, ast.expr):
            yield from _walk(child)
        else:
            yield child


def _about_rank(node: ast.AST, words: Words) -> bool:
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = _name(node)
        return _said(name) or name in words.numbers or name in words.conditions
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and _said(node.value)


def _said(name: str) -> bool:
    """Whether a name says that it is about the rank."""
    about = _CONDITION.search(name) or _NUMBER.search(name)
    return bool(about) and name.isidentifier() and not _OTHER.search(name)


def _named(name: str, rank: int, words: Words) -> object:
    """What something with a name is on a rank."""
    if name in words.numbers:
        return rank
    if name in words.conditions or not _said(name):
        return _UNKNOWN
    if _CONDITION.search(name):
        return rank == 0
    return rank if name.lower() != "ranks" else _UNKNOWN


def _value(node: ast.expr, rank: int, words: Words) -> object:
    """An expression on a rank, `_UNKNOWN` if it is not about the rank alone."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _named(_name(node), rank, words)
    if isinstance(node, ast.Subscript):
        return _named(_text(node.slice), rank, words)
    if isinstance(node, ast.Call):
        return _called(node, rank, words)
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, rank, words)
        if value is _UNKNOWN or not isinstance(node.op, (ast.Not, ast.USub)):
            return _UNKNOWN
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(value, int) else _UNKNOWN
    if isinstance(node, ast.BoolOp):
        return _combined(node, rank, words)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        if isinstance(node.ops[0], (ast.In, ast.NotIn)):
            return _among(node, rank, words)
        one = _value(node.left, rank, words)
        other = _value(node.comparators[0], rank, words)
        compared = _COMPARED.get(type(node.ops[0]))
        if one is _UNKNOWN or other is _UNKNOWN or compared is None:
            return _UNKNOWN
        try:
            return compared(one, other)
        except TypeError:
            return _UNKNOWN
    return _UNKNOWN


def _among(node: ast.Compare, rank: int, words: Words) -> object:
    """``rank in (0, 1)``, and ``"RANK" in os.environ``, which is so for all ranks."""
    inside = isinstance(node.ops[0], ast.In)
    one, others = _value(node.left, rank, words), node.comparators[0]
    if isinstance(node.left, ast.Constant):
        return inside
    if one is _UNKNOWN or not isinstance(others, (ast.Tuple, ast.List, ast.Set)):
        return _UNKNOWN
    values = [_value(each, rank, words) for each in others.elts]
    return _UNKNOWN if _UNKNOWN in values else (one in values) is inside


def _called(node: ast.Call, rank: int, words: Words) -> object:
    name = _name(node.func)
    if name in ("int", "str") and len(node.args) == 1:
        value = _value(node.args[0], rank, words)
        if isinstance(value, (int, str)):
            return str(value) if name == "str" else _number(value)
        return _UNKNOWN
    if name in ("get", "getenv") and node.args:
        # Of the environment it is a text, true also as "0".
        value = _named(_text(node.args[0]), rank, words)
        return str(value) if isinstance(value, int) else value
    if name == "hasattr":
        return True
    return _named(name, rank, words)


def _combined(node: ast.BoolOp, rank: int, words: Words) -> object:
    values = [_value(each, rank, words) for each in node.values]
    decisive = isinstance(node.op, ast.Or)
    if any(each is not _UNKNOWN and bool(each) is decisive for each in values):
        return decisive
    return _UNKNOWN if any(each is _UNKNOWN for each in values) else not decisive


def _number(value: int | str) -> object:
    try:
        return int(value)
    except ValueError:
        return _UNKNOWN


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _name(node: ast.expr) -> str:
    """The last part of a dotted name, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
