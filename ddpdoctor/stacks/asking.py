"""Ask one process for the stacks of its threads.

A process is asked only if it declared itself (`ddpdoctor.probe.runtime.stacks`): first a thread of
ours in it, in Python. If that waits for the GIL and does not get it, native code holds it, so that
no Python runs and ``faulthandler`` can be asked, by a real-time signal. Such a signal kills a
process that does not handle it, so before it is sent everything is checked that the process
declared: that it is the same process still, that it handles this signal, and that the file to
which it will write is ours.

The format of ``faulthandler``: ``Python/traceback.c`` of CPython 3.10 to 3.14. Frames come
innermost first, at most 100 of a thread; a text is cut after 500 characters, and what is not
printable ASCII in it is escaped.
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
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer, whole
from ddpdoctor.run.names import STACKS_SUFFIX
from ddpdoctor.run.records.base import JsonObject
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

# -- the processes of a run that can be asked for their stacks, as they declare it


_NAME = re.compile(rf"stacks-(\d+)-(\d+){re.escape(STACKS_SUFFIX)}$")
_MOST_HEAD = 1 << 14


@dataclass(frozen=True)
class Declared:
    """One process's word on how it is asked."""

    path: Path
    """Its answers are appended to this file, after :attr:`head`."""
    head: int
    """Bytes of the file's first line, in which all of this stands."""
    pid: int
    start: int
    """When the process started, in ticks since boot."""
    pipe: int
    """Descriptor, in the process, of the pipe that takes requests."""
    pipe_inode: int
    thread: int
    """Native id of the thread that answers."""
    signal: int
    """The signal that ``faulthandler`` answers; 0 for none."""
    file: int
    """Descriptor, in the process, of the file at :attr:`path`."""
    main_thread: int
    """Native id of the main thread."""
    main_ident: int
    rank: int | None
    """As its environment said at the start."""
    restart: int
    host: str
    namespace: str
    """Where its pid is valid: a boot and a pid namespace."""
    cwd: str


def read_declared(directory: Path) -> list[Declared]:
    """All declarations in a run directory, the newest last; damaged ones are left out."""
    found: list[tuple[int, Declared]] = []
    try:
        names = opening.names(directory)
    except OSError:
        return []
    for name in names:
        match = _NAME.match(name)
        if match is None:
            continue
        path = directory / name
        head = _first_line(path)
        try:
            record = opening.loads(head)
            declared = _from_record(record, path, len(head), int(match[1]), int(match[2]))
            found.append((integer(record, "time"), declared))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            # Still being written, or damaged.
            continue
    return [declared for _, declared in sorted(found, key=lambda each: each[0])]


def _from_record(record: JsonObject, path: Path, head: int, pid: int, start: int) -> Declared:
    rank = record["rank"]
    return Declared(
        path=path,
        head=head,
        pid=pid,
        start=start,
        pipe=int(record["pipe"]),
        pipe_inode=int(record["pipe_inode"]),
        thread=int(record["thread"]),
        signal=int(record["signal"]),
        file=int(record["file"]),
        main_thread=int(record["main_thread"]),
        main_ident=int(record["main_ident"]),
        rank=rank if isinstance(rank, int) else None,
        restart=integer(record, "restart"),
        host=str(record["host"]),
        namespace=str(record["namespace"]),
        cwd=str(record["cwd"]),
    )


def _first_line(path: Path) -> bytes:
    try:
        with opening.file(path) as file:
            head, newline, _ = file.read(_MOST_HEAD).partition(b"\n")
    except OSError:
        return b""
    return head + newline if newline else b""


# -- parse


_FRAME = re.compile(
    r'  File (?:"(?P<path>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<function>.*)$'
)
# "Current thread 0x00007f2f6c1b7740 (most recent call first):"; 3.14 has "[NAME]" before the
# bracket, and a build without the GIL more words in it.
_THREAD = re.compile(r"(?P<which>Current t|T)hread 0x(?P<ident>[0-9a-f]+)(?: \[(?P<name>.*)\])? \(")
_STACK = "Stack (most recent call first):"
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")


def parse_dump(text: str, directory: str = "") -> tuple[Thread, ...]:
    """The threads of a dump, or of several in a row, as they stand there.

    Args:
        text: What ``faulthandler`` wrote; lines that are not understood are skipped.
        directory: The working directory of the process, to which relative paths are taken to
            belong.
    """
    return tuple(_threads(text, directory))


def _threads(text: str, directory: str) -> Iterator[Thread]:
    begun: Thread | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        head = _thread_head(line)
        if head is not None:
            if begun is not None:
                yield _with_frames(begun, frames)
            begun, frames = head, []
        elif begun is not None and line.startswith("  "):
            match = _FRAME.match(line)
            if match:
                frames.append(_frame(match, directory))
            elif line == "  ...":
                frames.append(CUT)
        elif begun is not None:
            # The list of extension modules, say, which ends a dump.
            yield _with_frames(begun, frames)
            begun = None
    if begun is not None:
        yield _with_frames(begun, frames)


def _thread_head(line: str) -> Thread | None:
    if line == _STACK:
        return Thread(0, "", True, ())
    match = _THREAD.match(line)
    if match is None:
        return None
    return Thread(int(match["ident"], 16), match["name"] or "", match["which"] != "T", ())


def _with_frames(thread: Thread, frames: list[Frame]) -> Thread:
    return Thread(thread.ident, thread.name, thread.current, tuple(reversed(frames)))


def _frame(match: re.Match[str], directory: str) -> Frame:
    path = at(_unescaped(match["path"] or "???"), directory)
    line = match["line"]
    return Frame(path, whole(line), _unescaped(match["function"]))


def at(path: str, directory: str) -> str:
    """A frame's file, absolute if it is one and the working directory is known."""
    if not directory or path.startswith(("/", "<", "?")):
        return path
    return os.path.normpath(os.path.join(directory, path))


def _letter(match: re.Match[str]) -> str:
    code = int(match[1] or match[2] or match[3], 16)
    return chr(code) if code <= sys.maxunicode else "\N{REPLACEMENT CHARACTER}"


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(_letter, text)


# -- asks one process for the stacks of its threads


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
        found = parse_dump(written.decode("ascii", "replace"), declared.cwd)
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
