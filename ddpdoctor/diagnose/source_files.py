"""Read the user's source: its files, loops, lines, and conditions on the rank."""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ddpdoctor.core import opening
from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.names import MOST_WORLD
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Run

# -- the user's files that a run consists of, as far as it has shown them


MOST_FILES = 64
"""Files of the user's that are read."""


def files_of(run: Run) -> list[str]:
    """The files of the user's that are known to have run, and what they import beside them."""
    found: dict[str, None] = {}
    for rank in run.last:
        for record in (*rank.records.of(SiteRecord), *rank.records.of(DdpRecord)):
            if record.path:
                found[record.path] = None
    # The dictionary grows: an imported file may import others.
    queue = list(found)
    for path in queue:
        for each in imported_files(path, modified_at(path)):
            if each not in found and len(found) < MOST_FILES:
                found[each] = None
                queue.append(each)
    return list(found)


def modified_at(path: str) -> int:
    """When a file was changed; 0 if it cannot be read, or is too large."""
    try:
        stat = opening.facts(path)
    except OSError:
        return 0
    return stat.st_mtime_ns if stat.st_size <= opening.MOST_PARSED else 0


@functools.lru_cache(maxsize=MOST_FILES)
def tree_of(path: str, when: int) -> ast.Module | None:
    """A file, parsed; None if it cannot be."""
    try:
        return ast.parse(opening.contents(path, opening.MOST_PARSED, links=True)) if when else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


@functools.lru_cache(maxsize=MOST_FILES)
def imported_files(path: str, when: int) -> tuple[str, ...]:
    """The files that a file imports, as far as they lie beside it, beside its package, or below."""
    tree = tree_of(path, when)
    names: list[str] = []
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{each.name}".lstrip(".") for each in node.names)]
    here = os.path.dirname(path)
    bases = [
        os.path.join(folder, *name.split("."))
        for name in dict.fromkeys(filter(None, names))
        for folder in (here, os.path.dirname(here))
    ]
    files = (file for base in bases for file in (f"{base}.py", f"{base}/__init__.py"))
    return tuple(itertools.islice(filter(modified_at, files), MOST_FILES))


# -- sources


Loop: TypeAlias = "ast.For | ast.AsyncFor | ast.While"
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_SIMPLE_CALLS = ("len", "int", "min", "max")


class Source:
    """A file of the user's, parsed.

    Args:
        tree: Its syntax tree.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {
            child: node for node in self._nodes for child in ast.iter_child_nodes(node)
        }
        self._driven: dict[int, ast.For | None] = {}

    def driven_at(self, line: int) -> ast.For | None:
        """The ``for`` that takes its next item at a line, unless it hands items to a caller."""
        if line not in self._driven:
            self._driven[line] = self._driven_at(line)
        return self._driven[line]

    def _driven_at(self, line: int) -> ast.For | None:
        for node in self._nodes:
            if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0):
                inside = (each for part in node.body for each in _scope(part))
                yields = any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in inside)
                return None if yields else node
        return None

    def around(self, line: int) -> list[Loop]:
        """The loops of one function whose body a line is in, innermost first."""
        found: list[Loop] = []
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, _SCOPES):
            if isinstance(node, _LOOPS) and holds(node, line):
                found.append(node)
            node = self._parents.get(node)
        return found

    def leaves(self, line: int, loop: Loop) -> bool:
        """Whether the statement at a line is one that leaves a loop."""
        return any(each.lineno <= line <= (each.end_lineno or 0) for each in self.exits(loop))

    def exits(self, loop: Loop) -> list[ast.stmt]:
        """The statements that leave a loop: its ``break``, and ``return`` within it."""
        return [
            node
            for node in self._within(loop)
            if isinstance(node, ast.Return)
            or (isinstance(node, ast.Break) and self._loop_of(node) is loop)
        ]

    def skips(self, loop: Loop) -> list[ast.stmt]:
        """The ``continue`` statements of a loop."""
        return [
            node
            for node in self._within(loop)
            if isinstance(node, ast.Continue) and self._loop_of(node) is loop
        ]

    def returns_before(self, line: int, after: int) -> list[ast.stmt]:
        """The ``return`` statements of the function at ``line`` that stand in front of it."""
        node = self.scope(line)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        inside = (each for part in node.body for each in _scope(part))
        return [
            each for each in inside if isinstance(each, ast.Return) and after < each.lineno < line
        ]

    def conditions(self, line: int, loop: Loop) -> list[ast.If]:
        """The ``if`` statements within a loop whose body a line is in, innermost first."""
        if loop not in self.around(line):
            return []
        return [each for each in self.ifs(line) if each.lineno > loop.lineno]

    def ifs(self, line: int) -> list[ast.If]:
        """The ``if`` statements of one function whose body a line is in, innermost first."""
        found: list[ast.If] = []
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, _SCOPES):
            if isinstance(node, ast.If) and node.lineno != line:
                found.append(node)
            node = self._parents.get(node)
        return found

    def scope(self, line: int) -> ast.AST | None:
        """The function that a line is in; None on the module's own level."""
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node = self._parents.get(node)
        return node

    def branches(self, line: int) -> list[ast.If]:
        """The ``if`` statements of one function that a line is in a branch of, innermost first."""
        found: list[ast.If] = []
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, _SCOPES):
            parent = self._parents.get(node)
            if isinstance(parent, ast.If) and node is not parent.test:
                found.append(parent)
            node = parent
        return found

    def calls(self, name: str) -> list[int]:
        """The lines at which a function or method of that name is called."""
        called = ((node.lineno, node.func) for node in self._nodes if isinstance(node, ast.Call))
        return [
            line
            for line, function in called
            if name in (getattr(function, "attr", ""), getattr(function, "id", ""))
        ]

    def only(self, statements: Sequence[ast.stmt]) -> ast.stmt | None:
        """The one statement that can have decided by a value that only its rank has."""
        found = list(statements)
        if len(found) > 1:
            found = [each for each in found if not self.counts(each)]
        return found[0] if len(found) == 1 else None

    def counts(self, statement: ast.stmt) -> bool:
        """Whether what decides on a statement is nothing but a count that all ranks share.

        That is the ``if`` around it, or the test of a ``while``.
        """
        parent = statement if isinstance(statement, ast.While) else self._parents.get(statement)
        if not isinstance(parent, (ast.If, ast.While)):
            return False
        inside = list(ast.walk(parent.test))
        calls = [node.func for node in inside if isinstance(node, ast.Call)]
        if not all(isinstance(each, ast.Name) and each.id in _SIMPLE_CALLS for each in calls):
            return False
        names = {node.id for node in inside if isinstance(node, ast.Name)}
        if any("rank" in name for name in names):
            return False
        counters: set[str] = set()
        assigned: set[str] = set()
        node = statement if isinstance(statement, ast.While) else self._loop_of(statement)
        while node is not None:
            assert isinstance(node, _LOOPS)
            set_here = self._assigned(node)
            counters |= _counters(node) - set_here
            assigned |= set_here
            node = self._loop_of(node)
        return bool(names & counters) and not (names & assigned - counters)

    def _assigned(self, loop: Loop) -> set[str]:
        """Names that a loop's body sets, other than by counting."""
        return {
            each.id
            for part in loop.body
            for each in _scope(part)
            if isinstance(each, ast.Name)
            and isinstance(each.ctx, ast.Store)
            and not isinstance(self._parents[each], ast.AugAssign)
        }

    def _within(self, loop: Loop) -> Iterator[ast.stmt]:
        for part in loop.body:
            for node in _scope(part):
                if isinstance(node, ast.stmt):
                    yield node

    def _loop_of(self, node: ast.AST) -> ast.AST | None:
        """The loop that a ``break`` or ``continue`` is about."""
        inner, outer = node, self._parents.get(node)
        while outer is not None:
            # In the `else` of a loop it is about the next one outwards.
            if isinstance(outer, _LOOPS) and inner not in outer.orelse:
                return outer
            inner, outer = outer, self._parents.get(outer)
        return None

    def _statement(self, line: int) -> ast.stmt | None:
        """The smallest statement that a line belongs to."""
        # Inner ones stand behind the outer ones, and of equals the first is taken.
        spans = [
            node
            for node in reversed(self._nodes)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        return min(spans, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


def holds(loop: Loop, line: int) -> bool:
    """Whether a line is in the body of a loop."""
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)


def endless(loop: Loop) -> bool:
    """Whether a loop is a ``while True``."""
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)


def _counters(loop: Loop) -> set[str]:
    """Names that a loop counts up by itself: those of ``range``, ``enumerate`` and ``n += 1``."""
    found: set[str] = set()
    if isinstance(loop, (ast.For, ast.AsyncFor)) and isinstance(loop.iter, ast.Call):
        name = getattr(loop.iter.func, "id", "")
        target: ast.AST | None = loop.target if name == "range" else None
        if name == "enumerate" and isinstance(loop.target, ast.Tuple):
            target = loop.target.elts[0]
        if isinstance(target, ast.Name):
            found.add(target.id)
    for node in loop.body:
        # What is counted under a condition is no mere count.
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(node.value, ast.Constant)
        ):
            found.add(node.target.id)
    return found


def _scope(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, but not the functions and classes that are defined there."""
    yield node
    if isinstance(node, _SCOPES):
        return
    for child in ast.iter_child_nodes(node):
        yield from _scope(child)


def source_of(path: str) -> Source | None:
    """A file of the user's; None if it cannot be read here, or no more."""
    try:
        stat = opening.facts(path)
    except OSError:
        return None
    return _parsed(path, stat.st_mtime_ns) if stat.st_size <= opening.MOST_PARSED else None


@functools.lru_cache(maxsize=16)
def _parsed(path: str, changed: int) -> Source | None:
    try:
        return Source(ast.parse(opening.contents(path, opening.MOST_PARSED, links=True)))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


# -- what in the user's source is a rank, or a condition on it


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


# -- conditions on the rank in the user's source, around a line or before it


@dataclass(frozen=True)
class Guard:
    """A condition on the rank, and the lines that it decides on."""

    path: str
    line: int
    """Its own line."""
    start: int
    end: int
    way: str = ""
    """``return``, ``break`` or ``continue`` if it decides on what follows it, by leaving that."""

    @property
    def location(self) -> Location:
        """Where it stands."""
        return Location(self.path, self.line)

    def holds(self, lines: Iterable[Location]) -> bool:
        """Whether one of some lines is among those that it decides on."""
        return any(at.path == self.path and self.start <= at.line <= self.end for at in lines)


def guards_of(chain: Sequence[Location]) -> list[tuple[Guard, Location]]:
    """The conditions on the rank by which a call was made, innermost first, each with its line.

    Args:
        chain: The call's line and those that led to it, innermost first.
    """
    return [
        (guard, at)
        for at in chain
        for guard in sorted(_guards(at.path), key=lambda each: (-each.start, -each.line))
        if guard.holds([at])
    ]


def rank_guard(path: str, line: int) -> int | None:
    """The line of the condition on the rank that decides whether a line runs, or None.

    An ``if`` around the line, within its function, or one before it that returns or continues.
    """
    found = guards_of([Location(path, line)])
    return found[0][0].line if found else None


def ranks_at(path: str, line: int, world_size: int, *, one_node: bool) -> tuple[int, ...]:
    """The ranks that may run a line, by the conditions around it; empty where all may.

    Args:
        path: The file.
        line: The line.
        world_size: Ranks there are.
        one_node: Whether a rank and a local rank are the same.
    """
    tree = tree_of(path, modified_at(path))
    words = _words(path, modified_at(path))
    world_size = min(world_size, MOST_WORLD)
    found = set(range(world_size))
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.If) or not discerns(node.test, words):
            continue
        if not one_node and "local" in ast.unparse(node.test).lower():
            continue
        for part, wanted in ((node.body, True), (node.orelse, False)):
            if part and part[0].lineno <= line <= (part[-1].end_lineno or 0):
                found = {rank for rank in found if wanted in allowed(node.test, words, rank)}
    return tuple(sorted(found)) if len(found) < world_size else ()


def outcomes(guard: Guard, at: Location, ranks: Iterable[int]) -> dict[int, set[bool]]:
    """Whether each of some ranks comes to a line that a condition decides on: both if it may.

    Empty where the condition is no ``if``.
    """
    tree = tree_of(guard.path, modified_at(guard.path))
    words = _words(guard.path, modified_at(guard.path))
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.If) and node.lineno == guard.line:
            # What follows an `if` that leaves runs where its test is not true.
            leaves = any(isinstance(node.body[-1], kind) for kind, _ in _WAYS)
            inside = node.body[0].lineno <= at.line <= (node.body[-1].end_lineno or 0)
            wanted = inside or (bool(guard.way) and not leaves)
            return {
                rank: {each is wanted for each in allowed(node.test, words, rank)} for rank in ranks
            }
    return {}


def statement(path: str, line: int) -> str:
    """The source of a line in short, empty if it cannot be read."""
    text = _lines(path, modified_at(path))
    return text[line - 1].strip() if 0 < line <= len(text) else ""


def constant_while(path: str, line: int) -> int | None:
    """The line of the innermost ``while`` around a line that cannot end by its own test, or None.

    Its test is a constant, or reads only names that its body never sets; and no statement of its
    body leaves it.
    """
    best: int | None = None
    for start, end, head in _loops(path, modified_at(path)):
        if start <= line <= end:
            best = head if best is None else max(best, head)
    return best


def only_sleeps(path: str, line: int) -> bool:
    """Whether a line calls ``sleep``, and not in a ``while``, which may wait for something."""
    tree = tree_of(path, modified_at(path))
    if tree is None:
        return False
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Call, ast.While))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    calls = [node.func for node in around if isinstance(node, ast.Call)]
    names = [call.attr if isinstance(call, ast.Attribute) else call for call in calls]
    sleeps = any(each == "sleep" or getattr(each, "id", "") == "sleep" for each in names)
    return sleeps and len(calls) == len(around)


def _guards(path: str) -> tuple[Guard, ...]:
    return _found(path, modified_at(path))


@functools.lru_cache(maxsize=32)
def _lines(path: str, changed: int) -> tuple[str, ...]:
    if not changed:
        return ()
    try:
        source = opening.contents(path, opening.MOST_SOURCE, links=True)
        return tuple(source.decode("utf-8", "replace").splitlines())
    except OSError:
        return ()


@functools.lru_cache(maxsize=32)
def _words(path: str, changed: int) -> Words:
    """The names by which a file, or one that it imports from beside it, knows about the rank."""
    tree = tree_of(path, changed)
    if tree is None:
        return Words()
    words = words_of(tree)
    for other in imported_files(path, changed):
        there = tree_of(other, modified_at(other))
        if there is not None:
            words |= words_of(there)
    return words


@functools.lru_cache(maxsize=32)
def _found(path: str, changed: int) -> tuple[Guard, ...]:
    tree = tree_of(path, changed)
    if tree is None:
        return ()
    words = _words(path, changed)
    found = [
        Guard(path, line, start, end, way)
        for node in ast.walk(tree)
        for line, start, end, way in (
            *((*each, "") for each in _decides(node, words)),
            *_leaves(node, words),
        )
    ]
    return tuple(found)


def _decides(node: ast.AST, words: Words) -> list[tuple[int, int, int]]:
    """A condition's line, and the first and last line that it decides on."""
    if isinstance(node, ast.If):
        return _of_if(node, words)
    if isinstance(node, ast.Expr):
        test = _short_circuit(node.value)
        if test is not None and discerns(test, words) and is_plain(test, words):
            return [(node.lineno, node.lineno, node.end_lineno or 0)]
    if isinstance(node, ast.Match) and discerns(node.subject, words):
        return [
            (case.pattern.lineno, case.body[0].lineno, case.body[-1].end_lineno or 0)
            for case in node.cases
        ]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [
            (each.lineno, node.body[0].lineno, node.end_lineno or 0)
            for each in node.decorator_list
            if runs_on_one_rank(each)
        ]
    return []


def _of_if(node: ast.If, words: Words) -> list[tuple[int, int, int]]:
    """The two branches of an ``if`` on the rank."""
    if not discerns(node.test, words):
        return []
    # On its own line stands what is tested, too.
    least = node.lineno if is_plain(node.test, words) else node.lineno + 1
    parts = [part for part in (node.body, node.orelse) if part]
    return [(node.lineno, max(least, part[0].lineno), part[-1].end_lineno or 0) for part in parts]


def _short_circuit(value: ast.expr) -> ast.expr | None:
    """The condition of ``rank == 0 and barrier()``, or of ``barrier() if rank == 0 else None``."""
    if isinstance(value, ast.BoolOp):
        return value.values[0]
    return value.test if isinstance(value, ast.IfExp) else None


def _leaves(node: ast.AST, words: Words) -> Iterator[tuple[int, int, int, str]]:
    """What follows an ``if rank != 0: return`` in the same block."""
    for block in _blocks(node):
        for each in block[:-1]:
            if not isinstance(each, ast.If) or not discerns(each.test, words):
                continue
            last = [part[-1] for part in (each.body, each.orelse) if part]
            way = next((way for end in last for kind, way in _WAYS if isinstance(end, kind)), "")
            # After a `continue` that was about more than the rank, the next round comes there.
            if way and (way != "continue" or by_rank_alone(each.test, words)):
                end = block[-1].end_lineno or 0
                yield each.lineno, (each.end_lineno or each.lineno) + 1, end, way


_WAYS = ((ast.Return, "return"), (ast.Break, "break"), (ast.Continue, "continue"))


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    blocks = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [
        block
        for block in blocks
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt)
    ]


@functools.lru_cache(maxsize=32)
def _loops(path: str, changed: int) -> list[tuple[int, int, int]]:
    tree = tree_of(path, changed)
    if tree is None:
        return []
    return [
        (node.lineno, node.end_lineno or 0, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and _never_ends(node)
    ]


def _never_ends(loop: ast.While) -> bool:
    inside = [each for part in loop.body for each in ast.walk(part)]
    if any(isinstance(each, (ast.Break, ast.Return, ast.Raise, ast.Yield)) for each in inside):
        return False
    tested = list(ast.walk(loop.test))
    if any(isinstance(each, (ast.Call, ast.Attribute, ast.Subscript)) for each in tested):
        return False
    names = {each.id for each in tested if isinstance(each, ast.Name)}
    stored = {
        each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return not names & stored


# -- lines of the user's code: read from ``path:line``, and as sentences name them


def location(site: str) -> Location | None:
    """A place from ``path:line``."""
    path, _, line = site.rpartition(":")
    return Location(path, whole(line)) if path and line.isdigit() else None


def brief(at: Location | None) -> str:
    """A place in a sentence: ``train.py:61``."""
    return f"{os.path.basename(at.path)}:{at.line}" if at is not None else "an unknown line"


def quoted(at: Location | None) -> str:
    """A place with its code, where that is short: ```loss.backward()` train.py:61``."""
    text = statement(at.path, at.line).partition("  #")[0].rstrip() if at is not None else ""
    return f"`{text}` {brief(at)}" if 0 < len(text) <= 60 else brief(at)
