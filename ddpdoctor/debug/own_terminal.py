"""The prompt that ``ddpdoctor run --wait-in-terminal`` opens in its own terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import termios
from pathlib import Path
from typing import Any

from ddpdoctor.core.commands import in_own_process

_STDIN = 0
_END_TIMEOUT = 5.0  # Seconds for the prompt to end with the job


class OwnTerminal:
    """Lend the terminal to ``ddpdoctor debug`` while ranks wait for a debugger.

    The prompt has another process group than the job, so Ctrl-C there does not reach the job.
    """

    def __init__(self) -> None:
        self._prompt: subprocess.Popen[bytes] | None = None
        self._settings: list[Any] = []
        self._known: list[object] = []  # The waits for which a prompt was opened

    @property
    def is_open(self) -> bool:
        """Whether the prompt has the terminal."""
        return self._prompt is not None

    def update(self, directory: Path, waits: list[object]) -> None:
        """Open the prompt if ranks wait. Take the terminal back if the prompt has ended.

        Args:
            directory: The run directory.
            waits: One object for each rank that waits, the same as long as it waits.
        """
        if self._prompt is not None and self._prompt.poll() is not None:
            self._take_back()
        known = {id(each) for each in self._known}
        if self._prompt is None and any(id(each) not in known for each in waits):
            self._known = waits
            self._open(directory)

    def _open(self, directory: Path) -> None:
        try:
            name = os.ttyname(_STDIN)
            if os.tcgetpgrp(_STDIN) != os.getpgrp():
                # A shell has put this job into the background.
                return
            self._settings = termios.tcgetattr(_STDIN)
            with open(name, "wb", buffering=0) as output:
                self._prompt = subprocess.Popen(
                    in_own_process("debug", str(directory)),
                    stdout=output,
                    stderr=output,
                    preexec_fn=_take_terminal,
                )
        except (OSError, termios.error, subprocess.SubprocessError):
            # Without a terminal people attach as without the option.
            return

    def _take_back(self) -> None:
        self._prompt = None
        _give_terminal_to(os.getpgrp())
        with contextlib.suppress(termios.error):
            termios.tcsetattr(_STDIN, termios.TCSADRAIN, self._settings)

    def close(self) -> None:
        """End the prompt."""
        if self._prompt is not None:
            self._prompt.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._prompt.wait(_END_TIMEOUT)
            self._take_back()


def _take_terminal() -> None:
    os.setpgid(0, 0)
    _give_terminal_to(os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _give_terminal_to(group: int) -> None:
    """Make a process group of this session the terminal's foreground group."""
    # A process in the background is stopped for this otherwise.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    with contextlib.suppress(OSError):
        os.tcsetpgrp(_STDIN, group)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
