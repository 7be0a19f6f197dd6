"""Make frames of a live run from status pages, GPUs and processes, in detail for ranks on screen.

GPU readings come from the files that the pollers of all nodes write. CPU, memory and the states
of processes are those of this machine.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import psutil

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError, words
from ddpdoctor.core.opening import as_copy, integer, whole
from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT, namespace
from ddpdoctor.run.reader import read_manifest
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.supervisor import RankExitRecord
from ddpdoctor.run.records.training import PassRecord, StepRecord
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.snapshot import command_words
from ddpdoctor.run.status import Phase, Status
from ddpdoctor.run.step_series import StepLog, parts_of
from ddpdoctor.system.nvml import same_uuid
from ddpdoctor.system.process_activity import CpuTime, lacked, read_cpu_time
from ddpdoctor.top import headline, run_files
from ddpdoctor.top.frames import Visible
from ddpdoctor.top.run_files import (
    RecentSteps,
    StampAges,
    StatusPages,
    Stderr,
    SupervisorEvents,
    after_warm_up,
    without_control_characters,
)
from ddpdoctor.top.snapshot import Gpu, Job, Machine, RankRow, Snapshot, Times, Verdict

# -- GPUs, CPU and memory of the machines, and reasons why a process shows no sign of life


STALE_READING = 10.0  # Maximum age of a poller's last reading in seconds

MANY_NODES, MAX_NODES = 8, 1024
"""Number of nodes above which files are read every other time, and maximum number of nodes read."""

_MAX_BYTES = 8 << 20  # Maximum size of all nodes' files, with some hundred bytes per GPU


@dataclass
class _Node:
    """The known facts about the GPUs of a node."""

    seen: tuple[int, int] | None = None  # Modification time and inode of the read file
    changed: float = 0.0  # When it changed, on the monotonic clock
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


def gpus_of(record: Mapping[str, object]) -> tuple[Gpu, ...]:
    """Return the GPUs of a node from its poller's file. Skip damaged ones."""
    listed = record.get("gpus")
    node = str(record.get("host") or "")
    found = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    gpus = (decoder(Gpu)({**each, "node": node}) for each in found if "index" in each)
    return tuple(gpu for gpu in gpus if gpu.uuid)


def without_readings(gpu: Gpu, problem: str) -> Gpu:
    """Return a GPU with only its constant facts."""
    still = Gpu(node=gpu.node, index=gpu.index, uuid=gpu.uuid, name=gpu.name, mig=gpu.mig)
    return replace(still, memory_total=gpu.memory_total, problem=problem)


class GpuFiles:
    """The files of all nodes' pollers in a run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nodes: dict[str, _Node] = {}  # By the names of their files
        self._odd_turn = False
        self._left_out = 0

    def refresh(self) -> None:
        """List the directory again."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return
        ours = [name for name in names if name.startswith("gpus-") and name.endswith(".json")]
        self._nodes = {name: self._nodes.get(name, _Node()) for name in ours[:MAX_NODES]}
        self._left_out = len(ours[MAX_NODES:])

    def read(self, live: bool) -> tuple[tuple[Gpu, ...], str]:
        """Return the GPUs of all nodes without outdated numbers, and why some cannot be read."""
        found: list[Gpu] = []
        trouble: list[str] = []
        if self._left_out:
            trouble.append(f"more than {MAX_NODES} nodes: {self._left_out} others are left out")
        now = time.monotonic()
        self._odd_turn = not self._odd_turn
        many = len(self._nodes) > MANY_NODES
        for number, (name, node) in enumerate(self._nodes.items()):
            if not many or node.seen is None or number % 2 == self._odd_turn:
                self._read(name, node, now)
            age = now - node.changed
            if not live or node.seen is None:
                found += [without_readings(gpu, "") for gpu in node.gpus]
            elif age > STALE_READING:
                problem = f"not read for {age:.0f} s"
                found += [without_readings(gpu, problem) for gpu in node.gpus]
                trouble.append(f"GPUs {problem}")
            else:
                found += node.gpus
            trouble += [node.trouble] if node.trouble else []
        return tuple(found), "; ".join(dict.fromkeys(trouble))

    def _read(self, name: str, node: _Node, now: float) -> None:
        path = self._directory / name
        try:
            facts = path.lstat()
            key = (facts.st_mtime_ns, facts.st_ino)
            if node.seen == key:
                return
            record = opening.json_object(path, _MAX_BYTES // len(self._nodes))
            if int(record.get("format", 0)) > FORMAT:
                raise ValueError
        except OSError:
            return
        except (ValueError, TypeError, OverflowError):
            node.trouble = f"{name} is damaged"
            return
        # At first only the file system's clock shows its age.
        age = max(0.0, time.time() - facts.st_mtime) if node.seen is None else 0.0
        node.seen, node.changed = key, now - age
        node.gpus, node.trouble = gpus_of(record), str(record.get("nvml") or "")


MIN_CPU_INTERVAL = 0.1  # Seconds between two readings of the CPU, whose counters are in hundredths


class MachineMeter:
    """Reads CPU and memory of this machine."""

    def __init__(self) -> None:
        self._node = socket.gethostname()
        self._cores = psutil.cpu_count()
        self._read = 0.0
        self._cpu: float | None = None

    def read(self) -> Machine:
        """Return memory, and the CPU load since the last reading, which the first reading lacks."""
        used = total = None
        # Without /proc the load is unknown.
        with contextlib.suppress(OSError, RuntimeError):
            now = time.monotonic()
            if now - self._read >= MIN_CPU_INTERVAL:
                busy = psutil.cpu_percent() / 100
                # The first call has no earlier reading.
                self._cpu = busy if self._read else None
                self._read = now
            memory = psutil.virtual_memory()
            used, total = memory.total - memory.available, memory.total
        return Machine(self._node, self._cpu, self._cores, used, total)


FIRST_SAMPLE = 0.05  # Seconds between the first two samples of a process without a heartbeat
_SAMPLE_INTERVAL = 2.0  # Seconds after which its CPU time is sampled again

STOPPED = "its process is stopped (SIGSTOP)"
_STATE_TEXTS = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: "its process is traced",
    psutil.STATUS_DISK_SLEEP: "its process waits for a disk",
}


class ProcessStates:
    """Finds the reasons why processes of this machine show no sign of life."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[float, CpuTime | None]] = {}
        """CPU time of main threads, by pid, with the time of the sample."""

    def state(self, pid: int) -> tuple[str, str]:
        """Return the state of a process's rank, with the reason."""
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return "dead", "its process is gone"
        except (psutil.Error, OSError, ValueError, OverflowError):
            return "stale", ""
        if status == psutil.STATUS_ZOMBIE:
            return "dead", "its process has ended"
        if status == psutil.STATUS_RUNNING and self.lacks_core(pid):
            # The process and its heartbeat thread run as much as they can.
            return "running", "gets little CPU"
        return "stale", _STATE_TEXTS.get(status, "")

    def lacks_core(self, pid: int) -> bool:
        """Return whether a main thread was ready to run without a core for most of the time."""
        now, turn = time.monotonic(), read_cpu_time(pid, pid)
        if pid not in self._turns:
            self._turns[pid] = (now, turn)
            time.sleep(FIRST_SAMPLE)
            now, turn = time.monotonic(), read_cpu_time(pid, pid)
        when, before = self._turns[pid]
        if now - when >= _SAMPLE_INTERVAL:
            self._turns[pid] = (now, turn)
        if before is None or turn is None:
            return False
        return lacked(before, turn, now - when) > (now - when) / 2


# -- make frames of a live run from its status pages, in more detail for the ranks on screen


T = TypeVar("T")

RATE_WINDOW = 30.0  # Seconds over which the rate of steps is averaged
MAX_RANKS_FOR_LOSS = 4  # Maximum number of ranks whose losses and samples are read
LIST_INTERVAL = 1.0  # Seconds between two listings of the run directory
PASS_INTERVAL = 20.0  # Seconds between two checks of the length of an epoch

STALE = 5.0
"""Seconds without a heartbeat after which a rank is stale. A heartbeat comes four times a
second."""

MANY_RANKS = 64  # Number of ranks above which those off screen are read in every other frame

_EPOCHS_OPTION = re.compile(r"--(?:n|num|max|total)?[-_]?(?:train)?[-_]?epochs?$")
_STEPS_OPTION = re.compile(r"--(?:n|num|max|total)?[-_]?(?:train)?[-_]?(?:steps|iters|iterations)$")
_RESTARTS_OPTION = re.compile(r"--max[-_]restarts$")

_cleaned = lru_cache(maxsize=4096)(without_control_characters)
"""`without_control_characters`, for texts that are the same in most frames."""


class Progress:
    """The progress of the job, its rate, and the remaining time."""

    def __init__(self, manifest: Mapping[str, object]) -> None:
        command = command_words(manifest)
        restarts = _option_number(command, _RESTARTS_OPTION)
        self._job = Job(
            script=run_files.job_command(manifest),
            steps=_option_number(command, _STEPS_OPTION),
            epochs=_option_number(command, _EPOCHS_OPTION),
            attempts=None if restarts is None else restarts + 1,
        )
        self._seen: deque[tuple[float, int]] = deque()
        self._per_epoch: float | None = None

    def restarted(self) -> None:
        """Start a new attempt, whose steps count from 0."""
        self._seen.clear()

    def add_pass(self, record: PassRecord | None, step: StepRecord | None) -> None:
        """Use a pass over the loader to find the length of an epoch."""
        if record is not None and record.batches:
            self._per_epoch = record.batches / max(1, step.backwards if step is not None else 1)

    def rate(self, ticks: float, step: int | None, usual: float | None) -> float | None:
        """Return steps per second. The first rates come from ``usual``, a step's usual seconds."""
        if step is None:
            return None
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((ticks, step))
        while len(self._seen) > 2 and self._seen[1][0] <= ticks - RATE_WINDOW:
            self._seen.popleft()
        since, before = self._seen[0]
        # An unfinished step does not lower the rate until it takes long.
        long = max(5.0, 3 * usual) if usual else RATE_WINDOW
        if ticks - since < long:
            return 1 / usual if usual else None
        return (step - before) / (ticks - since)

    def job(
        self,
        attempt: int,
        step: int | None,
        epoch: int | None,
        rate: float | None,
        newest: Sequence[StepRecord],
        world_size: int | None,
    ) -> Job:
        """Describe the progress by steps and epoch so far, and the newest steps of some ranks."""
        samples = [each.samples for each in newest if each.samples]
        job = replace(
            self._job,
            attempt=attempt,
            step=step,
            epoch=epoch,
            rate=rate,
            steps=self._steps(step, epoch),
            loss=run_files.mean_loss(newest),
        )
        if samples and rate is not None and world_size:
            job = replace(job, samples_rate=fmean(samples) * world_size * rate)
        if job.steps is not None and step is not None and rate:
            job = replace(job, left=max(0, job.steps - step) / rate)
        return job

    def _steps(self, step: int | None, epoch: int | None) -> int | None:
        """Return the total steps of this attempt, if the command and the loader show it."""
        epochs, per_epoch = self._job.epochs, self._per_epoch
        if epochs is None:
            return self._job.steps
        if per_epoch is None or step is None:
            return None
        before = 0 if epoch is None else epoch - int(step / per_epoch)
        # A job that is one epoch ahead counts epochs from 1. More means a resumed job.
        done = before if before > 1 else 0
        steps = round(per_epoch * (epochs - done))
        return steps if steps >= step else None


def _option_number(words: Sequence[str], option: re.Pattern[str]) -> int | None:
    """Return the number passed for an option of the command."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if option.match(name):
            number = whole(value if equals else following, -1)
            return number if number >= 0 else None
    return None


class LiveRank:
    """The facts about a rank of the newest attempt, besides its status page."""

    def __init__(self, rank: int, pages: StatusPages) -> None:
        self._pages = pages
        self.path: Path = pages.path(rank, "jsonl")
        self._opened: OpenRecord | None = None
        self.group: tuple[int, ...] = ()
        """The ranks on GPUs with which it reduces gradients. Empty if there are none or unknown."""
        self._searched = 0  # Bytes of the journal that were searched for the group
        before = StepLog(self.path).newest(run_files.WINDOW)
        self.recent = RecentSteps(after_warm_up([parts_of(step) for step in before]))
        """The newest steps, including those before the monitor started."""
        self.row: RankRow | None = None  # The row as last shown

    @property
    def opened(self) -> OpenRecord | None:
        """Its first record, once written."""
        if self._opened is None:
            self._opened = run_files.open_record(self.path, self.max_memory)
        return self._opened

    def times(self, on_gpu: bool) -> Times | None:
        """Average its newest steps. On a GPU the wait is still within the backward."""
        if on_gpu and not self.group and len(self.recent):
            self.group, self._searched = run_files.ddp_group(
                self.path, self.max_memory, self._searched
            )
        return self.recent.times(apart=not self.group)

    @cached_property
    def error(self) -> ErrorRecord | None:
        """Its uncaught exception, once it has ended."""
        return run_files.last_error(self.path, self.max_memory)

    @property
    def newest(self) -> StepRecord | None:
        """Its newest step in the journal."""
        return next(iter(StepLog(self.path).newest(1)), None)

    @property
    def max_memory(self) -> int:
        """Maximum memory for a record of each rank, in bytes."""
        return opening.MOST_EXPANDED // (len(self._pages.ranks) or 1)


class LiveSource:
    """Follows the newest attempt of a live or just finished run.

    Raises:
        DoctorError: It is not a run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self.path = path
        self._manifest: JsonObject = {}
        self._progress = Progress({})
        self._read_manifest(rundir.is_live(path))
        self._pages = StatusPages(path)
        self._gpus = GpuFiles(path)
        self._stderr = Stderr(path)
        self._events = SupervisorEvents(path)
        self._meter = MachineMeter()
        self._ages = StampAges()
        self._processes = ProcessStates()
        self._namespace = namespace()
        self._remark = as_copy(path)
        self._listed = self._passes = float("-inf")
        self._gone = False
        self._attempt: int | None = None
        self._ranks: dict[int, LiveRank] = {}
        self._odd_turn = False
        self._broken: list[tuple[str, Exception]] = []
        """The parts of this frame that failed because of errors in ddpdoctor."""
        self.live = True  # Whether the run was live at the last reading

    def _read_manifest(self, live: bool) -> None:
        try:
            self._manifest = read_manifest(self.path)
            self._progress = Progress(self._manifest)
        except DoctorError:
            # A starting run may be incomplete.
            if not live:
                raise

    def close(self) -> None:
        """Close the files."""
        self._pages.close()

    def read(self, want: Visible) -> Snapshot:
        """Read the present frame."""
        now, ticks = time.time_ns(), time.monotonic()
        self._update(ticks)
        self._broken.clear()
        self._part("events", self._events.poll)
        skipped = self._skipped(want)
        pages = self._pages.read(skipped)
        self._part("the output", self._stderr.read)
        nothing: tuple[tuple[Gpu, ...], str] = (), ""
        gpus, nvml = self._part("the GPUs", lambda: self._gpus.read(self.live)) or nothing
        by_uuid = self._part("the GPUs", lambda: {same_uuid(gpu.uuid): gpu for gpu in gpus}) or {}
        for rank, status in pages.items():
            if rank not in skipped:
                row = self._part(
                    f"rank {rank}", partial(self._row, rank, status, by_uuid, want, now, ticks)
                )
                if row is not None:
                    self._ranks[rank].row = row
        known = (self._ranks[rank].row for rank in pages if rank in self._ranks)
        rows = run_files.with_waits([row for row in known if row is not None], self.groups)
        job = self._part("the progress", lambda: self._job(pages, rows, ticks)) or Job()
        return self._snapshot(rows, pages, job, gpus, nvml, now)

    def _update(self, ticks: float) -> None:
        """Check whether the run is live, list its files, and detect a new attempt."""
        # Check this first, so that later readings are complete if the run is over.
        self.live = rundir.is_live(self.path)
        if ticks - self._listed >= LIST_INTERVAL or not self.live or not self._pages.ranks:
            self._listed = ticks
            self._gone = not self._pages.refresh()
            self._gpus.refresh()
        if not self._manifest and not self._gone:
            with contextlib.suppress(DoctorError):
                self._read_manifest(True)
        if self._pages.restart != self._attempt:
            self._attempt = self._pages.restart
            self._ranks.clear()
            self._progress.restarted()

    def _part(self, name: str, read: Callable[[], T]) -> T | None:
        """Read a part of the frame. None after an error in ddpdoctor, which a note reports."""
        try:
            return read()
        except (OSError, DoctorError):
            raise
        except Exception as error:
            self._broken.append((name, error))
        return None

    @property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """The ranks on GPUs with which each rank reduces gradients."""
        return {rank: known.group for rank, known in self._ranks.items() if known.group}

    def _skipped(self, want: Visible) -> frozenset[int]:
        """Return the ranks whose rows are skipped in this frame: half of many unseen ones."""
        self._odd_turn = not self._odd_turn
        shown = {rank for rank, known in self._ranks.items() if known.row is not None}
        if want.ranks is None or len(shown) < MANY_RANKS or not self.live:
            return frozenset()
        over = {rank for rank, restart in self._events.exits if restart == self._attempt}
        unseen = shown - want.ranks - over
        return frozenset(rank for rank in unseen if rank % 2 == self._odd_turn)

    def _row(
        self, rank: int, status: Status, gpus: dict[str, Gpu], want: Visible, now: int, ticks: float
    ) -> RankRow:
        known = self._ranks.get(rank)
        if known is None:
            known = self._ranks[rank] = LiveRank(rank, self._pages)
        known.recent.add(status.parts)
        node = _cleaned(known.opened.host if known.opened is not None else "")
        since = self._ages.age((rank, "since"), status.since, now, ticks)
        beat = since
        if status.beat is not None:
            beat = min(since, self._ages.age((rank, "beat"), status.beat, now, ticks))
        state, said = self._state(rank, known, status, beat)
        over = state in ("ended", "dead")
        wanted = want.ranks is None or rank in want.ranks
        local = status.local_rank if status.local_rank >= 0 else None
        here = node == self._manifest.get("host")
        return RankRow(
            rank=rank,
            node=node,
            local_rank=local,
            restart=status.restart,
            stage=status.stage,
            pid=status.pid,
            state=state,
            held=state == "debugger" and self._events.holds(rank),
            said=said,
            phase="" if over else status.phase.label,
            since=None if over else since,
            site=_cleaned(status.site),
            collective=_cleaned(status.collective) if status.phase is Phase.WAIT else "",
            step=status.step,
            epoch=status.epoch,
            times=known.times(bool(status.gpu)),
            heartbeat=None if over else beat,
            dropped=status.dropped,
            rss=None if over else status.rss,
            allocated=None if over else status.allocated,
            reserved=None if over else status.reserved,
            peak=status.peak,
            cost=status.cost,
            gpu=gpus.get(status.gpu) if status.gpu else None,
            debug_port=None if over else self._events.port(rank),
            output=self._stderr.of(rank, local, here) if wanted else (),
        )

    def _state(
        self, rank: int, known: LiveRank, status: Status, heartbeat: float
    ) -> tuple[str, str]:
        """Return a rank's state and its description."""
        over = status.phase is Phase.ENDED
        ending = self._events.exits.get((rank, status.restart))
        if ending is not None:
            return self._ended_state(ending, known, over)
        if over and known.error is None:
            return "ended", ""
        if self._gone and not over:
            # The directory was removed, but the job may still run.
            return "stale", "nothing more is known about it"
        if over or not self.live:
            asked = self._events.asked and known.error is None
            return "ended" if asked else "dead", run_files.how_it_ended(None, known.error)
        debugged = self._events.debugged(rank)
        if debugged:
            return "debugger", debugged
        if heartbeat > STALE and status.beat is not None:
            near = known.opened is not None and known.opened.namespace == self._namespace
            return self._processes.state(status.pid) if near else ("stale", "")
        return ("starting" if status.phase is Phase.STARTING else "running"), ""

    def _ended_state(self, ending: RankExitRecord, known: LiveRank, over: bool) -> tuple[str, str]:
        """Return the state of a rank whose process has ended, and how it ended."""
        code = ending.status
        if code == 0 or (code is None and over):
            return "ended", ""
        words = run_files.how_it_ended(ending, known.error)
        if known.error is not None:
            return "dead", words
        # A failure after the end of the script does not concern training. A rank that a sent signal
        # ended has not failed.
        fine = (over and (code or 0) <= 0) or (self._events.asked and (code or 0) < 0)
        return "ended" if fine else "dead", words

    def _job(self, pages: dict[int, Status], rows: list[RankRow], ticks: float) -> Job:
        """Describe the progress by the ranks' pages and the newest steps of a few ranks."""
        known = [self._ranks.get(rank) for rank in self._pages.ranks[:MAX_RANKS_FOR_LOSS]]
        steps = [each.newest for each in known if each is not None]
        newest = [step for step in steps if step is not None]
        if rows and ticks - self._passes >= PASS_INTERVAL:
            self._passes = ticks
            first = self._ranks[min(row.rank for row in rows)]
            record = run_files.last_pass(first.path, first.max_memory)
            self._progress.add_pass(record, newest[0] if newest else None)
        step = max((status.step for status in pages.values()), default=None)
        epochs = [status.epoch for status in pages.values() if status.epoch is not None]
        timed = [row.times.total for row in rows if row.times is not None]
        usual = sorted(timed)[len(timed) // 2] if timed else None
        rate = self._progress.rate(ticks, step, usual)
        if not self.live:
            # The last steps were slow or stopped, so use the usual rate.
            rate = 1 / usual if usual else None
        return self._progress.job(
            self._attempt or 0, step, max(epochs, default=None), rate, newest, _world_size(pages)
        )

    @property
    def _debug_port(self) -> int | None:
        debug = self._manifest.get("debug") if self.live else None
        return integer(debug, "root") or None if isinstance(debug, dict) else None

    def _snapshot(
        self,
        rows: list[RankRow],
        pages: dict[int, Status],
        job: Job,
        gpus: tuple[Gpu, ...],
        nvml: str,
        now: int,
    ) -> Snapshot:
        events = self._events
        started = integer(self._manifest, "started") or None
        until = events.ended if events.ended is not None and not self.live else now
        opened = (known.opened for known in self._ranks.values())
        snapshot = Snapshot(
            time=until / 1e9,
            kind="run",
            verdict=Verdict(""),
            run=str(self._manifest.get("id") or self.path.name),
            path=str(self.path),
            command=run_files.command_line(self._manifest),
            started=None if started is None else started / 1e9,
            live=self.live,
            exit_status=None if self.live else events.status,
            world_size=_world_size(pages),
            debug_port=self._debug_port,
            job=job,
            gpus=gpus,
            machine=self._meter.read(),
            findings=events.findings,
            output=self._stderr.lines,
            nvml=nvml,
            environment=run_files.environment_facts(
                self._manifest, next((each for each in opened if each is not None), None)
            ),
        )
        facts = headline.VerdictFacts(
            live=self.live,
            exit_status=snapshot.exit_status,
            asked=events.asked,
            world_size=snapshot.world_size,
            since_start=None if started is None else max(0.0, (until - started) / 1e9),
            died=self._died({row.rank for row in rows if row.state == "dead"}),
            held=events.waiting,
            findings=events.findings,
            hung=events.hung(job.attempt),
            attempt=job.attempt,
            attempts=job.attempts,
        )
        snapshot = headline.judged_snapshot(snapshot, rows, facts, self._judge)
        if self._gone:
            snapshot = replace(snapshot, state="gone")
        return replace(snapshot, notes=self._notes(pages))

    def _judge(self, rows: Sequence[RankRow], facts: headline.VerdictFacts) -> Verdict:
        if self._gone:
            return Verdict("the run directory is gone: this is its last content", "warning")
        if self._remark and not facts.live and facts.exit_status is None:
            return Verdict("a copy: whether the run goes on is not known", "info")
        found = self._part("the verdict", lambda: headline.judge(rows, facts))
        return found or Verdict("not known", "warning")

    def _died(self, dead: set[int]) -> tuple[int, ...]:
        """Sort dead ranks by when they died."""
        ends = {
            rank: record.time
            for (rank, restart), record in self._events.exits.items()
            if restart == self._attempt
        }
        # The rank that raised first is the cause, even if its process ended after others.
        for rank in dead:
            error = self._ranks[rank].error
            if error is not None and error.time:
                ends[rank] = error.time
        return tuple(sorted(dead & ends.keys(), key=lambda rank: (ends[rank], rank)))

    def _notes(self, pages: dict[int, Status]) -> tuple[str, ...]:
        notes = [self._remark] if self._remark else []
        if self._gone:
            notes.append(f"{self.path} is gone")
        if not self._manifest:
            notes.append("run.json cannot be read")
        supervisor = integer(self._manifest, "supervisor", -1)
        here = self._manifest.get("host") == socket.gethostname()
        if (
            self.live
            and here
            and supervisor > 0
            and self._processes.state(supervisor)[1] == STOPPED
        ):
            notes.append(f"ddpdoctor is stopped and reports nothing: kill -CONT {supervisor}")
        unreadable = self._pages.unreadable
        if unreadable and not self._gone:
            rank, why = next(iter(unreadable.items()))
            more = f", and those of {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
            notes.append(f"the status page of rank {rank} cannot be read{more}: {why}")
        if self._pages.left_out:
            notes.append(f"{self._pages.left_out} more ranks are left out")
        if self._events.unread:
            notes.append(f"left out: {self._events.unread}")
        if unwritten := sum(status.unwritten for status in pages.values()):
            notes.append(
                f"{unwritten} of {len(pages)} ranks cannot write their records: disk full?"
            )
        if self._events.left_out:
            notes.append(f"{self._events.left_out} older findings are left out")
        if self._broken:
            notes.append(words(self._broken))
        return tuple(without_control_characters(note) for note in notes)


def _world_size(pages: dict[int, Status]) -> int | None:
    return max((status.world_size for status in pages.values()), default=None)
