"""Processes as torchrun starts them, with the real probe and without torch: quick to start."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import zlib
from pathlib import Path

import ddpdoctor.probe
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import glance
from ddpdoctor.run.records.supervisor import RankStacks, Thread
from ddpdoctor.stacks.capture import capture
from ddpdoctor.stacks.frames import innermost
from tests.conftest import LIMIT, Doctor, Live

ENTRY = Path(ddpdoctor.probe.__file__).parent / "entry"

SLEEPS = """
import threading, time

def nap():
    time.sleep(600)  # naps

threading.Thread(target=nap, name="helper", daemon=True).start()
print("ready")
time.sleep(600)  # here
"""

SPINS = """
def spin():
    while True: pass  # spins

print("ready")
spin()
"""

HOLDS_GIL = """
import ctypes, threading, time

def nap():
    time.sleep(600)  # naps

def hold():
    libc = ctypes.PyDLL(None)
    print("ready")
    # A signal ends each call.
    while True: libc.pause()  # here

threading.Thread(target=nap, daemon=True).start()
time.sleep(0.2)
hold()
"""


class Candidates:
    """Processes as torchrun starts them, at work in a run directory."""

    def __init__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        self.run_dir = doctor.directory / "run"
        self.run_dir.mkdir()
        (self.run_dir / "run.json").write_text(json.dumps({"format": FORMAT}))
        self.started: list[Live] = []

    def start(self, source: str, rank: int = 0, python: str = sys.executable) -> Live:
        """Start a script, and wait until it has printed ``ready``."""
        # Ranks of one job run one script.
        script = self.doctor.write(f"train{zlib.crc32(source.encode())}.py", source)
        live = self.doctor.start(
            python, "-u", str(script), watch=False,
            env={
                "PYTHONPATH": str(ENTRY), "DDPDOCTOR_RUN_DIR": str(self.run_dir),
                "TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "LOCAL_RANK": str(rank),
            },
        )  # fmt: skip
        self.started.append(live)
        deadline = time.monotonic() + LIMIT
        while "ready" not in live.out.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        return live

    def capture(self, patience: float = 60.0) -> tuple[RankStacks, ...]:
        """Longer than a person would wait: this machine may be busy with other tests."""
        return capture(glance(self.run_dir), patience=patience)

    def end(self) -> None:
        """Kill those that are left."""
        for live in self.started:
            with contextlib.suppress(ProcessLookupError):
                live.process.kill()
            live.process.wait()


def line_of(live: Live, mark: str) -> int:
    source = Path(str(live.process.args[2])).read_text()  # type: ignore[index]
    return next(n for n, line in enumerate(source.splitlines(), 1) if f"# {mark}" in line)


def at(thread: Thread | None) -> int:
    assert thread is not None
    frame = innermost(thread.frames)
    assert frame is not None
    return frame.line
