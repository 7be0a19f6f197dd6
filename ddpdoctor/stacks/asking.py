"""Asks one process for the stacks of its threads.

First a thread of ours in it, in Python. If that waits for the GIL and does not get it, native code
holds it, so that no Python runs and ``faulthandler`` can be asked, by a real-time signal. Such a
signal kills a process that does not handle it, so before it is sent everything is looked at that
the process declared: that it is the same process still, that it handles this signal, and that the
file to which it will write is ours.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import stat
import sys
import termios
import time
from collections.abc import Generator, Iterator
from dataclasses import replace

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.stacks.declared import Declared
from ddpdoctor.stacks.model import CUT, ENDING, MAIN, Frame, Thread
from ddpdoctor.stacks.parse import at, parse
from ddpdoctor.stacks.user_frames import is_ours
from ddpdoctor.system.process_state import (
    ENDED,
    is_foreign,
    is_open,
    lacked,
    read_signals,
    read_stat,
    read_turns,
    read_wait,
)

_MOST_ANSWER = 16 << 20
"""Bytes of an answer that are read."""

GIL_HELD = 1.0
"""Seconds for which it waits for the GIL. Python itself hands that over every 5 milliseconds, if
the thread that has it gets a core: what any thread of the process waits for one does not count."""

_NEARLY = 0.9
"""Of that second, since on a machine that idles a thread loses a few milliseconds, too."""

_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of a system call for which C libraries have no name before glibc 2.30."""

OTHER_PROGRAM = "does not answer any more: its program was replaced (exec), or closed our files"


class Asking:
    """The questions to one process and what it answered so far."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._bit = 1 << (declared.signal - 1) if declared.signal else 0
        self.threads: tuple[Thread, ...] = ()
        self.gil_held = False
        self.world_size = 0
        """Of the ``init_process_group`` that it is in."""
        self.trouble = ""
        """Why there are no stacks, in a few words."""

    def turns(self) -> Generator[None, None, None]:
        """Ask; yields where the process has to be waited for, so that others get their turn."""
        try:
            with opening.file(self._declared.path, os.O_RDWR) as file:
                while not _locked(file.fileno()):
                    # Another process is asking, and two answers in one file are hard to separate.
                    yield
                self.trouble = self._obstacle()
                if self.trouble:
                    return
                os.ftruncate(file.fileno(), self._declared.head)
                yield from self._ask(file.fileno())
        except OSError as error:
            foreign = isinstance(error, PermissionError) and is_foreign(self._declared.pid)
            why = "it is another user's" if foreign else error.strerror
            self.trouble = f"cannot be asked: {why}"

    def _obstacle(self) -> str:
        declared = self._declared
        process = read_stat(declared.pid)
        if process is None or process.start != declared.start or process.letter in ENDED:
            return "has ended"
        if process.letter == "T":
            return "stopped (SIGSTOP)"
        if process.letter == "t":
            return "held by a tracer such as gdb"
        return ""

    def _ask(self, file: int) -> Iterator[None]:
        declared = self._declared
        try:
            pipe = os.open(f"/proc/{declared.pid}/fd/{declared.pipe}", os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            self.trouble = OTHER_PROGRAM
            return
        try:
            facts = os.fstat(pipe)
            # The file says which descriptor it is, and may be anybody's: nothing but a pipe of a
            # process that has that file open is ever written to.
            if (
                facts.st_ino != declared.pipe_inode
                or not stat.S_ISFIFO(facts.st_mode)
                or not is_open(declared.pid, declared.file, str(declared.path))
            ):
                self.trouble = OTHER_PROGRAM
                return
            yield from self._wait(file, pipe)
        finally:
            os.close(pipe)
        if self.gil_held:
            yield from self._ask_faulthandler(file)

    def _wait(self, file: int, pipe: int) -> Iterator[None]:
        """Ask, and wait for the answer, or until it is known that there will be none."""
        declared = self._declared
        asked = False
        waits: _Patience | None = None
        while not self._answered(file):
            thread = read_wait(declared.pid, declared.thread)
            if thread is None:
                self.trouble = ENDING
                return
            if not _unread(pipe):
                if asked:
                    # It takes the request when it has written the answer.
                    if not self._answered(file):
                        self.trouble = "could not write its answer: is the disk full?"
                    return
                # Not before an earlier request is out of the pipe: it may be answered already.
                os.write(pipe, b"\n")
                asked = True
            # It sleeps although there is a request, so it waits for the GIL. If all it wanted were
            # a core, it would not sleep; a wait for the disk shows as another state.
            if thread.letter == "S" and thread.wchan in ("", "futex"):
                waits = waits or _Patience(declared.pid)
                if waits.over(GIL_HELD):
                    self.gil_held = True
                    return
            yield

    def _answered(self, file: int) -> bool:
        """Take what the process's thread wrote; whether it has."""
        head = self._declared.head
        written = os.pread(file, min(os.fstat(file).st_size - head, _MOST_ANSWER), head)
        if not (written.startswith(b"{") and written.endswith(b"\n")):
            return False
        try:
            answer = opening.loads(written.splitlines()[-1])
            threads = [self._thread(each) for each in answer["threads"]]
            self.world_size = integer(answer, "world_size")
        except (ValueError, LookupError, TypeError, OverflowError):
            return False
        self.threads = _main_first(threads)
        return True

    def _thread(self, answer: JsonObject) -> Thread:
        frames = [
            Frame(at(str(path), self._declared.cwd), int(line), str(function))
            for path, line, function in reversed(answer["frames"])
        ]
        name = MAIN if answer["main"] else str(answer["name"])
        cut = (CUT,) if answer["cut"] else ()
        awaited = answer.get("daemon") is False and not answer["main"]
        return Thread(int(answer["ident"]), name, False, (*cut, *frames), awaited)

    def _ask_faulthandler(self, file: int) -> Iterator[None]:
        declared = self._declared
        signals = read_signals(declared.pid, declared.main_thread)
        self.trouble = self._obstacle()
        if self.trouble:
            return
        if signals is None or not declared.signal or signals.blocked & self._bit:
            self.trouble = "native code holds the GIL, and signals are blocked"
            return
        if not signals.caught & self._bit:
            self.trouble = ENDING
            return
        if not is_open(declared.pid, declared.file, str(declared.path)):
            self.trouble = OTHER_PROGRAM
            return
        if not signals.pending & self._bit:
            # One that was sent before and not handled yet will do.
            _send(declared.pid, declared.main_thread, declared.signal)
        # The kernel takes a signal off the pending ones a moment before it blocks it for its
        # handler; once something is written, the handler is at work until that ends.
        while os.fstat(file).st_size == declared.head or self._is_handling():
            yield
        if self._answered(file):
            # It was a long call that has just returned.
            self.gil_held = False
            return
        size = min(os.fstat(file).st_size - declared.head, _MOST_ANSWER)
        written = os.pread(file, size, declared.head)
        found = parse(written.decode("ascii", "replace"), declared.cwd)
        self.threads = _main_first(
            replace(thread, name=MAIN) if thread.ident == declared.main_ident else thread
            for thread in found
            if thread.frames and not is_ours(thread.frames)
        )
        if not any(thread.name == MAIN for thread in self.threads):
            self.trouble = "wrote no stack of its main thread"

    def _is_handling(self) -> bool:
        """Whether the main thread has not handled the signal yet, or is at it."""
        signals = read_signals(self._declared.pid, self._declared.main_thread)
        return signals is not None and bool((signals.pending | signals.blocked) & self._bit)


class _Patience:
    """Time that passes while no thread of a process waits for a core."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._when = time.monotonic()
        self._turns = read_turns(pid)
        self._passed = 0.0

    def over(self, seconds: float) -> bool:
        """Whether so much has passed; looks at the process once it may have."""
        now = time.monotonic()
        since = now - self._when
        if self._passed + since < seconds:
            return False
        turns = read_turns(self._pid)
        without = max(
            (
                lacked(self._turns[thread], turn, since)
                for thread, turn in turns.items()
                if thread in self._turns
            ),
            default=0.0,
        )
        self._passed += max(0.0, since - without)
        self._when, self._turns = now, turns
        # What was lost is measured again over a while, not from one look to the next.
        return self._passed >= seconds * _NEARLY


def _main_first(threads: Iterator[Thread] | list[Thread]) -> tuple[Thread, ...]:
    return tuple(sorted(threads, key=lambda thread: thread.name != MAIN))


def _unread(pipe: int) -> int:
    """Bytes in a pipe that are still unread."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _send(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread.

    Raises:
        OSError: It cannot be sent.
    """
    if _libc is None:
        raise OSError(0, "not on this system")
    if hasattr(_libc, "tgkill"):
        failed = _libc.tgkill(pid, thread, number)
    elif os.uname().machine in _TGKILL:
        failed = _libc.syscall(_TGKILL[os.uname().machine], pid, thread, number)
    else:
        raise OSError(0, "the C library has no tgkill")
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
