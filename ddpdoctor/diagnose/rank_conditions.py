"""Find the conditions on the rank in the user's source, and the lines that they decide on."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.syntax import FUNCTIONS, LEAVING, last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.rank_expressions import (
    Words,
    allowed,
    assignments,
    by_rank_alone,
    discerns,
    is_plain,
    runs_on_one_rank,
    says_rank,
    words_of,
)
from ddpdoctor.diagnose.source_files import imported_files, in_block, nodes_of, per_file
from ddpdoctor.run.names import MAX_WORLD_SIZE


@dataclass(frozen=True)
class Guard:
    """A condition on the rank, and the lines that it decides on."""

    path: str
    line: int  # The line of the condition
    start: int
    end: int
    way: str = ""
    """``return``, ``break`` or ``continue`` if it decides on the following lines by skipping
    them."""

    @property
    def location(self) -> Location:
        """The condition's location."""
        return Location(self.path, self.line)

    def holds(self, lines: Iterable[Location]) -> bool:
        """Return whether the condition decides on any of the lines."""
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
    """Yield conditions on an object that only some ranks create: ``writer is not None``."""
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
        for given, value in assignments(nodes_of(path))
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
    """Return a file's names for the rank, and those of the local files that it imports."""
    words = (words_of(nodes_of(each)) for each in (path, *imported_files(path)))
    return functools.reduce(operator.or_, words, Words())


def names_rank(path: str, node: ast.AST) -> bool:
    """Return whether an expression of a file contains a rank."""
    numbers = _words(path).numbers
    names = (each for each in ast.walk(node) if isinstance(each, (ast.Name, ast.Attribute)))
    return any(says_rank(last_name(each)) or last_name(each) in numbers for each in names)


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
        # A test with a call may run code under its own condition.
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
    """Yield a condition for the code after an ``if rank != 0: return`` in the same block."""
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
