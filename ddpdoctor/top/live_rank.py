"""One rank of the newest attempt, followed from frame to frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ddpdoctor.analysis.pace import WARM_UP
from ddpdoctor.core import opening
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.status import Parts
from ddpdoctor.top import steplog, times
from ddpdoctor.top.pages import Pages
from ddpdoctor.top.snapshot import RankRow
from ddpdoctor.top.steplog import Seconds, StepLog, StepTail
from ddpdoctor.top.times import Recent

_DROP = 30.0
"""Seconds for which the steps of a rank are followed that is not looked at any more."""


class LiveRank:
    """What is known of a rank beside its status page.

    Args:
        rank: Which one.
        pages: Of the run.
    """

    def __init__(self, rank: int, pages: Pages) -> None:
        self._pages = pages
        self._path = pages.path(rank, "jsonl")
        self._opened: OpenRecord | None = None
        self._tail: StepTail | None = None
        self._looked_at = 0.0
        before = StepLog(self._path).until(1 << 62, times.WINDOW)
        self.recent = Recent(steady([step.parts for step in before]))
        """The newest steps, those before the first look among them."""
        self.row: RankRow | None = None
        """As it was shown last."""

    @property
    def opened(self) -> OpenRecord | None:
        """Its first record, once it is there."""
        if self._opened is None:
            self._opened = steplog.head(self._path, self._share)
        return self._opened

    @cached_property
    def error(self) -> ErrorRecord | None:
        """Its uncaught exception, once it has come to its end."""
        return steplog.last_error(self._path, self._share)

    @property
    def _share(self) -> int:
        """Bytes of memory that a record of each rank may take."""
        return opening.MOST_EXPANDED // (len(self._pages.ranks) or 1)

    def steps(self, history: int, ticks: float) -> list[Seconds]:
        """The newest steps, from the journal, which is followed from now on."""
        self._looked_at = ticks
        if self._tail is None or self._tail.keep < history:
            self._tail = StepTail(self._path, history)
        self._tail.poll()
        return list(self._tail.seconds)

    def rest(self, ticks: float) -> None:
        """Stop following the journal once its steps are not looked at."""
        if ticks - self._looked_at > _DROP:
            self._tail = None


def steady(steps: list[Parts]) -> list[Parts]:
    """Steps without the first ones of a job, if there are any others."""
    later = [parts for parts in steps if parts.number >= WARM_UP]
    return later or steps


def series(steps: Sequence[Seconds], history: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Own times and durations of the last steps; own times of those that were split, if any was."""
    steps = steps[-history:] if history > 0 else ()
    split = [own for own, _, split in steps if split]
    return tuple(split or [own for own, _, _ in steps]), tuple([total for _, total, _ in steps])
