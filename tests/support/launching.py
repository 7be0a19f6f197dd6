"""Programs for the tests of `ddpdoctor run`, and waiting for what they write."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import psutil

from tests.conftest import LIMIT

PYTHON = sys.executable
TORCHRUN = (PYTHON, "-m", "torch.distributed.run")

STUBBORN = """
import os, signal, time

def note(number, frame):
    open(f"got-{signal.Signals(number).name}", "w").close()

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, note)
open("ready0", "w").close()
while True:
    time.sleep(60)
"""


def wait_until(condition: Callable[[], bool], what: str = "it", timeout: float = LIMIT) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def wait_for_rounds(pid: int, seconds: float, rounds: int) -> None:
    """Wait until a process has had time to look around, also where it rarely gets a core.

    Its main thread sleeps once in each round of its loop.
    """
    process = psutil.Process(pid)
    before = process.num_ctx_switches().voluntary
    time.sleep(seconds)
    wait_until(lambda: process.num_ctx_switches().voluntary >= before + rounds, "its rounds")
