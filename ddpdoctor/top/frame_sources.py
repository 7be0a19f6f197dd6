"""Open the source of the monitor's frames: a run, the newest run, or the machine without one.

A run that is over is replayed step by step from its journals.
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
from ddpdoctor.run.status import Parts
from ddpdoctor.system.gpu_health import Poller
from ddpdoctor.top import hardware, headline, run_files, step_times
from ddpdoctor.top.frames import Source, Want
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.run_files import StatusPages
from ddpdoctor.top.snapshot import RankRow, Snapshot, Verdict
from ddpdoctor.top.step_times import StepLine, StepLog

# -- A run that is over, as a replay over the steps that its journals hold


_CHART_POINTS = 48
_READINGS, _FEWEST = 960, 10
"""Steps of which the history of the run is made; how many of ranks are read at most; and the
fewest that are worth it."""


class FinishedSource:
    """A frame for each step of the newest attempt, and a last one that says how it ended.

    It opens at the last one. Nothing is kept of the journals: each frame looks its steps up.

    Args:
        path: The run directory.
        interval: Seconds between frames while it plays.
        end: Has read its end already.

    Raises:
        DoctorError: It is no run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float, end: LiveSource | None = None) -> None:
        self.interval = interval
        self.path = path
        self._end = end or LiveSource(path, interval)
        pages = StatusPages(path)
        pages.look()
        self._logs = {rank: StepLog(pages.path(rank, "jsonl")) for rank in pages.ranks}
        spans = [span for log in self._logs.values() if (span := log.span()) is not None]
        self._first = min((first for first, _ in spans), default=0)
        last = max((last for _, last in spans), default=-1)
        self._steps = max(0, last - self._first + 1)
        self._position = self._steps
        self._last: Snapshot | None = None

    @property
    def replay(self) -> FinishedSource:
        """Itself."""
        return self

    @property
    def length(self) -> int:
        """The steps there are, and the end."""
        return self._steps + 1

    @property
    def position(self) -> int:
        """The frame that is read."""
        return self._position

    def seek(self, position: int) -> None:
        """Go to a frame; beyond the ends, to the nearest."""
        self._position = min(max(position, 0), self._steps)

    def close(self) -> None:
        """Close the files."""
        self._end.close()

    def read(self, want: Want) -> Snapshot:
        """The frame at the position."""
        if self._position == self._steps:
            return self._end.read(want)
        return self._at(self._first + self._position)

    def history(self) -> Iterator[Snapshot]:
        """Frames from the beginning to the end, evenly spread."""
        # Of many ranks it would take long, and the charts begin with the monitor.
        points = min(_CHART_POINTS, _READINGS // max(1, len(self._logs)))
        every = max(1, self._steps // max(1, points)) if points >= _FEWEST else self._steps + 1
        for position in range(every - 1, self._steps, every):
            yield self._at(self._first + position)

    def _at(self, number: int) -> Snapshot:
        if self._last is None:
            self._last = self._end.read(Want(frozenset()))
        last, groups = self._last, self._end.groups
        moment, seen = 0, step_times.WINDOW
        rows, lines = [], []
        for row in last.ranks:
            log = self._logs.get(row.rank)
            steps = log.until(number, step_times.WINDOW) if log is not None else []
            if steps and steps[-1].parts.number == number:
                moment = max(moment, steps[-1].end)
                seen = min(seen, len(steps))
                lines.append(steps[-1])
            rows.append(_row_at_step(row, number, steps, apart=row.rank not in groups))
        rows = step_times.with_waits(rows, groups)
        now = moment / 1e9 if moment else last.time
        found = tuple(each for each in last.findings if each.time is None or each.time <= now)
        attempt = last.job.attempt
        facts = headline.VerdictFacts(
            live=True, seen=seen, findings=found, attempt=attempt, whole=False
        )
        usual = step_times.median_times([row.times for row in rows if row.times is not None])
        loss = [line.loss for line in lines if line.loss is not None]
        job = replace(
            last.job,
            step=number + 1,
            epoch=lines[0].epoch if lines else None,
            rate=1 / usual.total if usual is not None and usual.total else None,
            samples_rate=None,
            loss=sum(loss) / len(loss) if loss else None,
            left=None,
        )
        snapshot = replace(
            last,
            time=now,
            exit_status=None,
            job=job,
            gpus=tuple(hardware.without_readings(gpu, "") for gpu in last.gpus),
            machine=None,
            findings=found,
        )
        return headline.judged_snapshot(snapshot, rows, facts)


def _row_at_step(last: RankRow, number: int, steps: list[StepLine], *, apart: bool) -> RankRow:
    """A rank when step ``number`` was closed; what only its status page knew is not known."""
    parts: list[Parts] = [step.parts for step in steps]
    reached = bool(parts) and parts[-1].number >= number
    waits = not reached and last.state not in ("ended", "dead")
    return RankRow(
        rank=last.rank,
        node=last.node,
        local_rank=last.local_rank,
        restart=last.restart,
        stage=last.stage,
        pid=last.pid,
        # A rank that has no such step had come to its end, or had not begun.
        state="running" if reached else "starting" if waits or not parts else last.state,
        said="" if reached or not parts else last.said,
        step=parts[-1].number + 1 if parts else None,
        epoch=steps[-1].epoch if steps else None,
        times=(step_times.mean_times if apart else step_times.mean_times_unsplit)(
            step_times.after_warm_up(parts)
        ),
        gpu=None if last.gpu is None else hardware.without_readings(last.gpu, ""),
    )


# -- one run, alive or over; the newest run; and the machine while there is none


class MachineSource:
    """The machine alone, its GPUs polled here, since no supervisor does.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.replay = None
        self._meter = hardware.MachineMeter()
        self._poller: Poller | None = None

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._poller is None:
            self._poller = Poller()
        record = self._poller.read()
        text = "no run of yours is live; the next one is shown when it starts"
        return Snapshot(
            time=time.time(),
            kind="machine",
            verdict=Verdict(text, "info"),
            gpus=hardware.gpus_of(record),
            machine=self._meter.read(),
            nvml=str(record["nvml"]),
        )

    def history(self) -> Iterable[Snapshot]:
        """There is none of a machine."""
        return ()

    def close(self) -> None:
        """Let go of the driver."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None


class RunSource:
    """One run: while it lives as it is, and then a replay of its steps.

    Args:
        path: The run directory.
        interval: Seconds between frames.

    Raises:
        DoctorError: It is no run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self.path = path
        self._live = LiveSource(path, interval)
        self._over = None if rundir.is_live(path) else self._replay()

    def _replay(self) -> FinishedSource:
        return FinishedSource(self.path, self.interval, self._live)

    @property
    def live(self) -> bool:
        """Whether the run lived when it was read last."""
        return self._over is None

    @property
    def replay(self) -> FinishedSource | None:
        """Its steps, once it is over."""
        return self._over

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._over is not None:
            return self._over.read(want)
        snapshot = self._live.read(want)
        # Of a directory that was removed there is nothing to play.
        if not snapshot.live and snapshot.state != "gone":
            self._over = self._replay()
        return snapshot

    def history(self) -> Iterator[Snapshot]:
        """Frames from its beginning until now."""
        return (self._over or self._replay()).history()

    def close(self) -> None:
        """Close the files."""
        self._live.close()


class FollowingSource:
    """The newest live run until it is over, and its end until another one starts.

    Before the first one, the machine.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._run: RunSource | None = None
        self._machine = MachineSource(interval)

    @property
    def replay(self) -> FinishedSource | None:
        """The steps of a run that is over."""
        return None if self._run is None else self._run.replay

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._run is None or not self._run.live:
            self._look()
        return (self._run or self._machine).read(want)

    def _look(self) -> None:
        try:
            path = next(iter(rundir.live()), None)
            if path is None or (self._run is not None and path == self._run.path):
                return
            run = RunSource(path, self.interval)
        except (OSError, DoctorError):
            # Over, and gone, since it was listed; or of a newer version.
            return
        self.close()
        self._run = run

    def history(self) -> Iterable[Snapshot]:
        """Of the run, where there is one."""
        return () if self._run is None else self._run.history()

    def close(self) -> None:
        """Close the files, and let go of the driver."""
        if self._run is not None:
            self._run.close()
        self._machine.close()
        self._run = None


# -- which run the monitor shows, and what makes its frames


@dataclass(frozen=True)
class RunChoice:
    """A live run to choose from."""

    id: str
    path: str
    command: str
    """The script and its options."""
    started: float | None
    """Unix seconds."""
    ranks: int


def live_runs() -> list[RunChoice]:
    """The live runs of this user, the newest first.

    Raises:
        DoctorError: They cannot be listed.
    """
    try:
        paths = rundir.live()
    except OSError as error:
        raise DoctorError(f"the runs cannot be listed: {error}") from None
    choices = []
    for path in paths:
        try:
            manifest = read_manifest(path)
        except DoctorError:
            # It begins or ends at this moment, or is of a newer version.
            continue
        pages = StatusPages(path)
        pages.look()
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
    name: str | None, *, demo: bool = False, replay: str | None = None, interval: float = 1.0
) -> Source:
    """The source that a command line asks for.

    Args:
        name: A run's name or directory. None: the newest live
            run, or the machine until there is one.
        demo: A made-up job instead.
        replay: A recording instead.
        interval: Seconds between frames.

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
        return FollowingSource(interval)

    return RunSource(rundir.find(name), interval)
