"""The keys and the mouse in the monitor."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top.app import TopApp
from ddpdoctor.top.draw import panels
from ddpdoctor.top.frame_sources import RunChoice
from ddpdoctor.top.frames import Replay, Visible
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import KEYS, VIEW_ACTIONS
from tests.conftest import LIMIT
from tests.support import top_snapshots as made
from tests.support.driven_monitor import Frames, drive, monitor, screen, until


class Replayed(Frames):
    """Ten frames that exist already."""

    def __init__(self, first: Snapshot) -> None:
        super().__init__(first)
        self.played = self.replay = Replay()
        self.played.length = 10

    def read(self, want: Visible) -> Snapshot:
        self.count = self.played.position
        return super().read(want)


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("?", "keys (esc: back)"),
        ("h", "keys (esc: back)"),
        ("f", "findings (esc: back)"),
        ("d", "what the ranks do (esc: back)"),
        ("d d", "what rank 1 does (esc: back)"),
        ("e", "NCCL_DEBUG"),
        ("s", "sorted by rank"),
        ("s s", "sorted by step"),
        ("s S", "sorted by rank, reversed"),
        ("t", "grouped by node"),
        ("enter", "rank 1 on node0, pid 4001"),
        ("j j enter", "rank 2 on node0"),
        ("down down enter", "rank 2 on node0"),
        ("j j k enter", "rank 1 on node0, pid 4001"),
        ("j down up enter", "rank 1 on node0, pid 4001"),
        ("end enter", "rank 5 on node0"),
        ("end home enter", "rank 1 on node0"),
        ("f enter", "fix       Give all ranks the same work"),
        ("space", "PAUSED"),
        (",", "PAUSED"),
        ("a", "nowhere has ended"),
        ("r", "a recording cannot be recorded"),
        ("c", "there are no live runs"),
        ("? escape", "med "),
        ("? ?", "med "),
        ("/ 3 enter", "filter 3"),
        ("/ 3 escape", "8 ranks"),
        ("/ 3 enter / 5 enter", "filter 5"),
    ],
)
def test_a_key_shows(keys: str, shown: str) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(*[_NAMES.get(key, key) for key in keys.split()])
        with contextlib.suppress(AssertionError):
            await until(pilot, lambda: shown in screen(app))
        assert shown in screen(app)

    app = monitor(replace(made.run(8), path="/nowhere"))
    drive(app, test, (110, 30))


_NAMES = {"?": "question_mark", "/": "slash", ",": "comma", ".": "full_stop"}


def test_every_key_of_the_table_does_something() -> None:
    own = set(monitor()._own_actions())
    assert {key.action for key in KEYS} <= own | set(VIEW_ACTIONS)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_quitting_closes_the_source(key: str) -> None:
    source = Frames(made.run(2))

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(key)

    app = monitor(source=source)
    drive(app, test)
    deadline = time.monotonic() + LIMIT
    while not source.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert app.return_code == 0


def test_pause_holds_the_picture_and_going_back_steps_through_it() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        source_time = app.shown.time
        await until(pilot, lambda: app.shown.time > source_time + 3)
        await pilot.press("space")
        held = app.shown.time
        await until(pilot, lambda: app._newest.time > held + 3)
        assert app.shown.time == held
        await pilot.press("comma")
        back = app.shown.time
        await pilot.press("comma")
        assert app.shown.time < back
        assert "frame" in screen(app)
        await pilot.press("full_stop")
        assert app.shown.time == back
        await pilot.press("space")
        await until(pilot, lambda: app.shown.time > held)
        assert "PAUSED" not in screen(app)

    drive(monitor(), test)


def test_a_replay_plays_stops_and_is_scrubbed() -> None:
    source = Replayed(replace(made.run(2), live=False, state="ended", exit_status=0))

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "frame 10/10" in screen(app))
        assert "ENDED, status 0" in screen(app)
        await pilot.press("comma", "comma")
        await until(pilot, lambda: "frame 8/10" in screen(app))
        await pilot.press("full_stop")
        await until(pilot, lambda: "frame 9/10" in screen(app))
        await pilot.press("space")
        await until(pilot, lambda: "frame 10/10" in screen(app))

    drive(monitor(source=source), test)


def test_the_filter_is_typed_letter_by_letter() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("slash", *"quit?")
        assert app.is_running
        assert app.view.filter == "quit?"
        assert "no rank passes the filter" in screen(app)
        await pilot.press("ctrl+u", *"4-6x", "backspace", "enter")
        assert set(app.drawn.ranks.values()) == {4, 5, 6}
        await pilot.press("escape")
        assert len(app.drawn.ranks) == 8

    drive(monitor(), test)


def test_the_mouse_selects_and_opens() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        line = next(y for y, rank in app.drawn.ranks.items() if rank == 3)
        await pilot.click(offset=(10, line))
        assert app.view.cursor == 3
        assert not app.view.expanded
        await pilot.click(offset=(10, line))
        assert app.view.expanded
        await pilot.press("f")
        await pilot.click(offset=(10, next(iter(app.drawn.entries))))
        assert app.view.opened

    drive(monitor(), test)


def test_only_ranks_in_sight_are_asked_for() -> None:
    source = Frames(made.run(256))

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: source.wanted[-1].ranks)
        wanted = source.wanted[-1].ranks
        assert wanted is not None and made.SLOW in wanted and len(wanted) < 30

    drive(monitor(source=source), test)


def test_a_source_that_fails_is_asked_again() -> None:
    source = Frames(made.run(2))

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        source.fail = DoctorError("the directory is gone")
        await until(pilot, lambda: "the directory is gone" in screen(app))
        source.fail = ValueError("broken")
        await until(pilot, lambda: "ValueError: broken" in screen(app))
        source.fail = None
        await until(pilot, lambda: "broken" not in screen(app))

    drive(monitor(source=source), test)


def test_a_fault_in_a_panel_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("of the panel")

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        monkeypatch.setattr(panels, "environment_panel", broken)
        await pilot.press("e")
        assert "RuntimeError in the monitor: of the panel" in screen(app)
        await pilot.press("escape")
        assert "OWN" in screen(app)

    drive(monitor(), test)


def test_resizing_in_a_loop() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        for n in range(60):
            width, height = 20 + (n * 37) % 200, 5 + (n * 13) % 60
            await pilot.resize_terminal(width, height)
            await until(pilot, lambda w=width, h=height: _size(app) == (w, h))  # type: ignore[misc]

    drive(monitor(), test)


def _size(app: TopApp) -> tuple[int, int]:
    lines = app.drawn.lines
    return (sum(len(text) for text, _ in lines[0]) if lines else 0), len(lines)


def test_choosing_among_several_runs() -> None:
    runs = [RunChoice(f"run{n}", f"/runs/{n}", "train.py", 0.0, 2) for n in range(3)]
    opened: list[str] = []

    def make_run(path: str) -> Frames:
        opened.append(path)
        return Frames(replace(made.run(2), run=path))

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        assert "live runs" in screen(app)
        assert "2 ranks  train.py (run1)" in screen(app)
        await pilot.press("j", "enter")
        await until(pilot, lambda: app.shown.run == "/runs/1")
        await pilot.press("c", "j", "j", "j", "enter")
        await until(pilot, lambda: app.shown.run == "/runs/2")
        assert opened == ["/runs/1", "/runs/2"]

    drive(monitor(runs=runs, make_run=make_run), test)


def test_runs_that_start_later_can_be_chosen() -> None:
    runs: list[RunChoice] = []

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("c")
        await until(pilot, lambda: "there are no live runs" in screen(app))
        runs.append(RunChoice("later", "/runs/later", "train.py", 0.0, 2))
        await pilot.press("c")
        await until(pilot, lambda: "train.py (later)" in screen(app))
        await pilot.press("c")
        assert "live runs" not in screen(app)
        await pilot.press("c")
        await until(pilot, lambda: "train.py (later)" in screen(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.shown.run == "/runs/later")

    def make_run(path: str) -> Frames:
        return Frames(replace(made.run(2), run=path))

    drive(monitor(list_runs=lambda: runs, make_run=make_run), test)


def test_what_a_key_has_to_say_goes_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("s")
        assert "sorted by rank" in screen(app)
        count = app.shown.time
        await until(pilot, lambda: app.shown.time > count + 3)
        assert "sorted by rank" in screen(app)
        monkeypatch.setattr("ddpdoctor.top.app.MESSAGE_TIMEOUT", 0.05)
        await until(pilot, lambda: "sorted by rank" not in screen(app))

    drive(monitor(), test)


@pytest.mark.parametrize("again", ["ctrl+l", "resume"])
def test_the_whole_screen_is_redrawn(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[bool] = []

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        refresh = app._canvas.refresh

        def refreshed(*regions: Any, **more: Any) -> Any:
            whole.append(not regions)
            return refresh(*regions, **more)

        monkeypatch.setattr(app._canvas, "refresh", refreshed)
        if again == "resume":
            app.app_resume_signal.publish(app)
        else:
            await pilot.press(again)
        await until(pilot, lambda: any(whole))

    drive(monitor(), test)


def test_a_replay_says_so_and_signals_nothing() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        assert "REPLAY" in screen(app)
        assert "LIVE" not in screen(app)
        await pilot.press("x")
        assert "this is a replay: there is nothing to signal" in screen(app)

    drive(monitor(source=Replayed(made.run(8))), test)


def test_of_a_directory_that_was_removed_no_end_is_claimed() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        assert "GONE" in screen(app)
        assert "ENDED" not in screen(app)

    drive(monitor(replace(made.run(2), live=False, state="gone")), test)
