"""Pipelines: which ranks do the same work, and so can be compared, and which run another stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ddpdoctor.core.ranks import named
from ddpdoctor.run.records.model import StageRecord
from ddpdoctor.run.snapshot import Rank, Run


@dataclass(frozen=True)
class Stage:
    """What some ranks run of a pipeline: one of its stages, or several in turn."""

    numbers: tuple[int, ...]
    """From 0, ascending."""
    of: int
    """Stages that the pipeline has."""
    ranks: tuple[Rank, ...]
    """Of each replica of the model one."""

    @cached_property
    def name(self) -> str:
        """``stage 1``, ``stages 0 and 2``."""
        return named(self.numbers, "stage")

    @property
    def record(self) -> StageRecord:
        """Of the first of its ranks."""
        return self.ranks[0].records.of(StageRecord)[-1]


def stages(run: Run) -> tuple[Stage, ...]:
    """The stages of the last attempt, in their order; empty where not every rank runs any."""
    found: dict[tuple[int, ...], list[Rank]] = {}
    of = 0
    for rank in run.last:
        records = rank.records.of(StageRecord)
        if not records:
            return ()
        # A job may have built pipelines before, to try them.
        of = records[-1].stages
        numbers = {record.stage for record in records if record.stages == of}
        found.setdefault(tuple(sorted(numbers)), []).append(rank)
    return tuple(Stage(numbers, of, tuple(ranks)) for numbers, ranks in sorted(found.items()))


def alike(run: Run) -> Sequence[Sequence[Rank]]:
    """The ranks of the last attempt, those together that do the same work."""
    return [stage.ranks for stage in stages(run)] or [run.last]


def stage_of(run: Run, number: int) -> Stage | None:
    """The stage that a rank runs."""
    of_rank = (each for each in stages(run) if any(rank.rank == number for rank in each.ranks))
    return next(of_rank, None)
