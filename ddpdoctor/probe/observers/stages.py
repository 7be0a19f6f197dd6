"""Stages of a pipeline (``torch.distributed.pipelining``): which this rank runs, and its waits.

A schedule runs every forward of a DDP module in ``no_sync`` and reduces with the last backward of a
step alone, of which DDP's logger has no times. What that one takes longer than the other backwards
is the wait for the replicas.
"""

from __future__ import annotations

from typing import Any

from ddpdoctor.probe.runtime import sites, torch_groups
from ddpdoctor.probe.runtime.events import Observer, subscribe
from ddpdoctor.probe.runtime.rank import RankState
from ddpdoctor.run.records.model import StageRecord

MOST = 64
"""Stages that are written down."""


class Stages(Observer):
    """Writes down which stages this rank runs."""

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        self._numbers: set[int] = set()
        self._reduces = False

    def stage_built(self, stage: Any) -> None:
        """Write it down, and measure its waits from now on if it has any."""
        number, of = stage.stage_index, stage.num_stages
        group = tuple(torch_groups.pipeline_ranks(stage))
        record = StageRecord(stage=number, stages=of, group=group, **sites.caller().place)
        self.state.add(record, MOST, ("stage", number, of))
        self._numbers.add(number)
        self.state.tracker.page.set_stage(sorted(self._numbers))
        # Of a GPU the host's times say nothing.
        if not self._reduces and str(stage.device) == "cpu" and torch_groups.is_reduced(stage):
            self._reduces = True
            subscribe(Waits(self.state))


class Waits(Observer):
    """Tells the wait for the replicas from the backward of the micro-batches."""

    def step_begins(self, optimizer: Any) -> None:
        """All backwards of the step are done."""
        tracker = self.state.tracker
        count = tracker.step_backwards
        passes = tracker.backwards[-count:] if count > 1 else []
        if passes and not tracker.step_armed:
            *others, last = (ended - began for began, ended, _ in passes)
            tracker.step.exposed = max(0, int(last - _median(others)))


def _median(values: list[int]) -> float:
    """Return the median. Not the library's, whose module a job may have a file in place of."""
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2
