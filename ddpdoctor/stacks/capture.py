"""Capture stacks of processes: by the probe, or by py-spy.

Only a process that declared how (`ddpdoctor.probe.runtime.stacks`) is asked. First we ask a thread
of ddpdoctor in that process. If it does not get the GIL, native code holds it and no Python
runs, so ``faulthandler`` is asked by a real-time signal. Such a signal kills a process that does
not handle it. Therefore everything that the process declared is checked before: that it is still
the same process, that it handles this signal, and that it will write to our file.

The format of ``faulthandler`` is that of ``Python/traceback.c`` in CPython 3.10 to 3.14. Frames
come innermost first, at most 100 per thread. A text is cut after 500 characters, and characters
that are not printable ASCII are escaped.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer, whole
from ddpdoctor.run.names import STACKS_SUFFIX, namespace
from ddpdoctor.run.records.base import JsonObject, Part
from ddpdoctor.run.records.process import StoreRecord
from ddpdoctor.run.records.supervisor import MAIN, Frame, ProcessState, RankStacks, Thread, Variable
from ddpdoctor.run.records.typed_json import required
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.stacks.frames import CUT, ENDING, is_ours
from ddpdoctor.system.proc import ENDED, pause, read_stat
from ddpdoctor.system.process_activity import (
    CpuTime,
    is_foreign,
    is_open,
    most_lacked,
    read_cpu_time,
    read_cpu_times,
    read_signals,
    read_state,
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
    rank: int | None  # The rank in its environment at its start
    host: str
    namespace: str  # The boot and pid namespaces in which its pid is valid
    cwd: str
    restart: int = 0
    time: int = 0  # Unix nanoseconds of the declaration
    world_size: int = 0  # The world size in its environment at its start
    store: StoreRecord | None = None  # The address at which torchrun's ranks meet


def read_declared(directory: Path) -> list[Declared]:
    """Return all declarations in a run directory, newest last. Skip damaged ones."""
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
                # It is still being written.
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
    """Return the threads of one or several dumps of ``faulthandler``, in order.

    Unknown lines are skipped. Relative paths refer to the working ``directory`` of the process.
    """
    return tuple(_dumped_threads(text, directory))


def _dumped_threads(text: str, directory: str) -> Iterator[Thread]:
    begun: Thread | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        head = _thread_head(line)
        if head is None and begun is not None and line.startswith("  "):
            match = _FRAME.match(line)
            if match:
                path = path_in(_unescaped(match["path"] or "???"), directory)
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


def path_in(path: str, directory: str) -> str:
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


_MAX_RESPONSE = 16 << 20  # Maximum bytes of a response to read

GIL_TIMEOUT = 1.0
"""Seconds without the GIL after which native code is assumed to hold it. Python passes it on every
5 milliseconds if the holder has a core. Time in which any thread lacks a core does not count.
"""

_MIN_GIL_SHARE = 0.9
"""Required share of that time, because threads lose milliseconds even on an idle machine."""

_TGKILL = {"x86_64": 234, "aarch64": 131}  # Numbers of a system call that glibc names since 2.30

OTHER_PROGRAM = "does not answer any more: its program was replaced (exec), or closed our files"


class StackRequest:
    """A request to one process, and its response so far. ``variables`` asks for the user's."""

    def __init__(self, declared: Declared, *, variables: bool = False) -> None:
        self._declared = declared
        self._request = b"\n\n" if variables else b"\n"
        self._bit = 1 << (declared.signal - 1) if declared.signal else 0
        self.threads: tuple[Thread, ...] = ()
        self.gil_held = False
        self.world_size = 0  # World size of the ``init_process_group`` call that it is in
        self.trouble = ""  # The reason why there are no stacks, in a few words

    def turns(self) -> Generator[None, None, None]:
        """Send the request. Yield while waiting, so that requests to other processes proceed."""
        try:
            with opening.file(self._declared.path, os.O_RDWR) as file:
                while not _is_locked(file.fileno()):
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
            # The declaration may be forged. Write only to a pipe of a process that has our file
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
        """Send the request and wait until a response arrives or is ruled out."""
        declared = self._declared
        asked = False
        waits: _Stopwatch | None = None
        while not self._answered(file):
            thread = read_wait(declared.pid, declared.thread)
            if thread is None:
                self.trouble = ENDING
                return
            unread = array.array("i", [0])
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
            if not unread[0]:
                if asked:
                    # The process removes the request from the pipe after writing the response.
                    if not self._answered(file):
                        self.trouble = "could not write its answer: is the disk full?"
                    return
                # Only if the pipe holds no earlier request, which may already be answered.
                os.write(pipe, self._request)
                asked = True
            # The thread sleeps although there is a request, so it waits for the GIL. A thread that
            # waits for a core does not sleep, and a wait for the disk is another state.
            if thread.letter == "S" and thread.wchan in ("", "futex"):
                waits = waits or _Stopwatch(declared.pid)
                if waits.over(GIL_TIMEOUT):
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
            Frame(path_in(str(path), self._declared.cwd), int(line), str(function))
            for path, line, function in reversed(answer["frames"])
        ]
        name = MAIN if answer["main"] else str(answer["name"])
        cut = (CUT,) if answer["cut"] else ()
        awaited = answer.get("daemon") is False and not answer["main"]
        last = len(cut) + len(frames) - 1
        variables = [
            Variable(last - int(number), str(variable), str(value))
            for number, variable, value in answer.get("variables", ())
            if 0 <= int(number) < len(frames)
        ]
        stack = (*cut, *frames)
        return Thread(int(answer["ident"]), name, False, stack, awaited, tuple(variables))

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
            # A signal that is still pending is enough.
            _send_signal(declared.pid, declared.main_thread, declared.signal)
        # The kernel removes a pending signal slightly before it blocks it for the handler. Once
        # there is output, the handler runs until the signal is no longer blocked.
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
            self.trouble = "did not write a stack of its main thread"

    def _is_handling(self) -> bool:
        """Return whether the main thread still has to handle the signal, or is handling it."""
        signals = read_signals(self._declared.pid, self._declared.main_thread)
        return signals is not None and bool((signals.pending | signals.blocked) & self._bit)


class _Stopwatch:
    """Measures time in which no thread of a process waits for a core."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._when = time.monotonic()
        self._turns = read_cpu_times(pid)
        self._passed = 0.0

    def over(self, seconds: float) -> bool:
        """Return whether that much time has passed. Read the process only if it may have."""
        now = time.monotonic()
        since = now - self._when
        if self._passed + since < seconds:
            return False
        turns = read_cpu_times(self._pid)
        self._passed += max(0.0, since - most_lacked(self._turns, turns, since))
        self._when, self._turns = now, turns
        return self._passed >= seconds * _MIN_GIL_SHARE


def _main_first(threads: Iterable[Thread]) -> tuple[Thread, ...]:
    return tuple(sorted(threads, key=lambda thread: thread.name != MAIN))


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _send_signal(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread. Raise OSError if it cannot be sent."""
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


# -- py-spy, if it is installed and has the permission (ptrace)


MISSING = "py-spy is not installed (pip install py-spy)"
FORBIDDEN = "py-spy may not look into the process (ptrace is not permitted)"

SAID = "py-spy says: "  # Prefix of a note that quotes py-spy

MAX_PROCESSES = 16  # Maximum number of processes that py-spy examines at once
_KILL_TIMEOUT = 0.3  # Seconds to wait for a killed py-spy, which may be blocked in the kernel

_UNPAUSABLE = ("T", "t", "D")
"""States in which a process cannot be paused: it is already stopped, or does not react."""

_Dump = list[dict[str, Any]]


def find_py_spy() -> str | None:
    """Find py-spy next to this interpreter, or on ``PATH``."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_silent(stacks: Sequence[RankStacks], patience: float) -> list[RankStacks]:
    """Add stacks from py-spy for living processes that did not respond.

    No process is paused, and processes that responded are not read. ``patience`` is the limit in
    seconds for all of them together.
    """
    silent = [
        number
        for number, each in enumerate(stacks)
        if not each.threads and each.state.letter and each.state.letter not in ENDED
    ]
    found = list(stacks)
    for number, (dump, why) in _dump_each(stacks, silent, ["--nonblocking"], patience).items():
        each = stacks[number]
        threads = _threads(dump, each.pid) if dump is not None else ()
        if any(thread.name == MAIN for thread in threads):
            note = f"{each.trouble}; its stack was read by py-spy"
            found[number] = replace(each, threads=threads, trouble="", note=note)
        else:
            found[number] = replace(each, note=why or "py-spy saw no main thread")
    return found


def add_native(
    stacks: Sequence[RankStacks], patience: float, ranks: Collection[int] | None = None
) -> list[RankStacks]:
    """Add native frames of ranks from py-spy, or a note why they are missing.

    This pauses each process for a second or two, so use it only for requested or hopeless ranks.
    ``patience`` is the limit in seconds for all of them together. Processes without a stack are
    left unchanged.
    """
    wanted = [
        number
        for number, each in enumerate(stacks)
        if each.threads
        and each.state.letter not in _UNPAUSABLE
        and (ranks is None or each.rank in ranks)
    ]
    found = list(stacks)
    for number, (dump, why) in _dump_each(stacks, wanted, ["--native"], patience).items():
        each = stacks[number]
        frames = native_frames(dump) if dump is not None else ()
        note = f"no native frames: {why}" if why else each.note
        found[number] = replace(each, native=frames, note=note)
    return found


def _dump_each(
    stacks: Sequence[RankStacks], numbers: Sequence[int], how: list[str], patience: float
) -> dict[int, tuple[_Dump | None, str]]:
    """Run py-spy on some of the processes. Return its outputs, or the reasons for their absence."""
    program = find_py_spy()
    if program is None:
        return dict.fromkeys(numbers, (None, MISSING))
    deadline = time.monotonic() + patience
    started: dict[int, subprocess.Popen[str]] = {}
    for number in numbers[:MAX_PROCESSES]:
        with contextlib.suppress(OSError):
            started[number] = _start(program, stacks[number].pid, how)
    outcomes: dict[int, tuple[_Dump | None, str]] = dict.fromkeys(
        numbers, (None, f"only {MAX_PROCESSES} processes were examined")
    )
    for number, process in started.items():
        outcomes[number] = _outcome(process, max(deadline - time.monotonic(), 0.05), patience)
    return outcomes


def _start(program: str, pid: int, how: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, "dump", *how, "--json", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )


def _outcome(
    process: subprocess.Popen[str], left: float, patience: float
) -> tuple[_Dump | None, str]:
    try:
        out, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        # The kernel resumes the paused process when its tracer ends.
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_TIMEOUT)
        return None, f"py-spy took over {patience:.1f} s"
    # The exit status may be missing, because the supervisor reaps all its children.
    if not out.strip():
        return None, _reason(errors)
    try:
        return _checked(json.loads(out)), ""
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None, "the output of this py-spy is not understood"


def _reason(errors: str) -> str:
    if "ermission" in errors or "not permitted" in errors:
        return FORBIDDEN
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"{SAID}{lines[0][:100]}" if lines else "py-spy failed without a message"


def _checked(dump: Any) -> _Dump:
    """Check the structure of a dump. Raise an error if a part is missing or has another type."""
    for thread in dump:
        if not isinstance(thread["pid"], int):
            raise TypeError("no pid")
        for frame in thread["frames"]:
            frame["name"].startswith("")
            frame["filename"].startswith("")
            int(frame["line"])
    return list(dump)


def _is_main(thread: dict[str, Any]) -> bool:
    native = thread.get("os_thread_id")
    return native == thread["pid"] if native else thread.get("thread_name") == MAIN


def _threads(dump: _Dump, pid: int) -> tuple[Thread, ...]:
    """Return the Python stacks of a dump without ddpdoctor's threads, the main thread first."""
    try:
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        cwd = ""
    found = []
    for thread in dump:
        frames = tuple(
            Frame(
                path_in(each["filename"], cwd), int(each["line"]), each["name"].rpartition(".")[2]
            )
            for each in reversed(thread["frames"])
            if not each.get("module")
        )
        main = _is_main(thread)
        if frames and (main or not is_ours(frames)):
            name = MAIN if main else str(thread.get("thread_name") or "")
            found.append(Thread(int(thread.get("thread_id") or 0), name, False, frames))
    return tuple(sorted(found, key=lambda each: each.name != MAIN))


def native_frames(dump: _Dump) -> tuple[str, ...]:
    """Return the native frames below the main thread's innermost Python frame, outermost first."""
    main = next((thread for thread in dump if _is_main(thread)), None)
    found: list[str] = []
    for frame in main["frames"] if main is not None else ():
        if not frame.get("module"):
            # This is the innermost Python frame.
            break
        # An address means nothing, and differs between ranks.
        name = "?" if frame["name"].startswith("0x") else frame["name"]
        found.append(f"{name} ({os.path.basename(frame['module'])})")
    return tuple(reversed(found))


# -- All ranks of this host, in parallel


CAPTURE_TIMEOUT = 3.0  # Seconds to wait for all ranks together
_RESPONSE_SHARE = 0.7  # Share of these seconds for responses, if py-spy can read silent ranks
_MAX_STRETCH = 3.0  # Maximum factor by which the wait grows for ranks that lack a core
_DONE = object()  # Marks an exhausted request. A pending one yields None.

_POLLS = (0.001, 0.02)
"""Seconds between two polls for responses: the first interval, and the longest."""


def capture(
    run: Run,
    ranks: Collection[int] | None = None,
    patience: float = CAPTURE_TIMEOUT,
    *,
    native: bool = False,
    variables: bool = False,
) -> tuple[RankStacks, ...]:
    """Return the stacks of the newest attempt's ranks, ascending by rank. Never raise.

    This includes processes that torchrun started but that have not become ranks, for example
    because they hang in ``init_process_group``. A rank that cannot be asked (on another host, dead)
    has a ``trouble``. py-spy examines ranks that do not respond, if it can.

    Args:
        run: A snapshot of the run.
        ranks: Only these ranks.
        patience: Seconds in total, including py-spy on ranks that do not respond. With ``native``,
            py-spy gets the same time again.
        native: Also get native frames from py-spy, which pauses each rank for a second or two.
        variables: Also get the variables of the user's innermost frames.
    """
    began = time.monotonic()
    here = namespace()
    sought = [target for target in _targets(run) if ranks is None or target.rank in ranks]
    for target in sought:
        target.look(here)
        if target.declared is not None and not target.trouble:
            target.asking = StackRequest(target.declared, variables=variables)
    limit = patience * (_RESPONSE_SHARE if find_py_spy() is not None else 1.0)
    waited = _ask(sought, limit)
    found = [target.stacks(waited) for target in sought]
    left = max(began + patience - time.monotonic(), patience * (1.0 - _RESPONSE_SHARE))
    found = read_silent(found, left)
    if native:
        found = add_native(found, patience)
    return tuple(found)


def _ask(targets: Sequence[_Target], limit: float) -> float:
    """Ask all processes at once.

    Return the allowed seconds, which exceed ``limit`` if ranks have no core to respond.
    """
    began = time.monotonic()
    asked = [
        (target, target.asking.turns(), _turns(target))
        for target in targets
        if target.asking is not None
    ]
    poll, slowest = _POLLS
    until = limit
    while True:
        asked = [each for each in asked if next(each[1], _DONE) is None]
        waited = time.monotonic() - began
        if asked and waited >= until:
            lost = max(most_lacked(before, _turns(each), waited) for each, _, before in asked)
            until = min(limit + lost, _MAX_STRETCH * limit)
        if not asked or waited >= until:
            break
        pause(poll)
        poll = min(poll * 1.5, slowest)
    for _, turns, _ in asked:
        turns.close()
    return until


def _turns(target: _Target) -> dict[int, CpuTime]:
    """Return the CPU time used by the threads whose response we are waiting for."""
    declared = target.declared
    threads = (declared.thread, declared.main_thread) if declared is not None else ()
    found = {thread: read_cpu_time(target.pid, thread) for thread in threads}
    return {thread: turn for thread, turn in found.items() if turn is not None}


@dataclass
class _Target:
    """A process that is a rank, or will become one."""

    rank: int
    restart: int
    pid: int
    host: str
    namespace: str
    declared: Declared | None
    trouble: str = ""
    state: ProcessState = field(default_factory=ProcessState)
    asking: StackRequest | None = None

    def look(self, here: str) -> None:
        """Check from outside whether it can respond."""
        if self.namespace and self.namespace != here:
            self.trouble = f"on another host or in another container: {self.host or 'unknown'}"
            return
        stat = read_stat(self.pid)
        reused = (
            self.declared is not None and stat is not None and stat.start != self.declared.start
        )
        if stat is None or reused or stat.letter in ENDED:
            self.trouble = "has ended"
            return
        self.state = read_state(self.pid)
        if self.declared is None:
            self.trouble = (
                "takes no stack requests: not on Linux, without a free signal, or watched late"
            )

    def stacks(self, waited: float) -> RankStacks:
        """Return the result after ``waited`` seconds."""
        asking = self.asking
        found = RankStacks(
            self.rank, self.restart, self.pid, self.host, state=self.state, trouble=self.trouble
        )
        if asking is None:
            return found
        trouble = asking.trouble
        if not trouble and not asking.threads:
            waits = ", in disk sleep" if self.state.letter == "D" else ""
            trouble = f"did not answer within {waited:.3g} s{waits}"
        return replace(
            found,
            threads=asking.threads,
            gil_held=asking.gil_held,
            world_size=asking.world_size,
            trouble=trouble,
        )


def _targets(run: Run) -> list[_Target]:
    """Return the processes of the newest attempt, ascending by rank."""
    every = read_declared(run.path)
    by_pid = {(declared.namespace, declared.pid): declared for declared in every}
    attempt = max([run.restarts[-1], *(declared.restart for declared in every)])
    found: dict[int, _Target] = {}
    for declared in every:
        # The process is not a rank yet. Its environment shows the rank that it will be.
        if declared.rank is not None and declared.restart == attempt:
            found[declared.rank] = _Target(
                declared.rank, attempt, declared.pid, declared.host, declared.namespace, declared
            )
    for rank in run.attempt(attempt):
        target = _of_rank(rank, by_pid)
        if target is not None:
            found[rank.rank] = target
    return [found[number] for number in sorted(found)]


def _of_rank(rank: Rank, by_pid: dict[tuple[str, int], Declared]) -> _Target | None:
    pid = rank.status.pid if rank.status is not None else rank.opened.pid
    if not pid:
        return None
    place, host = rank.opened.namespace or "", rank.opened.host
    if rank.elsewhere:
        return _Target(rank.rank, rank.restart, pid, host, place or "@", None)
    declared = by_pid.get((place, pid))
    if declared is None and not place:
        # The rank has not written its journal yet.
        declared = next((each for (_, known), each in by_pid.items() if known == pid), None)
    if declared is not None:
        place, host = declared.namespace, declared.host
    return _Target(rank.rank, rank.restart, pid, host, place, declared)
