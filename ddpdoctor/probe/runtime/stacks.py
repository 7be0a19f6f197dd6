"""Write the stacks of this process when asked, from a thread of ours.

The thread sleeps until somebody writes into its pipe, and then writes the stacks of all threads to
a file of the run directory. It needs the GIL for that, as all of Python does, so nothing runs
meanwhile that it looks at.

Where native code holds the GIL it cannot answer, and whoever asks sees it wait for the GIL, the
request still in the pipe. Then, and only then, is ``faulthandler`` asked, by a signal: it works in
C, without the GIL. Not before, because a stack that it reads while Python runs may be half-made: a
process whose threads run ordinary Python code ended with SIGSEGV after 4 to 2,820 signals to write
all stacks (Python 3.10 to 3.13), and after 18 to 7,045 to write that of the signalled thread alone
(3.10, 3.12 and 3.13). ``python benchmarks/stacks.py survive`` does it again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType

from ddpdoctor.probe.runtime import control, rank, shield
from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.names import STACKS_SUFFIX, namespace, stacks_stem
from ddpdoctor.run.records.base import JsonObject, json_line

MOST_FRAMES = 200
"""Frames of one thread that are reported, the innermost ones."""

_FIRST = 9
"""How far below the highest real-time signal the search begins; the ends are popular."""

joining = 0
"""The world size of the ``init_process_group`` that the process is in, 0 outside of it."""

_declared: _Declared | None = None


class _Declared:
    """What this process has declared of itself."""

    def __init__(self, path: str, file: int, ends: tuple[int, int], number: int) -> None:
        self.path = path
        self.file = file
        self.ends = ends
        """Of the pipe; the writing one is kept open, so that reading never comes to an end."""
        self.signal = number
        """The one that ``faulthandler`` answers; 0 for none."""
        self._files = {file: os.fstat(file).st_ino, ends[0]: os.fstat(ends[0]).st_ino}

    def is_whole(self) -> bool:
        """Whether these descriptors are still ours: a job may close them, and have others then."""
        return all(os.fstat(number).st_ino == inode for number, inode in self._files.items())


@shield.shielded
def declare() -> None:
    """This process is a rank, or is to become one: it can be asked from now on."""
    global _declared
    if _declared is not None or sys.platform != "linux":
        return
    pid = os.getpid()
    path = os.path.join(rank.run_directory(), stacks_stem(pid, start_time()) + STACKS_SUFFIX)
    try:
        # Emptied, since a process that has called `exec` is the same one to the kernel.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = move_up(os.open(path, flags | os.O_NOFOLLOW, 0o600))
    except OSError:
        # It cannot be asked; that the directory cannot be written is reported elsewhere.
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
    }
    os.write(file, json_line(declaration))


def declare_worker() -> None:
    """At the start of a process: if torchrun started it, it is to become a rank."""
    if control.is_worker():
        control.claim()
        declare()


def _free_signal() -> int:
    """A real-time signal that nothing in this process uses; 0 if there is none."""
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
    """When this process started, in ticks since boot: no later process of that id has the same.

    Raises:
        OSError: This is no Linux.
    """
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


# -- the thread


def _serve(declared: _Declared) -> None:
    reading = declared.ends[0]
    requests = select.poll()
    requests.register(reading, select.POLLIN)
    try:
        while requests.poll()[0][1] == select.POLLIN and declared.is_whole():
            with contextlib.suppress(OSError):
                # The disk may be full.
                os.write(declared.file, json_line(_answer()))
            # Only now: as long as the request lies there it is known to be unanswered.
            os.read(reading, 4096)
            if declared.signal and signal.getsignal(declared.signal) is not signal.SIG_DFL:
                _declare_again(declared)
                return
    except OSError:
        # The job has closed what is not its own.
        return


@shield.shielded
def _declare_again(declared: _Declared) -> None:
    """The job has taken the signal for itself: it may not be sent any more, but another one."""
    global _declared
    os.unlink(declared.path)
    _declared = None
    declare()


def _answer() -> JsonObject:
    """The stacks of all threads but ours and the debugger's."""
    named = {thread.ident: thread for thread in threading.enumerate()}
    frames_now = sys._current_frames()
    # A frame that refers to itself would keep what the others refer to: tensors.
    del frames_now[threading.get_ident()]
    main = threading.main_thread().ident
    threads = []
    for ident, frame in frames_now.items():
        thread = named.get(ident)
        if thread is None or ident == main or not hasattr(thread, "pydev_do_not_trace"):
            frames, cut = _frames(frame)
            threads.append(
                {
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
    """Path, line and function of a stack's frames, innermost first; whether there are more."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        # The short name: it is what `faulthandler` writes, and stacks of ranks are compared.
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found, frame is not None


def forget() -> None:
    """In a forked child, which has no such thread: the pipe is its parent's."""
    global _declared
    if _declared is not None:
        for end in _declared.ends:
            os.close(end)
        # The file stays open: `faulthandler` knows it by its number.
        _declared = None
