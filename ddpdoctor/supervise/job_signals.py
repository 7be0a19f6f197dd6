"""Pass terminal, input and signals through to the job, and stop it when asked to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import struct
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import FrameType

from ddpdoctor.core.job import Command
from ddpdoctor.run.records.supervisor import SignalRecord
from ddpdoctor.supervise import processes
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.system import proc
from ddpdoctor.system.proc import pause, readable, until

# -- pass the job's stderr through, unchanged, and print ddpdoctor's lines between its lines


MAX_TAIL = 1 << 20  # Maximum bytes kept from the end of the job's stderr

_OUT = 2
_CHUNK = 1 << 16
_LINE_TIMEOUT = 1.0  # Seconds for the job to complete its line before ours, in a pipe


def _is_one_file(one: int, other: int) -> bool:
    """Return whether two descriptors refer to the same pipe or file, as with ``2>&1``."""
    try:
        first, second = os.fstat(one), os.fstat(other)
    except OSError:
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _ends_line(file: int) -> bool:
    """Return whether a file is empty or ends with a whole line.

    The content of a pipe is unknown, and an empty line is better than a finding after half a line
    of the job's stdout.
    """
    try:
        size = os.fstat(file).st_size
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return not stat.S_ISFIFO(os.fstat(file).st_mode)
        with open(f"/proc/self/fd/{file}", "rb", buffering=0) as reader:
            return not size or os.pread(reader.fileno(), 1, size - 1) == b"\n"
    except OSError:
        return True


class Passthrough:
    """Carry the job's stderr to ours.

    If our stderr is a terminal, the job gets a pseudo-terminal, so progress bars and ``isatty``
    work as before. Otherwise it gets a pipe. One thread does all the writing. A reader that stops
    reading blocks this thread and so the job, as it would without ddpdoctor, but nothing else.

    Args:
        direct: Give the job the terminal itself, if our stderr is one, and read nothing.
    """

    def __init__(self, direct: bool = False) -> None:

        self._terminal = os.isatty(_OUT)
        self._stdout_shares = self._terminal and os.isatty(1)
        self._one_file = not self._terminal and _is_one_file(1, _OUT)
        self._lock = threading.Lock()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.carried = 0  # Number of bytes that the job has written so far
        self._pending: deque[tuple[float, bytes]] = deque()
        self._line_start = True
        self._drain = threading.Event()
        self._drained = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._source: int | None
        if self._terminal and direct:
            self._source, self.child_end = None, os.dup(_OUT)
        else:
            ends = None
            if self._terminal:
                with contextlib.suppress(OSError):
                    ends = os.openpty()
                    # Only the real terminal must translate newlines.
                    tty.setraw(ends[1])
            self._source, self.child_end = ends or os.pipe()
        self.resize()
        self._thread = threading.Thread(target=self._pump, name="ddpdoctor-stderr", daemon=True)

    def resize(self) -> None:
        """Give the job's terminal the size of ours, on SIGWINCH."""
        source = self._source
        if self._terminal and source is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(_OUT, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(source, termios.TIOCSWINSZ, size)

    def start(self) -> None:
        """Start the thread once the child has its end of the pipe."""
        os.close(self.child_end)
        self._thread.start()

    def finish(self, timeout: float | None) -> None:
        """Wait until all output so far is written, for at most ``timeout`` seconds.

        With None, wait as long as the reader needs, as the job itself would.
        """
        if self._thread.is_alive():
            self._drained.clear()
            self._drain.set()
            self._wake()
            over = float("inf") if timeout is None else timeout
            until(lambda: self._drained.is_set() or not self._thread.is_alive(), over)
        if not self._thread.is_alive():
            # Without a job, or after the thread has failed, only ddpdoctor's own lines are left.
            while self._pending:
                self._write(self._pending.popleft()[1])

    @property
    def tail(self) -> bytes:
        """Return the end of the job's output, at most `MAX_TAIL` bytes."""
        with self._lock:
            return b"".join(self._tail)

    def last(self, size: int) -> bytes:
        """Return the last ``size`` bytes that the job wrote."""
        chunks: list[bytes] = []
        with self._lock:
            for chunk in reversed(self._tail):
                if size <= 0:
                    break
                chunks.append(chunk[-size:])
                size -= len(chunk)
        return b"".join(reversed(chunks))

    def say(self, text: str) -> None:
        """Print ddpdoctor's lines, never within a line of the job. Does not wait."""
        self._pending.append((time.monotonic(), text.encode("utf-8", "replace")))
        self._wake()

    def _wake(self) -> None:
        # A full pipe wakes the thread as well.
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"w")

    # -- the writing thread

    def _pump(self) -> None:
        try:
            self._carry_all()
        except Exception:
            # Whatever fails, the job must not wait for a reader.
            while self._source is not None:
                if readable([self._source], _LINE_TIMEOUT / 4):
                    self._take(self._write)
                elif self._drain.is_set():
                    self._drained.set()
            self._drained.set()

    def _carry_all(self) -> None:
        while True:
            sources = [self._wake_reader]
            if self._source is not None:
                sources.append(self._source)
            wait = _LINE_TIMEOUT / 4 if self._pending or self._drain.is_set() else None
            ready = readable(sources, wait)
            if self._wake_reader in ready:
                os.read(self._wake_reader, _CHUNK)
            carried = self._source in ready and self._take(self._carry)
            more = self._source is not None and readable([self._source], 0)
            draining = self._drain.is_set() and not carried and not more
            self._release(force=draining)
            if draining and not self._pending:
                self._drain.clear()
                self._drained.set()

    def _take(self, carry: Callable[[bytes], bool]) -> bool:
        """Read a chunk and pass it on. Returns False at the end of the job's stderr."""
        assert self._source is not None
        try:
            chunk = os.read(self._source, _CHUNK)
        except OSError:
            chunk = b""
        try:
            if chunk and carry(chunk):
                return True
        except Exception:
            self._write(chunk)
            raise
        # The job has closed its stderr, or our reader is gone and the job has to get the error.
        source, self._source = self._source, None
        os.close(source)
        return False

    def _carry(self, chunk: bytes) -> bool:
        with self._lock:
            self._tail.append(chunk)
            self._tail_size += len(chunk)
            self.carried += len(chunk)
            while self._tail_size - len(self._tail[0]) >= MAX_TAIL:
                self._tail_size -= len(self._tail.popleft())
        head, newline, rest = chunk.rpartition(b"\n")
        if self._pending and newline:
            if not self._write(head + newline):
                return False
            self._line_start = True
            self._release()
            chunk = rest
        if chunk:
            self._line_start = chunk.endswith(b"\n")
            return self._write(chunk)
        return True

    def _release(self, force: bool = False) -> None:
        """Write ddpdoctor's waiting lines if the job's output is at the start of a line."""
        if not self._pending:
            return
        waited = time.monotonic() - self._pending[0][0]
        if self._terminal:
            self._write(self._fresh_line())
        elif not self._line_start:
            if not force and waited < _LINE_TIMEOUT:
                return
            self._write(b"\n")
        elif self._one_file and not _ends_line(_OUT):
            self._write(b"\n")
        self._line_start = True
        while self._pending:
            self._write(self._pending.popleft()[1])

    def _fresh_line(self) -> bytes:
        """Return the characters that move a terminal's cursor to an empty line.

        As many blanks as the line is wide wrap only if the cursor was not at the left edge. Its
        position is unknown, because output to stdout also moves it.
        """
        if not self._stdout_shares and self._line_start:
            return b""
        try:
            size = fcntl.ioctl(_OUT, termios.TIOCGWINSZ, bytes(8))
            columns = struct.unpack("HHHH", size)[1]
        except OSError:
            columns = 0
        return b" " * (columns - 1) + b"\r" if columns > 1 else b"\n"

    def _write(self, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(_OUT, view) :]
            except BlockingIOError:
                # The reader has made this end non-blocking, and is slow.
                pause(0.01)
            except OSError:
                return False
        return True


# -- the terminal, and its job control


_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh", "fish", "tcsh", "csh"})


def has_terminal() -> bool:
    """Return whether this process still has the terminal from which it was started."""
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
    """Return whether no process of this session could continue the process group if it stopped.

    This is so if no member has a parent in the session but outside the group, such as a shell. The
    kernel does not let a terminal stop such a group. Parents in ``without`` are ignored.
    """
    every = {process.pid: process for process in processes.listed()}
    parents = {each.parent for each in every.values() if each.group == group} - set(without)
    session = os.getsid(0)
    return not any(
        pid in every and every[pid].group != group and proc.session_of(pid) == session
        for pid in parents
    )


# -- signals for the job


HANGUP_GRACE = 4.0  # Maximum grace period when the terminal is closed, in seconds

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TO_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
"""Signals for the whole group, because a terminal sends them to its whole foreground group."""


class JobSignals:
    """The signal handlers of this process.

    On a terminal the job shares this process's group, so the shell treats both as one job.
    Otherwise it has its own session, and a signal to this process does not reach it.
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

        Only Linux shows whether a signal has already reached the job.
        """
        self.received: set[int] = set()  # Signals that ask the job to end
        self.deadline: float | None = None  # Monotonic time in seconds by which the job has to end
        self._started = False
        self._unsent: list[int] = []  # Signals that arrived before the job's command started
        self._records: list[SignalRecord] = []
        self._interrupts = 0
        """Number of Ctrl-C presses. Python calls a handler once for several that arrive together.
        """
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)

    @property
    def descriptor(self) -> int:
        """The descriptor that is readable after a signal, and after :meth:`wake`."""
        return self._woken

    def install(self) -> None:
        """Handle signals from now on. Ignored signals stay ignored."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        handlers = dict.fromkeys(PASSED_ON, self._pass_on)
        # Schedulers announce a job's time limit with these signals, and the job may count them.
        handlers |= dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), self._pass_on_every)
        if self.group is not None:
            # This process stops after the job's command has stopped.
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
        """Empty the pipe that woke the loop, and count Ctrl-C presses."""
        with contextlib.suppress(BlockingIOError):
            # One byte for each signal: its number.
            self._interrupts += os.read(self._woken, 4096).count(signal.SIGINT)

    def started(self) -> None:
        """Send the signals that arrived earlier to the job's command, which has just started."""
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
        """Return whether Ctrl-C was pressed a second time, which ends the job's grace period."""
        repeated = self._interrupts > 1 and self.deadline is not None
        if repeated:
            self._interrupts = 1
            self.deadline = time.monotonic()
        return repeated

    def suspend(self, number: int) -> float:
        """Stop the whole job and this process, because signal ``number`` stopped the job's command.

        They continue when this process does, for example by a shell's ``fg``. Return the duration
        of the stop in seconds.
        """
        if self.group is None:
            return 0.0
        if number == signal.SIGTSTP and is_orphaned_group(self.group, self._keepers.parents):
            # Without ddpdoctor it would not have stopped, because no shell could continue it.
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
            # The SIGCONT was meant for the job, even if only this process received it.
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
            # The terminal's own signal may have arrived before the job's stderr had its new size.
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
