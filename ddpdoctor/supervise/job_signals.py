"""Pass signals on to the job, each exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from types import FrameType

from ddpdoctor.core.job import Command
from ddpdoctor.run.records.supervisor import SignalRecord
from ddpdoctor.supervise import processes
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.supervise.passthrough import Passthrough
from ddpdoctor.system import proc

# -- the terminal, and its job control


_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "fish", "tcsh", "csh"})


def has_terminal() -> bool:
    """Return whether this process still has the terminal it was started from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def is_interactive_shell(argv: Sequence[str]) -> bool:
    """Return whether a command is an interactive shell, whose stderr has to be the terminal."""
    if os.path.basename(argv[0]).lstrip("-") not in _SHELLS:
        return False
    for word in argv[1:]:
        if not word.startswith("-") or word == "--":
            return False
        if not word.startswith("--") and "i" in word:
            return True
        if not word.startswith("--") and "c" in word:
            return False
    return os.isatty(0)


def is_orphaned_group(group: int, without: Collection[int]) -> bool:
    """Return whether no process of this session would continue a stopped process group.

    That is the case if no member has a parent outside the group and in its session, such as a
    shell. The kernel does not let a terminal stop such a group.

    Args:
        group: A process group of this session.
        without: Parents that do not count.
    """
    every = {process.pid: process for process in processes.listed()}
    parents = {each.parent for each in every.values() if each.group == group} - set(without)
    session = os.getsid(0)
    return not any(
        pid in every and every[pid].group != group and proc.session_of(pid) == session
        for pid in parents
    )


# -- signals for the job


HANGUP_GRACE = 4.0  # Most seconds of grace when the terminal is closed

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TO_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
"""Signals for the whole group, because a terminal sends them to its whole foreground group."""


class JobSignals:
    """The signal handlers of this process.

    On a terminal the job shares this process's group, which is what a shell calls a job. Otherwise
    it has its own session, and a signal to this process does not reach it.
    """

    def __init__(
        self,
        command: Command,
        keepers: Keepers,
        passthrough: Passthrough,
        job: Callable[[], processes.Job],
    ) -> None:
        self._command = command
        self._keepers = keepers
        self._passthrough = passthrough
        self._job = job
        self._had_terminal = has_terminal()
        self.group = os.getpgrp() if self._had_terminal and sys.platform == "linux" else None
        """The process group of the job's command, if it shares this terminal.

        Only Linux shows whether a signal has reached the job already.
        """
        self.received: set[int] = set()  # Signals that ask the job to end
        self.deadline: float | None = None  # Monotonic time in seconds by which the job has to end
        self._started = False
        self._unsent: list[int] = []  # Signals that came before the job's command started
        self._records: list[SignalRecord] = []
        self._interrupts = 0
        """Number of Ctrl-C. Python calls a handler once for several that arrive together."""
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    @property
    def descriptor(self) -> int:
        """Readable after a signal, and after :meth:`wake`."""
        return self._woken

    def install(self) -> None:
        """Handle signals from now on. Ignored signals stay ignored."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        handlers = dict.fromkeys(PASSED_ON, self._pass_on)
        # Schedulers announce the end of a job's time with these, and the job may count them.
        handlers |= dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), self._pass_on_every)
        if self.group is not None:
            # This process stops after the job's command has.
            handlers[signal.SIGTSTP] = self._pass_on_every
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGWINCH, self._resize)

    def wake(self) -> None:
        """Wake the supervisor's loop. May be called from any thread."""
        # With a full pipe the loop wakes up anyway.
        with contextlib.suppress(OSError):
            os.write(self._wake, b"w")

    def drain(self) -> None:
        """Empty the pipe that has woken the loop, and count Ctrl-C."""
        with contextlib.suppress(BlockingIOError):
            # One byte for each signal: its number.
            self._interrupts += os.read(self._woken, 4096).count(signal.SIGINT)

    def started(self) -> None:
        """Send the job's command, which has just started, the signals that came before."""
        self._started = True
        while self._unsent:
            self._send(self._unsent.pop(0))

    def end_job(self, grace: float) -> None:
        """Ask the job to end within ``grace`` seconds."""
        self.deadline = time.monotonic() + grace
        self._send(signal.SIGTERM)

    def take(self) -> list[SignalRecord]:
        """Return the records of signals since the last call, for the journal."""
        return [self._records.pop(0) for _ in range(len(self._records))]

    def asked_again(self) -> bool:
        """Return whether Ctrl-C came a second time. The job's time is over then."""
        repeated = self._interrupts > 1 and self.deadline is not None
        if repeated:
            self._interrupts = 1
            self.deadline = time.monotonic()
        return repeated

    def suspend(self, number: int) -> float:
        """Stop the whole job and this process, because the job's command was stopped.

        They continue when this process is continued, as by a shell's ``fg``.

        Args:
            number: The signal that stopped the command.

        Returns:
            The seconds for which this process was stopped.
        """
        if self.group is None:
            return 0.0
        if number == signal.SIGTSTP and is_orphaned_group(self.group, self._keepers.parents):
            # Without ddpdoctor it would not have stopped, as no shell could continue it.
            for process in self._in_group():
                processes.send(process, signal.SIGCONT)
            return 0.0
        running = [each for each in self._job().processes() if each.state not in "tT"]
        stopped = [each for each in running if processes.send(each, signal.SIGSTOP)]
        self._passthrough.finish(0.2)
        since = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        seconds = time.monotonic() - since
        for process in stopped:
            processes.send(process, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            # The job was meant, even if only this process was continued.
            os.kill(self._keepers.pid, signal.SIGCONT)
        return seconds

    # -- handlers, which must not take a lock or write a file

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in self.received:
            return
        self.received.add(number)
        grace = self._command.own.grace
        if number == signal.SIGHUP and self._had_terminal and not has_terminal():
            grace = min(grace, HANGUP_GRACE)
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + grace)
        self._records.append(SignalRecord(time=time.time_ns(), signal=number))
        self._pass_on_every(number, frame)

    def _pass_on_every(self, number: int, frame: FrameType | None) -> None:
        if not self._started:
            self._unsent.append(number)
        elif not self._keepers.sent_to_group(number):
            self._send(number)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        self._passthrough.resize()
        if not self._command.through_torchrun:
            # The terminal's own signal may have come before the job's stderr had its new size.
            self._send(number)

    def _send(self, number: int) -> None:
        pid = self._keepers.pid
        if not pid or self._keepers.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number not in _TO_GROUP:
                os.kill(pid, number)
            elif self.group is None:
                os.killpg(pid, number)
            else:
                for process in self._in_group():
                    processes.send(process, number)

    def _in_group(self) -> list[processes.Process]:
        """Return the job's processes in the group that it shares with this process."""
        return [each for each in self._job().processes() if each.group == self.group]
