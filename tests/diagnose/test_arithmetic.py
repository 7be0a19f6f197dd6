"""Which line of the job's own arithmetic does an operation."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_operations import operation_lines

LOOP = """\
def train():
    for batch in loader:
        scale = 1 / len(batch)
        out = model(batch)
        loss = out.mean()
        loss = loss * weight
        loss.backward()
        total = loss * 2
"""


def named(path: Path, text: str, operation: str, forward: int, backward: int) -> list[int]:
    path.write_text(text)
    sites = Location(str(path), forward), Location(str(path), backward)
    return [each.line for each in operation_lines([operation], *sites)]


@pytest.mark.parametrize(
    ("operation", "lines"), [("mul", [6]), ("mean", [5]), ("div", []), ("log", [])]
)
def test_between_forward_and_backward(tmp_path: Path, operation: str, lines: list[int]) -> None:
    assert named(tmp_path / "train.py", LOOP, operation, 4, 7) == lines


def test_a_loss_of_a_function_of_its_own(tmp_path: Path) -> None:
    text = (
        "def compute(model, batch):\n    out = model(batch)\n    return out.log()\n\n\n"
        "def step(batch):\n    loss = compute(model, batch)\n    loss /= steps\n"
        "    loss.backward()\n"
    )
    path = tmp_path / "train.py"
    assert named(path, text, "log", 2, 9) == [3]
    assert named(path, text, "div", 2, 9) == [8]


def test_what_cannot_be_read_has_no_lines(tmp_path: Path) -> None:
    missing = Location(str(tmp_path / "gone.py"), 3)
    assert operation_lines(["mul"], missing, None) == []
    assert named(tmp_path / "train.py", "def broken(:\n", "mul", 1, 1) == []


TWICE = """\
def train():
    for batch in loader:
        loss = model(batch).mean()
        loss = loss * weight
        if rank == 1:
            loss = loss * float("nan")
        loss = loss * scale
        loss.backward()
"""


@pytest.mark.parametrize(
    ("order", "constant", "lines"),
    [
        ((0, 3), False, [4]),
        ((1, 3), True, [6]),
        ((2, 3), True, [7]),
        # On a rank that did not take the branch, or with one of the model's own among them.
        ((0, 2), False, [4, 6, 7]),
        ((0, 4), False, [4, 6, 7]),
        (None, False, [4, 6, 7]),
        (None, True, [6]),
    ],
)
def test_one_of_several_lines(
    tmp_path: Path, order: tuple[int, int] | None, constant: bool, lines: list[int]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(TWICE)
    sites = Location(str(path), 3), Location(str(path), 8)
    found = operation_lines(["mul"], *sites, order, constant=constant)
    assert [each.line for each in found] == lines
