"""Whatever a check warns of ends in a line that can be typed: read from the sources of them all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpdoctor.preflight
from tests.conftest import ROOT

MAKERS = ("failure", "warning", "finding")
"""The functions of `ddpdoctor.preflight.check` that make a finding above information."""

SOURCES = sorted(
    source
    for source in Path(ddpdoctor.preflight.__file__).parent.rglob("*.py")
    if any(f"{maker}(" in source.read_text() for maker in MAKERS) and source.name != "check.py"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """A source file, and where in it findings are made."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, Function)]
        self._asked: list[tuple[str, int]] = []
        """The variables that are being looked into: one may be assigned from itself."""

    def faults(self) -> list[tuple[int, str]]:
        """The findings above information that may come without such a line: where, and why."""
        return [
            (call.lineno, why)
            for maker in MAKERS
            for function, call in self.calls(maker)
            for why in self._lacks(_given(call, "paste", None), function)
        ]

    def calls(self, name: str) -> Iterator[tuple[Function | None, ast.Call]]:
        """The calls of a name, with the innermost function around each."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and _name(node.func) == name:
                around = [each for each in self.functions if node in ast.walk(each)]
                yield (max(around, key=lambda each: each.lineno) if around else None), node

    def _lacks(self, value: ast.expr | None, function: Function | None) -> Iterator[str]:
        """Why an expression may be no line; nothing where it always is one."""
        if value is None:
            yield "no paste"
        elif isinstance(value, ast.Constant):
            if not isinstance(value.value, str) or not value.value.strip():
                yield f"an empty line, from line {value.lineno}"
            elif _is_comment(value.value):
                yield "a comment alone"
        elif isinstance(value, ast.JoinedStr):
            yield "an f-string, whose values are not quoted: typed() does that"
        elif isinstance(value, ast.IfExp):
            yield from self._lacks(value.body, function)
            yield from self._lacks(value.orelse, function)
        elif isinstance(value, ast.BoolOp):
            yield from self._lacks(value.values[-1], function)
        elif isinstance(value, ast.Name) and function is not None:
            yield from self._named(value.id, function)
        elif isinstance(value, ast.Call):
            for called in self.functions:
                if called.name == _name(value.func):
                    for node in ast.walk(called):
                        if isinstance(node, ast.Return):
                            yield from self._lacks(node.value, called)

    def _named(self, name: str, function: Function) -> Iterator[str]:
        """The same of a variable: what it is assigned, or what the function is called with."""
        if (name, function.lineno) in self._asked:
            return
        self._asked.append((name, function.lineno))
        yield from self._values(name, function)
        self._asked.pop()

    def _values(self, name: str, function: Function) -> Iterator[str]:
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from self._assigned(name, target, node.value, function)
        listed = function.args.posonlyargs + function.args.args
        names = [each.arg for each in listed]
        if name in names:
            place = names.index(name)
            behind = len(listed) - place
            defaults = function.args.defaults
            default = defaults[-behind] if behind <= len(defaults) else None
            for caller, call in self.calls(function.name):
                given = _given(call, name, place)
                yield from self._lacks(default if given is None else given, caller)

    def _assigned(
        self, name: str, target: ast.expr, value: ast.expr, function: Function
    ) -> Iterator[str]:
        if isinstance(target, ast.Name) and target.id == name:
            yield from self._lacks(value, function)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, part in zip(target.elts, value.elts, strict=True):
                yield from self._assigned(name, each, part, function)


def _given(call: ast.Call, name: str, place: int | None) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if place is not None and place < len(call.args):
        return call.args[place]
    return None


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else ""


def _is_comment(line: str) -> bool:
    """Whether a shell and Slurm, whose options are comments of a batch script, take no notice."""
    return line.lstrip().startswith("#") and not line.startswith("#SBATCH --")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_every_warning_and_every_error_ends_in_a_line_to_type(source: Path) -> None:
    assert Module(source.read_text()).faults() == []


@pytest.mark.parametrize(
    "text",
    [
        "failure('x', fix='y')",
        "failure('x', paste='')",
        "warning('x', paste='  # look at it')",
        "warning('x', paste=f'ls {it}')",
        "finding(severity, 'x', paste='ls' if a else '')",
        "def f(a):\n    line = 'ls'\n    if a:\n        line = ''\n    failure('x', paste=line)",
        "def f(a):\n    fix, line = 'y', ''\n    failure('x', paste=line)",
        "def f(a, paste=''):\n    failure('x', paste=paste)\nf(1)",
        "def f(a, paste):\n    failure('x', paste=paste)\nf(1, '')",
        "def g():\n    return ''\nfailure('x', paste=g())",
    ],
)
def test_a_finding_without_such_a_line_is_found(text: str) -> None:
    assert Module(text).faults()


@pytest.mark.parametrize(
    "text",
    [
        "note('x')",
        "failure('x', paste=typed('{} -x', tool))",
        "def f(a, paste=''):\n    failure('x', paste=paste)\nf(1, 'ls')",
    ],
)
def test_a_finding_with_one_is_left_alone(text: str) -> None:
    assert not Module(text).faults()
