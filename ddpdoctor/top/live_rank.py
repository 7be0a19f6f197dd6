"""One rank of the newest attempt, followed from frame to frame."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.top import steplog, times
from ddpdoctor.top.pages import Pages
from ddpdoctor.top.snapshot import RankRow, Times
from ddpdoctor.top.steplog import StepLine, StepLog
from ddpdoctor.top.times import Recent, steady


class LiveRank:
    """What is known of a rank beside its status page.

    Args:
        rank: Which one.
        pages: Of the run.
    """

    def __init__(self, rank: int, pages: Pages) -> None:
        self._pages = pages
        self.path: Path = pages.path(rank, "jsonl")
        self._opened: OpenRecord | None = None
        self.group: tuple[int, ...] = ()
        """The ranks on GPUs that it reduces gradients with; empty where it does not, or unknown."""
        before = StepLog(self.path).newest(times.WINDOW)
        self.recent = Recent(steady([step.parts for step in before]))
        """The newest steps, those before the first look among them."""
        self.row: RankRow | None = None
        """As it was shown last."""

    @property
    def opened(self) -> OpenRecord | None:
        """Its first record, once it is there."""
        if self._opened is None:
            self._opened = steplog.head(self.path, self.share)
        return self._opened

    def times(self, on_gpu: bool) -> Times | None:
        """Its means over the newest steps; on a GPU the wait is still within the backward."""
        if on_gpu and not self.group and len(self.recent):
            self.group = steplog.group(self.path)
        return self.recent.times(apart=not self.group)

    @cached_property
    def error(self) -> ErrorRecord | None:
        """Its uncaught exception, once it has come to its end."""
        return steplog.last_error(self.path, self.share)

    @property
    def newest(self) -> StepLine | None:
        """Its newest step, as its journal has it."""
        return next(iter(StepLog(self.path).newest(1)), None)

    @property
    def share(self) -> int:
        """Bytes of memory that a record of each rank may take."""
        return opening.MOST_EXPANDED // (len(self._pages.ranks) or 1)
