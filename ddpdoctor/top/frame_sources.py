"""Open the source of the monitor's frames: a run, the newest run, or the machine without a run.

A finished run is replayed step by step from its journals.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import read_manifest
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.step_series import StepLog, parts_of
from ddpdoctor.system.gpu_poll import Poller
from ddpdoctor.top import headline, live, run_files
from ddpdoctor.top.frames import Replay, Source, Visible
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.run_files import StatusPages
from ddpdoctor.top.snapshot import RankRow, Snapshot, Verdict

_MAX_CHART_POINTS = 48  # Number of steps in the charts of a finished run

_MAX_READINGS, _MIN_CHART_POINTS = 960, 10
"""Maximum number of single steps read for the charts, and the minimum number of points to do so."""


class FinishedSource(Replay):
    """A frame for each step of the newest attempt, and a last one that shows how it ended.

    It opens at the last frame. Journals are not kept in memory: each frame reads its steps. ``end``
    is a source that has already read the run's end.

    Raises:
        DoctorError: It is not a run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float, end: LiveSource | None = None) -> None:
        self.interval = interval
        self.path = path
        self._end = end or LiveSource(path, interval)
        pages = StatusPages(path)
        pages.refresh()
        self._logs = {rank: StepLog(pages.path(rank, "jsonl")) for rank in pages.ranks}
        spans = [span for log in self._logs.values() if (span := log.span()) is not None]
        self._first = min((first for first, _ in spans), default=0)
        last = max((last for _, last in spans), default=-1)
        self._steps = max(0, last - self._first + 1)
        # The steps, and the end.
        self.length = self._steps + 1
        self._position = self._steps
        self._last: Snapshot | None = None

    def close(self) -> None:
        """Close the files."""
        self._end.close()

    def read(self, want: Visible) -> Snapshot:
        """Read the frame at the position."""
        if self._position == self._steps:
            return self._end.read(want)
        return self._at(self._first + self._position)

    def history(self) -> Iterator[Snapshot]:
        """Yield frames from the beginning to the end, evenly spread.

        Yield none if it would take long with many ranks: the charts then begin with the monitor.
        """
        points = min(_MAX_CHART_POINTS, _MAX_READINGS // max(1, len(self._logs)))
        every = max(1, self._steps // points) if points >= _MIN_CHART_POINTS else self._steps + 1
        for position in range(every - 1, self._steps, every):
            yield self._at(self._first + position)

    def _at(self, number: int) -> Snapshot:
        if self._last is None:
            self._last = self._end.read(Visible(frozenset()))
        last, groups = self._last, self._end.groups
        rows, newest = [], []
        for row in last.ranks:
            log = self._logs.get(row.rank)
            steps = log.until(number, run_files.WINDOW) if log is not None else []
            if steps and steps[-1].step == number:
                newest.append(steps[-1])
            rows.append(_row_at_step(row, number, steps, apart=row.rank not in groups))
        rows = run_files.with_waits(rows, groups)
        ends = [step.start + max(1, step.steps) * step.total for step in newest]
        now = max(ends) / 1e9 if ends else last.time
        findings = tuple(each for each in last.findings if each.time is None or each.time <= now)
        facts = headline.VerdictFacts(
            live=True, findings=findings, attempt=last.job.attempt, whole=False
        )
        usual = run_files.median_times([row.times for row in rows if row.times is not None])
        job = replace(
            last.job,
            step=number + 1,
            epoch=newest[0].epoch if newest else None,
            rate=1 / usual.total if usual is not None and usual.total else None,
            samples_rate=None,
            loss=run_files.mean_loss(newest),
            left=None,
        )
        snapshot = replace(
            last,
            time=now,
            exit_status=None,
            job=job,
            gpus=tuple(live.without_readings(gpu, "") for gpu in last.gpus),
            machine=None,
            findings=findings,
        )
        return headline.judged_snapshot(snapshot, rows, facts)


def _row_at_step(row: RankRow, number: int, steps: list[StepRecord], *, apart: bool) -> RankRow:
    """Return a rank at the end of a step, without values that only its status page has."""
    reached = bool(steps) and steps[-1].step == number
    waits = not reached and row.state not in ("ended", "dead")
    parts = run_files.after_warm_up([parts_of(step) for step in steps])
    return RankRow(
        rank=row.rank,
        node=row.node,
        local_rank=row.local_rank,
        restart=row.restart,
        stage=row.stage,
        pid=row.pid,
        # A rank without the step had ended or had not begun.
        state="running" if reached else "starting" if waits or not steps else row.state,
        said="" if reached or not steps else row.said,
        step=steps[-1].step + 1 if steps else None,
        epoch=steps[-1].epoch if steps else None,
        times=run_files.mean_times(parts, apart),
        gpu=None if row.gpu is None else live.without_readings(row.gpu, ""),
    )


class MachineSource:
    """The machine without a run. Its GPUs are polled here, because there is no supervisor."""

    def __init__(self, interval: float, whose: str = "yours") -> None:
        self.interval = interval
        self.replay = None
        self._whose = whose
        self._meter = live.MachineMeter()
        self._poller: Poller | None = None

    def read(self, want: Visible) -> Snapshot:
        """Read the present frame."""
        if self._poller is None:
            self._poller = Poller()
        record = self._poller.read()
        text = f"no run of {self._whose} is live; the next one is shown when it starts"
        return Snapshot(
            time=time.time(),
            kind="machine",
            verdict=Verdict(text, "info"),
            gpus=live.gpus_of(record),
            machine=self._meter.read(),
            nvml=str(record["nvml"]),
        )

    def history(self) -> Iterable[Snapshot]:
        """Return nothing: a machine has no history."""
        return ()

    def close(self) -> None:
        """Release the driver."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None


class RunSource:
    """One run: live at first, then a replay of its steps.

    Raises:
        DoctorError: It is not a run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self.path = path
        self._live = LiveSource(path, interval)
        self.replay: FinishedSource | None = None  # Its steps, once it is over
        if not rundir.is_live(path):
            self.replay = FinishedSource(path, interval, self._live)

    def read(self, want: Visible) -> Snapshot:
        """Read the present frame."""
        if self.replay is not None:
            return self.replay.read(want)
        snapshot = self._live.read(want)
        # A removed directory has no steps.
        if not snapshot.live and snapshot.state != "gone":
            self.replay = FinishedSource(self.path, self.interval, self._live)
        return snapshot

    def history(self) -> Iterator[Snapshot]:
        """Yield frames from the run's beginning until now."""
        return (self.replay or FinishedSource(self.path, self.interval, self._live)).history()

    def close(self) -> None:
        """Close the files."""
        self._live.close()


class FollowingSource:
    """The newest live run until it ends, then its end until another run starts.

    Before the first run, show the machine. With a folder, show only its runs
    (:func:`ddpdoctor.run.rundir.belongs`).
    """

    def __init__(self, interval: float, folder: str | None = None) -> None:
        self.interval = interval
        self._folder = folder
        self._run: RunSource | None = None
        self._machine = MachineSource(interval, folder or "yours")

    @property
    def replay(self) -> FinishedSource | None:
        """The steps of a finished run."""
        return None if self._run is None else self._run.replay

    def read(self, want: Visible) -> Snapshot:
        """Read the present frame."""
        if self._run is None or self._run.replay is not None:
            self._find_run()
        return (self._run or self._machine).read(want)

    def _find_run(self) -> None:
        try:
            path = next(iter(rundir.live(self._folder)), None)
            if path is None or (self._run is not None and path == self._run.path):
                return
            run = RunSource(path, self.interval)
        except (OSError, DoctorError):
            # The run was removed after the listing, or is of a newer version.
            return
        self.close()
        self._run = run

    def history(self) -> Iterable[Snapshot]:
        """Return the frames of the run, if there is one."""
        return () if self._run is None else self._run.history()

    def close(self) -> None:
        """Close the files, and release the driver."""
        if self._run is not None:
            self._run.close()
        self._machine.close()
        self._run = None


@dataclass(frozen=True)
class RunChoice:
    """A live run to choose from."""

    id: str
    path: str
    command: str  # The script and its options
    started: float | None  # Unix seconds
    ranks: int


def live_runs(folder: str | None = None) -> list[RunChoice]:
    """List the live runs of this user, or of a folder (`rundir.belongs`), newest first.

    Raises:
        DoctorError: The runs cannot be listed.
    """
    try:
        paths = rundir.live(folder)
    except OSError as error:
        raise DoctorError(f"the runs cannot be listed: {error}") from None
    choices = []
    for path in paths:
        try:
            manifest = read_manifest(path)
        except DoctorError:
            # The run is starting or ending, or of a newer version.
            continue
        pages = StatusPages(path)
        pages.refresh()
        started = integer(manifest, "started") or None
        choices.append(
            RunChoice(
                id=str(manifest.get("id") or path.name),
                path=str(path),
                command=run_files.job_command(manifest),
                started=None if started is None else started / 1e9,
                ranks=len(pages.ranks),
            )
        )
    return choices


def open_source(
    name: str | None,
    *,
    demo: bool = False,
    replay: str | None = None,
    interval: float = 1.0,
    folder: str | None = None,
) -> Source:
    """Open the source that a command line asks for.

    By default it is the newest live run, of ``folder`` if that is given, or the machine until there
    is a run.

    Raises:
        DoctorError: There is no such run or recording.
    """
    if demo:
        from ddpdoctor.top.recording import DemoSource

        return DemoSource(interval)
    if replay is not None:
        from ddpdoctor.top.recording import RecordingSource

        return RecordingSource(replay)
    if name is None:
        return FollowingSource(interval, folder)
    return RunSource(rundir.find(name), interval)
