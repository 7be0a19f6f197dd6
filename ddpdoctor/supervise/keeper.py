"""The process between the supervisor and its job that makes sure that the job ends with it.

Run as a script by a bare interpreter, it becomes two processes, and the job is the child of the
second::

    supervisor -> keeper -> keeper -> the job's command

All three are subreapers: whatever becomes an orphan below one of them becomes its child, be it
in its own session, with an emptied environment, or a daemon by two forks. When one is
killed, all that was below it comes to the next one above. So whichever of the three is left knows
every process of the job from the kernel; and the job goes on as long as the supervisor lives.

The supervisor holds the writing end of a pipe: its end of file means that the supervisor is gone,
and what is left of the job then is ended. What becomes of the job's command is written to another
pipe, in lines: ``pids KEEPER KEEPER WITNESS``, ``stopped SIGNAL``, ``ended STATUS``, and ``lost``
when the second keeper was killed.

A third pipe is for the start. The command's process writes its pid there, and ``ERRNO`` behind it
if the program cannot be executed; a keeper that cannot get as far writes ``0 ERRNO``. No process
holds the writing end once the command runs, so the supervisor reads to the end of file, whatever
was killed on the way: without a pid the job has not started.

``standby`` is another form, beside the job, for the time after a keeper was killed: it remembers
what was below the supervisor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ddpdoctor.run.names import KEEPERS, MARK
from ddpdoctor.supervise import processes
from ddpdoctor.system import proc
from ddpdoctor.system.proc import pause

NAME = "ddp-keeper"
"""What the kernel calls a keeper: `killall python` is not meant for it."""

SOFT = 4.0
"""Seconds between SIGTERM and SIGKILL once the supervisor is gone."""

OTHER = 7.0
"""Seconds in which the second keeper should be done with that; then the first does it."""

HARD = 60.0
"""Seconds that a keeper goes on sending SIGKILL, to processes in uninterruptible sleep."""

LOOK = 0.5
"""Seconds between two looks of the standby."""

REMEMBERED = 2.0
"""Least seconds that a signal stays to be seen with the witness; twice that at most."""

END = "end"
"""What follows the words of the command, each of which ends with a null byte."""

_BLOCKED = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGABRT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
}


class Keeper:
    """One of the two.

    Args:
        run_id: The job's id.
        supervisor: The reading end of the supervisor's pipe.
        words: The writing end of the pipe for what happens.
        job: Memory that both share, for the pid of the job's command.
        other: The other keeper's pid.
        below: Whether that one is this one's child.
    """

    def __init__(
        self, run_id: str, supervisor: int, words: int, job: mmap.mmap, other: int, below: bool
    ) -> None:
        proc.become_subreaper()
        self._run_id = run_id
        self._supervisor = supervisor
        self._words = words
        self._shared = job
        self._other = other
        self._below = below
        self._witness = 0
        self._reported_end = False
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def start(
        self, command: Callable[[], NoReturn], witness: Callable[[], NoReturn] | None
    ) -> None:
        """Start the job's command and, on a terminal, the witness of its process group."""
        if witness is not None:
            self._witness = os.fork()
            if self._witness == 0:
                witness()
        self.report(f"pids {self._other} {os.getpid()} {self._witness}")
        if os.fork() == 0:
            # Here rather than in the parent, which may be killed before it can.
            self._shared[:] = struct.pack("q", os.getpid())
            command()

    def keep(self) -> None:
        """Wait for the supervisor's end; then end the job."""
        poller = select.poll()
        # The end of the other side is reported without being asked for.
        poller.register(self._supervisor, 0)
        poller.register(self._woken, select.POLLIN)
        ready: dict[int, int] = {}
        while self._supervisor not in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._look_at_command()
            self._reap(but_command=True)
            ready = dict(poller.poll())
        self._end()

    def report(self, line: str) -> None:
        """Let the supervisor know, if it lives."""
        with contextlib.suppress(OSError):
            os.write(self._words, f"{line}\n".encode())

    @property
    def _job(self) -> int:
        """The pid of the job's command; 0 if not started."""
        return int(struct.unpack("q", self._shared[:])[0])

    def _look_at_command(self) -> None:
        """Report what became of the job's command, where this keeper is its parent.

        It stays a zombie until the supervisor is over, so its pid is not reused.
        """
        pid = self._job
        if not pid or self._reported_end:
            return
        if not hasattr(os, "waitid"):
            self._look_without_waitid(pid)
            return
        with contextlib.suppress(ChildProcessError):
            while (state := os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)) is not None:
                self.report(f"stopped {state.si_status}")
        with contextlib.suppress(ChildProcessError):
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                exited = state.si_code == os.CLD_EXITED
                self._reported_end = True
                self.report(f"ended {state.si_status if exited else -state.si_status}")

    def _look_without_waitid(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                self.report(f"stopped {os.WSTOPSIG(status)}")
            elif found:
                self._reported_end = True
                self.report(f"ended {os.waitstatus_to_exitcode(status)}")

    def _reap(self, *, but_command: bool = False) -> bool:
        """Let ended children go. Returns True if there are any left."""
        own = os.getpid()
        children = proc.children(own) or {
            each.pid for each in processes.listed() if each.parent == own
        }
        for pid in children:
            if but_command and pid == self._job:
                continue
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] and self._below and pid == self._other:
                    self._below = False
                    self.report("lost")
        return bool(children)

    def _end(self) -> None:
        deadline = time.monotonic() + OTHER
        while self._below and time.monotonic() < deadline:
            self._idle(0.05)
        if self._below:
            os.kill(self._other, signal.SIGKILL)
        spared = frozenset({self._other} if self._other else ())
        job = processes.Job(self._run_id, frozenset({os.getpid()}), spared=spared)
        processes.end(job, soft=SOFT, idle=self._idle)
        deadline = time.monotonic() + HARD
        while self._reap() and time.monotonic() < deadline:
            # As long as there is a child there is something of the job.
            processes.end(job, soft=0.0, idle=self._idle)

    def _idle(self, seconds: float) -> None:
        pause(seconds)
        self._reap()


def keep(run_id: str, supervisor: int, words: int, begun: int, group: int, argv: list[str]) -> None:
    """Become the two keepers, and start the job's command."""
    proc.set_name(NAME)
    for descriptor in (supervisor, words, begun):
        os.set_inheritable(descriptor, False)
    try:
        keeper = _start(run_id, supervisor, words, begun, group, argv)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(begun, f"0 {error.errno}".encode())
        os._exit(1)
    keeper.keep()


def _start(
    run_id: str, supervisor: int, words: int, begun: int, group: int, argv: list[str]
) -> Keeper:
    """Fork the second keeper and the job's command. Returns the keeper that this process is.

    Raises:
        OSError: The system refuses a process or a descriptor.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    above, first = os.getppid(), os.getpid()
    shared = mmap.mmap(-1, struct.calcsize("q"))
    second = os.fork()
    if second:
        _let_go(begun)
        return Keeper(run_id, supervisor, words, shared, second, below=True)
    _leave_group(group)
    second = os.getpid()
    keeper = Keeper(run_id, supervisor, words, shared, first, below=False)

    def command() -> NoReturn:
        try:
            os.write(begun, f"{os.getpid()} ".encode())
            if group:
                os.setpgid(0, group)
            else:
                os.setsid()
            os.environ[MARK] = run_id
            os.environ[KEEPERS] = f"{above},{first},{second}"
            _take_over_sockets(above)
            # What Python ignores for itself, and `subprocess` restores, too.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(argv[0], argv, os.environ)
        except OSError as error:
            os.write(begun, str(error.errno or 1).encode())
        finally:
            os._exit(127)

    def witness() -> NoReturn:
        try:
            os.setpgid(0, group)
            _let_go(begun)
            _witness(supervisor)
        finally:
            os._exit(1)

    keeper.start(command, witness if group else None)
    _let_go(begun)
    return keeper


def _take_over_sockets(supervisor: int) -> None:
    """Let systemd's sockets, which were for the supervisor's pid, be for this process's."""
    if os.environ.get("LISTEN_PID") == str(supervisor):
        os.environ["LISTEN_PID"] = str(os.getpid())
        os.environ.pop("LISTEN_PIDFDID", None)


def _leave_group(group: int) -> None:
    """Leave the supervisor's process group: whoever kills that does not reach the keepers.

    On a terminal the session stays, since the job's command, a child, is to stay in it.
    """
    if group:
        os.setpgid(0, 0)
    else:
        os.setsid()


def _reserve_standard_files() -> None:
    """Occupy the standard files that are closed, which else a pipe of ours would become."""
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(nothing)


def _let_go(begun: int) -> None:
    """Close what is the job's: its reader sees the end of a pipe when the job closes it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in (nothing, begun, *proc.inheritable()):
        os.close(descriptor)


def _witness(supervisor: int) -> NoReturn:
    """Be a member of the job's process group to whom no signal means anything.

    Those that were sent to the group stay pending here, where the supervisor sees them, and so does
    not pass on a second time what the job has already got.
    """
    poller = select.poll()
    poller.register(supervisor, 0)
    pending: set[int] = set()
    while not poller.poll(REMEMBERED * 1000):
        for number in pending:
            signal.sigtimedwait({number}, 0)
        pending = {int(number) for number in signal.sigpending()}
    os._exit(0)


def standby(run_id: str, supervisor: int) -> None:
    """Remember what is below the supervisor, and end it when the supervisor is gone."""
    proc.set_name(NAME)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    above = os.getppid()
    known: dict[int, processes.Process] = {}
    poller = select.poll()
    poller.register(supervisor, 0)
    while not poller.poll(LOOK * 1000):
        job = processes.Job(run_id, frozenset({above}))
        known = {process.pid: process for process in job.processes()}
    job = processes.Job(run_id, known=frozenset(known.values()))
    processes.end(job, soft=SOFT)


def main(words: list[str]) -> None:
    """``keep RUN_ID PIPE PIPE PIPE GROUP COMMAND_PIPE`` or ``standby RUN_ID PIPE``."""
    if words[0] == "standby":
        standby(words[1], int(words[2]))
        return
    _reserve_standard_files()
    supervisor, ended, begun, group, command = map(int, words[2:])
    # Not on the command line: `pkill -f train.py` is not meant for a keeper.
    with open(command, "rb") as file:
        *argv, rest = os.fsdecode(file.read()).split("\0")
    # Else the supervisor was killed while it wrote, and this is half a command.
    if rest == END:
        keep(words[1], supervisor, ended, begun, group, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
