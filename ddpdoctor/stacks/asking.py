"""Request the stacks of a process's threads.

Only a process that declared how (`ddpdoctor.probe.runtime.stacks`) is asked. First, a thread of
ddpdoctor in that process, in Python. If it waits for the GIL in vain, native code holds the GIL and
no Python runs, so ``faulthandler`` is asked by a real-time signal. Such a signal kills a process
that does not handle it. Therefore everything that the process declared is checked before: that it
is still the same process, that it handles this signal, and that it will write to our file.

The format of ``faulthandler`` is that of ``Python/traceback.c`` in CPython 3.10 to 3.14. Frames
come innermost first, at most 100 per thread. A text is cut after 500 characters, and characters
that are not printable ASCII are escaped.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import re
import stat
import sys
import termios
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer, whole
from ddpdoctor.run.names import STACKS_SUFFIX
from ddpdoctor.run.records.base import JsonObject, Part
from ddpdoctor.run.records.process import StoreRecord
from ddpdoctor.run.records.typed_json import required
from ddpdoctor.stacks.frames import is_ours
from ddpdoctor.stacks.rank_stacks import CUT, ENDING, MAIN, Frame, Thread
from ddpdoctor.system.proc import ENDED, read_stat
from ddpdoctor.system.process_activity import (
    is_foreign,
    is_open,
    lacked,
    read_signals,
    read_turns,
    read_wait,
)

# -- Declarations of processes


_NAME = re.compile(rf"stacks-(\d+)-(\d+){re.escape(STACKS_SUFFIX)}$")
_MAX_HEAD = 1 << 14


@dataclass(frozen=True)
class Declared(Part):
    """How to request the stacks of one process, as the process declared it."""

    path: str  # Its responses are appended to this file, after :attr:`head`
    head: int  # Bytes of the file's first line, which holds the declaration
    pid: int
    start: int  # Start of the process, in ticks since boot
    pipe: int  # Descriptor, in the process, of the pipe for requests
    pipe_inode: int
    thread: int  # Native id of the thread that responds
    signal: int  # The signal that ``faulthandler`` handles, or 0
    file: int  # Descriptor, in the process, of the file at :attr:`path`
    main_thread: int  # Native id of the main thread
    main_ident: int
    rank: int | None  # The rank of its environment at the start
    host: str
    namespace: str  # Where its pid is valid: a boot and a pid namespace
    cwd: str
    restart: int = 0
    time: int = 0  # Unix nanoseconds of the declaration
    world_size: int = 0  # As in its environment at the start
    store: StoreRecord | None = None  # Where torchrun lets the ranks meet


def read_declared(directory: Path) -> list[Declared]:
    """Return all declarations in a run directory, the newest last. Skip damaged ones."""
    found: list[Declared] = []
    try:
        names = opening.names(directory)
    except OSError:
        return []
    for name in names:
        match = _NAME.match(name)
        if match is None:
            continue
        path = directory / name
        try:
            with opening.file(path) as file:
                line, newline, _ = file.read(_MAX_HEAD).partition(b"\n")
            if not newline:
                # Still being written.
                continue
            known = {
                "path": str(path), "head": len(line) + 1,
                "pid": int(match[1]), "start": int(match[2]),
            }  # fmt: skip
            found.append(required(Declared, {**opening.loads(line), **known}))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda each: each.time)


# -- The output of `faulthandler`


_FRAME = re.compile(
    r'  File (?:"(?P<path>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<function>.*)$'
)
# "Current thread 0x00007f2f6c1b7740 (most recent call first):". 3.14 has "[NAME]" before the
# bracket, and a build without the GIL has more words in it.
_THREAD = re.compile(r"(?P<which>Current t|T)hread 0x(?P<ident>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(")
_STACK = "Stack (most recent call first):"
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def parse_dump(text: str, directory: str = "") -> tuple[Thread, ...]:
    """Return the threads of one or several dumps, in their order.

    Args:
        text: The output of ``faulthandler``. Unknown lines are skipped.
        directory: The working directory of the process, for relative paths.
    """
    return tuple(_threads(text, directory))


def _threads(text: str, directory: str) -> Iterator[Thread]:
    begun: Thread | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        head = _thread_head(line)
        if head is None and begun is not None and line.startswith("  "):
            match = _FRAME.match(line)
            if match:
                path = at(_unescaped(match["path"] or "???"), directory)
                frames.append(Frame(path, whole(match["line"]), _unescaped(match["function"])))
            elif line == "  ...":
                frames.append(CUT)
            continue
        # Other lines end a thread: the list of extension modules ends a dump.
        if begun is not None:
            yield replace(begun, frames=tuple(reversed(frames)))
        begun, frames = head, []
    if begun is not None:
        yield replace(begun, frames=tuple(reversed(frames)))


def _thread_head(line: str) -> Thread | None:
    if line == _STACK:
        return Thread(0, "", True, ())
    match = _THREAD.match(line)
    if match is None:
        return None
    return Thread(int(match["ident"], 16), match["name"] or "", match["which"] != "T", ())


def at(path: str, directory: str) -> str:
    """Return a frame's file, made absolute if it is relative and the directory is known."""
    if not directory or path.startswith(("/", "<", "?")):
        return path
    return os.path.normpath(os.path.join(directory, path))


def _unescaped(text: str) -> str:
    def letter(match: re.Match[str]) -> str:
        code = int(match[1] or match[2] or match[3], 16)
        return chr(code) if code <= sys.maxunicode else "\N{REPLACEMENT CHARACTER}"

    return _ESCAPED.sub(letter, text)


# -- Requests


_MAX_RESPONSE = 16 << 20  # Bytes of a response that are read

GIL_HELD = 1.0
"""Seconds without the GIL after which native code is said to hold it. Python passes it on every
5 milliseconds if the holder has a core. Time in which any thread lacks a core does not count."""

_NEARLY = 0.9
"""Share of that time that is enough, since threads lose milliseconds even on an idle machine."""

_TGKILL = {"x86_64": 234, "aarch64": 131}  # Numbers of a system call that glibc names since 2.30

OTHER_PROGRAM = "does not answer any more: its program was replaced (exec), or closed our files"


class Asking:
    """A request to one process, and its response so far."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._bit = 1 << (declared.signal - 1) if declared.signal else 0
        self.threads: tuple[Thread, ...] = ()
        self.gil_held = False
        self.world_size = 0  # World size of the ``init_process_group`` call that it is in
        self.trouble = ""  # Why there are no stacks, in a few words

    def turns(self) -> Generator[None, None, None]:
        """Send the request. Yield while waiting, so that requests to other processes proceed."""
        try:
            with opening.file(self._declared.path, os.O_RDWR) as file:
                while not _locked(file.fileno()):
                    # Another process is asking, and two responses are hard to tell apart.
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
        return "held by a tracer such as gdb" if process.letter == "t" else ""

    def _ask(self, file: int) -> Iterator[None]:
        declared = self._declared
        try:
            pipe = os.open(f"/proc/{declared.pid}/fd/{declared.pipe}", os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            self.trouble = OTHER_PROGRAM
            return
        try:
            facts = os.fstat(pipe)
            # The declaration may be forged. Write only to a pipe, of a process that has our file
            # open.
            if (
                facts.st_ino != declared.pipe_inode
                or not stat.S_ISFIFO(facts.st_mode)
                or not is_open(declared.pid, declared.file, declared.path)
            ):
                self.trouble = OTHER_PROGRAM
                return
            yield from self._wait(file, pipe)
        finally:
            os.close(pipe)
        if self.gil_held:
            yield from self._ask_faulthandler(file)

    def _wait(self, file: int, pipe: int) -> Iterator[None]:
        """Send the request and wait for a response, or until it is known that none will come."""
        declared = self._declared
        asked = False
        waits: _Patience | None = None
        while not self._answered(file):
            thread = read_wait(declared.pid, declared.thread)
            if thread is None:
                self.trouble = ENDING
                return
            unread = array.array("i", [0])
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
            if not unread[0]:
                if asked:
                    # It takes the request off the pipe after it has written the response.
                    if not self._answered(file):
                        self.trouble = "could not write its answer: is the disk full?"
                    return
                # Not while an earlier request is in the pipe, which may be answered already.
                os.write(pipe, b"\n")
                asked = True
            # It sleeps although there is a request, so it waits for the GIL. A thread that waits
            # for a core does not sleep, and a wait for the disk is another state.
            if thread.letter == "S" and thread.wchan in ("", "futex"):
                waits = waits or _Patience(declared.pid)
                if waits.over(GIL_HELD):
                    self.gil_held = True
                    return
            yield

    def _written(self, file: int) -> bytes:
        head = self._declared.head
        return os.pread(file, min(os.fstat(file).st_size - head, _MAX_RESPONSE), head)

    def _answered(self, file: int) -> bool:
        """Read the response of the process's thread. Return whether it is complete."""
        written = self._written(file)
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
        if not is_open(declared.pid, declared.file, declared.path):
            self.trouble = OTHER_PROGRAM
            return
        if not signals.pending & self._bit:
            # An earlier signal that is still pending will do.
            _send(declared.pid, declared.main_thread, declared.signal)
        # The kernel removes a pending signal slightly before it blocks it for the handler. Once
        # something is written, the handler runs until the signal is no longer blocked.
        while os.fstat(file).st_size == declared.head or self._is_handling():
            yield
        if self._answered(file):
            # A long native call has just returned.
            self.gil_held = False
            return
        self.threads = _main_first(
            replace(thread, name=MAIN) if thread.ident == declared.main_ident else thread
            for thread in parse_dump(self._written(file).decode("ascii", "replace"), declared.cwd)
            if thread.frames and not is_ours(thread.frames)
        )
        if not any(thread.name == MAIN for thread in self.threads):
            self.trouble = "wrote no stack of its main thread"

    def _is_handling(self) -> bool:
        """Return whether the main thread still has to handle the signal, or is handling it."""
        signals = read_signals(self._declared.pid, self._declared.main_thread)
        return signals is not None and bool((signals.pending | signals.blocked) & self._bit)


class _Patience:
    """Measures time in which no thread of a process waits for a core."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._when = time.monotonic()
        self._turns = read_turns(pid)
        self._passed = 0.0

    def over(self, seconds: float) -> bool:
        """Return whether that much time has passed. Read the process only if it may have."""
        now = time.monotonic()
        since = now - self._when
        if self._passed + since < seconds:
            return False
        turns = read_turns(self._pid)
        lost = [
            lacked(self._turns[thread], turn, since)
            for thread, turn in turns.items()
            if thread in self._turns
        ]
        self._passed += max(0.0, since - max(lost, default=0.0))
        self._when, self._turns = now, turns
        return self._passed >= seconds * _NEARLY


def _main_first(threads: Iterable[Thread]) -> tuple[Thread, ...]:
    return tuple(sorted(threads, key=lambda thread: thread.name != MAIN))


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
