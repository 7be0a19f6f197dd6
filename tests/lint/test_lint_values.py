"""Rules find the same when values come through helpers, objects and other files."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.lint import check, files
from tests.lint.test_lint_rules import CASES

_MADE = ("DDP", "DistributedDataParallel", "DataLoader", "DistributedSampler")
_NESTED = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.Global, ast.ListComp, ast.GeneratorExp)


def found(*sources: str) -> Counter[str]:
    """Return the codes of warnings and errors in a script and the file that it imports."""
    names = ("train.py", "helpers.py")
    read = [files.parse(name, each.encode()) for name, each in zip(names, sources, strict=False)]
    return Counter(each.code for each in check.check(read) if each.severity > Severity.INFO)


def names(node: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, kind)}


def parameters(function: ast.FunctionDef) -> set[str]:
    return {each.arg for each in function.args.args}


def is_simple(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and not any(
        isinstance(each, _NESTED) for part in node.body for each in ast.walk(part)
    )


def above_all(tree: ast.Module, new: list[ast.stmt]) -> ast.Module:
    """Insert functions below the imports."""
    imports = [
        at for at, each in enumerate(tree.body) if isinstance(each, (ast.Import, ast.ImportFrom))
    ]
    at = max(imports, default=-1) + 1
    tree.body[at:at] = new
    return tree


def through_helpers(tree: ast.Module) -> list[ast.Module]:
    """Let a function make each wrapper, loader and sampler, and return it."""
    made: list[ast.stmt] = []
    for function in filter(is_simple, ast.walk(tree)):
        assert isinstance(function, ast.FunctionDef)
        local = parameters(function) | names(function, ast.Store)
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            call = node.value
            if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] not in _MADE:
                continue
            passed = ", ".join(sorted(names(call, ast.Load) & local - {"self"}))
            if "self" in names(call, ast.Load):
                continue
            name = f"build{len(made)}"
            made += ast.parse(f"def {name}({passed}):\n    return {ast.unparse(call)}\n").body
            node.value = ast.parse(f"{name}({passed})", mode="eval").body
    return [above_all(tree, made)]


class _Attributes(ast.NodeTransformer):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        own = ast.Name("state", ast.Load())
        return ast.Attribute(own, node.id, node.ctx) if node.id in self.names else node


def in_an_object(tree: ast.Module) -> list[ast.Module]:
    """Keep what calls of a function return in an object: ``state.model = DDP(net)``."""
    for function in filter(is_simple, list(tree.body)):
        assert isinstance(function, ast.FunctionDef)
        inside = [one for each in ast.walk(function) if isinstance(each, ast.For) for one in [each]]
        local = {name for each in inside for name in names(each, ast.Store)}
        calls = {
            target.id
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        change = _Attributes(calls - local - parameters(function))
        function.body = [*ast.parse("state = make_state()").body, *map(change.visit, function.body)]
    return [tree]


class _Guards(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        text, is_equal = ast.unparse(node.left), isinstance(node.ops[0], ast.Eq)
        if "rank" not in text or not (is_equal or isinstance(node.ops[0], ast.NotEq)):
            return node
        if ast.unparse(node.comparators[0]) != "0":
            return node
        return ast.parse(f"{'' if is_equal else 'not '}first({text})", mode="eval").body


_FIRST = "def first(number):\n    if number != 0:\n        return False\n    return True\n"


def behind_a_function(tree: ast.Module) -> list[ast.Module]:
    """Compare the rank with 0 in a function that gets it."""
    return [above_all(_Guards().visit(tree), ast.parse(_FIRST).body)]


def in_two_files(tree: ast.Module) -> list[ast.Module]:
    """Move all functions and classes but the last one to a file that the script imports."""
    imports = [each for each in tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
    defined = [each for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
    rest = [each for each in tree.body if each not in imports and each not in defined]
    moved = defined if rest else defined[:-1]
    shared = {name for each in rest for name in names(each, ast.Store)}
    if not moved or any(shared & names(each, ast.Load) for each in moved):
        return [tree]
    taken = ast.parse(f"from helpers import {', '.join(each.name for each in moved)}").body
    kept = [each for each in tree.body if each not in imports and each not in moved]
    return [ast.Module([*imports, *taken, *kept], []), ast.Module([*imports, *moved], [])]


LOST = {
    # An attribute may be read, or have been set, elsewhere.
    "in_an_object": {
        "collectives: DDP405: None on the other ranks, in two branches",
        "collectives: DDP405: a writer of rank 0 that all close",
        "data: DDP106: the sampler is another function's, and gets its epochs here",
        "model: DDP315: thrown away",
        "model: DDP962: a model of another file, wrapped only in a distributed job",
    },
    "through_helpers": {
        "launch: DDP213: above the start",
        "model: DDP314: moved after the wrap",
        "model: DDP314: to the CPU and back in the loop",
    },
}
"""Snippets of which a rule finds less than before, by the change."""


@pytest.mark.parametrize("change", [through_helpers, in_an_object, behind_a_function, in_two_files])
def test_values_are_followed(change: Callable[[ast.Module], list[ast.Module]]) -> None:
    lost, wrong = set(), set()
    for name, code in CASES.items():
        before = found(ast.unparse(ast.parse(code)))
        after = found(*map(ast.unparse, change(ast.parse(code))))
        lost |= {name} if before - after else set()
        wrong |= {name} if after - before else set()
    assert not wrong
    assert lost <= LOST.get(change.__name__, set())
