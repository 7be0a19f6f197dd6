"""What the monitor does to files and processes: recordings and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from textual.pilot import Pilot

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT, rank_stem
from ddpdoctor.run.status import StatusPage
from ddpdoctor.top import actions
from ddpdoctor.top.app import TopApp
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import View
from tests.conftest import LIMIT
from tests.support import top_snapshots as made
from tests.support.driven_monitor import drive, monitor, screen, until


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
            actions.signal_choices(at(live_run), None)
        (live_run / "run.json").write_text(json.dumps(manifest))
        return error.value.message

    choices = actions.signal_choices(at(live_run), None)
    assert [choice.words.partition(" ")[0] for choice in choices] == [
        "Cancel", "SIGINT", "SIGTERM", "SIGKILL",
    ]  # fmt: skip
    assert "given to another" in asked(started=time.time_ns() - 3600 * 10**9)
    assert "the run is on elsewhere" in asked(host="elsewhere")
    assert "is not the launcher" in asked(supervisor=os.getpid()) or "ddpdoctor" in str(sys.argv)
    assert "no process" in asked(supervisor=2**22 + 1)
    assert "another user" in asked(supervisor=1) or os.getuid() == 0
    with pytest.raises(DoctorError, match="nothing to signal"):
        actions.signal_choices(replace(at(live_run), live=False), None)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(DoctorError, match="the process has ended"):
        actions.send_signal(choices[1])


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
    with pytest.raises(DoctorError, match="is not known"):
        actions.signal_choices(at(live_run), row)
    status(0, sleeper.pid)
    with pytest.raises(DoctorError, match="is not rank 0 of this run"):
        actions.signal_choices(at(live_run), row)
    environment = {
        **os.environ, "DDPDOCTOR_TEST_TOKEN": token, "DDPDOCTOR_RUN_ID": "1-a",
        "DDPDOCTOR_SUPERVISOR": f"{sleeper.pid}@here",
    }  # fmt: skip
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env=environment) as rank:
        try:
            # The kernel shows a new program's environment a moment after it runs.
            while not psutil.Process(rank.pid).environ():
                time.sleep(0.01)
            status(1, rank.pid)
            choices = actions.signal_choices(at(live_run), replace(made.row(1), pid=rank.pid))
            assert "the others may hang" in choices[-1].words
            actions.send_signal(choices[-1])
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
