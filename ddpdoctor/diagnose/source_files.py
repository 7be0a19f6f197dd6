"""Read the user's source: its files, loops, lines, and conditions on the rank.

Each file is parsed once. Everything derived from it is cached until the file changes (`per_file`).
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ddpdoctor.core import opening
from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.names import MOST_WORLD
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Run

MAX_FILES = 64
"""Maximum number of the user's files that are read."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

T = TypeVar("T")
Loop: TypeAlias = "ast.For | ast.AsyncFor | ast.While"
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)


def per_file(read: Callable[[str], T]) -> Callable[[str], T]:
    """Cache what a function derives from a source file until the file changes."""

    @functools.lru_cache(maxsize=MAX_FILES)
    def cached(path: str, _modified: int) -> T:
        return read(path)

    @functools.wraps(read)
    def current(path: str) -> T:
        return cached(path, modified_at(path))

    return current


def modified_at(path: str) -> int:
    """Return when a file was changed, in Unix nanoseconds; 0 if it is unreadable or too large."""
    try:
        stat = opening.facts(path)
    except OSError:
        return 0
    return stat.st_mtime_ns if stat.st_size <= opening.MOST_PARSED else 0


@per_file
def tree_of(path: str) -> ast.Module | None:
    """Parse a file. Return None if that is impossible."""
    try:
        return ast.parse(opening.contents(path, opening.MOST_PARSED, links=True))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def nodes_of(path: str) -> Iterator[ast.AST]:
    """Yield all nodes of a file, outer ones first. Yield none if it cannot be parsed."""
    tree = tree_of(path)
    return ast.walk(tree) if tree is not None else iter(())


def walk_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and those below them in order, but not what nested functions and classes hold."""
    for node in nodes:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from walk_scope(ast.iter_child_nodes(node))


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, ``c`` of ``a.b.c``; empty for anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def covers(node: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a line belongs to a statement or an expression."""
    return node.lineno <= line <= (node.end_lineno or 0)


def _in_block(block: Sequence[ast.stmt], line: int) -> bool:
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


def files_of(run: Run) -> list[str]:
    """Return the user's files that are known to have run, and the files beside them they import."""
    found = dict.fromkeys(
        record.path
        for rank in run.last
        for record in (*rank.records.of(SiteRecord), *rank.records.of(DdpRecord))
        if record.path
    )
    # The queue grows: an imported file may import others.
    queue = list(found)
    for path in queue:
        for each in imported_files(path):
            if each not in found and len(found) < MAX_FILES:
                found[each] = None
                queue.append(each)
    return list(found)


@per_file
def imported_files(path: str) -> tuple[str, ...]:
    """Return the files that a file imports from beside it, beside its package, or below."""
    names: list[str] = []
    for node in nodes_of(path):
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
    return tuple(itertools.islice(filter(modified_at, files), MAX_FILES))


class Source:
    """Loops, conditions and calls of one file, by line.

    Args:
        tree: The file's syntax tree.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {
            child: node for node in self._nodes for child in ast.iter_child_nodes(node)
        }
        self._driven: dict[int, ast.For | None] = {}

    def driven_at(self, line: int) -> ast.For | None:
        """Return the ``for`` that takes its next item at a line; None if it is a generator's."""
        if line not in self._driven:
            loops = (node for node in self._nodes if isinstance(node, ast.For))
            loop = next(
                (each for each in loops if each.lineno <= line <= (each.iter.end_lineno or 0)), None
            )
            inside = walk_scope(loop.body) if loop is not None else ()
            yields = any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in inside)
            self._driven[line] = None if yields else loop
        return self._driven[line]

    def around(self, line: int) -> list[Loop]:
        """Return the loops of one function whose body holds a line, innermost first."""
        return [
            node for node in self._enclosing(line) if isinstance(node, LOOPS) and holds(node, line)
        ]

    def loop_at(self, line: int) -> Loop | None:
        """Return the loop that begins at a line."""
        loops = (node for node in self._nodes if isinstance(node, LOOPS))
        return next((each for each in loops if each.lineno == line), None)

    def leaves(self, line: int, loop: Loop) -> bool:
        """Return whether the statement at a line leaves a loop."""
        return any(covers(each, line) for each in self.exits(loop))

    def exits(self, loop: Loop) -> list[ast.stmt]:
        """Return the statements that leave a loop: its ``break``, and each ``return`` in it."""
        return [
            node
            for node in walk_scope(loop.body)
            if isinstance(node, ast.Return)
            or (isinstance(node, ast.Break) and self._loop_of(node) is loop)
        ]

    def skips(self, loop: Loop) -> list[ast.stmt]:
        """Return the ``continue`` statements of a loop."""
        return [
            node
            for node in walk_scope(loop.body)
            if isinstance(node, ast.Continue) and self._loop_of(node) is loop
        ]

    def returns_before(self, line: int, after: int) -> list[ast.stmt]:
        """Return the ``return`` statements above ``line`` in its function, below ``after``."""
        function = self.scope(line)
        return [
            each
            for each in walk_scope(getattr(function, "body", ()))
            if isinstance(each, ast.Return) and after < each.lineno < line
        ]

    def conditions(self, line: int, loop: Loop) -> list[ast.If]:
        """Return the ``if`` statements within a loop whose body holds a line, innermost first."""
        if loop not in self.around(line):
            return []
        return [each for each in self.ifs(line) if each.lineno > loop.lineno]

    def ifs(self, line: int) -> list[ast.If]:
        """Return the ``if`` statements of one function that a line is in, innermost first."""
        return [
            node
            for node in self._enclosing(line)
            if isinstance(node, ast.If) and node.lineno != line
        ]

    def deciding(self, line: int) -> list[tuple[ast.If | ast.While, int, int]]:
        """Return the conditions of one function that decide whether a line runs, outermost first.

        They are those around the line, and those above it that leave the block around it. Each has
        the first and the last line that it decides on.
        """
        found: list[tuple[ast.If | ast.While, int, int]] = []
        for node in self._enclosing(line):
            parent = self._parents.get(node)
            for name in ("body", "orelse", "finalbody"):
                block = getattr(parent, name, None)
                if not isinstance(block, list) or node not in block:
                    continue
                first, last = block[0].lineno, block[-1].end_lineno or 0
                if isinstance(parent, (ast.If, ast.While)) and not isinstance(
                    parent.test, ast.Constant
                ):
                    found.append((parent, first, last))
                found += [
                    (each, (each.end_lineno or 0) + 1, last)
                    for each in block[: block.index(node)]
                    if isinstance(each, ast.If) and isinstance(each.body[-1], tuple(_WAYS))
                ]
        return sorted(found, key=lambda each: each[0].lineno)

    def varies(self, node: ast.If | ast.While) -> bool:
        """Return whether a condition compares sizes, or tests a name that a loop around it sets."""
        inside = list(ast.walk(node.test))
        if any(isinstance(each, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for each in inside):
            return True
        names = {each.id for each in inside if isinstance(each, ast.Name)}
        return any(
            isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id in names
            for loop in self.around(node.lineno)
            for each in walk_scope(loop.body)
        )

    def scope(self, line: int) -> ast.AST | None:
        """Return the function that a line is in; None at the module's level."""
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, FUNCTIONS):
            node = self._parents.get(node)
        return node

    def branches(self, line: int) -> list[ast.If]:
        """Return the ``if`` statements of one function with a branch that holds a line."""
        parents = ((self._parents.get(node), node) for node in self._enclosing(line))
        return [
            parent
            for parent, node in parents
            if isinstance(parent, ast.If) and node is not parent.test
        ]

    def calls(self, name: str) -> list[int]:
        """Return the lines at which a function or method of that name is called."""
        return [
            node.lineno
            for node in self._nodes
            if isinstance(node, ast.Call) and last_name(node.func) == name
        ]

    def only(self, statements: Sequence[ast.stmt]) -> ast.stmt | None:
        """Return the one statement that may depend on a value that only its rank has."""
        found = list(statements)
        if len(found) > 1:
            found = [each for each in found if not self.counts(each)]
        return found[0] if len(found) == 1 else None

    def counts_alike(self, loop: ast.For) -> bool:
        """Return whether a loop runs over a range, or over a literal."""
        made = loop.iter
        names = isinstance(made, ast.Call) and last_name(made.func) == "range"
        return names or isinstance(made, (ast.List, ast.Tuple, ast.Constant))

    def counts(self, statement: ast.stmt) -> bool:
        """Return whether only a count that all ranks share decides on a statement.

        The decision is the ``if`` around it, or the test of a ``while``.
        """
        parent = statement if isinstance(statement, ast.While) else self._parents.get(statement)
        if not isinstance(parent, (ast.If, ast.While)):
            return False
        inside = list(ast.walk(parent.test))
        calls = [node.func for node in inside if isinstance(node, ast.Call)]
        simple = ("len", "int", "min", "max")
        if not all(isinstance(each, ast.Name) and each.id in simple for each in calls):
            return False
        names = {node.id for node in inside if isinstance(node, ast.Name)}
        if any("rank" in name for name in names):
            return False
        counters: set[str] = set()
        assigned: set[str] = set()
        node = statement if isinstance(statement, ast.While) else self._loop_of(statement)
        while node is not None:
            assert isinstance(node, LOOPS)
            set_here = {
                each.id
                for each in walk_scope(node.body)
                if isinstance(each, ast.Name)
                and isinstance(each.ctx, ast.Store)
                and not isinstance(self._parents[each], ast.AugAssign)
            }
            counters |= _counters(node) - set_here
            assigned |= set_here
            node = self._loop_of(node)
        return bool(names & counters) and not (names & assigned - counters)

    def _loop_of(self, node: ast.AST) -> ast.AST | None:
        """Return the loop that a ``break`` or ``continue`` refers to."""
        inner, outer = node, self._parents.get(node)
        while outer is not None:
            # In a loop's `else` it refers to the loop around that one.
            if isinstance(outer, LOOPS) and inner not in outer.orelse:
                return outer
            inner, outer = outer, self._parents.get(outer)
        return None

    def _enclosing(self, line: int) -> Iterator[ast.AST]:
        """Yield the statement at a line and what encloses it within its function."""
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, _SCOPES):
            yield node
            node = self._parents.get(node)

    def _statement(self, line: int) -> ast.stmt | None:
        """Return the smallest statement that a line belongs to."""
        # `_nodes` lists outer statements first, and `min` takes the first of equals.
        spans = [
            node
            for node in reversed(self._nodes)
            if isinstance(node, ast.stmt) and covers(node, line)
        ]
        return min(spans, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


def holds(loop: Loop, line: int) -> bool:
    """Return whether a line is in the body of a loop."""
    return _in_block(loop.body, line)


def endless(loop: Loop) -> bool:
    """Return whether a loop is a ``while True``."""
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)


def _counters(loop: Loop) -> set[str]:
    """Return the names that only count a loop's rounds: ``range``, ``enumerate``, ``n += 1``."""
    found: set[str] = set()
    if isinstance(loop, (ast.For, ast.AsyncFor)) and isinstance(loop.iter, ast.Call):
        name = last_name(loop.iter.func)
        target: ast.AST | None = loop.target if name == "range" else None
        if name == "enumerate" and isinstance(loop.target, ast.Tuple):
            target = loop.target.elts[0]
        if isinstance(target, ast.Name):
            found.add(target.id)
    # A count under a condition differs between ranks, so only the body's own statements matter.
    found |= {
        node.target.id
        for node in loop.body
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    return found


@per_file
def source_of(path: str) -> Source | None:
    """Return one of the user's files. None if it cannot be read or parsed."""
    tree = tree_of(path)
    return Source(tree) if tree is not None else None


# -- expressions about the rank

_CONDITION = re.compile(
    r"is_?(main|master|chief|zero|primary|lead|leader|root|rank)|(main|master|chief)_(process|rank)"
    r"|rank_?(zero|0)|is_global_zero",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"rank|process_index|procid", re.IGNORECASE)
_OTHER_RANK = re.compile(
    r"(lora|low|full|matrix|max|min|tensor|num|page|all)_?rank|ranking|ranked|ranker"
    r"|rank_?(loss|ratio)",
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
    """Return the names that are set only to a rank or a condition on it, or return one.

    Args:
        nodes: All nodes of a file.
    """
    given: dict[str, list[ast.expr]] = {}
    for name, value in _assignments(nodes):
        # A first `main = None` says nothing.
        if name and not isinstance(value, ast.Constant):
            given.setdefault(name, []).append(value)
    words, before = Words(), None
    # Repeat for names that are set to another such name.
    for _ in range(3):
        if words == before:
            break
        before = words
        numbers = {
            name
            for name, each in given.items()
            if all(_value(value, 3, words) in (3, "3") for value in each)
        }
        conditions = {
            name
            for name, each in given.items()
            if all(_is_condition(value) and discerns(value, words) for value in each)
        }
        words |= Words(frozenset(numbers), frozenset(conditions - numbers))
    return words


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
    """Return whether a condition visibly differs between ranks.

    ``rank is not None`` and ``local_rank != -1`` do not.
    """
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


def _says_rank(name: str) -> bool:
    about = _CONDITION.search(name) or _NUMBER.search(name)
    return bool(about) and name.isidentifier() and not _OTHER_RANK.search(name)


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


# -- conditions on the rank that decide whether a line runs


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

    Args:
        chain: The call's line and those that led to it, innermost first.
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
    """Yield conditions that ask for an object which only some ranks make: ``writer is not None``.

    Args:
        path: The file with the conditions.
        makers: The files that may make the object.
    """
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
    """Return whether a name gets a value only under conditions on the rank.

    Args:
        name: The name of a variable, an attribute or a parameter.
        makers: The files to search.
        depth: How often a value that is another name is followed.
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

    Args:
        path: The file.
        line: The line.
        world_size: The number of ranks.
        one_node: Whether rank and local rank are the same.
    """
    words = _words(path)
    world_size = min(world_size, MOST_WORLD)
    found = set(range(world_size))
    for node in nodes_of(path):
        if not isinstance(node, ast.If) or not discerns(node.test, words):
            continue
        if not one_node and "local" in ast.unparse(node.test).lower():
            continue
        for part, wanted in ((node.body, True), (node.orelse, False)):
            if _in_block(part, line):
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
            leaves = isinstance(node.body[-1], tuple(_WAYS))
            wanted = _in_block(node.body, at.line) or (bool(guard.way) and not leaves)
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
            way = next((_WAYS[type(end)] for end in last if isinstance(end, tuple(_WAYS))), "")
            # A `continue` that depends on more than the rank may let a later iteration reach it.
            if way and (way != "continue" or by_rank_alone(each.test, words)):
                start = (each.end_lineno or each.lineno) + 1
                yield Guard(path, each.lineno, start, block[-1].end_lineno or 0, way)


# -- lines


@per_file
def _lines(path: str) -> tuple[str, ...]:
    try:
        source = opening.contents(path, opening.MOST_PARSED, links=True)
        return tuple(source.decode("utf-8", "replace").splitlines())
    except OSError:
        return ()


def statement(path: str, line: int) -> str:
    """Return the source of a line, stripped; empty if it cannot be read."""
    text = _lines(path)
    return text[line - 1].strip() if 0 < line <= len(text) else ""


def constant_while(path: str, line: int) -> int | None:
    """Return the line of the innermost ``while`` around a line whose own test cannot end it.

    Its test is a constant, or reads only names that its body never sets, and no statement of its
    body leaves it.
    """
    loops = (node for node in nodes_of(path) if isinstance(node, ast.While) and covers(node, line))
    return max((loop.lineno for loop in loops if _never_ends(loop)), default=None)


def _never_ends(loop: ast.While) -> bool:
    inside = [each for part in loop.body for each in ast.walk(part)]
    if any(isinstance(each, (ast.Break, ast.Return, ast.Raise, ast.Yield)) for each in inside):
        return False
    tested = list(ast.walk(loop.test))
    if any(isinstance(each, (ast.Call, ast.Attribute, ast.Subscript)) for each in tested):
        return False
    names = {each.id for each in tested if isinstance(each, ast.Name)}
    return not any(
        isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id in names
        for each in inside
    )


def only_sleeps(path: str, line: int) -> bool:
    """Return whether a line calls ``sleep``. Skip calls in a ``while``, which may be polling."""
    around = [
        node
        for node in nodes_of(path)
        if isinstance(node, (ast.Call, ast.While)) and covers(node, line)
    ]
    calls = [node for node in around if isinstance(node, ast.Call)]
    return len(calls) == len(around) and any(last_name(call.func) == "sleep" for call in calls)


def location(site: str) -> Location | None:
    """Parse a location from ``path:line``."""
    path, _, line = site.rpartition(":")
    return Location(path, whole(line)) if path and line.isdigit() else None


def brief(at: Location | None) -> str:
    """Name a location in a sentence: ``train.py:61``."""
    return f"{os.path.basename(at.path)}:{at.line}" if at is not None else "an unknown line"


def quoted(at: Location | None) -> str:
    """Name a location with its code if that is short: ```loss.backward()` train.py:61``."""
    text = statement(at.path, at.line).partition("  #")[0].rstrip() if at is not None else ""
    return f"`{text}` {brief(at)}" if 0 < len(text) <= 60 else brief(at)
