"""The monitor's key ``d``: the stacks of real processes in the real app, and why there are none."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from ddpdoctor.run.records.supervisor import MAIN, Frame, RankStacks, Thread
from ddpdoctor.stacks import frames
from ddpdoctor.top.actions import take_stacks
from ddpdoctor.top.app import TopApp
from tests.support import top_snapshots as made
from tests.support.candidates import HOLDS_GIL, SLEEPS, SPINS, Candidates, line_of
from tests.support.driven_monitor import Frames, drive, monitor, screen, until
from tests.top.test_top_keys import Replayed

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="stacks are asked for by /proc")


def of(run_dir: Path, ranks: int) -> TopApp:
    return monitor(replace(made.run(ranks), path=str(run_dir), live=True))


@needs_linux
def test_all_ranks_and_then_the_selected_one_with_its_threads(candidates: Candidates) -> None:
    spins = line_of(candidates.start(SPINS, 1), "spins")
    here = line_of(candidates.start(SLEEPS, 0), "here")

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await until(pilot, lambda: "2 ranks at 2 different places" in screen(app))
        assert f"py:{here}" in screen(app)
        assert f"py:{spins}" in screen(app)
        assert "thread helper" not in screen(app)
        await pilot.press("d")
        # Rank 1 is the one that is blamed.
        await until(pilot, lambda: "stacks at" in screen(app) and "2 ranks at" not in screen(app))
        assert f"py:{spins}" in screen(app)
        assert f"py:{here}" not in screen(app)
        await pilot.press("escape", "j", "j", "d", "d")
        await until(pilot, lambda: "thread helper" in screen(app))

    drive(of(candidates.run_dir, 2), test, (100, 40))


@needs_linux
def test_frames_and_keys_go_on_while_a_rank_is_waited_for(candidates: Candidates) -> None:
    here = line_of(candidates.start(HOLDS_GIL), "here")
    time.sleep(0.2)

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        before = app.shown.time
        await pilot.press("d")
        assert "taking the stacks" in screen(app)
        await until(pilot, lambda: app.shown.time > before + 3)
        await pilot.press("f")
        assert "findings" in screen(app)
        # It is asked again while the first answer is still waited for, and again.
        for _ in range(5):
            await pilot.press("escape", "d")
            await until(pilot, lambda: "stacks at" in screen(app))
            if f"py:{here}  hold" in screen(app):
                break
        assert f"py:{here}  hold" in screen(app)

    drive(of(candidates.run_dir, 1), test, (100, 40))


@pytest.mark.parametrize(
    ("kind", "source", "said"),
    [
        ("demo", Frames, "a made-up job has no stacks"),
        ("run", Replayed, "none were taken during the run"),
        ("run", Frames, "no stacks can be taken"),
    ],
)
def test_where_there_are_none_it_is_said(
    kind: str, source: type[Frames], said: str, tmp_path: Path
) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await until(pilot, lambda: said in screen(app))

    first = replace(made.run(2), kind=kind, path=str(tmp_path), live=True)
    drive(monitor(source=source(first)), test, (100, 40))


def test_a_run_that_is_over_shows_what_was_taken_last(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": 1}')
    threads = (Thread(1, MAIN, False, (Frame("/data/train.py", 7, "main"),)),)
    ranks = tuple(RankStacks(rank, 0, 0, "node0", threads) for rank in (0, 1))
    frames.save_stacks(tmp_path, ranks, time.time_ns())

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await until(pilot, lambda: "the last stacks that were taken" in screen(app))
        assert "/data/train.py:7" in screen(app)

    first = replace(made.run(2), path=str(tmp_path), live=False)
    drive(monitor(source=Replayed(first)), test, (100, 40))
    assert [each.rank for each in take_stacks(first, True, (1,)).stacks] == [1]
