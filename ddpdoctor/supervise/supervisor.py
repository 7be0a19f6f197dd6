"""The parent of a job: starts it, watches its run directory, says what it finds, cleans up."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Protocol

from ddpdoctor import __version__
from ddpdoctor.core import working_directory
from ddpdoctor.core.errors import HANG, STRICT, DoctorError
from ddpdoctor.core.faults import Faults
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.job import Command
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.run import rundir
from ddpdoctor.run.environment import BUDGET, MARK, namespace
from ddpdoctor.run.record import FORMAT, Journal, Record
from ddpdoctor.run.reported import Event
from ddpdoctor.run.snapshot import Run, RunReader
from ddpdoctor.supervise import processes, terminal
from ddpdoctor.supervise.gpu_poll import GpuPoll
from ddpdoctor.supervise.gpu_watch import GpuWatch
from ddpdoctor.supervise.hangs.watch import HangWatch
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.supervise.passthrough import Passthrough
from ddpdoctor.supervise.ranks import RankWatch
from ddpdoctor.supervise.showing import Showing
from ddpdoctor.supervise.stragglers import Stragglers
from ddpdoctor.supervise.suspicions import Suspicions
from ddpdoctor.supervise.unwatched import Unwatched, bare_option, of_option
from ddpdoctor.system import kernel
from ddpdoctor.system.oom import OomWatch

ENTRY = str(Path(__file__).parents[1] / "probe" / "entry")
"""The folder on PYTHONPATH by which the probe comes."""

DEBUGGER_END = "the end of the debugger"

TICK = 0.5
"""Seconds between two looks at the run directory."""

EXAMINE = 5.0
"""Seconds between two examinations of a job in which nothing has happened."""

SETTLE = 0.7
"""Seconds for the other ranks' records to arrive once something has happened."""

HANGUP_GRACE = 4.0
"""Most seconds of grace when the terminal is gone."""

KILL_GRACE = 5.0
"""Most seconds that a job which hangs has to end."""

LEFT_BEHIND = 2.0
"""Seconds for processes that are still there when the job's command has ended."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TO_GROUP = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH)
"""A terminal sends these to the whole foreground group, so the whole group gets them."""


class Reporter(Protocol):
    """Where the supervisor's words go (`ddpdoctor.render.report` is the one for people)."""

    @property
    def found(self) -> list[Finding]:
        """What the last examination found."""

    @property
    def news(self) -> list[Event]:
        """What was said and withdrawn after it."""

    @property
    def standing(self) -> list[Finding]:
        """What was said and not withdrawn."""

    @property
    def faults(self) -> Faults:
        """What failed in ddpdoctor itself."""

    def note(self, text: str) -> None:
        """Say what ddpdoctor does."""

    def say(self, text: str) -> None:
        """Say what a person has to act on."""

    def warn(self, text: str) -> None:
        """Say what has to be seen, once."""

    def examine(self, run: Run) -> None:
        """Run the rules and say what is new, and what stands no more."""

    def summary(self, run: Run) -> None:
        """Say how it ended."""


class Supervisor:
    """One run, from start to exit status.

    Args:
        command: The job.
        directory: The run directory, or None if there can be none: then the job runs unwatched.
        passthrough: Carries the job's stderr.
        reporter: Says what is found.
        debugging: The debugger's side, or None for a run without.
    """

    def __init__(
        self,
        command: Command,
        directory: Path | None,
        passthrough: Passthrough,
        reporter: Reporter,
        debugging: Debugging | None,
    ) -> None:
        self._command = command
        self._directory = directory
        self._debugging = debugging if directory is not None else None
        # A run within a run belongs to both: its processes carry both ids.
        outer = os.environ.get(MARK)
        own = f"{int(time.time())}-{os.urandom(6).hex()}"
        self._run_id = f"{outer}/{own}" if outer else own
        self._passthrough = passthrough
        self._oom = OomWatch()
        self._ranks = RankWatch(self._oom)
        self._gpus = GpuWatch()
        self._unwatched_ranks = Unwatched(ENTRY)
        self._gpu_poll: GpuPoll | None = None
        self._showing: Showing | None = None
        self._reader: RunReader | None = None
        self._suspicions: Suspicions | None = None
        self._stragglers: Stragglers | None = None
        self._hangs: HangWatch | None = None
        self._killed = False
        """The job hung and was ended for it."""
        self._journal: Journal | None = None
        self._lock: rundir.Lock | None = None
        self._reporter = reporter
        self._faults = reporter.faults
        self._status: int | None = None
        self._keepers = Keepers(self._run_id, reporter.warn)
        self._signals: set[int] = set()
        self._unwritten: list[Record] = []
        self._asked_again = False
        self._had_terminal = terminal.lives()
        self._group = os.getpgrp() if self._had_terminal and sys.platform == "linux" else None
        """The process group of the job's command, where it shares this terminal.

        Elsewhere it cannot be seen whether a signal has reached the job already.
        """
        self._trouble = 0
        self._happened: float | None = None
        """When something happened that the rules should look at soon."""
        self._mute_told = False
        self._examined = time.monotonic()
        self._ticks = 0
        self._deadline: float | None = None
        self._wake_writer = -1

    # -- the run

    def run(self) -> int:
        """Run the job to its end.

        Returns:
            The exit status of the job; negative for a signal that ended it. `STRICT` and `HANG` as
            their options say.
        """
        kernel.become_subreaper()
        self._prepare()
        if self._command.note:
            self._reporter.note(self._command.note)
        option = bare_option(self._command.argv, self._command.through_torchrun)
        if option and self._directory is not None:
            why = of_option(option)
            self._reporter.say(f"{why}: leave out {option}, or this process is not watched")
            self._write({"kind": "unwatched", "time": time.time_ns(), "why": why})
        wake_reader, wake_writer = os.pipe()
        os.set_blocking(wake_writer, False)
        os.set_blocking(wake_reader, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self._wake_writer = wake_writer
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # Schedulers announce the end of a job's time so, and the job may count them.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on_every)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGWINCH, self._resize)
        if self._group is not None and signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            # This process stops when the job's command has.
            signal.signal(signal.SIGTSTP, self._pass_on_every)
        self._start()
        try:
            self._loop(wake_reader)
            return self._finish()
        finally:
            self._keepers.dismiss(self._idle)
            if self._gpu_poll is not None:
                self._gpu_poll.stop()
            if self._debugging is not None:
                self._faults.guarded(DEBUGGER_END, self._debugging.stop)
            watches = (self._suspicions, self._stragglers, self._hangs)
            for held in (self._journal, self._lock, *watches):
                if held is not None:
                    held.close()

    def _prepare(self) -> None:
        if self._directory is None:
            return
        try:
            self._lock = rundir.Lock(self._directory)
            self._open_debugger()
            manifest = json.dumps(self._manifest(), indent=1)
            rundir.put(self._directory / rundir.MANIFEST, manifest.encode())
            self._journal = Journal(str(self._directory / "supervisor.jsonl"), 1 << 24)
            self._reader = RunReader(self._directory)
            self._suspicions = Suspicions(self._directory, self._write)
            self._stragglers = Stragglers(self._directory, self._write)
            self._showing = Showing(self._directory, self._passthrough)
            self._hangs = HangWatch(
                self._directory,
                self._command.own.hang_after,
                self._write,
                self._reporter,
                self._wake,
            )
        except (OSError, DoctorError) as error:
            self._reporter.warn(f"the run directory cannot be written ({error}); not watching")
            self._unwatched()
        except Exception as error:
            self._faults.failed([("the start of the watch", error)])
            self._unwatched()

    def _unwatched(self) -> None:
        """Let the job run, and do nothing else."""
        self._directory = self._reader = self._journal = self._showing = None
        self._suspicions = self._hangs = None
        self._without_debugger()

    def _open_debugger(self) -> None:
        """Make what debuggers need.

        Raises:
            OSError: The run directory cannot be written.
        """
        if self._debugging is None or self._directory is None:
            return
        try:
            self._debugging.open(self._directory)
        except (OSError, DoctorError):
            raise
        except Exception as error:
            self._faults.failed([("the debugger", error)])
            self._without_debugger()

    def _without_debugger(self) -> None:
        if self._debugging is not None:
            self._faults.guarded(DEBUGGER_END, self._debugging.stop)
            self._debugging = None

    def _manifest(self) -> Record:
        assert self._directory is not None
        return {
            "format": FORMAT,
            "id": self._directory.name,
            "started": time.time_ns(),
            "command": list(self._command.argv),
            "launcher": "torchrun" if self._command.through_torchrun else "command",
            "cwd": working_directory.path(),
            "host": socket.gethostname(),
            "supervisor": os.getpid(),
            "debug": self._debugging.manifest() if self._debugging is not None else None,
            "versions": {
                "ddpdoctor": __version__,
                "python": ".".join(map(str, sys.version_info[:3])),
                "torch": _installed("torch"),
            },
        }

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._directory is not None:
            before = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = f"{ENTRY}{os.pathsep}{before}" if before else ENTRY
            environment["DDPDOCTOR_RUN_DIR"] = str(self._directory)
            environment["DDPDOCTOR_JOURNAL_MB"] = str(self._command.own.journal_mb)
            environment[BUDGET] = str(self._command.own.overhead_budget)
            environment["DDPDOCTOR_SUPERVISOR"] = f"{os.getpid()}@{namespace()}"
            if self._debugging is not None:
                environment.update(self._debugging.environment())
        return environment

    def _start(self) -> None:
        try:
            # On a terminal it shares this process's group, which is what a shell calls a job. Else
            # it has a session of its own: what is sent here reaches this process alone, which
            # passes each signal on exactly once.
            self._keepers.start(
                self._command.argv, self._environment(), self._passthrough.child_end, self._group
            )
        except OSError as error:
            self._keepers.dismiss(self._idle)
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            raise DoctorError(f"cannot start {self._command.argv[0]}: {error.strerror}") from None
        if self._directory is not None:
            with contextlib.suppress(OSError, DoctorError):
                rundir.publish(self._directory)
            self._gpu_poll = GpuPoll(self._directory)
            self._faults.guarded("the GPU poll", self._gpu_poll.start)
        self._passthrough.start()
        if self._debugging is not None:
            self._faults.guarded("the debugger", self._debugging.start, self._wake)
        if self._hangs is not None:
            self._faults.guarded("the hang watch", self._hangs.begin, self._keepers.pid)
        for number in tuple(self._signals):
            # It came while there was no child yet.
            self._send(number)

    def _wake(self) -> None:
        # A full pipe means that the loop will wake up anyway.
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"w")

    def _loop(self, wake: int) -> None:
        while self._status is None:
            ready: list[int] = []
            ends = [each for each in (wake, self._keepers.descriptor) if each >= 0]
            with contextlib.suppress(InterruptedError):
                ready = select.select([*ends, *self._rank_ends()], [], [], TICK)[0]
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
            self._reap()
            stopped = self._keepers.look()
            self._status = self._keepers.status
            self._after_signals()
            if stopped and self._status is None:
                self._suspend(stopped)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._end_tree()
            else:
                self._watch([each for each in ready if each not in ends])

    def _rank_ends(self) -> list[int]:
        # Those that are not taken in any more would wake us all the time.
        return [] if "the rank watch" in self._faults else self._ranks.descriptors

    def _watch(self, ended: list[int]) -> None:
        """One look at the job; ``ended`` are the descriptors of ranks that have just ended."""
        now, guarded = time.monotonic(), self._faults.guarded
        if self._debugging is not None:
            guarded("the debugger", self._note, self._debugging.look)
            if self._debugging.stopped:
                self._end_for_debugger()
        if self._showing is not None:
            guarded("the monitor's files", self._showing.look, at_once=self._happened is not None)
        for descriptor in ended:
            guarded("the rank watch", self._rank_ended, descriptor)
            self._happened = self._happened or now
        guarded("the rank watch", self._ranks.end_leftovers, self._keepers.parents)
        self._ticks += 1
        if self._ticks % 2 == 0:
            guarded("the rank watch", self._ranks.note_children)
        run = self._look()
        if run is not None and not run.ranks and self._ticks % 2:
            look = partial(self._unwatched_ranks.look, self._keepers.pid)
            guarded("the look for unwatched ranks", self._note, look)
        if run is not None:
            self._watch_run(run, now)
        if self._gpu_poll is not None and self._gpu_poll.failed is not None:
            self._faults.failed([("the GPU poll", self._gpu_poll.failed)])
        self._note(self._faults.take)

    def _watch_run(self, run: Run, now: float) -> None:
        guarded = self._faults.guarded
        mute = [each.rank for each in run.ranks if each.status and each.status.unwritten]
        if mute and not self._mute_told:
            # The others follow, for the disk is full for all of them: once is enough.
            self._mute_told = True
            self._reporter.warn(
                f"rank {mute[0]} cannot write its records to {self._directory}; "
                "the job goes on, unwatched from there"
            )
        if self._debugging is not None:
            guarded("the debugger", self._debugging.look_at, run)
        guarded("the rank watch", self._follow, run)
        if guarded("the GPU watch", self._note, partial(self._gpus.look_at, run)):
            self._happened = self._happened or now
        if self._suspicions is not None and guarded("the suspicions", self._suspicions.look, run):
            self._happened = now - SETTLE
        if self._stragglers is not None and guarded(
            "the straggler watch", self._stragglers.look, run
        ):
            self._happened = now - SETTLE
        if self._hangs is not None and guarded("the hang watch", self._hangs.look, run):
            # With the record that was just written.
            run = self._look() or run
            self._happened = now - SETTLE
        if self._new_trouble(run):
            self._happened = self._happened or now
        due = self._examined + EXAMINE if self._happened is None else self._happened + SETTLE
        if now >= due:
            self._happened, self._examined = None, now
            # With what was written in between.
            self._examine(self._look() or run)

    def _note(self, tell: Callable[[], Iterable[Record]]) -> bool:
        """Write what somebody tells; whether it was anything."""
        told = False
        for record in tell():
            self._write(record)
            told = True
        return told

    def _rank_ended(self, descriptor: int) -> None:
        self._write(self._ranks.ended(descriptor))

    def _examine(self, run: Run) -> None:
        self._faults.guarded("the rules", self._reporter.examine, run)
        if self._showing is not None:
            news = partial(self._showing.news, self._reporter.news)
            self._faults.guarded("the monitor's files", self._note, news)
        self._faults.guarded("the hang watch", self._end_hung_job)

    def _end_hung_job(self) -> None:
        """With ``--kill-on-hang``: end a job that hangs for sure, all that is known being saved."""
        own, hangs = self._command.own, self._hangs
        hung = hangs is not None and hangs.judged(self._reporter.found)
        if not (hung and own.kill_on_hang and self._status is None and self._deadline is None):
            return
        # A rank may have moved or ended while the verdict was made.
        run = self._look()
        if hangs is None or run is None or not hangs.confirmed(run):
            self._happened = time.monotonic()
        else:
            self._killed = True
            self._reporter.note("ending the job, which hangs (--kill-on-hang)")
            now = time.time_ns()
            self._write({"kind": "signal", "time": now, "signal": signal.SIGTERM, "hang": True})
            self._deadline = time.monotonic() + min(own.grace, KILL_GRACE)
            self._send(signal.SIGTERM)

    def _end_for_debugger(self) -> None:
        """With ``--stop-with-debugger``: end all ranks, since the person has stopped debugging."""
        if self._status is None and self._deadline is None:
            self._reporter.note("the debugger was stopped: ending the job")
            now = time.time_ns()
            self._write({"kind": "signal", "time": now, "signal": signal.SIGTERM, "debugger": True})
            self._deadline = time.monotonic() + self._command.own.grace
            self._send(signal.SIGTERM)

    def _finish(self) -> int:
        assert self._status is not None
        self._after_signals()
        self._last_exits()
        # Whoever was asked to end ends, even if nobody reads its stderr any more.
        patience = 1.0 if self._signals else None
        if self._debugging is not None:
            self._faults.guarded(DEBUGGER_END, self._debugging.stop)
        self._passthrough.finish(1.0)
        self._save_stderr()
        run = self._look()
        if run is not None and self._hangs is not None:
            self._faults.guarded("the hang watch", self._hangs.end, run, self._status)
        self._write({"kind": "job", "time": time.time_ns(), "status": self._status})
        run = self._look()
        if run is not None:
            self._examine(run)
        findings = self._reporter.standing
        self._sweep()
        if run is not None:
            self._faults.guarded("the summary", self._reporter.summary, run)
        self._note(self._faults.take)
        self._passthrough.finish(patience)
        if self._killed:
            return HANG
        if (
            self._command.own.strict
            and self._status == 0
            and any(finding.severity >= Severity.ERROR for finding in findings)
        ):
            return STRICT
        return self._status

    def _look(self) -> Run | None:
        if self._reader is None:
            return None
        try:
            return self._reader.snapshot()
        except (OSError, DoctorError) as error:
            self._reporter.warn(f"the run directory cannot be read ({error}); not watching")
            self._reader = None
        except Exception as error:
            self._faults.failed([("reading the records", error)])
            self._reader = None
        return None

    def _write(self, record: Record) -> None:
        if self._journal is None:
            return
        try:
            self._journal.write([record])
        except OSError as error:
            self._journal = None
            self._reporter.warn(f"the run directory cannot be written: {error}")

    def _save_stderr(self) -> None:
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            rundir.put(self._directory / rundir.STDERR, bytes(self._passthrough.tail))
            if self._showing is not None:
                self._faults.guarded("the monitor's files", self._showing.end)

    # -- processes

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._keepers.reaped(pid, status)

    def _follow(self, run: Run) -> None:
        for record in self._ranks.follow(run):
            self._write(record)

    def _last_exits(self) -> None:
        """The ends of ranks that came together with the end of the job."""
        run = self._look()
        if run is not None:
            self._faults.guarded("the rank watch", self._follow, run)
        ready = select.select(self._rank_ends(), [], [], 0)[0]
        for descriptor in ready:
            self._faults.guarded("the rank watch", self._rank_ended, descriptor)

    def _idle(self, seconds: float) -> None:
        time.sleep(seconds)
        self._reap()

    def _job(self) -> processes.Job:
        return processes.Job(
            self._run_id,
            ancestors=self._keepers.parents | {os.getpid()},
            spared=self._keepers.pids,
        )

    def _end_tree(self) -> None:
        """The grace period is over."""
        processes.end(self._job(), soft=0.5, idle=self._idle)
        self._deadline = time.monotonic() + 2.0

    def _sweep(self) -> None:
        """End what the job left behind."""
        # A job that was asked to stop has had its time.
        patience = LEFT_BEHIND / 4 if self._signals else LEFT_BEHIND
        ended = processes.end(self._job(), patience=patience, soft=3.0, idle=self._idle)
        self._reap()
        if ended:
            more = f" and {len(ended) - 3} more" if len(ended) > 3 else ""
            self._reporter.note(
                f"ended {_count(len(ended), 'process', 'processes')} that the job left behind: "
                f"{', '.join(ended[:3])}{more}"
            )

    # -- signals

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: nothing here takes a lock or writes a file."""
        if number in self._signals:
            self._asked_again |= number == signal.SIGINT
            return
        self._signals.add(number)
        grace = self._command.own.grace
        if number == signal.SIGHUP and self._had_terminal and not terminal.lives():
            grace = min(grace, HANGUP_GRACE)
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + grace)
        self._unwritten.append({"kind": "signal", "time": time.time_ns(), "signal": number})
        if not self._keepers.sent_to_group(number):
            self._send(number)

    def _pass_on_every(self, number: int, frame: FrameType | None) -> None:
        if not self._keepers.sent_to_group(number):
            self._send(number)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        self._passthrough.resize()
        if not self._command.through_torchrun:
            # On a terminal it has got one, which may have come before its stderr had its new size.
            self._send(number)

    def _send(self, number: int) -> None:
        pid = self._keepers.pid
        if not pid or self._keepers.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number not in _TO_GROUP:
                os.kill(pid, number)
            elif self._group is None:
                os.killpg(pid, number)
            else:
                for process in self._in_group():
                    processes.send(process, number)

    def _in_group(self) -> list[processes.Process]:
        """The job's processes in the group that it shares with this process."""
        return [each for each in self._job().processes() if each.group == self._group]

    def _suspend(self, number: int) -> None:
        """The job's command was stopped, as by Ctrl-Z: all of the job stops, and this process.

        They go on when somebody continues this process, as a shell's ``fg`` does.
        """
        if self._group is None:
            return
        if number == signal.SIGTSTP and terminal.is_orphaned(self._group, self._keepers.parents):
            # Without ddpdoctor it would not have stopped: there is no shell to continue it.
            for process in self._in_group():
                processes.send(process, signal.SIGCONT)
            return
        running = [each for each in self._job().processes() if each.state not in "tT"]
        stopped = [each for each in running if processes.send(each, signal.SIGSTOP)]
        self._passthrough.finish(0.2)
        since = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._hangs is not None:
            self._faults.guarded("the hang watch", self._hangs.slept, time.monotonic() - since)
        for process in stopped:
            processes.send(process, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            # Whoever continued this process alone meant the job.
            os.kill(self._keepers.pid, signal.SIGCONT)

    def _after_signals(self) -> None:
        while self._unwritten:
            self._write(self._unwritten.pop(0))
        if self._asked_again and self._deadline is not None:
            self._asked_again = False
            self._deadline = time.monotonic()
            self._reporter.note("asked again: ending the job now")

    def _new_trouble(self, run: Run) -> bool:
        """Whether a process has just recorded something that ends it."""
        records = [record for rank in run.ranks for record in rank.records] + list(run.strays)
        trouble = sum(record["kind"] in ("error", "exit", "end") for record in records)
        fresh = trouble > self._trouble
        self._trouble = trouble
        return fresh


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def end_like(status: int) -> int:
    """End this process as the job ended: by the same signal, or return its exit status."""
    if status >= 0:
        return status
    number = -status
    with contextlib.suppress(OSError, ValueError):
        import resource

        # The job has left its core dump; ours would only overwrite it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, AttributeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
