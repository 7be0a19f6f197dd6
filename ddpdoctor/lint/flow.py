"""Find the assignments of a name that a read of it may see."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from ddpdoctor.core.syntax import LOOPS

_BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def reaching(
    parents: Callable[[ast.AST], ast.AST | None], scope: ast.AST, read: ast.AST, sets: set[ast.stmt]
) -> tuple[set[ast.stmt], bool]:
    """Return the statements whose value a read may see, and whether one of them always runs before.

    Args:
        parents: Returns the node around a node.
        scope: The function or module of the name.
        read: The expression that reads the name.
        sets: The statements of the scope that set it.
    """
    found: set[ast.stmt] = set()
    inner = read
    holders: set[ast.AST] = set()
    for each in sets:
        node: ast.AST | None = each
        while node is not None and node not in holders:
            holders.add(node)
            node = parents(node)
    while inner is not scope:
        outer = parents(inner)
        if outer is None:
            break
        for name in _BLOCKS:
            block = getattr(outer, name, None)
            if not isinstance(block, list) or inner not in block:
                continue
            for each in reversed(block[: block.index(inner)]):
                if each not in holders:
                    continue
                found |= lasting(each, sets)
                if _always_sets(each, sets):
                    return found, True
            if isinstance(outer, ast.Try) and name != "body":
                found |= lasting(outer, sets)
            elif isinstance(outer, LOOPS):
                # The previous round, and a `for` sets its target before each.
                found |= lasting(outer, sets)
                if name == "body" and outer in sets:
                    return found, True
        inner = outer
    return found, False


def lasting(node: ast.AST, sets: set[ast.stmt], leaves: bool = False) -> set[ast.stmt]:
    """Return the statements in a node whose value lasts to its end.

    Args:
        node: The node.
        sets: The statements that set the name.
        leaves: Keep those in branches that leave the node.
    """
    blocks: list[Sequence[ast.AST]] = [getattr(node, name, ()) for name in _BLOCKS]
    if isinstance(node, ast.If) and not leaves:
        blocks = [each for each in (node.body, node.orelse) if not _leaves(each)]
    found = {node} & sets if isinstance(node, ast.stmt) else set()
    for block in blocks:
        for each in reversed(block):
            found |= lasting(each, sets, leaves)
            always = isinstance(each, ast.stmt) and _always_sets(each, sets)
            if always and not isinstance(node, ast.Try):
                break
    return found


def _leaves(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], _LEAVING)


def _always_sets(node: ast.stmt, sets: set[ast.stmt]) -> bool:
    """Return whether a statement sets the name whenever it runs to its end."""
    if isinstance(node, ast.If):
        return all(
            _leaves(block) or any(_always_sets(each, sets) for each in block)
            for block in (node.body, node.orelse)
        )
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return node in sets or any(_always_sets(each, sets) for each in node.body)
    return node in sets and not isinstance(node, LOOPS)
