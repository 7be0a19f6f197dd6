"""The processes between the supervisor and its job, which end the job if the supervisor is gone.

Run as a script by a bare interpreter, this becomes two processes, and the job is the child of the
second::

    supervisor -> keeper -> keeper -> the job's command

All three are subreapers: an orphan below one of them becomes its child, even if it has its own
session or an empty environment, or is a daemon that forked twice. When one of them is killed, its
descendants become those of the next one above. So any survivor of the three knows every process of
the job from the kernel, and the job continues as long as the supervisor lives.

Three pipes connect them:

- The supervisor holds the writing end of the first. Its end of file means that the supervisor is
  gone, and the keepers end what is left of the job.
- The second reports on the job's command, in lines: ``pids KEEPER KEEPER SENTINEL``,
  ``stopped SIGNAL``, ``ended STATUS``, and ``lost`` when the second keeper was killed.
- The third is for the start. The command's process writes its pid there, and ``ERRNO`` after it if
  the program cannot be executed. A keeper that fails earlier writes ``0 ERRNO``. No process holds
  the writing end once the command runs, so the supervisor reads up to the end of file, whichever
  process was killed meanwhile: without a pid the job has not started.

``standby`` is another form, for the time after a keeper was killed. It runs next to the job and
remembers which processes were below the supervisor.
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
"""The name of a keeper in the kernel, so that `killall python` does not reach it."""

TERM_TIMEOUT = 4.0  # Seconds between SIGTERM and SIGKILL once the supervisor is gone
OTHER_KEEPER_TIMEOUT = 7.0  # Seconds for the second keeper to end the job before the first does
KILL_TIMEOUT = 60.0  # Seconds in which SIGKILL is repeated, for uninterruptible sleep
STANDBY_INTERVAL = 0.5  # Seconds after which the standby lists the job's processes again

SIGNAL_MEMORY = 2.0
"""Minimum seconds for which a signal stays pending in the sentinel. The maximum is twice that."""

END = "end"  # Follows the words of the command, each of which ends with a null byte

_BLOCKED = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGABRT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
}


class Keeper:
    """One of the two keepers.

    Args:
        run_id: The job's id.
        supervisor: The reading end of the supervisor's pipe.
        reports: The writing end of the pipe for reports.
        job: Memory that both keepers share, for the pid of the job's command.
        other: The other keeper's pid.
        below: Whether the other keeper is this one's child.
    """

    def __init__(
        self, run_id: str, supervisor: int, reports: int, job: mmap.mmap, other: int, below: bool
    ) -> None:
        proc.become_subreaper()
        self._run_id = run_id
        self._supervisor = supervisor
        self._reports = reports
        self._shared = job
        self._other = other
        self._below = below
        self._reported_end = False
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def start(
        self, command: Callable[[], NoReturn], sentinel: Callable[[], NoReturn] | None
    ) -> None:
        """Start the job's command and, on a terminal, the sentinel of its process group."""
        pid = 0
        if sentinel is not None:
            pid = os.fork()
            if pid == 0:
                sentinel()
        self.report(f"pids {self._other} {os.getpid()} {pid}")
        if os.fork() == 0:
            # In the child, because the parent may be killed first.
            self._shared[:] = struct.pack("q", os.getpid())
            command()

    def keep(self) -> None:
        """Wait for the end of the supervisor, then end the job."""
        poller = select.poll()
        # ``POLLHUP`` is always reported.
        poller.register(self._supervisor, 0)
        poller.register(self._woken, select.POLLIN)
        ready: dict[int, int] = {}
        while self._supervisor not in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._check_command()
            self._reap(but_command=True)
            ready = dict(poller.poll())
        deadline = time.monotonic() + OTHER_KEEPER_TIMEOUT
        while self._below and time.monotonic() < deadline:
            self._idle(0.05)
        if self._below:
            os.kill(self._other, signal.SIGKILL)
        spared = frozenset({self._other} if self._other else ())
        job = processes.Job(self._run_id, frozenset({os.getpid()}), spared=spared)
        processes.end(job, soft=TERM_TIMEOUT, idle=self._idle)
        deadline = time.monotonic() + KILL_TIMEOUT
        while self._reap() and time.monotonic() < deadline:
            # Every remaining child belongs to the job.
            processes.end(job, soft=0.0, idle=self._idle)

    def report(self, line: str) -> None:
        """Send a line to the supervisor, if it is alive."""
        with contextlib.suppress(OSError):
            os.write(self._reports, f"{line}\n".encode())

    @property
    def _job(self) -> int:
        """The pid of the job's command. 0 if not started."""
        return int(struct.unpack("q", self._shared[:])[0])

    def _check_command(self) -> None:
        """Report a stop or the end of the job's command, if this keeper is its parent.

        It stays a zombie until the run is over, so its pid is not reused.
        """
        pid = self._job
        if not pid or self._reported_end:
            return
        ended: int | None = None
        if hasattr(os, "waitid"):
            # Linux also raises the error for a zombie, so it must not skip the next call.
            with contextlib.suppress(ChildProcessError):
                while (state := os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG)) is not None:
                    self.report(f"stopped {state.si_status}")
            with contextlib.suppress(ChildProcessError):
                state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if state is not None:
                    exited = state.si_code == os.CLD_EXITED
                    ended = state.si_status if exited else -state.si_status
        else:
            with contextlib.suppress(ChildProcessError):
                found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if found and os.WIFSTOPPED(status):
                    self.report(f"stopped {os.WSTOPSIG(status)}")
                elif found:
                    ended = os.waitstatus_to_exitcode(status)
        if ended is not None:
            self._reported_end = True
            self.report(f"ended {ended}")

    def _reap(self, *, but_command: bool = False) -> bool:
        """Reap children that have ended. Returns True if there are any children left."""
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

    def _idle(self, seconds: float) -> None:
        pause(seconds)
        self._reap()


def _start(
    run_id: str, supervisor: int, reports: int, begun: int, group: int, argv: list[str]
) -> Keeper:
    """Fork the second keeper and the job's command. Return this process's keeper.

    Raises:
        OSError: If the system refuses a process or a descriptor.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    above, first = os.getppid(), os.getpid()
    shared = mmap.mmap(-1, struct.calcsize("q"))
    second = os.fork()
    if second:
        _let_go(begun)
        return Keeper(run_id, supervisor, reports, shared, second, below=True)
    # A signal to the supervisor's process group must not reach the keepers. On a terminal they stay
    # in its session, because the job's command has to.
    if group:
        os.setpgid(0, 0)
    else:
        os.setsid()
    second = os.getpid()
    keeper = Keeper(run_id, supervisor, reports, shared, first, below=False)

    def command() -> NoReturn:
        try:
            os.write(begun, f"{os.getpid()} ".encode())
            if group:
                os.setpgid(0, group)
            else:
                os.setsid()
            os.environ[MARK] = run_id
            os.environ[KEEPERS] = f"{above},{first},{second}"
            if os.environ.get("LISTEN_PID") == str(above):
                # systemd passed its sockets to the supervisor's pid.
                os.environ["LISTEN_PID"] = str(os.getpid())
                os.environ.pop("LISTEN_PIDFDID", None)
            # Python ignores these signals for itself. `subprocess` restores them as well.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.execvpe(argv[0], argv, os.environ)
        except OSError as error:
            os.write(begun, str(error.errno or 1).encode())
        finally:
            os._exit(127)

    def sentinel() -> NoReturn:
        try:
            os.setpgid(0, group)
            _let_go(begun)
            _hold_signals(supervisor)
        finally:
            os._exit(1)

    keeper.start(command, sentinel if group else None)
    _let_go(begun)
    return keeper


def _let_go(begun: int) -> None:
    """Close the job's descriptors, so that readers see the end of file when the job closes them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in (nothing, begun, *proc.inheritable()):
        os.close(descriptor)


def _hold_signals(supervisor: int) -> NoReturn:
    """Act as the sentinel: a member of the job's process group that blocks all signals.

    Signals that were sent to the group stay pending here, where the supervisor sees them. So it
    does not send the job a signal that the job has already received.
    """
    poller = select.poll()
    poller.register(supervisor, 0)
    pending: set[int] = set()
    while not poller.poll(SIGNAL_MEMORY * 1000):
        for number in pending:
            signal.sigtimedwait({number}, 0)
        pending = {int(number) for number in signal.sigpending()}
    os._exit(0)


def standby(run_id: str, supervisor: int) -> None:
    """Track the processes below the supervisor, and end them when the supervisor is gone."""
    proc.set_name(NAME)
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    above = os.getppid()
    known: frozenset[processes.Process] = frozenset()
    poller = select.poll()
    poller.register(supervisor, 0)
    while not poller.poll(STANDBY_INTERVAL * 1000):
        known = frozenset(processes.Job(run_id, frozenset({above})).processes())
    processes.end(processes.Job(run_id, known=known), soft=TERM_TIMEOUT)


def main(words: list[str]) -> None:
    """Run ``keep RUN_ID PIPE PIPE PIPE GROUP COMMAND_PIPE`` or ``standby RUN_ID PIPE``."""
    if words[0] == "standby":
        standby(words[1], int(words[2]))
        return
    # Occupy closed standard descriptors, or one of our pipes would get their number.
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(nothing)
    supervisor, reports, begun, group, command = map(int, words[2:])
    # Not on the command line, where `pkill -f train.py` would find the keepers.
    with open(command, "rb") as file:
        *argv, rest = os.fsdecode(file.read()).split("\0")
    if rest != END:
        # The supervisor was killed while it wrote, so the command is incomplete.
        return
    proc.set_name(NAME)
    for descriptor in (supervisor, reports, begun):
        os.set_inheritable(descriptor, False)
    try:
        keeper = _start(words[1], supervisor, reports, begun, group, argv)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(begun, f"0 {error.errno}".encode())
        os._exit(1)
    keeper.keep()


if __name__ == "__main__":
    main(sys.argv[1:])
