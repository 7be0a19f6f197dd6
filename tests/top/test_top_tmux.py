"""The real monitor in a real terminal, on a live job with a slowed rank."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor, Live

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

TRAIN = str(Path(__file__).parents[1] / "jobs" / "train.py")
TOP = f"{shlex.quote(sys.executable)} -m ddpdoctor top"
UTF_8 = {"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8"}


class Tmux:
    """A terminal multiplexer of its own, with one window."""

    def __init__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        self.name = ""
        self.environment = doctor.environment({"TERM": "xterm-256color"})

    def __call__(self, *words: str) -> str:
        return subprocess.run(
            ["tmux", "-u", "-L", self.name, "-f", "/dev/null", *words],
            env=self.environment,
            cwd=self.doctor.directory,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    def open(self, command: str, width: int, height: int, env: dict[str, str]) -> None:
        """Run a command in a window of that size, which says when it has ended."""
        # A server that was told to end may take a moment, and would take the next one with it.
        self.name = f"ddpdoctor-{uuid.uuid4().hex[:8]}"
        settings = " ".join(f"{key}={value}" for key, value in env.items())
        unset = " ".join(
            f"-u {name}" for name in ("LC_ALL", "LC_CTYPE", "LANG", "COLUMNS", "LINES")
        )
        shell = f"env {unset} {settings} {command}; echo ended with $?; sleep 1000"
        self("new-session", "-d", "-x", str(width), "-y", str(height), shell)

    @property
    def screen(self) -> list[str]:
        return self("capture-pane", "-p").splitlines()

    def keys(self, *keys: str) -> None:
        self("send-keys", *keys)

    def wait_for(
        self, condition: Callable[[list[str]], object], timeout: float = LIMIT
    ) -> list[str]:
        deadline = time.monotonic() + timeout
        while True:
            screen = self.screen
            if condition(screen):
                return screen
            assert time.monotonic() < deadline, "\n".join(screen)
            time.sleep(0.1)

    def wait_for_text(self, text: str) -> list[str]:
        return self.wait_for(lambda screen: text in "\n".join(screen))

    def close(self) -> None:
        if self.name:
            with contextlib.suppress(subprocess.CalledProcessError):
                self("kill-server")


@pytest.fixture
def tmux(doctor: Doctor) -> Iterator[Tmux]:
    tmux = Tmux(doctor)
    yield tmux
    tmux.close()


@pytest.fixture
def job(doctor: Doctor) -> Iterator[Live]:
    """Two ranks, of which rank 1 takes 50 ms longer in its backward."""
    live = doctor.start(
        "--nproc-per-node", "2", TRAIN, "--steps", "100000", "--pause", "0.01", "--slow-backward",
        "0.05",
    )  # fmt: skip
    live.wait_for_steps(40)
    yield live
    if live.process.poll() is None:
        live.process.terminate()
        live.process.wait(LIMIT)


def blames_the_slow_rank(screen: list[str]) -> bool:
    rows = [line.split() for line in screen if re.match(r"\s*!?\s*\d+ ", line)]
    said = " ".join(screen[:5])
    return "rank 1" in said and bool(rows) and rows[0][:2] == ["!", "1"]


def steps(job: Live) -> int:
    return min(rank.status.step for rank in job.snapshot().ranks if rank.status is not None)


@pytest.mark.slow
def test_the_slowed_rank_comes_first_at_every_size(tmux: Tmux, job: Live) -> None:
    for width, height in ((60, 15), (80, 24), (200, 60)):
        tmux.open(TOP, width, height, UTF_8)
        screen = tmux.wait_for(blames_the_slow_rank)
        assert len(screen) == height
        assert "backward" in " ".join(screen[:4])
        assert max(map(len, screen)) <= width
        assert "LIVE" in screen[-2]
        if width == 200:
            tmux.wait_for_text("step of rank 1, over")
            tmux.wait_for_text("stack of rank 1 at")
        tmux.keys("?")
        tmux.wait_for_text("keys (esc: back)")
        tmux.keys("q")
        tmux.wait_for_text("ended with 0")
        tmux.close()
    before = steps(job)
    job.wait_for_steps(before + 10)


@pytest.mark.slow
def test_in_the_locale_c_only_ascii_is_drawn(tmux: Tmux, job: Live) -> None:
    tmux.open(TOP, 80, 24, {"LANG": "C"})
    screen = tmux.wait_for(blames_the_slow_rank)
    assert "\n".join(screen).isascii()
    assert "\\u" not in "\n".join(screen)
    tmux.wait_for(lambda screen: any("bbb" in line for line in screen))
    for key, text in (("Enter", "rank 1 on"), ("Escape", "step"), ("d", "what the ranks do")):
        tmux.keys(key)
        assert "\n".join(tmux.wait_for_text(text)).isascii()
    # The stacks of the ranks themselves, merged.
    screen = tmux.wait_for(lambda screen: any("train.py:" in line for line in screen[4:]))
    assert "\n".join(tmux.wait_for_text("stacks at ")).isascii()
    assert any(line.strip().startswith("[0-1]") for line in tmux.wait_for_text("<module>"))


@pytest.mark.slow
def test_sizes_signals_and_the_end(tmux: Tmux, job: Live) -> None:
    tmux.open(TOP, 100, 30, {**UTF_8, "NO_COLOR": "1"})
    tmux.wait_for(blames_the_slow_rank)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", tmux("capture-pane", "-p", "-e"))
    for n in range(20):
        tmux("resize-window", "-x", str(20 + n * 7), "-y", str(5 + n * 2))
    tmux("resize-window", "-x", "20", "-y", "5")
    tmux.wait_for(lambda screen: len(screen) == 5 and "LIVE" in screen[-1])
    tmux("resize-window", "-x", "100", "-y", "30")
    tmux.wait_for(blames_the_slow_rank)
    tmux.keys("C-z")
    tmux.wait_for(lambda screen: not any("OWN" in line for line in screen))
    (top,) = psutil.Process(int(tmux("display-message", "-p", "#{pane_pid}"))).children()
    # It gives the screen back a moment before it stops.
    tmux.wait_for(lambda _: top.status() == psutil.STATUS_STOPPED)
    top.send_signal(signal.SIGCONT)
    # What has not changed meanwhile is drawn again, too.
    tmux.wait_for(lambda screen: blames_the_slow_rank(screen) and "? help" in screen[-1])
    tmux.keys("x")
    tmux.wait_for_text("▸ Cancel")
    tmux.keys("Enter")
    tmux.wait_for_text("nothing was sent")
    tmux.keys("x")
    tmux.wait_for_text("▸ Cancel")
    tmux.keys("j", "Enter")
    tmux.wait_for_text("SIGINT was sent to the launcher")
    job.process.wait(LIMIT)
    tmux.wait_for_text("ENDED")
    shutil.rmtree(job.run_dir)
    tmux.keys("s")
    tmux.wait_for_text("sorted by rank")
    tmux.keys("C-c")
    tmux.wait_for_text("ended with 0")


@pytest.mark.slow
def test_one_frame_as_text(doctor: Doctor, job: Live) -> None:
    result = doctor.cli("top", "--once", str(job.run_dir), env=UTF_8)
    assert result.status == 0
    lines = result.stdout.splitlines()
    assert blames_the_slow_rank(lines)
    assert len(lines) == 24
    assert "\x1b" not in result.stdout
