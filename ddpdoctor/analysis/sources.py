"""The user's source, as far as a rule has to read it: loops, and the statements that leave them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ddpdoctor.core import opening

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
