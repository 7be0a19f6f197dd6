"""The supervisor's end of the guard process (`ddpdoctor.launch.guard`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ddpdoctor
from ddpdoctor.launch import kernel

MOST = 10
"""How often a guard is started in one run: one that cannot live is not called for ever."""


class GuardPost:
    """Keeps one guard (a pair of processes) on duty.

    Args:
        run_id: The job's id.
        warn: Called with a sentence if no guard can be started.
    """

    def __init__(self, run_id: str, warn: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._warn = warn
        self._guard: subprocess.Popen[bytes] | None = None
        self._called = 0
        self._command: int | None = None

    def call(self) -> None:
        """Start a guard."""
        self._called += 1
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "ddpdoctor.launch.guard", self._run_id],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=Path(ddpdoctor.__file__).parent.parent,
                env={**os.environ, "DDPDOCTOR_GUARDED": str(os.getpid())},
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"cannot start a guard process: {error}")
            return
        if self._command is not None:
            self.tell(self._command)

    def tell(self, command: int) -> None:
        """Let the guard know the pid of the job's command."""
        self._command = command
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(f"{command}\n".encode())
                self._guard.stdin.flush()

    def reaped(self, pid: int, status: int) -> bool:
        """Whether the child that ended was the guard, which is replaced a few times."""
        if self._guard is None or pid != self._guard.pid:
            return False
        self._guard.returncode = os.waitstatus_to_exitcode(status)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard = None
        if self._called < MOST:
            self.call()
        return True

    @property
    def pids(self) -> frozenset[int]:
        """The processes on duty."""
        if self._guard is None:
            return frozenset()
        return frozenset({self._guard.pid} | kernel.children(self._guard.pid))

    def dismiss(self, idle: Callable[[float], None]) -> None:
        """The run is over. ``idle`` lets time pass and reaps children."""
        guard, self._guard = self._guard, None
        if guard is None or guard.stdin is None:
            return
        with contextlib.suppress(OSError):
            guard.stdin.write(b"q")
            guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(2.0)
        # Its second half is this process's child now.
        deadline = time.monotonic() + 1.0
        while kernel.children(os.getpid()) and time.monotonic() < deadline:
            idle(0.01)
