"""Every key of the monitor, pressed in the real app."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from textual.pilot import Pilot

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.run.record import FORMAT, StatusPage, rank_stem
from ddpdoctor.top import actions, signals
from ddpdoctor.top.app import TopApp
from ddpdoctor.top.choosing import RunChoice
from ddpdoctor.top.keys import KEYS
from ddpdoctor.top.line import plain
from ddpdoctor.top.panels import environment
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.source import Want
from ddpdoctor.top.view import View
from tests import top_snapshots as made
from tests.conftest import LIMIT


class Frames:
    """A source that hands out frames, one step further each time."""

    interval = 0.02

    def __init__(self, first: Snapshot) -> None:
        self.first = first
        self.count = 0
        self.wanted: list[Want] = []
        self.closed = False
        self.fail: Exception | None = None

    def read(self, want: Want) -> Snapshot:
        self.wanted.append(want)
        if self.fail is not None:
            raise self.fail
        self.count += 1
        rows = tuple(replace(row, step=self.count) for row in self.first.ranks)
        return replace(self.first, ranks=rows, time=self.first.time + self.count)

    def close(self) -> None:
        self.closed = True


class Replayed(Frames):
    """Ten frames that exist already."""

    length = 10
    position = 0

    def read(self, want: Want) -> Snapshot:
        self.count = self.position
        return super().read(want)

    def seek(self, position: int) -> None:
        self.position = max(0, min(position, self.length - 1))


Test = Callable[[TopApp, Pilot[None]], Awaitable[None]]


def drive(app: TopApp, test: Test, size: tuple[int, int] = (100, 30)) -> None:
    """Run a test in the app, at a given size."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.shown.time > 0)
            await test(app, pilot)

    asyncio.run(run())


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        await pilot.pause(0.01)


def screen(app: TopApp) -> str:
    return "\n".join(plain(line) for line in app.drawn.lines)


def monitor(first: Snapshot | None = None, view: View = View(), **more: Any) -> TopApp:  # noqa: B008
    source = more.pop("source", None) or Frames(first or made.run(8))
    return TopApp(lambda: source, view, **more)


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
        ("a", "no run directory"),
        ("r", "a recording cannot be recorded"),
        ("c", "there are no live runs"),
        ("? escape", "OWN, 0 to"),
        ("? ?", "OWN, 0 to"),
        ("/ 3 enter", "filter 3"),
        ("/ 3 escape", "8 ranks"),
    ],
)
def test_a_key_shows(keys: str, shown: str) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press(*[_NAMES.get(key, key) for key in keys.split()])
        with contextlib.suppress(AssertionError):
            await until(pilot, lambda: shown in screen(app))
        assert shown in screen(app)

    app = monitor(replace(made.run(8), path="/nowhere"))
    if keys == "a":
        shown = "is not a run directory"
    drive(app, test, (110, 30))


_NAMES = {"?": "question_mark", "/": "slash", ",": "comma", ".": "full_stop"}


def test_every_key_of_the_table_does_something() -> None:
    own = set(monitor()._own())
    assert {key.action for key in KEYS} <= own | set(actions.PURE)


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
    source = Replayed(replace(made.run(2), live=False, exit_status=0))

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
        monkeypatch.setattr(environment, "draw", broken)
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
        monkeypatch.setattr("ddpdoctor.top.app.MESSAGE", 0.05)
        await until(pilot, lambda: "sorted by rank" not in screen(app))

    drive(monitor(), test)


@pytest.mark.parametrize("again", ["ctrl+l", "resume"])
def test_the_whole_screen_is_drawn_anew(again: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

    drive(monitor(replace(made.run(2), live=False, gone=True)), test)


class Kept:
    """A recording in memory."""

    path = "kept.jsonl"

    def __init__(self) -> None:
        self.frames: list[Snapshot] = []
        self.closed = False

    def add(self, snapshot: Snapshot) -> None:
        self.frames.append(snapshot)

    def close(self) -> None:
        self.closed = True


def test_recording_starts_and_stops() -> None:
    kept = Kept()

    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("r")
        await until(pilot, lambda: len(kept.frames) > 2)
        assert "recording to kept.jsonl; r ends it" in screen(app)
        assert "LIVE, recording" in screen(app)
        await pilot.press("r")
        assert kept.closed
        assert "recorded to kept.jsonl" in screen(app)

    drive(monitor(record=lambda: kept), test)


# -- signals


@pytest.fixture
def sleeper(token: str) -> Any:
    """A process that could be a run's launcher."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", "ddpdoctor"]
    process = subprocess.Popen(command, env={**os.environ, "DDPDOCTOR_TEST_TOKEN": token})
    # Python 3.13 spawns it, and may be back before the kernel shows its words.
    while not psutil.Process(process.pid).cmdline():
        time.sleep(0.001)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def live_run(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> Any:
    """The directory of a live run whose launcher is the sleeper."""
    manifest = {
        "format": FORMAT, "host": socket.gethostname(), "supervisor": sleeper.pid,
        "started": time.time_ns(),
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(manifest))
    lock = rundir.Lock(tmp_path)
    yield tmp_path
    lock.close()


def at(path: Path, ranks: int = 2) -> Snapshot:
    return replace(made.run(ranks), path=str(path))


def test_a_signal_is_asked_for_with_cancel_selected(
    live_run: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("x")
        held = app.shown
        await until(pilot, lambda: "send a signal" in screen(app))
        await until(pilot, lambda: app._newest.time > held.time + 3)
        assert app.shown is held
        assert "▸ Cancel" in screen(app)
        # What a stray report of the mouse may type does nothing here.
        await pilot.press("s", "t", "r", "space", "enter")
        assert sleeper.poll() is None
        assert "nothing was sent" in screen(app)
        await until(pilot, lambda: app.shown.time > held.time)
        await pilot.press("x")
        await until(pilot, lambda: "send a signal" in screen(app))
        await pilot.press("q")
        assert app.is_running
        await pilot.press("x")
        await until(pilot, lambda: "send a signal" in screen(app))
        await pilot.press("j", "j", "enter")
        assert "SIGTERM was sent to the launcher" in screen(app)

    drive(monitor(at(live_run)), test)
    assert sleeper.wait(LIMIT) == -signal.SIGTERM


def test_readonly_sends_nothing(live_run: Path) -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("x")
        assert "signals are off: --readonly" in screen(app)

    drive(monitor(at(live_run), View(readonly=True)), test)


def test_only_what_is_proven_to_be_the_launcher_is_signalled(
    live_run: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    def asked(**changed: object) -> str:
        manifest = json.loads((live_run / "run.json").read_text())
        (live_run / "run.json").write_text(json.dumps({**manifest, **changed}))
        with pytest.raises(DoctorError) as error:
            signals.choices(at(live_run), None)
        (live_run / "run.json").write_text(json.dumps(manifest))
        return error.value.message

    choices = signals.choices(at(live_run), None)
    assert [choice.words.partition(" ")[0] for choice in choices] == [
        "Cancel", "SIGINT", "SIGTERM", "SIGKILL",
    ]  # fmt: skip
    assert "given to another" in asked(started=time.time_ns() - 3600 * 10**9)
    assert "the run is on elsewhere" in asked(host="elsewhere")
    assert "is not the launcher" in asked(supervisor=os.getpid()) or "ddpdoctor" in str(sys.argv)
    assert "no process" in asked(supervisor=2**22 + 1)
    assert "another user" in asked(supervisor=1) or os.getuid() == 0
    with pytest.raises(DoctorError, match="nothing to signal"):
        signals.choices(replace(at(live_run), live=False), None)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(DoctorError, match="the process has ended"):
        signals.send(choices[1])


def test_a_rank_is_signalled_only_if_it_is_the_runs(
    live_run: Path, sleeper: subprocess.Popen[bytes], token: str
) -> None:
    def status(rank: int, pid: int) -> None:
        path = live_run / f"{rank_stem(rank, 0)}.status"
        StatusPage(
            str(path), rank=rank, world_size=2, local_rank=rank, restart=0, started=time.time_ns()
        )
        page = bytearray(path.read_bytes())
        page[16:24] = pid.to_bytes(8, "little")
        path.write_bytes(page)

    row = replace(made.row(0), pid=sleeper.pid)
    with pytest.raises(DoctorError, match="cannot be told"):
        signals.choices(at(live_run), row)
    status(0, sleeper.pid)
    with pytest.raises(DoctorError, match="is not rank 0 of this run"):
        signals.choices(at(live_run), row)
    environment = {
        **os.environ, "DDPDOCTOR_TEST_TOKEN": token, "DDPDOCTOR_RUN_ID": "1-a",
        "DDPDOCTOR_SUPERVISOR": f"{sleeper.pid}@here",
    }  # fmt: skip
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment) as rank:
        try:
            status(1, rank.pid)
            choices = signals.choices(at(live_run), replace(made.row(1), pid=rank.pid))
            assert "the others may hang" in choices[-1].words
            signals.send(choices[-1])
            assert rank.wait(LIMIT) == -signal.SIGKILL
        finally:
            rank.kill()


def test_the_reader_outlives_the_app_by_no_thread() -> None:
    async def test(app: TopApp, pilot: Pilot[None]) -> None:
        await pilot.press("q")

    drive(monitor(), test)
    deadline = time.monotonic() + LIMIT
    while any(each.name == "ddpdoctor-top-reader" for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
