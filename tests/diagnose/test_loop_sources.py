"""Conditions on the rank, endless loops and sleeps, as the source shows them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose import source_files
from ddpdoctor.diagnose.rank_conditions import guards_of, rank_guard, ranks_at
from ddpdoctor.diagnose.source_files import constant_while, only_sleeps, statement

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
        ("while True:\n    return", False),
        ("while True:\n    raise Late", False),
        ("while True:\n    yield x", False),
        ("while not done[0]:\n    x()", False),
        ("while done < 3:\n    other = x()", True),
        ("while done < 3:\n    done += 1", False),
    ],
)
def test_loops_that_cannot_end(tmp_path: Path, loop: str, endless: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(loop + "\n")
    assert constant_while(str(path), 2) == (1 if endless else None)


def test_the_innermost_loop_that_cannot_end(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("while True:\n    x()\n    while True:\n        y()\n    z()\nlast()\n")
    found = {line: constant_while(str(path), line) for line in range(1, 7)}
    assert found == {1: 1, 2: 1, 3: 3, 4: 3, 5: 1, 6: None}
    assert constant_while("/nowhere/train.py", 2) is None


BRANCHES = """\
if rank == 0:
    first()
else:
    others()
if local_rank < 2:
    local()
elif rank == 3:
    third()
if step == 5:
    everyone()
if rank in (0, 2):
    some()
if rank not in [0]:
    rest()
if rank == 0 or rank == 3:
    ends()
if rank > 0 and not rank == 3:
    inner()
"""


@pytest.mark.parametrize(
    ("line", "one_node", "ranks"),
    [
        (2, True, (0,)),
        (4, True, (1, 2, 3)),
        (6, True, (0, 1)),
        (6, False, ()),
        (8, True, (3,)),
        (8, False, (3,)),
        (10, True, ()),
        (12, True, (0, 2)),
        (14, True, (1, 2, 3)),
        (16, True, (0, 3)),
        (18, True, (1, 2)),
        (1, True, ()),
    ],
)
def test_the_ranks_that_may_run_a_line(
    tmp_path: Path, line: int, one_node: bool, ranks: tuple[int, ...]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(BRANCHES)
    assert ranks_at(str(path), line, 4, one_node=one_node) == ranks


def test_the_source_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("one()\n  two()\n")
    assert [statement(str(path), line) for line in (0, 1, 2, 3)] == ["", "one()", "two()", ""]
    assert statement("/nowhere/train.py", 1) == ""


GUARDED = """\
rank == 0 and barrier()
barrier() if rank == 0 else None
match rank:
    case 0:
        barrier()
    case _:
        work()
@rank_zero_only
def log(x):
    barrier()
for x in loader:
    if rank != 0:
        continue
    barrier()
for x in loader:
    if rank != 0 and x:
        continue
    barrier()
while True:
    if rank != 0:
        break
    barrier()
if barrier(rank):
    barrier()
"""


def test_what_a_condition_on_the_rank_decides_on(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(GUARDED)
    found = {line: rank_guard(str(path), line) for line in range(1, 25)}
    assert {line: guard for line, guard in found.items() if guard is not None} == {
        1: 1, 2: 2, 5: 4, 7: 6, 10: 8, 13: 12, 14: 12, 17: 16, 21: 20, 22: 20, 24: 23,
    }  # fmt: skip
    (guard, at), *_ = guards_of([Location(str(path), 14)])
    assert (guard.way, at.line) == ("continue", 14)


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


def test_the_files_that_a_script_imports_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("train.py", "helper.py", "package/__init__.py", "package/inner.py", "other.py"):
        (tmp_path / name).write_text("")
    train, inner = tmp_path / "train.py", package / "inner.py"
    train.write_text("import torch, helper\nfrom package import inner, missing\n")
    inner.write_text("from . import helper\nimport other\n")

    def found(path: Path) -> set[str]:
        each = source_files.imported_files(str(path))
        return {str(Path(file).relative_to(tmp_path)) for file in each}

    assert found(train) == {"helper.py", "package/__init__.py", "package/inner.py"}
    assert found(inner) == {"helper.py", "other.py"}
    assert source_files.modified_at(str(tmp_path / "gone.py")) == 0
    assert found(tmp_path / "gone.py") == set()


@pytest.mark.parametrize(
    ("loop", "fixed", "exhausted"),
    [
        ("for step in range(10):\n    train()\n", True, False),
        ("for step in range(STEPS):\n    train()\n", True, False),
        ("for step in range(len(files)):\n    train()\n", False, False),
        ("for step in range(10):\n    if train():\n        break\n", False, False),
        ("for step in range(10):\n    if train():\n        raise Enough\n", False, False),
        ("while (batch := next(batches, None)) is not None:\n    train(batch)\n", False, True),
        ("while loss > 1:\n    train()\n", False, False),
    ],
)
def test_loops_that_ranks_may_leave_apart(loop: str, fixed: bool, exhausted: bool) -> None:
    source = source_files.Source(ast.parse(loop))
    (found,) = source.around(2)
    assert source.has_fixed_length(found) == fixed
    assert source.is_exhausted(found) == exhausted


def test_a_break_at_the_end_of_an_iterator() -> None:
    source = source_files.Source(
        ast.parse(
            "while True:\n"
            "    try:\n"
            "        batch = next(batches)\n"
            "    except StopIteration:\n"
            "        break\n"
            "    if train(batch):\n"
            "        break\n"
        )
    )
    (loop,) = source.around(3)
    assert [source.is_exhausted(each) for each in source.exits(loop)] == [True, False]
