"""The supervisor's end of the keepers (`ddpdoctor.supervise.keeper`), and of the job's command."""

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

MOST = 10
"""How often a standby is started in one run: one that cannot live is not called for ever."""


class Keepers:
    """Starts the job's command below two keepers, and hears from them.

    Args:
        run_id: The job's id.
        inherited: The descriptors above 2 that the job is to have, as without ddpdoctor.
        warn: Called with a sentence if no standby can be started.
    """

    def __init__(self, run_id: str, inherited: Sequence[int], warn: Callable[[str], None]) -> None:
        self._run_id = run_id
        self._inherited = inherited
        self._warn = warn
        self._above: subprocess.Popen[bytes] | None = None
        self._below = 0
        self.witness = 0
        """A process in the job's process group that keeps the signals it gets; 0 for none."""
        self.pid = 0
        """The job's command."""
        self.status: int | None = None
        """Its exit status once it has ended, negative for a signal."""
        self._standby: subprocess.Popen[bytes] | None = None
        self._standbys = 0
        self._pipe_reader, self._pipe = os.pipe()
        self._words, self._words_writer = os.pipe()
        self._heard = b""

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stderr: int,
        group: int | None,
    ) -> None:
        """Start the command.

        Args:
            argv: Its words.
            environment: Its environment, but for the run's id.
            stderr: Its standard error.
            group: The process group of this session that it joins; None: it leads a new session.

        Raises:
            DoctorError: It cannot be started.
        """
        command, command_writer = os.pipe()
        begun, begun_writer = os.pipe()
        pipes = (self._pipe_reader, self._words_writer, begun_writer)
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
        # Copies here would keep a lock that the job gives up, or a pipe that it closes.
        for descriptor in (self._words_writer, begun_writer, command, *self._inherited):
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError), open(command_writer, "wb") as file:
            file.write(b"".join(os.fsencode(f"{word}\0") for word in argv) + keeper.END.encode())
        with open(begun, "rb") as file:
            self.pid, refusal, *_ = [*map(int, file.read().split()), 0, 0]
        if not self.pid:
            raise _not_started(os.strerror(refusal) if refusal else "what starts it was killed")
        if refusal:
            raise DoctorError(f"cannot start {argv[0]}: {os.strerror(refusal)}")
        os.set_blocking(self._words, False)
        # The witness is known before the first signal has to be passed on.
        self._hear()

    @property
    def descriptor(self) -> int:
        """Readable when there is something to hear; -1 when both keepers are gone."""
        return self._words

    @property
    def pids(self) -> frozenset[int]:
        """Those on duty: processes that are not the job's."""
        standby = self._standby.pid if self._standby is not None else 0
        return self.parents | frozenset({self.witness, standby} - {0})

    @property
    def parents(self) -> frozenset[int]:
        """The keepers, which adopt what the job leaves."""
        above = self._above.pid if self._above is not None else 0
        return frozenset({above, self._below} - {0})

    def look(self) -> int:
        """Hear what there is; the signal that has stopped the command meanwhile, or 0."""
        stopped = 0
        for word, value in self._hear():
            if word == "stopped":
                stopped = value
        return stopped

    def _hear(self) -> list[tuple[str, int]]:
        if self._words < 0:
            return []
        try:
            chunk = os.read(self._words, 4096)
        except BlockingIOError:
            return []
        if not chunk:
            os.close(self._words)
            self._words = -1
        *lines, self._heard = (self._heard + chunk).split(b"\n")
        heard = []
        for line in lines:
            try:
                word, *values = line.decode().split()
                numbers = [int(value) for value in values] or [0]
            except ValueError:
                continue
            if word == "pids" and len(numbers) == 3:
                self._below, self.witness = numbers[1:]
            elif word == "ended" and self.status is None:
                self.status = numbers[0]
            elif word == "lost":
                self._below = 0
                self._start_standby()
            heard.append((word, numbers[0]))
        return heard

    def reaped(self, pid: int, status: int) -> None:
        """A child of this process has ended: a keeper, the standby, or the command itself."""
        if pid == self.pid and self.status is None:
            # Both keepers were killed, and it has become this process's child.
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
        """Have a standby, now that a keeper is missing."""
        if self._pipe < 0 or self._standby is not None or self._standbys >= MOST:
            return
        self._standbys += 1
        words = [*_script("standby", self._run_id), str(self._pipe_reader)]
        nothing = subprocess.DEVNULL
        try:
            self._standby = subprocess.Popen(
                words,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                pass_fds=(self._pipe_reader,),
                start_new_session=True,
            )
        except OSError as error:
            self._warn(f"cannot start a process that ends the job with this one: {error}")

    def sent_to_group(self, number: int) -> bool:
        """Whether a signal that this process got has gone to its whole process group."""
        return bool(self.witness) and number in proc.pending(self.witness)

    def dismiss(self, idle: Callable[[float], None]) -> None:
        """The run is over: whatever is still there of the job ends. ``idle`` lets time pass."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._pipe = -1
        while self._above is not None or self._below or self._standby is not None:
            if not proc.children(os.getpid()):
                break
            idle(0.01)
        for descriptor in (self._pipe_reader, self._words):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._words = -1


def _not_started(why: str) -> DoctorError:
    """The job did not run, for no fault of its command."""
    return DoctorError(f"the job was not started: {why}", "start it again", INTERNAL)


def _script(*words: str) -> list[str]:
    """A bare interpreter: it starts in no time, and reads nothing of the job's folders."""
    # Where it says where Python is, Python does not start without the environment.
    isolated = [] if "PYTHONHOME" in os.environ else ["-I"]
    return [sys.executable, *isolated, "-S", str(Path(keeper.__file__)), *words]
