"""Start a job, watch it, pass signals on, and end the processes that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.core.errors import HANG, STRICT, DoctorError
from ddpdoctor.core.finding import Severity
from ddpdoctor.core.formatting import count
from ddpdoctor.core.job import Command
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run import rundir
from ddpdoctor.run.names import MARK
from ddpdoctor.supervise import processes
from ddpdoctor.supervise.job_signals import JobSignals, Passthrough
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.supervise.run_watch import RunWatch
from ddpdoctor.system import proc
from ddpdoctor.system.proc import pause, readable

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

POLL_INTERVAL = 0.5  # Seconds between two reads of the run directory

_WATCH, _WATCH_END = "the watch", "the end of the watch"

SOURCE_TIMEOUT = 10.0  # Seconds for which --strict waits for the check of the job's code

LEFTOVER_TIMEOUT = 2.0  # Seconds for the job's processes to end after its command has ended


class Supervisor:
    """One run, from start to exit status.

    Without a run directory the job runs unwatched. ``inherited`` are the descriptors above 2 that
    the job inherits, as without ddpdoctor.
    """

    def __init__(
        self,
        command: Command,
        directory: Path | None,
        passthrough: Passthrough,
        reporter: Reporter,
        debugging: Debugging | None,
        inherited: Sequence[int],
    ) -> None:
        # Processes of a nested run have both ids.
        outer = os.environ.get(MARK)
        own = f"{int(time.time())}-{os.urandom(6).hex()}"
        self._run_id = f"{outer}/{own}" if outer else own
        self._command = command
        self._directory = directory
        self._passthrough = passthrough
        self._reporter = reporter
        self._guarded = reporter.faults.guarded
        self._keepers = Keepers(self._run_id, inherited, reporter.warn)
        self._signals = JobSignals(command, self._keepers, passthrough, self._job)
        self._watch = RunWatch(
            command, directory, passthrough, reporter, debugging, self._keepers, self._signals
        )

    def run(self) -> int:
        """Run the job to its end. Return its exit status, negative for a signal that ended it.

        It is `STRICT` or `HANG` if these options apply.
        """
        proc.become_subreaper()
        self._guarded(_WATCH, self._watch.open)
        if self._command.note:
            self._reporter.note(self._command.note)
        self._signals.install()
        self._start()
        ready: list[int] = []
        while self._keepers.status is None:
            try:
                ready = self._turn(ready)
            except Exception as error:
                # Only the job's own end decides its exit status.
                self._reporter.faults.failed([("the supervisor", error)])
                ready = []
                pause(POLL_INTERVAL)
        status = self._finish(self._keepers.status)
        self._guarded("the end of the job's processes", self._keepers.dismiss, self._idle)
        self._guarded(_WATCH_END, self._watch.close)
        # A run that was asked to end has to end, even if its stderr is no longer read.
        patience = 1.0 if self._signals.received else None
        self._guarded("the job's stderr", self._passthrough.finish, patience)
        return status

    def _start(self) -> None:
        try:
            self._keepers.start(
                self._command.argv,
                self._watch.environment(),
                self._passthrough.child_end,
                self._signals.group,
            )
        except DoctorError:
            self._keepers.dismiss(self._idle)
            if self._directory is not None:
                rundir.discard(self._directory)
            raise
        self._signals.started()
        self._passthrough.start()
        self._guarded(_WATCH, self._watch.started)

    def _turn(self, ready: list[int]) -> list[int]:
        """Perform all tasks that are due, first for the job's processes, and wait for more.

        ``ready`` holds the watch's readable descriptors of the last turn. Return those of this one.
        """
        self._reap()
        stopped = self._keepers.poll()
        self._signals.drain()
        self._guarded(_WATCH, self._after_signals)
        if stopped and self._keepers.status is None:
            self._guarded("the stop of the job", self._suspend, stopped)
        deadline = self._signals.deadline
        if deadline is not None and time.monotonic() >= deadline:
            # The grace period is over.
            processes.end(self._job(), soft=0.5, idle=self._idle)
            self._signals.deadline = time.monotonic() + 2.0
        else:
            self._guarded(_WATCH, self._watch.check, ready)
        if self._keepers.status is not None:
            return []
        ends = [each for each in (self._signals.descriptor, self._keepers.descriptor) if each >= 0]
        found = readable([*ends, *self._watch.descriptors], POLL_INTERVAL)
        return [each for each in found if each not in ends]

    def _suspend(self, number: int) -> None:
        self._watch.slept(self._signals.suspend(number))

    def _after_signals(self) -> None:
        for record in self._signals.take():
            if record.signal == signal.SIGTERM:
                self._watch.scheduler.ask()
            self._watch.write(record)
        if self._signals.asked_again():
            self._reporter.note("interrupted again: ending the job now")

    def _finish(self, status: int) -> int:
        run = self._guarded(_WATCH_END, self._end_watch, status)
        if self._command.own.strict:
            self._guarded("the check of the job's code", self._reporter.tell_source, SOURCE_TIMEOUT)
        findings = [*self._reporter.current, *self._reporter.in_code]
        self._guarded("the end of what the job left behind", self._sweep)
        self._guarded(_WATCH_END, self._watch.summarize, run, status)
        failed = any(finding.severity >= Severity.ERROR for finding in findings)
        if self._watch.killed:
            status = HANG
        elif self._command.own.strict and status == 0 and failed:
            status = STRICT
        self._guarded("the end of the JSON file", self._reporter.finish, run, status)
        return status

    def _end_watch(self, status: int) -> Run | None:
        self._after_signals()
        return self._watch.end(status, lambda: readable(self._watch.descriptors, 0))

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._keepers.reaped(*ended)

    def _idle(self, seconds: float) -> None:
        pause(seconds)
        self._reap()

    def _job(self) -> processes.Job:
        return processes.Job(
            self._run_id,
            ancestors=self._keepers.parents | {os.getpid()},
            spared=self._keepers.pids | self._watch.notifications.pids,
            helpers=self._watch.helpers,
        )

    def _sweep(self) -> None:
        """End processes that the job left behind."""
        # A job that was asked to stop has had its grace period.
        patience = LEFTOVER_TIMEOUT / 4 if self._signals.received else LEFTOVER_TIMEOUT
        ended = processes.end(self._job(), patience=patience, soft=3.0, idle=self._idle)
        self._reap()
        if ended:
            more = f" and {len(ended) - 3} more" if len(ended) > 3 else ""
            self._reporter.note(
                f"ended {count(len(ended), 'process', 'processes')} that the job left behind: "
                f"{', '.join(ended[:3])}{more}"
            )


def end_like(status: int) -> int:
    """End this process as the job ended: by the same signal, or return its exit status."""
    if status >= 0:
        return status
    number = -status
    with contextlib.suppress(OSError, ValueError):
        import resource

        # Our core dump would overwrite the job's.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
