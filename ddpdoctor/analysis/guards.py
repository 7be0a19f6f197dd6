"""Conditions on the rank in the user's source, around a line or before it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ddpdoctor.analysis.programs import changed as changed_at
from ddpdoctor.analysis.programs import imported, tree_of
from ddpdoctor.analysis.rank_words import (
    Words,
    allowed,
    by_rank_alone,
    discerns,
    is_plain,
    runs_on_one_rank,
    words_of,
)
from ddpdoctor.core import opening
from ddpdoctor.core.finding import Location
from ddpdoctor.run.names import MOST_WORLD


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
    tree = tree_of(path, changed_at(path))
    words = _words(path, changed_at(path))
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
    tree = tree_of(guard.path, changed_at(guard.path))
    words = _words(guard.path, changed_at(guard.path))
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
    text = _lines(path, changed_at(path))
    return text[line - 1].strip() if 0 < line <= len(text) else ""


def constant_while(path: str, line: int) -> int | None:
    """The line of the innermost ``while`` around a line that cannot end by its own test, or None.

    Its test is a constant, or reads only names that its body never sets; and no statement of its
    body leaves it.
    """
    best: int | None = None
    for start, end, head in _loops(path, changed_at(path)):
        if start <= line <= end:
            best = head if best is None else max(best, head)
    return best


def only_sleeps(path: str, line: int) -> bool:
    """Whether a line calls ``sleep``, and not in a ``while``, which may wait for something."""
    tree = tree_of(path, changed_at(path))
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
    return _found(path, changed_at(path))


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
    for other in imported(path, changed):
        there = tree_of(other, changed_at(other))
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
