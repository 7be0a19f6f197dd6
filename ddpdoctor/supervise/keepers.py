"""Start the job's command below two keepers (`ddpdoctor.supervise.keeper`), and follow them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddpdoctor.core.errors import INTERNAL, DoctorError
from ddpdoctor.run.names import MARK
from ddpdoctor.supervise import keeper
from ddpdoctor.system import proc

MAX_STANDBYS = 10  # Maximum number of standbys started in a run


class Keepers:
    """The supervisor's connection to the keepers and to the job's command.

    The job inherits the descriptors above 2 that it would inherit without ddpdoctor.
    """

    def __init__(self, run_id: str, inherited: Sequence[int], warn: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._inherited = inherited
        self._warn = warn
        self._above: subprocess.Popen[bytes] | None = None
        self._below = 0
        self.sentinel = 0
        """The pid of the sentinel, which holds signals in the job's process group. 0 if none."""
        self.pid = 0  # The pid of the job's command
        self.status: int | None = None  # Its exit status once it has ended, negative for a signal
        self._standby: subprocess.Popen[bytes] | None = None
        self._standbys = 0
        self._pipe_reader, self._pipe = os.pipe()
        self._reports, self._reports_writer = os.pipe()
        self._partial = b""

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], stderr: int, group: int | None
    ) -> None:
        """Start the command. The keepers add the run's id to its environment.

        It joins process ``group`` of this session. None makes a new session. ``stderr`` is a
        descriptor.

        Raises:
            DoctorError: If it cannot be started.
        """
        command, command_writer = os.pipe()
        begun, begun_writer = os.pipe()
        pipes = (self._pipe_reader, self._reports_writer, begun_writer)
        try:
            self._above = subprocess.Popen(
                [*_script("keep", self._run_id), *map(str, (*pipes, group or 0, command))],
                env={name: value for name, value in environment.items() if name != MARK},
                stderr=stderr,
                pass_fds=(*pipes, command, *self._inherited),
                start_new_session=group is None,
                preexec_fn=os.setpgrp if group is not None else None,
            )
        except OSError as error:
            raise _not_started(error.strerror or str(error)) from None
        # Copies in this process would keep a lock that the job releases, or a pipe that it closes.
        for descriptor in (self._reports_writer, begun_writer, command, *self._inherited):
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError), open(command_writer, "wb") as file:
            file.write(b"".join(os.fsencode(f"{word}\0") for word in argv) + keeper.END.encode())
        with open(begun, "rb") as file:
            self.pid, refusal, *_ = [*map(int, file.read().split()), 0, 0]
        if not self.pid:
            raise _not_started(os.strerror(refusal) if refusal else "its keepers were killed")
        if refusal:
            raise DoctorError(f"cannot start {argv[0]}: {os.strerror(refusal)}")
        os.set_blocking(self._reports, False)
        # The sentinel has to be known before the first signal is passed on.
        self.poll()

    @property
    def descriptor(self) -> int:
        """The descriptor of the pipe for reports. -1 if both keepers are gone."""
        return self._reports

    @property
    def pids(self) -> frozenset[int]:
        """The live helper processes, which do not belong to the job."""
        standby = self._standby.pid if self._standby is not None else 0
        return self.parents | frozenset({self.sentinel, standby} - {0})

    @property
    def parents(self) -> frozenset[int]:
        """The keepers, which adopt the job's orphans."""
        above = self._above.pid if self._above is not None else 0
        return frozenset({above, self._below} - {0})

    def poll(self) -> int:
        """Read the keepers' reports. Returns the signal that stopped the command, or 0."""
        if self._reports < 0:
            return 0
        try:
            chunk = os.read(self._reports, 4096)
        except BlockingIOError:
            return 0
        if not chunk:
            os.close(self._reports)
            self._reports = -1
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        stopped = 0
        for line in lines:
            try:
                word, *values = line.decode().split()
                numbers = [int(value) for value in values] or [0]
            except ValueError:
                continue
            if word == "pids" and len(numbers) == 3:
                self._below, self.sentinel = numbers[1:]
            elif word == "stopped":
                stopped = numbers[0]
            elif word == "ended" and self.status is None:
                self.status = numbers[0]
            elif word == "lost":
                self._below = 0
                self._start_standby()
        return stopped

    def reaped(self, pid: int, status: int) -> None:
        """Handle the end of a child: a keeper, the standby, or the command itself."""
        if pid == self.pid and self.status is None:
            # Both keepers were killed, so this process became its parent.
            self.status = os.waitstatus_to_exitcode(status)
        elif self._above is not None and pid == self._above.pid:
            self._above.returncode = os.waitstatus_to_exitcode(status)
            self._above = None
            self._start_standby()
        elif pid == self._below:
            self._below = 0
            self._start_standby()
        elif self._standby is not None and pid == self._standby.pid:
            self._standby.returncode = os.waitstatus_to_exitcode(status)
            self._standby = None
            self._start_standby()

    def _start_standby(self) -> None:
        """Start a standby, because a keeper or a standby has ended."""
        if self._pipe < 0 or self._standby is not None or self._standbys >= MAX_STANDBYS:
            return
        self._standbys += 1
        try:
            self._standby = subprocess.Popen(
                [*_script("standby", self._run_id), str(self._pipe_reader)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._pipe_reader,),
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"cannot start the process that ends the job if this one is killed: {error}")

    def sent_to_group(self, number: int) -> bool:
        """Return whether a signal to this process was sent to its whole process group."""
        return bool(self.sentinel) and number in proc.pending(self.sentinel)

    def dismiss(self, idle: Callable[[float], None]) -> None:
        """Close the supervisor's pipe and wait for the keepers to end the rest of the job.

        ``idle`` waits for some seconds and reaps children.
        """
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._pipe = -1
        while self._above is not None or self._below or self._standby is not None:
            if not proc.children(os.getpid()):
                break
            idle(0.01)
        for descriptor in (self._pipe_reader, self._reports):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._reports = -1


def _not_started(why: str) -> DoctorError:
    """Return the error for a job that did not start although its command is valid."""
    return DoctorError(f"the job was not started: {why}", "start it again", INTERNAL)


def _script(*words: str) -> list[str]:
    """Return the command of a bare interpreter, which starts fast and reads no folder of the job.

    With PYTHONHOME set, Python may not start without its environment.
    """
    isolated = [] if "PYTHONHOME" in os.environ else ["-I"]
    return [sys.executable, *isolated, "-S", str(Path(keeper.__file__)), *words]
