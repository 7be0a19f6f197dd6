"""Conditions on the rank, endless loops and sleeps, as the source shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpdoctor.rules  # noqa: F401 (registers the rules)
from ddpdoctor.analysis.guards import constant_while, only_sleeps, rank_guard

# -- the source


def test_conditions_on_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def save(rank):\n"
        "    if rank == 0:\n"
        "        write()\n"
        "        barrier()\n"
        "    else:\n"
        "        barrier()\n"
        "    barrier()\n"
        "def log(loss):\n"
        "    if not is_main_process():\n"
        "        return\n"
        "    reduce(loss)\n"
        "if step == 5:\n"
        "    barrier()\n"
    )
    lines = range(1, 14)
    assert {line: rank_guard(str(path), line) for line in lines} == {
        **dict.fromkeys(lines),
        **dict.fromkeys((3, 4, 6), 2),
        10: 9,
        11: 9,
    }
    assert rank_guard("/nowhere/train.py", 3) is None


@pytest.mark.parametrize(
    ("loop", "endless"),
    [
        ("while True:\n    x()", True),
        ("while not done:\n    x()", True),
        ("while not done:\n    done = x()", False),
        ("while True:\n    if x(): break", False),
        ("while x():\n    pass", False),
        ("while self.more:\n    pass", False),
        ("for each in x:\n    pass", False),
    ],
)
def test_loops_that_cannot_end(tmp_path: Path, loop: str, endless: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(loop + "\n")
    assert constant_while(str(path), 2) == (1 if endless else None)


@pytest.mark.parametrize(
    ("source", "sleeps"),
    [
        ("time.sleep(5)", True),
        ("for each in x:\n    sleep(5)", True),
        ("while not os.path.exists(x):\n    time.sleep(5)", False),
        ("wait(5)", False),
        ("time.sleep(", False),
    ],
)
def test_a_sleep_that_waits_for_nothing(tmp_path: Path, source: str, sleeps: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(source + "\n")
    assert only_sleeps(str(path), source.count("\n") + 1) is sleeps
