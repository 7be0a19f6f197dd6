"""Read the user's source: its files, loops and lines.

Each file is parsed once. Everything derived from it is cached until the file changes (`per_file`).
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from ddpdoctor.core import opening
from ddpdoctor.core.opening import whole
from ddpdoctor.core.syntax import FUNCTIONS, LEAVING, LOOPS, NESTED, Loop, Tree, last_name, parts
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import SiteRecord
from ddpdoctor.run.snapshot import Run

MAX_FILES = 64  # Maximum number of user files to read

T = TypeVar("T")
Scope: TypeAlias = "ast.Module | ast.FunctionDef | ast.AsyncFunctionDef"


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
    """Return a file's mtime in Unix nanoseconds. 0 if the file is unreadable or too large."""
    try:
        stat = opening.facts(path)
    except OSError:
        return 0
    return stat.st_mtime_ns if stat.st_size <= opening.MOST_PARSED else 0


@per_file
def tree_of(path: str) -> ast.Module | None:
    """Parse a file. Return None on failure."""
    try:
        return ast.parse(opening.contents(path, opening.MOST_PARSED, links=True))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def nodes_of(path: str) -> Iterator[ast.AST]:
    """Yield all nodes of a file, outer ones first. Yield none if it cannot be parsed."""
    tree = tree_of(path)
    return ast.walk(tree) if tree is not None else iter(())


def scopes_of(path: str) -> list[Scope]:
    """Return a file's module and its functions, outer ones first."""
    return [node for node in nodes_of(path) if isinstance(node, (ast.Module, *FUNCTIONS))]


def calls_at(at: Location) -> list[ast.Call]:
    """Return the calls that include a line."""
    return [
        node for node in nodes_of(at.path) if isinstance(node, ast.Call) and covers(node, at.line)
    ]


def names_in(*nodes: ast.AST, stored: bool = False) -> set[str]:
    """Return the variables in nodes, or only those that the nodes assign."""
    return {
        each.id
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and (not stored or isinstance(each.ctx, ast.Store))
    }


def values_of(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call."""
    return [*call.args, *(each.value for each in call.keywords)]


def walk_scope(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and their descendants in order, except those in nested functions and classes."""
    for node in nodes:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield from walk_scope(parts(node))


def covers(node: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a line belongs to a statement or an expression."""
    return node.lineno <= line <= (node.end_lineno or 0)


def in_block(block: Sequence[ast.stmt], line: int) -> bool:
    """Return whether a line belongs to a statement of a block."""
    return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or 0)


def files_of(run: Run) -> list[str]:
    """Return the user's files that are known to have run, and the local files that they import."""
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


class Source(Tree):
    """Loops, conditions and calls of one file, by line."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._driven: dict[int, ast.For | None] = {}

    def driven_at(self, line: int) -> ast.For | None:
        """Return the ``for`` that takes its next item at a line. None if its body yields."""
        if line not in self._driven:
            loops = (node for node in self.nodes if isinstance(node, ast.For))
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
        loops = (node for node in self.nodes if isinstance(node, LOOPS))
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

    def raises(self, loop: Loop) -> list[ast.stmt]:
        """Return the ``raise`` statements of a loop."""
        return [node for node in walk_scope(loop.body) if isinstance(node, ast.Raise)]

    def is_exhausted(self, statement: ast.stmt) -> bool:
        """Return whether a statement runs once ``next()`` has returned its last item."""
        if isinstance(statement, ast.While):
            called = (each.func for each in ast.walk(statement.test) if isinstance(each, ast.Call))
            return any(isinstance(each, ast.Name) and each.id == "next" for each in called)
        handler = self.parents.get(statement)
        return isinstance(handler, ast.ExceptHandler) and "StopIteration" in {
            each.id for each in ast.walk(handler.type or handler) if isinstance(each, ast.Name)
        }

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
        """Return the ``if`` statements around a line in its function, innermost first."""
        return [
            node
            for node in self._enclosing(line)
            if isinstance(node, ast.If) and node.lineno != line
        ]

    def deciding(self, line: int) -> list[tuple[ast.If | ast.While, int, int]]:
        """Return the conditions that decide in a function whether a line runs, outermost first.

        They are around the line, or above it and leave the block around it. Each comes with the
        first and the last line that it decides on.
        """
        found: list[tuple[ast.If | ast.While, int, int]] = []
        for node in self._enclosing(line):
            parent = self.parents.get(node)
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
                    if isinstance(each, ast.If) and isinstance(each.body[-1], LEAVING)
                ]
        return sorted(found, key=lambda each: each[0].lineno)

    def varies(self, node: ast.If | ast.While) -> bool:
        """Return whether a condition compares sizes, or tests a name that a loop around it sets."""
        operators = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
        if any(isinstance(each, operators) for each in ast.walk(node.test)):
            return True
        names = names_in(node.test)
        return any(
            isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id in names
            for loop in self.around(node.lineno)
            for each in walk_scope(loop.body)
        )

    def scope(self, line: int) -> ast.AST | None:
        """Return the function that a line is in; None at the module's level."""
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, FUNCTIONS):
            node = self.parents.get(node)
        return node

    def branches(self, line: int) -> list[ast.If]:
        """Return the ``if`` statements of one function with a branch that holds a line."""
        parents = ((self.parents.get(node), node) for node in self._enclosing(line))
        return [
            parent
            for parent, node in parents
            if isinstance(parent, ast.If) and node is not parent.test
        ]

    def calls(self, name: str) -> list[int]:
        """Return the lines at which a function or method of that name is called."""
        return [
            node.lineno
            for node in self.nodes
            if isinstance(node, ast.Call) and last_name(node.func) == name
        ]

    def only(self, statements: Sequence[ast.stmt]) -> ast.stmt | None:
        """Return the only statement that may depend on a value of a single rank."""
        found = list(statements)
        if len(found) > 1:
            found = [each for each in found if not self.counts(each)]
        return found[0] if len(found) == 1 else None

    def counts_alike(self, loop: ast.For) -> bool:
        """Return whether a loop runs over a range, or over a literal."""
        made = loop.iter
        names = isinstance(made, ast.Call) and last_name(made.func) == "range"
        return names or isinstance(made, (ast.List, ast.Tuple, ast.Constant))

    def has_fixed_length(self, loop: Loop) -> bool:
        """Return whether a loop runs over a range of constants, and nothing leaves it earlier."""
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
            return False
        fixed = all(
            isinstance(each, ast.Constant) or (isinstance(each, ast.Name) and each.id.isupper())
            for each in loop.iter.args
        )
        early = (*self.exits(loop), *self.raises(loop), *self.skips(loop))
        return fixed and last_name(loop.iter.func) == "range" and not early

    def counts(self, statement: ast.stmt) -> bool:
        """Return whether a statement depends only on a count that all ranks share.

        The count is tested by the ``if`` around it, or by its own test if it is a ``while``.
        """
        parent = statement if isinstance(statement, ast.While) else self.parents.get(statement)
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
                and not isinstance(self.parents[each], ast.AugAssign)
            }
            counters |= _counters(node) - set_here
            assigned |= set_here
            node = self._loop_of(node)
        return bool(names & counters) and not (names & assigned - counters)

    def _loop_of(self, node: ast.AST) -> ast.AST | None:
        """Return the loop that a ``break`` or ``continue`` refers to."""
        inner, outer = node, self.parents.get(node)
        while outer is not None:
            # In a loop's `else` it refers to the loop around that one.
            if isinstance(outer, LOOPS) and inner not in outer.orelse:
                return outer
            inner, outer = outer, self.parents.get(outer)
        return None

    def _enclosing(self, line: int) -> Iterator[ast.AST]:
        """Yield the statement at a line, and the nodes around it in its function."""
        node: ast.AST | None = self._statement(line)
        while node is not None and not isinstance(node, NESTED):
            yield node
            node = self.parents.get(node)

    def _statement(self, line: int) -> ast.stmt | None:
        """Return the smallest statement that a line belongs to."""
        # `nodes` lists outer statements first, and `min` takes the first of equals.
        spans = [
            node
            for node in reversed(self.nodes)
            if isinstance(node, ast.stmt) and covers(node, line)
        ]
        return min(spans, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)


def holds(loop: Loop, line: int) -> bool:
    """Return whether a line is in the body of a loop."""
    return in_block(loop.body, line)


def endless(loop: Loop) -> bool:
    """Return whether a loop is a ``while True``."""
    return isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)


def _counters(loop: Loop) -> set[str]:
    """Return the names that only count iterations: ``range``, ``enumerate``, ``n += 1``."""
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
    inside = (each for part in loop.body for each in ast.walk(part))
    if any(isinstance(each, (ast.Break, ast.Return, ast.Raise, ast.Yield)) for each in inside):
        return False
    tested = ast.walk(loop.test)
    if any(isinstance(each, (ast.Call, ast.Attribute, ast.Subscript)) for each in tested):
        return False
    return names_in(loop.test).isdisjoint(names_in(*loop.body, stored=True))


def only_sleeps(path: str, line: int) -> bool:
    """Return whether a line only calls ``sleep``, outside of a ``while``, which may be polling."""
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
