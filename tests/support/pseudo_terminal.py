"""A pseudo-terminal that a job runs on."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor


class Terminal:
    """A pseudo-terminal with a command in it, as a terminal emulator would have it."""

    def __init__(self, doctor: Doctor, *words: str, rows: int = 30, columns: int = 100) -> None:
        self.master, slave = os.openpty()
        self.resize(rows, columns)
        self.seen = b""

        environment = doctor.environment({"TERM": "xterm"})
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            words,
            cwd=doctor.directory,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(slave)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_some(self) -> bool:
        """Take in what has been written; False at the end."""
        if not select.select([self.master], [], [], 0.05)[0]:
            return True
        try:
            chunk = os.read(self.master, 1 << 16)
        except OSError:
            return False
        self.seen += chunk
        return bool(chunk)

    def wait_for(self, text: bytes, timeout: float = LIMIT) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            assert time.monotonic() < deadline, f"never seen: {text!r} in {self.seen!r}"
            assert self.read_some() or text in self.seen, f"ended without {text!r}: {self.seen!r}"

    def interrupt(self) -> None:
        """Press Ctrl-C until something is written.

        Python's ``input`` does not notice a signal between its prompt and its wait for a key.
        """
        before, deadline = self.seen, time.monotonic() + LIMIT
        while self.seen == before:
            assert time.monotonic() < deadline, f"Ctrl-C changes nothing: {self.seen!r}"
            self.type(b"\x03")
            for _ in range(20):
                if self.seen == before:
                    assert self.read_some(), f"ended: {self.seen!r}"

    def finish(self, timeout: float = LIMIT) -> int:
        deadline = time.monotonic() + timeout
        while self.read_some():
            assert time.monotonic() < deadline, f"still running: {self.seen!r}"
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """What closing the window does."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1


Open = Callable[..., Terminal]


COUNT = """
import signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
print("ready", flush=True)
while not got:
    time.sleep(0.02)
time.sleep(0.7)  # a second delivery would come now
print("got", *got, flush=True)
sys.exit(23)
"""
