"""Find ranks with bitwise equal losses, which implies equal batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.model import DdpRecord, SoloRecord
from ddpdoctor.run.snapshot import Rank, Run

MIN_STEPS = 16  # Minimum number of steps with a loss on every rank
MIN_RISES = 0.2
"""Minimum fraction of steps after which the loss rises. It rarely does if the batch never changes,
as in a benchmark."""


@dataclass(frozen=True)
class EqualLosses:
    """Ranks of a DDP group, or ranks that average by hand, with the same losses."""

    ranks: tuple[int, ...]
    steps: int
    at: Location | None  # The line that computes or uses the loss


def groups_of(run: Run) -> Iterator[tuple[Rank, ...]]:
    """Yield the ranks of each DDP group of several ranks, if all of them have records."""
    ranks = {rank.rank: rank for rank in run.last}
    groups = dict.fromkeys(
        tuple(sorted(record.group_ranks))
        for rank in run.last
        for record in rank.records.of(DdpRecord)
    )
    for group in groups:
        if len(group) > 1 and ranks.keys() >= set(group):
            yield tuple(ranks[number] for number in group)


def _averaging(run: Run) -> Iterator[tuple[Rank, ...]]:
    """Yield all ranks if they average gradients by hand instead of using DDP."""
    complete = 1 < len(run.last) == run.world_size
    if complete and all(map(_averages, run.last)):
        yield tuple(run.last)


def _averages(rank: Rank) -> bool:
    """Return whether a rank reduces as much as a gradient in each step, and nothing else."""
    ring, solo = rank.ring, rank.records.of(SoloRecord)
    if rank.records.of(DdpRecord) or rank.lost or ring is None or ring.partial or not solo:
        return False
    first, last = solo[0], solo[-1]
    if None in (first.calls, first.wide, last.calls, last.wide):
        return False
    calls, wide = (last.calls or 0) - (first.calls or 0), (last.wide or 0) - (first.wide or 0)
    names = {each.name for each in ring.collectives}
    # Other collectives may gather the outputs from which the loss is computed.
    return calls == wide >= last.step - first.step > 0 and names == {"all_reduce"}


def equal_losses(run: Run) -> EqualLosses | None:
    """Return the first group whose ranks had the same loss in every step that all recorded."""
    for group in (*groups_of(run), *_averaging(run)):
        # A journal line for several steps has the loss of one of them.
        losses = [
            {each.step: each.loss for each in rank.steps if each.steps == 1 and each.loss}
            for rank in group
        ]
        common = sorted(set.intersection(*map(set, losses)))
        if len(common) < MIN_STEPS or any(
            _may_reduce(rank, len(common)) and not _averages(rank) for rank in group
        ):
            continue
        values = [losses[0][step] or 0.0 for step in common]
        rises = sum(later > before for before, later in pairwise(values))
        if rises < MIN_RISES * len(values) or 2 * len(set(values)) < len(values):
            continue
        if all(each[step] == losses[0][step] for step in common for each in losses):
            at = group[0].site("forward") or group[0].site("backward")
            return EqualLosses(tuple(rank.rank for rank in group), len(common), at)
    return None


def _may_reduce(rank: Rank, steps: int) -> bool:
    """Return whether the losses may be the mean over the ranks, or of gathered outputs."""
    ring = rank.ring
    return not rank.counted_collectives or ring is None or 2 * ring.calls >= steps
