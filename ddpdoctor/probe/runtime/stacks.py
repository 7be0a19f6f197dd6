"""Write the stacks of this process when asked, from a thread of ours.

The thread sleeps until its pipe is written to, and then writes the stacks of all threads to a file
of the run directory. It holds the GIL for that, so the threads that it examines do not run.

If native code holds the GIL, the thread cannot answer. The request then stays in the pipe, and the
supervisor sees the thread wait for the GIL. Only then does it signal ``faulthandler``, which
works in C, without the GIL. It is the last resort because a stack may be half-made while Python
runs: processes with ordinary Python threads ended with SIGSEGV after 4 to 2,820 signals to write
all stacks (Python 3.10 to 3.13), and after 18 to 7,045 to write that of the signalled thread alone
(3.10, 3.12 and 3.13). ``python benchmarks/stacks.py survive`` repeats that.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import control, rank, shield, values
from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.names import STACKS_SUFFIX, namespace, stacks_stem
from ddpdoctor.run.records.base import JsonObject, as_json, json_line

MAX_FRAMES = 200  # maximum number of innermost frames reported of a thread
_MAX_WITH_VARIABLES = 5  # maximum number of user frames whose variables are reported
_MAX_VARIABLES = 40  # maximum number of variables reported of a frame
_FIRST = 9  # offset of the first candidate from the highest signal: others use the ends
joining = 0  # the world size while the process is in ``init_process_group``, otherwise 0

_declared: _Declared | None = None


class _Declared:
    """The file, pipe and signal by which this process can be asked."""

    def __init__(self, path: str, file: int, ends: tuple[int, int], number: int) -> None:
        self.path = path
        self.file = file
        self.ends = ends  # ends of the pipe; the writing end stays open, so that reading never ends
        self.signal = number  # for ``faulthandler``, or 0
        self._files = {file: os.fstat(file).st_ino, ends[0]: os.fstat(ends[0]).st_ino}

    def is_whole(self) -> bool:
        """Return whether the descriptors are still ours. A job may close and reuse them."""
        return all(os.fstat(number).st_ino == inode for number, inode in self._files.items())


@shield.shielded
def declare() -> None:
    """Let others ask for the stacks of this process, which is a rank or is to become one."""
    global _declared
    if _declared is not None or sys.platform != "linux":
        return
    pid = os.getpid()
    path = os.path.join(rank.run_directory(), stacks_stem(pid, start_time()) + STACKS_SUFFIX)
    try:
        # Empty it: a process that has called `exec` is the same one to the kernel.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = move_up(os.open(path, flags | os.O_NOFOLLOW, 0o600))
    except OSError:
        # The unwritable directory is reported elsewhere.
        return
    reading, writing = os.pipe()
    ends = move_up(reading), move_up(writing)
    number = _free_signal()
    if number:
        faulthandler.register(number, file=file, all_threads=True, chain=False)
    _declared = _Declared(path, file, ends, number)
    thread = background("stacks", _serve, _declared)
    thread.start()
    main = threading.main_thread()
    declaration: JsonObject = {
        "kind": "stacks",
        "time": time.time_ns(),
        "pid": pid,
        "pipe": ends[1],
        "pipe_inode": os.fstat(ends[1]).st_ino,
        "thread": thread.native_id,
        "signal": number,
        "file": file,
        "main_thread": main.native_id,
        "main_ident": main.ident,
        "rank": rank.environment_int("RANK"),
        "restart": rank.environment_int("TORCHELASTIC_RESTART_COUNT") or 0,
        "host": socket.gethostname(),
        "namespace": namespace(),
        "cwd": os.getcwd(),
        "world_size": rank.environment_int("WORLD_SIZE") or 0,
    }
    port = rank.environment_int("MASTER_PORT")
    if port and control.is_worker():
        # Under torchrun the store exists before the ranks do.
        declaration["store"] = as_json(rank.met_at(os.environ.get("MASTER_ADDR", ""), port))
    os.write(file, json_line(declaration))


def declare_worker() -> None:
    """Declare a process that torchrun started, as it is to become a rank."""
    if control.is_worker():
        control.claim()
        declare()


def _free_signal() -> int:
    """Return a real-time signal that nothing in this process uses, or 0."""
    used = 0
    with open("/proc/self/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in ("SigBlk", "SigIgn", "SigCgt"):
                used |= int(value, 16)
    for number in range(signal.SIGRTMAX - _FIRST, signal.SIGRTMIN, -1):
        if not used >> (number - 1) & 1 and signal.getsignal(number) is signal.SIG_DFL:
            return int(number)
    return 0


def start_time() -> int:
    """Return this process's start time in ticks since boot. Time and pid identify the process.

    Raises:
        OSError: This is not Linux.
    """
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _serve(declared: _Declared) -> None:
    reading = declared.ends[0]
    requests = select.poll()
    requests.register(reading, select.POLLIN)
    try:
        while requests.poll()[0][1] == select.POLLIN and declared.is_whole():
            found = array.array("i", [0])
            fcntl.ioctl(reading, termios.FIONREAD, found)
            with_variables = found[0] > 1
            with contextlib.suppress(OSError):
                # The disk may be full.
                os.write(declared.file, json_line(_answer(with_variables=with_variables)))
            # Only now: a request in the pipe is known to be unanswered.
            os.read(reading, 4096)
            if declared.signal and signal.getsignal(declared.signal) is not signal.SIG_DFL:
                # The job uses the signal now.
                _declare_again(declared)
                return
    except OSError:
        # The job has closed our descriptor.
        return


@shield.shielded
def _declare_again(declared: _Declared) -> None:
    global _declared
    os.unlink(declared.path)
    _declared = None
    declare()


def _answer(*, with_variables: bool = False) -> JsonObject:
    """Return the stacks of all threads except ours and the debugger's."""
    named = {thread.ident: thread for thread in threading.enumerate()}
    frames_now = sys._current_frames()
    # A frame that refers to itself would keep the tensors of the others alive.
    del frames_now[threading.get_ident()]
    main = threading.main_thread().ident
    threads = []
    for ident, frame in frames_now.items():
        thread = named.get(ident)
        if thread is None or ident == main or not hasattr(thread, "pydev_do_not_trace"):
            frames, cut = _frames(frame)
            variables = _variables(frame) if with_variables and ident == main else []
            threads.append(
                {
                    "variables": variables,
                    "ident": ident,
                    "name": thread.name if thread is not None else "",
                    "main": ident == main,
                    "daemon": thread is None or thread.daemon,
                    "frames": frames,
                    "cut": cut,
                }
            )
    answer: JsonObject = {"kind": "answer", "time": time.time_ns(), "threads": threads}
    return {**answer, "world_size": joining} if joining else answer


def _frames(frame: FrameType | None) -> tuple[list[tuple[str, int, str]], bool]:
    """Return path, line and function of a stack's innermost frames, and whether there are more."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        # `faulthandler` writes this short name, and stacks of ranks are compared.
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found, frame is not None


def _variables(top: FrameType) -> list[tuple[int, str, str]]:
    """Return the local variables of the user's innermost frames, as `Variable`.

    Frames are counted from the innermost one. Modules, functions and classes are left out.
    """
    found: list[tuple[int, str, str]] = []
    frame: FrameType | None = top
    frames = 0
    for number in range(MAX_FRAMES):
        if frame is None or frames == _MAX_WITH_VARIABLES:
            break
        if user_file(frame.f_code.co_filename):
            frames += 1
            rows = [
                (number, name, values.summary(value))
                for name, value in dict(frame.f_locals).items()
                if not name.startswith("__")
                and not isinstance(value, (type, ModuleType, FunctionType, BuiltinFunctionType))
            ]
            found += rows[:_MAX_VARIABLES]
        frame = frame.f_back
    return found


def forget() -> None:
    """Close the parent's pipe in a forked child, which has no such thread."""
    global _declared
    if _declared is not None:
        for end in _declared.ends:
            os.close(end)
        # The file stays open, since `faulthandler` has its number.
        _declared = None
