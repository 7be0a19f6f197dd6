"""A run that is over, as a replay over the steps that its journals hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ddpdoctor.run.status import Parts
from ddpdoctor.top import hardware, headline, times, verdict
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.pages import Pages
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.source import Want
from ddpdoctor.top.steplog import StepLine, StepLog

_POINTS = 48
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
        pages = Pages(path)
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
        points = min(_POINTS, _READINGS // max(1, len(self._logs)))
        every = max(1, self._steps // max(1, points)) if points >= _FEWEST else self._steps + 1
        for position in range(every - 1, self._steps, every):
            yield self._at(self._first + position)

    def _at(self, number: int) -> Snapshot:
        if self._last is None:
            self._last = self._end.read(Want(frozenset()))
        last, groups = self._last, self._end.groups
        moment, seen = 0, times.WINDOW
        rows, lines = [], []
        for row in last.ranks:
            log = self._logs.get(row.rank)
            steps = log.until(number, times.WINDOW) if log is not None else []
            if steps and steps[-1].parts.number == number:
                moment = max(moment, steps[-1].end)
                seen = min(seen, len(steps))
                lines.append(steps[-1])
            rows.append(_row(row, number, steps, apart=row.rank not in groups))
        rows = times.compared(rows, groups)
        now = moment / 1e9 if moment else last.time
        found = tuple(each for each in last.findings if each.time is None or each.time <= now)
        attempt = last.job.attempt
        facts = verdict.Facts(live=True, seen=seen, findings=found, attempt=attempt, whole=False)
        usual = times.of_ranks([row.times for row in rows if row.times is not None])
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
            gpus=tuple(hardware.silent(gpu, "") for gpu in last.gpus),
            machine=None,
            findings=found,
        )
        return headline.judged(snapshot, rows, facts)


def _row(last: RankRow, number: int, steps: list[StepLine], *, apart: bool) -> RankRow:
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
        times=(times.of_steps if apart else times.unsplit)(times.steady(parts)),
        gpu=None if last.gpu is None else hardware.silent(last.gpu, ""),
    )
