"""Watch the run directory while the job runs: write records, examine the ranks, report findings.

Also write run.json and the files with which other commands find the live run, and prepare the
job's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor import __version__
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import Command
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.debug.vscode_files import job_workspace
from ddpdoctor.failures import slurm
from ddpdoctor.render.reporter import Reporter
from ddpdoctor.run import code_version, rundir
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.mapped import PROFILE, SUSPICION, RequestWriter, SuspicionWriter
from ddpdoctor.run.names import BUDGET, CAPSULE, FAILURE, FORMAT, namespace
from ddpdoctor.run.records.base import JsonObject, Record
from ddpdoctor.run.records.process import EndRecord, ErrorRecord, ExitRecord, FaultRecord
from ddpdoctor.run.records.supervisor import JobRecord, SignalRecord, UnwatchedRecord
from ddpdoctor.run.reported import to_journal
from ddpdoctor.supervise.job_signals import JobSignals, Passthrough
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.supervise.notify import Notifications, Tracking, is_first
from ddpdoctor.supervise.rank_processes import RankWatch, Unwatched, bare_option, why_unwatched

if TYPE_CHECKING:
    from ddpdoctor.run.reader import RunReader
    from ddpdoctor.run.snapshot import Run
    from ddpdoctor.run.vitals import Vitals
    from ddpdoctor.supervise.hang_watch import HangWatch
    from ddpdoctor.supervise.node_link import NodeLink
    from ddpdoctor.supervise.slow_ranks import GpuWatch, LinkWatch, Stragglers, Suspicions
    from ddpdoctor.system.gpu_poll import GpuPoll


# -- run.json


ENTRY = str(Path(__file__).parents[1] / "probe" / "entry")
"""The folder on PYTHONPATH that loads the probe."""


def run_manifest(directory: Path, command: Command, debugging: Debugging | None) -> JsonObject:
    """Return the content of run.json."""
    from importlib import metadata

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "format": FORMAT,
        "id": directory.name,
        "started": time.time_ns(),
        "command": list(command.attached or command.argv),
        "launcher": command.launcher,
        "cwd": opening.working_directory(),
        "workspace": job_workspace(command.own.workspace),
        "host": socket.gethostname(),
        "supervisor": os.getpid(),
        "debug": debugging.manifest() if debugging is not None else None,
        "versions": {
            "ddpdoctor": __version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": torch,
        },
    }


# -- files of the run directory that show the live run


MAX_SHOWN = 64 << 10  # Maximum bytes to show from the end of the job's stderr
SHOW_INTERVAL = 1.0  # Seconds between two writes of these bytes


class StderrFile:
    """Provide the end of the job's stderr to other commands while the job runs."""

    def __init__(self, directory: Path, passthrough: Passthrough) -> None:
        self._file = directory / rundir.STDERR_SO_FAR
        self._passthrough = passthrough
        self._due = 0.0
        self._shown = 0

    def update(self, *, at_once: bool = False) -> None:
        """Write the job's new output, at most once a second unless ``at_once``."""
        now, carried = time.monotonic(), self._passthrough.carried
        if carried == self._shown or (now < self._due and not at_once):
            return
        self._due, self._shown = now + SHOW_INTERVAL, carried
        # The journal reports a full disk.
        with contextlib.suppress(OSError):
            rundir.put(self._file, self._passthrough.last(MAX_SHOWN))

    def end(self) -> None:
        """Remove the file, once the end of stderr is in its final file."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def keep_stderr(directory: Path, passthrough: Passthrough) -> None:
    """Keep the end of the job's stderr, which the diagnosis of a crash may need."""
    with contextlib.suppress(OSError):
        rundir.put(directory / rundir.STDERR, bytes(passthrough.tail))


# -- why the machine's scheduler ends the job


SCHEDULER_TIMEOUT = 3.0  # Seconds for the scheduler to answer


class Scheduler:
    """Asks Slurm or Kubernetes why they end a job, once."""

    def __init__(self) -> None:
        self._job = os.environ.get("SLURM_JOB_ID", "")
        self._pod = (
            os.environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in os.environ else ""
        )
        self._why = ""
        self._thread: threading.Thread | None = None
        self._is_asked = False

    @property
    def restarts(self) -> str:
        """Return a sentence if Slurm has started the job before. Otherwise empty."""
        count = os.environ.get("SLURM_RESTART_COUNT", "0") if self._job else "0"
        if not count.isdigit() or int(count) == 0:
            return ""
        return f"Slurm has started job {self._job} again (restart {int(count)})"

    def ask(self) -> None:
        """Start to query why the job is asked to end, because Slurm may forget it soon."""
        self._is_asked = True
        if self._thread is None and self._job:
            self._thread = threading.Thread(target=self._ask, name="ddpdoctor-slurm", daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        self._why = slurm.why_stopped(self._job, SCHEDULER_TIMEOUT)

    def why(self) -> str:
        """Return why the job was asked to end. Empty if unknown, or after `SCHEDULER_TIMEOUT`."""
        if self._thread is not None:
            self._thread.join(SCHEDULER_TIMEOUT)
        if self._is_asked and not self._why and self._pod:
            return (
                f"`kubectl describe pod {self._pod}` says whether Kubernetes deleted, evicted or "
                "preempted the pod"
            )
        return self._why


# -- the watch of a run

EXAMINE_INTERVAL = 5.0  # Seconds between two examinations of a job without events
MAX_EXAMINE_SHARE = 0.1  # Maximum share of a core for these examinations
KILL_GRACE = 5.0  # Maximum grace period of a job that hangs, in seconds
SETTLE_TIME = 0.7  # Seconds for the other ranks' records to arrive after an event

_DEBUGGER, _DEBUGGER_END = "the debugger", "the end of the debugger"
_RANKS, _HANGS, _SHOWING = "the rank watch", "the hang watch", "the monitor's files"
_NOTIFY, _STRAGGLERS = "the notifications", "the straggler watch"
_NODES, _TRACKERS = "the link to other nodes", "the trackers"
_SOURCE = "the check of the code"


class RunWatch:
    """Watch one run.

    An error in one part ends only that part. The job and all other parts continue.

    The arguments are those of the supervisor, and its keepers and signals.
    """

    def __init__(
        self,
        command: Command,
        directory: Path | None,
        passthrough: Passthrough,
        reporter: Reporter,
        debugging: Debugging | None,
        keepers: Keepers,
        signals: JobSignals,
    ) -> None:
        self._command = command
        self._directory = directory
        self._passthrough = passthrough
        self._reporter = reporter
        self._guarded = reporter.faults.guarded
        self._debugging = debugging if directory is not None else None
        self._keepers = keepers
        self._signals = signals
        self.killed = False  # Whether the job was ended because it hung
        self._ranks = RankWatch()
        self._gpus: GpuWatch | None = None
        self._gpu_poll: GpuPoll | None = None
        self._unwatched_ranks = Unwatched(ENTRY)
        self._showing: StderrFile | None = None
        self.nodes: NodeLink | None = None
        self._reader: RunReader | None = None
        self._journal: Journal | None = None
        self._lock: rundir.Lock | None = None
        self.notifications = Notifications(command, reporter.say)
        self._tracking: Tracking | None = None
        self._targets = command.own.log_to
        self.scheduler = Scheduler()
        self._requests: tuple[RequestWriter, RequestWriter, SuspicionWriter] | None = None
        self._hangs: HangWatch | None = None
        self._stragglers: Stragglers | None = None
        self._watches: dict[str, Suspicions | Stragglers | HangWatch | LinkWatch | Vitals] = {}
        self._trouble = 0
        self._happened: float | None = None  # Time of the first event still to be examined
        self._mute_reported = False
        self._examined = time.monotonic()
        self._cost = 0.0  # CPU seconds of the last examination
        self._ticks = 0

    # -- the start

    def open(self) -> None:
        """Create the files of the run."""
        directory = self._directory
        if directory is None:
            return
        try:
            self._lock = rundir.Lock(directory)
            try:
                if self._debugging is not None:
                    self._debugging.open(directory)
            except (OSError, DoctorError):
                raise
            except Exception as error:
                self._reporter.faults.failed([(_DEBUGGER, error)])
                self._stop_debugger()
            self._journal = Journal(str(directory / "supervisor.jsonl"), 1 << 24)
            self._requests = (
                RequestWriter(str(directory)),
                RequestWriter(str(directory), PROFILE),
                SuspicionWriter(str(directory / SUSPICION)),
            )
        except (OSError, DoctorError) as error:
            self._give_up(error)
        except Exception as error:
            self._reporter.faults.failed([("the start of the watch", error)])
            self._stop_watching()
        option = bare_option(self._command.argv, self._command.through_torchrun)
        if option and self._directory is not None:
            why = why_unwatched(option)
            self._reporter.say(f"{why}: leave out {option}, or this process is not watched")
            self.write(UnwatchedRecord(time=time.time_ns(), why=why))

    def _give_up(self, error: Exception) -> None:
        self._reporter.warn(f"cannot use the run directory ({error}); the job runs unwatched")
        self._stop_watching()

    def _stop_watching(self) -> None:
        """Stop all parts, but let the job run."""
        self._directory = self._reader = self._journal = self._showing = None
        self._hangs = self._stragglers = None
        self._watches = {}
        self._stop_debugger()

    def _stop_debugger(self) -> None:
        if self._debugging is not None:
            self._guarded(_DEBUGGER_END, self._debugging.stop)
            self._debugging = None

    def environment(self) -> dict[str, str]:
        """Return the job's environment. Without a run directory, it is that of this process."""
        environment = dict(os.environ)
        if self._directory is None:
            return environment
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{ENTRY}{os.pathsep}{before}" if before else ENTRY
        environment["DDPDOCTOR_RUN_DIR"] = str(self._directory)
        environment["DDPDOCTOR_JOURNAL_MB"] = str(self._command.own.journal_mb)
        environment[BUDGET] = str(self._command.own.overhead_budget)
        if self._command.own.capsule:
            environment[CAPSULE] = FAILURE
        environment["DDPDOCTOR_SUPERVISOR"] = f"{os.getpid()}@{namespace()}"
        debugging = self._debugging
        return environment | (debugging.environment() if debugging is not None else {})

    def started(self) -> None:
        """Start watching the job, whose command has just started."""
        if self._debugging is not None and self._directory is not None:
            # Before the manifest, which contains the label that is chosen here.
            self._guarded(_DEBUGGER, self._debugging.announce, self._directory)
        if self._directory is not None:
            self._begin(self._directory)
        if restarts := self.scheduler.restarts:
            self._reporter.note(restarts)
        if self._debugging is not None:
            self._guarded(_DEBUGGER, self._debugging.start, self._signals.wake)
        if self._hangs is not None:
            self._guarded(_HANGS, self._hangs.begin, self._keepers.pid)
        if self.nodes is not None:
            self.nodes.begin(self._keepers.pid)

    def _begin(self, directory: Path) -> None:
        """Write run.json and start the parts of the watch.

        The job does not wait for their imports.
        """
        try:
            manifest = run_manifest(directory, self._command, self._debugging)
            rundir.put(directory / rundir.MANIFEST, json.dumps(manifest, indent=1).encode())
        except OSError as error:
            self._give_up(error)
            return
        with contextlib.suppress(OSError, DoctorError):
            rundir.publish(directory)
        self._guarded("the record of the code", code_version.keep, directory, self._command.argv)
        self._guarded("the start of the watch", self._start_parts, directory)

    def _start_parts(self, directory: Path) -> None:
        from ddpdoctor.run.reader import RunReader
        from ddpdoctor.run.vitals import Vitals
        from ddpdoctor.supervise.hang_watch import HangWatch
        from ddpdoctor.supervise.node_link import NodeLink
        from ddpdoctor.supervise.slow_ranks import GpuWatch, LinkWatch, Stragglers, Suspicions
        from ddpdoctor.system.gpu_poll import GpuPoll

        if self._requests is None:
            return
        try:
            self._reader = RunReader(directory)
        except DoctorError as error:
            # The directory has been removed already.
            self._give_up(error)
            return
        self._showing = StderrFile(directory, self._passthrough)
        examination, profile, suspicion = self._requests
        self._watches["the suspicions"] = Suspicions(suspicion, self.write)
        self._stragglers = Stragglers(profile, self.write)
        self._watches[_STRAGGLERS] = self._stragglers
        self._watches["the record of memory and GPUs"] = Vitals(directory)
        self._hangs = HangWatch(
            directory,
            examination,
            self._command.own.hang_after,
            self.write,
            self._reporter.note,
            self._signals.wake,
        )
        self._watches[_HANGS] = self._hangs
        if not self._command.own.no_nodes:
            journal_bytes = self._command.own.journal_mb << 20
            self.nodes = NodeLink(
                directory,
                journal_bytes,
                self._reporter.note,
                debug_nodes=self._command.own.debug_nodes,
                chosen=self._command.own.run_dir,
            )
            self._watches["the link watch"] = LinkWatch(self.write)
        elif is_first(os.environ):
            self._track(directory)
        self._gpus = GpuWatch()
        self._gpu_poll = GpuPoll(directory)
        self._guarded("the GPU poll", self._gpu_poll.start)

    # -- while the job runs

    @property
    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a rank ends."""
        # After an error in that part they are not read, and would wake the loop constantly.
        return [] if _RANKS in self._reporter.faults else self._ranks.descriptors

    def check(self, ended: Iterable[int] = ()) -> None:
        """Run all parts once. ``ended`` are the descriptors of ranks that have just ended."""
        now, guarded = time.monotonic(), self._guarded
        guarded(_SOURCE, self._reporter.tell_source)
        if self._debugging is not None:
            guarded(_DEBUGGER, self._note, self._debugging.poll)
            if self._debugging.stopped:
                self._end_job("the debugger was stopped: ending the job", debugger=True)
        if self._tracking is not None:
            guarded(_TRACKERS, self._tracking.poll)
        if self._showing is not None:
            guarded(_SHOWING, self._showing.update, at_once=self._happened is not None)
        for descriptor in ended:
            guarded(_RANKS, self._rank_ended, descriptor)
            self._happened = self._happened or now
        guarded(_RANKS, self._ranks.end_leftovers, self._keepers.parents)
        self._ticks += 1
        if self._ticks % 2 == 0:
            guarded(_RANKS, self._ranks.note_children)
        run = self._read()
        if run is not None and not run.ranks and self._ticks % 2:
            find = partial(self._unwatched_ranks.find, self._keepers.pid)
            guarded("the search for unwatched ranks", self._note, find)
        if run is not None:
            self._check_run(run, now)
        if self._gpu_poll is not None and self._gpu_poll.failed is not None:
            self._reporter.faults.failed([("the GPU poll", self._gpu_poll.failed)])
        self._note(self._faults)

    def _check_run(self, run: Run, now: float) -> None:
        guarded = self._guarded
        if self.nodes is not None:
            self._link_nodes(self.nodes, run)
        if self._hangs is not None:
            self._hangs.left_to_head = self._left_to_head
        self._warn_of_mute_ranks(run)
        if self._debugging is not None:
            guarded(_DEBUGGER, self._debugging.check, run)
        guarded(_RANKS, self._note, partial(self._ranks.follow, run))
        gpus = self._gpus
        if gpus and guarded("the GPU watch", self._note, partial(gpus.look_at, run)):
            self._happened = self._happened or now
        for name, watch in self._watches.items():
            if guarded(name, watch.look, run):
                # Include the record that was just written.
                run = self._read() or run
                self._happened = now - SETTLE_TIME
        if self._new_trouble(run):
            self._happened = self._happened or now
        # With many ranks an examination takes long, and the ranks need the cores.
        idle = self._examined + max(EXAMINE_INTERVAL, self._cost / MAX_EXAMINE_SHARE)
        due = idle if self._happened is None else self._happened + SETTLE_TIME
        if now >= due:
            self._happened, self._examined = None, now
            if self._stragglers is not None:
                guarded(_STRAGGLERS, self._stragglers.ask, run)
            # Include the records written in between.
            began = time.thread_time()
            self._examine(self._read() or run)
            self._cost = time.thread_time() - began

    def _warn_of_mute_ranks(self, run: Run) -> None:
        mute = [each.rank for each in run.ranks if each.status and each.status.unwritten]
        if mute and not self._mute_reported:
            # Report once: the disk is full for all ranks.
            self._mute_reported = True
            self._reporter.warn(
                f"rank {mute[0]} cannot write its records to {self._directory}; "
                "the job goes on, unwatched from now on"
            )

    def _note(self, report: Callable[[], Iterable[Record]]) -> bool:
        """Write the records that a part returns. Return whether there were any."""
        reported = False
        for record in report():
            self.write(record)
            reported = True
        return reported

    def _faults(self) -> Iterator[FaultRecord]:
        """Yield errors in ddpdoctor itself since the last call."""
        for each in self._reporter.faults.take():
            yield FaultRecord(time=each.time, part=each.part, error=each.error, places=each.places)

    def _rank_ended(self, descriptor: int) -> None:
        self.write(self._ranks.ended(descriptor))

    @property
    def helpers(self) -> frozenset[int]:
        """Pids of ddpdoctor's processes below the supervisor. They may have children."""
        trackers = {self._tracking.pid} if self._tracking is not None else set()
        return frozenset(trackers | (self.nodes.pids if self.nodes is not None else set()))

    def _link_nodes(self, nodes: NodeLink, run: Run) -> None:
        self._guarded(_NODES, nodes.look, run)
        if nodes.job_hangs and self._command.own.kill_on_hang and self._may_end:
            self._end_hung(f"the job hangs, says {nodes.judge}")
        if any(rank.rank == 0 and not rank.elsewhere for rank in run.ranks):
            # The node of rank 0 has the records of all nodes.
            self._track(run.path)

    def _track(self, directory: Path) -> None:
        """Start to send the run to the targets of ``--log-to``, once."""
        targets, self._targets = self._targets, ()
        if targets:
            self._tracking = self._guarded(
                _TRACKERS, Tracking, directory, targets, self._reporter.say
            )

    @property
    def _left_to_head(self) -> bool:
        return self.nodes is not None and self.nodes.leaves_to_head

    def _examine(self, run: Run) -> None:
        left = self._left_to_head
        if left and not self._reporter.current:
            return
        self._guarded("the rules", partial(self._reporter.examine, left=left), run)
        if self._showing is not None:
            news = self._reporter.news
            self._guarded(
                _SHOWING, self._note, lambda: [to_journal(each, run.taken) for each in news]
            )
        self._guarded(_NOTIFY, self.notifications.news, run, self._reporter.news)
        if self._debugging is not None:
            self._guarded(_DEBUGGER, self._debugging.tell, self._reporter.news)
        self._guarded(_HANGS, self._end_hung_job)

    def _end_hung_job(self) -> None:
        """End a job that certainly hangs, with ``--kill-on-hang``."""
        hangs, one_node = self._hangs, self._command.one_node
        if hangs is None or not hangs.judged(self._reporter.found, one_node=one_node):
            return
        if not (self._command.own.kill_on_hang and self._may_end):
            return
        run = self._read()
        if run is None or not hangs.confirmed(run):
            # A rank may have moved or ended meanwhile: examine the run again.
            self._happened = time.monotonic()
            return
        self._end_hung("the job hangs")

    def _end_hung(self, why: str) -> None:
        self.killed = True
        self._end_job(f"{why}: ending it (--kill-on-hang)", hang=True)

    @property
    def _may_end(self) -> bool:
        """Whether the job still runs and was not asked to end."""
        return self._keepers.status is None and self._signals.deadline is None

    def _end_job(self, why: str, *, hang: bool = False, debugger: bool = False) -> None:
        if self._may_end:
            self._reporter.note(why)
            now, number, grace = time.time_ns(), signal.SIGTERM, self._command.own.grace
            self.write(SignalRecord(time=now, signal=number, hang=hang, debugger=debugger))
            self._signals.end_job(min(grace, KILL_GRACE) if hang else grace)

    def slept(self, seconds: float) -> None:
        """Ignore a period of ``seconds`` in which the whole job was stopped."""
        if self._hangs is not None:
            self._guarded(_HANGS, self._hangs.slept, seconds)

    def _new_trouble(self, run: Run) -> bool:
        """Return whether a process has just recorded a fatal event."""
        records = [record for rank in run.ranks for record in rank.records] + list(run.strays)
        before = self._trouble
        self._trouble = sum(type(each) in (ErrorRecord, ExitRecord, EndRecord) for each in records)
        return self._trouble > before

    # -- the end
    def end(self, status: int, ready: Callable[[], Iterable[int]]) -> Run | None:
        """Write the last records and report the last findings, after the job's command has ended.

        ``ready`` returns the readable ones of :attr:`descriptors`. Return the run at its end, if it
        can be read.
        """
        self._guarded(_SOURCE, self._reporter.tell_source)
        if (run := self._read()) is not None:
            self._guarded(_RANKS, self._note, partial(self._ranks.follow, run))
        # Some ranks ended together with the job.
        for descriptor in ready():
            self._guarded(_RANKS, self._rank_ended, descriptor)
        if self._debugging is not None:
            self._guarded(_DEBUGGER_END, self._debugging.stop)
        self._passthrough.finish(1.0)
        if self._directory is not None:
            self._guarded("the end of stderr", keep_stderr, self._directory, self._passthrough)
        if self._showing is not None:
            self._guarded(_SHOWING, self._showing.end)
        run = self._read()
        if run is not None and self._hangs is not None:
            self._guarded(_HANGS, self._hangs.end, run, status)
        if self.nodes is not None:
            self._guarded(_NODES, self.nodes.end, status, hangs=self.killed)
        why = self._guarded("the scheduler", self.scheduler.why) or ""
        self.write(JobRecord(time=time.time_ns(), status=status, why=why))
        if (run := self._read()) is not None:
            self._examine(run)
        return run

    def summarize(self, run: Run | None, status: int) -> None:
        """Print the summary of the run, and send it to the targets of ``--notify``."""
        judge = self.nodes.judge if self.nodes is not None else ""
        if run is not None:
            self._guarded("the summary", self._reporter.summary, run, judge)
        self._guarded(_NOTIFY, self.notifications.end, run, status, self._reporter.current)
        if run is not None and not judge and is_first(os.environ):
            self._track(run.path)
        if self._tracking is not None:
            self._guarded(_TRACKERS, self._tracking.end)
        self._note(self._faults)

    def close(self) -> None:
        """Stop all parts and close all files."""
        if self._gpu_poll is not None:
            self._gpu_poll.stop()
        if self.nodes is not None:
            self._guarded(_NODES, self.nodes.close)
        if self._debugging is not None:
            self._guarded(_DEBUGGER_END, self._debugging.stop)
        for held in (self._journal, self._lock, *self._watches.values()):
            if held is not None:
                held.close()

    # -- the run directory

    def _read(self) -> Run | None:
        if self._reader is None:
            return None
        try:
            return self._reader.snapshot()
        except (OSError, DoctorError) as error:
            self._reporter.warn(
                f"cannot read the run directory ({error}); the job goes on unwatched"
            )
        except Exception as error:
            self._reporter.faults.failed([("reading the records", error)])
        self._reader = None
        return None

    def write(self, record: Record) -> None:
        """Write a record of the supervisor. Stop after the first error."""
        if self._journal is None:
            return
        try:
            self._journal.write([record])
        except OSError as error:
            self._journal = None
            self._reporter.warn(f"cannot use the run directory: {error}")
