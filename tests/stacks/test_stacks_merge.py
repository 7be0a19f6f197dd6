"""Stacks of all ranks merged into one tree, as text and JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.core.formatting import bracketed
from ddpdoctor.render import stack_text as render
from ddpdoctor.render.terminal import Line
from ddpdoctor.run.records.base import document
from ddpdoctor.run.records.supervisor import (
    MAIN,
    ChildState,
    Frame,
    ProcessState,
    RankStacks,
    Thread,
)
from ddpdoctor.stacks import capture, frames
from ddpdoctor.stacks.frames import (
    FOLDED,
    code_of,
    fold,
    innermost,
    merge,
    stacks_from_record,
    tail,
)

TORCH = "/srv/env/lib/python3.12/site-packages/torch"


@pytest.fixture
def spied() -> None:
    """For a test in which py-spy looks, if it is installed."""


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere nobody looks into a process that does not answer."""
    if "spied" not in request.fixturenames:
        monkeypatch.setattr(capture, "find_py_spy", lambda: None)


TRAIN = Frame("/job/train.py", 40, "main")
STEP = Frame("/job/train.py", 12, "step")
SAVE = Frame("/job/train.py", 20, "save")
CALL = Frame(f"{TORCH}/nn/modules/module.py", 1700, "_call_impl")
HOOK = Frame("/srv/ddpdoctor/probe/hooks/collectives.py", 100, "collective")
REDUCE = Frame(f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce")
RUNNER = Frame("<frozen runpy>", 88, "_run_code")


def test_libraries_are_folded_and_our_hooks_are_nobodys_business() -> None:
    stack = (RUNNER, TRAIN, CALL, STEP, HOOK, CALL, REDUCE, HOOK)
    assert fold(stack) == (TRAIN, Frame("torch", 0, FOLDED), STEP)
    assert tail(stack) == (CALL, REDUCE)
    assert innermost(stack) == STEP
    assert fold((RUNNER, CALL)) == (RUNNER, CALL)
    assert innermost((RUNNER, CALL)) is None


# -- merging


def stacks_of(rank: int, *frames: Frame, trouble: str = "") -> RankStacks:
    threads = (Thread(1, MAIN, False, frames),) if frames else ()
    return RankStacks(rank, 0, 100 + rank, "node0", threads, trouble=trouble)


def test_equal_frames_stand_once_and_the_odd_one_comes_first() -> None:
    ranks = [stacks_of(rank, TRAIN, STEP, REDUCE) for rank in (0, 1, 3)]
    merged = merge([*ranks, stacks_of(2, TRAIN, SAVE)])
    (root,) = merged.roots
    assert (root.ranks, root.frames, root.odd) == ((0, 1, 2, 3), (TRAIN,), False)
    odd, most = root.children
    assert (odd.ranks, odd.frames, odd.odd) == ((2,), (SAVE,), True)
    assert (most.ranks, most.frames, most.odd) == ((0, 1, 3), (STEP, REDUCE), False)
    assert (set(merged.odd), merged.places) == ({2}, 2)


def test_nobody_is_odd_in_a_tie_or_for_what_a_library_does() -> None:
    tie = merge([stacks_of(0, TRAIN, STEP), stacks_of(1, TRAIN, SAVE)])
    assert (tie.odd, tie.places) == (frozenset(), 2)
    below = merge(
        [stacks_of(0, TRAIN, CALL), stacks_of(1, TRAIN, REDUCE), stacks_of(2, TRAIN, REDUCE)]
    )
    assert (below.odd, below.places) == (frozenset(), 1)


def test_a_rank_may_end_where_others_go_on() -> None:
    (root,) = merge([stacks_of(0, TRAIN), stacks_of(1, TRAIN, STEP)]).roots
    assert root.ranks == (0, 1)
    assert [child.ranks for child in root.children] == [(1,)]


def test_ranks_without_a_stack_stand_alone() -> None:
    merged = merge([stacks_of(0, TRAIN), stacks_of(1, trouble="has ended")])
    assert [each.rank for each in merged.missing] == [1]
    assert merged.roots[0].ranks == (0,)
    assert merge([]).roots == ()


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "[0]"), ([3, 0, 2, 4, 4], "[0,2-4]"), (range(8), "[0-7]")]
)
def test_rank_sets(ranks: Sequence[int], text: str) -> None:
    assert bracketed(ranks) == text


def test_a_thousand_ranks_become_a_few_lines() -> None:
    ranks = [
        stacks_of(rank, RUNNER, TRAIN, *[CALL] * 60, SAVE if rank == 700 else STEP, REDUCE)
        for rank in range(1024)
    ]
    lines = render.draw(ranks, render.StackStyle(), {})
    assert len(lines) < 12
    assert "! [700]" in "\n".join(plain(lines))


# -- as text


def plain(lines: Sequence[Line]) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def test_the_tree_as_text_in_80_columns_of_ascii() -> None:
    ranks = [stacks_of(rank, RUNNER, TRAIN, STEP, HOOK, REDUCE) for rank in (0, 1, 3)]
    ranks += [stacks_of(2, RUNNER, TRAIN, SAVE), stacks_of(4, trouble="stopped (SIGSTOP)")]
    code = {STEP: "loss.backward()" + " # and so on" * 9, TRAIN: "main()"}
    look = render.StackStyle(80, ascii_only=True)
    assert plain(render.draw(ranks, look, code)) == [
        "x [4]  no stack: stopped (SIGSTOP)",
        "[0-3]",
        "  /job/train.py:40  main  main()",
        "  ! [2]  not where the other 3 are",
        "    /job/train.py:20  save",
        "  [0-1,3]",
        "    /job/train.py:12  step  loss.backward() # and so on # and so on # and so...",
        "    ... 1 frame in torch, in all_reduce (distributed_c10d.py:3252)",
    ]
    assert render.stacks_summary(merge(ranks)) == "4 of 5 ranks: [2] is not where the other 3 are"


def test_a_long_path_keeps_its_end_and_every_line_fits() -> None:
    deep = Frame("/srv/" + "very/" * 30 + "deep/train.py", 7, "main")
    for width in (40, 80, 120):
        look = render.StackStyle(width, ascii_only=True)
        lines = plain(render.draw([stacks_of(0, deep)], look, {deep: "main()"}))
        assert all(len(line) <= width for line in lines)
        assert "deep/train.py:7" in lines[1]


def test_the_state_of_a_process_is_said_where_it_matters() -> None:
    ranks = [
        replace(stacks_of(0, TRAIN, SAVE), state=ProcessState("D")),
        replace(stacks_of(1, TRAIN, STEP), gil_held=True),
        stacks_of(2, TRAIN, STEP),
    ]
    lines = plain(render.draw(ranks, render.StackStyle(ascii_only=True), {}))
    assert "  ! [0]  not where the other 2 are  in disk sleep" in lines
    assert "  [1-2]  [1] in native code that holds the GIL" in lines


def test_what_is_below_differs_by_rank() -> None:
    ranks = [stacks_of(0, TRAIN, REDUCE), stacks_of(1, TRAIN, CALL), stacks_of(2, TRAIN, REDUCE)]
    assert plain(render.draw(ranks, render.StackStyle(ascii_only=True), {}))[2:] == [
        "  [0,2] ... 1 frame in torch, in all_reduce (distributed_c10d.py:3252)",
        "  [1] ... 1 frame in torch, in _call_impl (module.py:1700)",
    ]


def test_code_is_not_shown_of_a_file_that_was_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\nloss.backward()\n")
    frame = Frame(str(path), 2, "f")
    beyond = Frame(str(path), 20, "f")
    later = time.time_ns() + 10**9
    assert code_of([frame, beyond, CALL], later) == {frame: "loss.backward()"}
    assert code_of([frame], path.stat().st_mtime_ns - 1) == {}


# -- as JSON


def test_json_and_back() -> None:
    child = ChildState(7, "S", 0.5, "python train.py")
    one = RankStacks(
        3, 1, 44, "node1", (Thread(9, MAIN, False, (TRAIN, STEP)),), ("poll (libc.so.6)",),
        ProcessState("D", 1.5, "futex", (child,)), True, "", "no native frames",
    )  # fmt: skip
    assert stacks_from_record(json.loads(json.dumps(document(one)))) == one


@pytest.mark.parametrize("damaged", [{}, {"threads": 3, "state": [], "native": {}, "rank": "x"}])
def test_damaged_json_is_read_as_far_as_it_goes(damaged: dict[str, object]) -> None:
    assert stacks_from_record(damaged).threads == ()


def test_the_last_stacks_are_kept(tmp_path: Path) -> None:
    assert frames.load_stacks(tmp_path) is None
    ranks = (stacks_of(0, TRAIN), stacks_of(1, trouble="has ended"))
    frames.save_stacks(tmp_path, ranks, 5)
    assert frames.load_stacks(tmp_path) == frames.Saved(5, ranks)
    (tmp_path / frames.STACKS_FILE).write_text('{"ranks": [3]}')
    assert frames.load_stacks(tmp_path) is None
