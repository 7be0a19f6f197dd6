"""Pass signals on to the job, each exactly once, and end a job that hangs or whose time is over.

Also the terminal that the job is started from, and its job control.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.job import Command, OwnOptions
from ddpdoctor.run.records.supervisor import SignalRecord
from ddpdoctor.supervise import processes
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.supervise.passthrough import Passthrough
from ddpdoctor.system import proc

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run
    from ddpdoctor.supervise.hang_watch import HangWatch


# -- the terminal that a job is started from, and its job control


_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "fish", "tcsh", "csh"})


def has_terminal() -> bool:
    """Whether this process still has the terminal it was started from."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def is_interactive_shell(argv: Sequence[str]) -> bool:
    """Whether a command is a shell for a person, whose job control needs the terminal as stderr."""
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
    """Whether no process of this session would continue a process group that was stopped.

    That is: no member's parent is outside of the group and in its session, as a shell is. The
    kernel does not let a terminal stop such a group.

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


# -- signals on their way to the job: each exactly once, and when the time of the job is over


HANGUP_GRACE = 4.0
"""Most seconds of grace when the terminal is gone."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TO_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
"""A terminal sends these to the whole foreground group, so the whole group gets them."""


class JobSignals:
    """Handles the signals of this process.

    On a terminal the job shares this process's group, which is what a shell calls a job. Else it
    has its own session: what is sent here reaches this process alone.

    Args:
        command: The job.
        keepers: Hold the job's command.
        passthrough: Carries the job's stderr.
        job: Finds the job's processes.
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
        """The process group of the job's command, where it shares this terminal.

        Elsewhere it cannot be seen whether a signal has reached the job already.
        """
        self.received: set[int] = set()
        """Those that ask the job to end."""
        self.deadline: float | None = None
        """When the job must have ended (monotonic seconds)."""
        self._started = False
        self._unsent: list[int] = []
        """What came while the job's command was not there yet."""
        self._records: list[SignalRecord] = []
        self._interrupts = 0
        """Times that Ctrl-C came: Python calls a handler once for several that came meanwhile."""
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    @property
    def descriptor(self) -> int:
        """Readable after a signal, and after :meth:`wake`."""
        return self._woken

    def install(self) -> None:
        """Handle signals from now on; those that are ignored stay so."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        handlers = dict.fromkeys(PASSED_ON, self._pass_on)
        # Schedulers announce the end of a job's time by these, and the job may count them.
        handlers |= dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), self._pass_on_every)
        if self.group is not None:
            # This process stops when the job's command has.
            handlers[signal.SIGTSTP] = self._pass_on_every
        for number, handler in handlers.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGWINCH, self._resize)

    def wake(self) -> None:
        """Wake the supervisor's loop; from any thread."""
        # A full pipe means that the loop will wake up anyway.
        with contextlib.suppress(OSError):
            os.write(self._wake, b"w")

    def drain(self) -> None:
        """The loop is awake."""
        with contextlib.suppress(BlockingIOError):
            # A byte for each signal, its number.
            self._interrupts += os.read(self._woken, 4096).count(signal.SIGINT)

    def started(self) -> None:
        """The job's command has started: it gets what came while it was not there yet."""
        self._started = True
        while self._unsent:
            self._send(self._unsent.pop(0))

    def end_job(self, grace: float) -> None:
        """Ask the job to end within so many seconds."""
        self.deadline = time.monotonic() + grace
        self._send(signal.SIGTERM)

    def take(self) -> list[SignalRecord]:
        """The records of what came since the last call, for the journal."""
        taken = []
        while self._records:
            taken.append(self._records.pop(0))
        return taken

    def asked_again(self) -> bool:
        """Whether Ctrl-C came a second time; then the job's time is over."""
        repeated = self._interrupts > 1 and self.deadline is not None
        if repeated:
            self._interrupts = 1
            self.deadline = time.monotonic()
        return repeated

    def suspend(self, number: int) -> float:
        """The job's command was stopped, as by Ctrl-Z: all of the job stops, and this process.

        They go on when somebody continues this process, as a shell's ``fg`` does.

        Args:
            number: The signal that stopped it.

        Returns:
            For how many seconds this process was stopped.
        """
        if self.group is None:
            return 0.0
        if number == signal.SIGTSTP and is_orphaned_group(self.group, self._keepers.parents):
            # Without ddpdoctor it would not have stopped: there is no shell to continue it.
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
            # Whoever continued this process alone meant the job.
            os.kill(self._keepers.pid, signal.SIGCONT)
        return seconds

    # -- handlers: nothing here takes a lock or writes a file

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
            # On a terminal it has got one, which may have come before its stderr had its new size.
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
        """The job's processes in the group that it shares with this process."""
        return [each for each in self._job().processes() if each.group == self.group]


# -- ends a job for its user: one that hangs, or whose debugger was stopped


KILL_GRACE = 5.0
"""Most seconds that a job which hangs has to end."""


class Ending:
    """Ends the job once, if it still runs and was not asked to end.

    Args:
        own: What the user asked for.
        keepers: Hold the job's command.
        signals: Ends it.
        note: Says why, to people.
        write: Records it.
    """

    def __init__(
        self,
        own: OwnOptions,
        keepers: Keepers,
        signals: JobSignals,
        note: Callable[[str], object],
        write: Callable[[SignalRecord], object],
    ) -> None:
        self._own = own
        self._keepers = keepers
        self._signals = signals
        self._note = note
        self._write = write
        self.killed = False
        """The job hung and was ended for it."""

    def if_hung(
        self, hangs: HangWatch | None, found: Iterable[Finding], read: Callable[[], Run | None]
    ) -> bool:
        """With ``--kill-on-hang``: end a job that hangs for sure, all that is known being saved.

        Args:
            hangs: Watches for hangs.
            found: What the rules have just found.
            read: Reads the run as it is now.

        Returns:
            False where a rank may have moved or ended while the verdict was made: look again.
        """
        hung = hangs is not None and hangs.judged(found)
        if not (hung and self._own.kill_on_hang and self._may_end):
            return True
        run = read()
        if hangs is None or run is None or not hangs.confirmed(run):
            return False
        self.killed = True
        self._note("the job hangs: ending it (--kill-on-hang)")
        self._end(min(self._own.grace, KILL_GRACE), hang=True)
        return True

    def for_debugger(self) -> None:
        """With ``--stop-with-debugger``: end all ranks, since the person has stopped debugging."""
        if self._may_end:
            self._note("the debugger was stopped: ending the job")
            self._end(self._own.grace, debugger=True)

    @property
    def _may_end(self) -> bool:
        return self._keepers.status is None and self._signals.deadline is None

    def _end(self, grace: float, *, hang: bool = False, debugger: bool = False) -> None:
        self._write(
            SignalRecord(time=time.time_ns(), signal=signal.SIGTERM, hang=hang, debugger=debugger)
        )
        self._signals.end_job(grace)
