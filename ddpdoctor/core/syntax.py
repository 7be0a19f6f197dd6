"""Syntax trees of Python files: what a node is called, and what is around and inside of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
LEAVING = (ast.Return, ast.Break, ast.Continue)
NESTED = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
"""Nodes whose content is not part of the block around them."""

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
Loop: TypeAlias = "ast.For | ast.AsyncFor | ast.While"

_PLAIN_FIELDS = frozenset(
    (
        *("ctx", "op", "ops", "id", "attr", "arg", "asname", "conversion", "is_async", "kind"),
        *("level", "module", "simple", "type_comment", "type_ignores", "rest"),
    )
)
"""Fields without children. Operators and contexts are nodes that all trees share."""

_FIELDS = {
    kind: tuple(each for each in kind._fields if each not in _PLAIN_FIELDS)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
} | {ast.Constant: ()}
"""The fields of each type of node that may hold children."""


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name, ``c`` of ``a.b.c``; empty for anything else."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def parts(node: ast.AST) -> list[ast.AST]:
    """Return the children of a node, except operators, contexts, and code that never runs."""
    found: list[ast.AST] = []
    fields = _FIELDS[type(node)]
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and not node.test.value:
        fields = ("test", "orelse")
    for name in fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            found += [each for each in value if isinstance(each, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes in it, outer ones first."""
    found = [node]
    for each in found:
        found += parts(each)
    return found


class Tree:
    """The nodes of a file, outer ones first, and what is around each of them."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes: list[ast.AST] = [tree]
        self.parents: dict[ast.AST, ast.AST] = {}
        self._children: dict[ast.AST, list[ast.AST]] = {}
        self._inside: dict[ast.AST, list[ast.AST]] = {}
        # The list grows during the loop: children are appended to it.
        for node in self.nodes:
            children = self._children[node] = parts(node)
            for child in children:
                self.parents[child] = node
            self.nodes += children

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what encloses a node, innermost first."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)

    def below(self, node: ast.AST) -> list[ast.AST]:
        """Return a node and all nodes in it, outer ones first."""
        found = [node]
        for each in found:
            found += self._children[each]
        return found

    def within(self, node: ast.AST) -> list[ast.AST]:
        """Return the nodes of a block in order, without what nested functions and classes hold."""
        known = self._inside.get(node)
        if known is None:
            known = self._inside[node] = []
            stack = self._children[node][::-1]
            while stack:
                child = stack.pop()
                known.append(child)
                if not isinstance(child, NESTED):
                    stack += self._children[child][::-1]
        return known

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops of a function around a node, innermost first."""
        found: list[Loop] = []
        inner = node
        for each in self.above(node):
            if isinstance(each, NESTED):
                break
            if isinstance(each, LOOPS) and inner in each.body:
                found.append(each)
            inner = each
        return found
