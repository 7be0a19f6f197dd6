"""Whether a rank does the same in one examination after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.diagnose.hangs.process_activity import MIN_STEADY, lasts, with_steadiness
from tests.support.hanging_ranks import NOW, findings, rank, stacks, state, waiting

SCRIPT = """\
def wait(state):
    while not state.done:
        poll(state)
        count(state)
def evaluate(model, loader):
    for batch in loader:
        measure(batch)
        model(batch)
def train():
    while step < 100:
        prepare()
        loss = model(batch)
        loss.backward()
def solve(x):
    while change > 0.1:
        x, change = better(x)
def leave(x):
    while True:
        x = better(x)
        if x.good:
            break
"""
MODULE = ("/lib/python3.11/site-packages/torch/nn/modules/module.py", 7, "_call_impl")


def spins() -> dict[str, Any]:
    return {"activity": {"seconds": 1.0, "letters": "RR", "cpu": 1.0, "busy": 1.0}}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "wait.py"
    path.write_text(SCRIPT)
    return str(path)


Frames = tuple[tuple[str, int, str], ...]


def looked(first: Frames, second: Frames, **more: Any) -> dict[str, Any]:
    """A rank that was at two places within a second, as JSON."""
    given = {"phase": "other", **spins(), **more}
    return rank(1, **given, stacks=stacks(1, *first), later=stacks(1, *second))


def looks(first: Frames, second: Frames, **more: Any) -> RankState:
    return state(looked(first, second, **more))


def steady(before: RankState, now: RankState) -> int:
    """In how many examinations it did the same, after two in which it had been silent for 20 s."""
    known = replace(before.evidence, steady=2, steadied=20.0)
    return with_steadiness(now, replace(before, evidence=known)).steady


def test_the_first_examination_is_one(script: str) -> None:
    one = looks(((script, 3, "wait"),), ((script, 3, "wait"),), lost=11.0)
    found = with_steadiness(one, None)
    assert (found.steady, found.steadied) == (1, 30.0)


@pytest.mark.parametrize(
    ("lines", "below", "expected"),
    [
        # A ``while`` that polls, in a function of its own or not.
        ((3, 3, 3, 3), (), 3),
        ((3, 4, 4, 3), (), 3),
        ((3, 4, 3, 3), ("poll", 7), 3),
        # A loop over something that ends, though it was seen at one line, and that of the training.
        ((7, 7, 7, 7), (), 1),
        ((11, 12, 11, 12), (), 1),
        ((12, 12, 12, 12), (), 1),
        # One that computes until a result is good enough, or leaves by itself.
        ((16, 16, 16, 16), (), 1),
        ((19, 19, 19, 19), (), 1),
        # A ``while`` that calls the model.
        ((3, 3, 3, 3), MODULE, 1),
    ],
)
def test_what_is_the_same_place(
    script: str, lines: tuple[int, int, int, int], below: Any, expected: int
) -> None:
    def frames(number: int) -> Frames:
        here = (script, lines[number], "work")
        if below == MODULE:
            return here, MODULE
        return (here, (script, below[1] + number % 2, below[0])) if below else (here,)

    sites = {"sites": {"forward": f"{script}:12", "backward": f"{script}:13"}}
    before = looks(frames(0), frames(1), **sites)
    assert steady(before, looks(frames(2), frames(3), **sites)) == expected


IDLE: dict[str, Any] = {"activity": {"seconds": 1.0, "letters": "SS", "cpu": 0.0}}


@pytest.mark.parametrize(
    ("line", "later", "more", "expected"),
    [(7, 7, IDLE, 3), (7, 8, IDLE, 1), (7, 7, {"phase": "wait"}, 3), (7, 7, {}, 1)],
)
def test_who_waits_is_at_one_line(
    script: str, line: int, later: int, more: Any, expected: int
) -> None:
    """With NCCL the host may spin there."""
    one, two = (looks(((script, at, "wait"),), (), **more) for at in (line, later))
    assert steady(one, two) == expected


def test_one_that_moved_begins_again(script: str) -> None:
    here = ((script, 3, "wait"),)
    assert steady(looks(here, here), looks(here, here, since=NOW - 5)) == 1
    assert steady(looks(here, here), looks(here, here, pid=7)) == 1


@pytest.mark.parametrize(("lost", "expected"), [(0.0, 3), (10.0, 3), (12.0, 2), (41.0, 2)])
def test_the_time_without_a_core_does_not_count(script: str, lost: float, expected: int) -> None:
    here = ((script, 3, "wait"),)
    assert steady(looks(here, here), looks(here, here, lost=lost)) == expected


def test_without_a_stack_nothing_is_known() -> None:
    bare = state(rank(1, "other", **spins()))
    assert steady(bare, bare) == 1


@pytest.mark.parametrize("moves", ["characters", "disk", "since_children_cpu"])
def test_who_moves_data_gets_on(script: str, moves: str) -> None:
    here = ((script, 3, "wait"),)
    assert lasts(looks(here, here, steady=MIN_STEADY))
    moving = {"activity": {**spins()["activity"], moves: 1 << 24}}
    assert not lasts(looks(here, here, steady=MIN_STEADY, **moving))


@pytest.mark.parametrize(
    ("steadies", "expected"), [((3, 3), Severity.ERROR), ((3, 2), Severity.WARNING)]
)
def test_ranks_that_stay_in_one_collective(
    tmp_path: Path, steadies: tuple[int, int], expected: Severity
) -> None:
    ranks = [{**waiting(number), "steady": each} for number, each in enumerate(steadies)]
    (finding,) = findings(tmp_path, *({**each, "world_size": 2} for each in ranks))
    assert (finding.code, finding.severity) == ("DDP814", expected)


def test_a_rank_that_computes_in_one_loop(tmp_path: Path, script: str) -> None:
    late = looked(((script, 3, "wait"),), ((script, 4, "wait"),), steady=MIN_STEADY, flight=[])
    (finding,) = findings(tmp_path, {**waiting(0), "world_size": 2}, {**late, "world_size": 2})
    assert (finding.code, finding.ranks, finding.severity) == ("DDP802", (1,), Severity.ERROR)
    late["steady"] = MIN_STEADY - 1
    (finding,) = findings(tmp_path, {**waiting(0), "world_size": 2}, {**late, "world_size": 2})
    assert finding.severity is Severity.WARNING
    # Some rank moves: it may be work.
    late["steady"] = MIN_STEADY
    ranks = {**waiting(0), "world_size": 2}, {**late, "world_size": 2}
    (finding,) = findings(tmp_path, *ranks, everybody=False)
    assert finding.severity is Severity.WARNING
