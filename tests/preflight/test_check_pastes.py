"""Whatever a check warns of ends in a line that can be typed: read from the sources of them all.

A line that changes something is run by a test, which then finds the check green.
"""

from __future__ import annotations

import ast
import re
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

SHOWS = re.compile(
    r"(sudo )?(ls|df|cat|ss|getent|find|findmnt|ps|sha256sum|grep|mount \\||dmesg|git diff|pip list"
    r"|ip (-s|-brief|route get|(link|address) show)|nvidia-smi (-q|--query|nvlink)"
    r"|python(3)? (-m (py_compile|\\{\\} --help)|-c)|mount$|line$|paste$|ADDRESSES|DRIVER"
    r"|SHARED_ADDRESS_PASTE)"
)
"""Lines that show what is wrong, where only the user knows what to change."""

RUN = {
    "EXPORT": "test_the_end_at_fault_is_named_and_its_line_repairs",
    "check_line()": "test_options_that_differ",
    'echo "$(hostname -I | cut -d " " -f 1)" {}': "test_a_name_that_a_node_does_not_know",
    "export GLOO_SOCKET_IFNAME={}": "test_ipv6_on_one_node_alone",
    "export {}={}": "test_a_variable_that_differs",
    "export_line()": "test_an_old_line_of_the_own_name",
    "export MASTER_ADDR={}": "test_the_line_repairs",
    "export MASTER_PORT={}": "test_the_line_repairs",
    "git checkout {}": "test_another_commit",
    "hosts_line()": "test_an_old_line_of_the_own_name",
    "let_through()": "test_a_firewall_of_the_machine",
    "mkdir -p {}": "test_a_checkpoint_folder_that_is_not_there",
    "open_port()": "test_a_firewall_of_the_machine",
    "sudo ip link set dev {} mtu {}": "test_packets_that_are_too_large",
    "sudo ip link set dev {} up": "test_a_chosen_interface_that_is_down_at_the_other_end",
    "UP": "test_a_chosen_interface_that_is_down_at_the_other_end",
    "ulimit -n 65536": "test_the_line_repairs",
    "ulimit -n {}": "test_the_line_repairs",
    "unset {}": "test_a_variable_that_differs",
    "unset RANK": "test_the_line_repairs",
    "NUMBERS[name]": "test_the_line_repairs",
    "NUMBERS['MASTER_PORT']": "test_the_line_repairs",
    "NUMBERS['RANK']": "test_the_line_repairs",
    "unset {} {}": "test_the_line_repairs",
}
"""The lines that repair, and the test that types each."""

NOT_RUN = {
    "it changes the machine that runs the tests": (
        "sudo timedatectl set-ntp true || sudo chronyc makestep", "sudo reboot",
        "sudo sysctl -w net.ipv4.neigh.default.gc_thresh1={} "
        "net.ipv4.neigh.default.gc_thresh2={} net.ipv4.neigh.default.gc_thresh3={}",
        "sudo tee -a /etc/security/limits.conf", "ulimit -l unlimited", "ulimit -u unlimited",
        "ulimit {} unlimited", "sudo mount -", "sed -i {{}} {{}}", "export OMP_NUM_THREADS={}",
    ),
    "a package index": (
        "pip install", "python{} -m venv venv", "pip uninstall",
    ),
    "a GPU": (
        "nvidia-smi -i", "nvidia-smi --gpu-reset", "modprobe nvidia", "nvidia-fabricmanager",
        "CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "run --gpus all",
    ),
    "a container or a launcher starts anew": (
        "#SBATCH", "{} run --", "mpirun", "volumes: [", "container_run_line()",
    ),
    "it makes torch or the check say more": (
        "NCCL_DEBUG", "TORCH_CPP_LOG_LEVEL", "OWN_WORDS", "GLOO_MESSAGES", "check --soak",
    ),
    "its own test runs it": (
        "--kill-orphans", "PYTHONPATH={}", "corrected_line()", "line_on_node_0()",
    ),
}  # fmt: skip
"""The lines that no test types as they are, by what that would need; each by a part of it."""

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

    def lines(self) -> set[str]:
        """The lines of all findings, with places for values; ``name()`` of other modules' ones."""
        return {
            line
            for maker in MAKERS
            for function, call in self.calls(maker)
            for leaf in self._leaves(_given(call, "paste", None), function)
            for line in self._texts(leaf)
        }

    def _texts(self, leaf: ast.expr | None) -> Iterator[str]:
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
            yield leaf.value
        elif isinstance(leaf, ast.Call) and _name(leaf.func) == "typed":
            yield from self._texts(leaf.args[0])
        elif isinstance(leaf, ast.Call):
            yield f"{ast.unparse(leaf.func).rpartition('.')[2]}()"
        elif leaf is not None:
            yield ast.unparse(leaf).rpartition(".")[2]

    def _lacks(self, value: ast.expr | None, function: Function | None) -> Iterator[str]:
        """Why an expression may be no line; nothing where it always is one."""
        for leaf in self._leaves(value, function):
            if leaf is None:
                yield "no paste"
            elif isinstance(leaf, ast.Constant):
                if not isinstance(leaf.value, str) or not leaf.value.strip():
                    yield f"an empty line, from line {leaf.lineno}"
                elif _is_comment(leaf.value):
                    yield "a comment alone"
            elif isinstance(leaf, ast.JoinedStr):
                yield "an f-string, whose values are not quoted: typed() does that"

    def _leaves(
        self, value: ast.expr | None, function: Function | None
    ) -> Iterator[ast.expr | None]:
        """What an expression may be: each constant, and each call of another module."""
        if isinstance(value, ast.IfExp):
            yield from self._leaves(value.body, function)
            yield from self._leaves(value.orelse, function)
        elif isinstance(value, ast.BoolOp):
            yield from self._leaves(value.values[-1], function)
        elif isinstance(value, ast.Name) and function is not None:
            found = list(self._named(value.id, function))
            yield from found or [value]
        elif isinstance(value, ast.Call) and self._defines(_name(value.func)):
            for called in self.functions:
                if called.name == _name(value.func):
                    for node in ast.walk(called):
                        if isinstance(node, ast.Return):
                            yield from self._leaves(node.value, called)
        else:
            yield value

    def _defines(self, name: str) -> bool:
        return any(called.name == name for called in self.functions)

    def _named(self, name: str, function: Function) -> Iterator[ast.expr | None]:
        """The same of a variable: what it is assigned, or what the function is called with."""
        if (name, function.lineno) in self._asked:
            return
        self._asked.append((name, function.lineno))
        yield from self._values(name, function)
        self._asked.pop()

    def _values(self, name: str, function: Function) -> Iterator[ast.expr | None]:
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
                yield from self._leaves(default if given is None else given, caller)

    def _assigned(
        self, name: str, target: ast.expr, value: ast.expr, function: Function
    ) -> Iterator[ast.expr | None]:
        if isinstance(target, ast.Name) and target.id == name:
            yield from self._leaves(value, function)
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


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT)))
def test_every_line_that_repairs_is_run_by_a_test(source: Path) -> None:
    parts = [part for parts in NOT_RUN.values() for part in parts]
    for line in Module(source.read_text()).lines():
        known = line in RUN or SHOWS.match(line) or any(part in line for part in parts)
        assert known, f"{line!r}: run it in the lab, and see the check green after it"


def test_those_tests_are_there() -> None:
    tests = (ROOT / "tests").rglob("test_*.py")
    there = {name for test in tests for name in re.findall(r"def (test_\w+)", test.read_text())}
    assert not set(RUN.values()) - there


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
