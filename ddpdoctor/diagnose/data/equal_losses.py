"""Find ranks that compute the same losses bit for bit, so that their batches are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.snapshot import Rank, Run

MIN_STEPS = 16
"""Steps with a loss on every rank."""
MIN_RISES = 0.2
"""The part of steps after which the loss rises. It falls in most steps if the batch never changes,
as in a benchmark."""


@dataclass(frozen=True)
class EqualLosses:
    """Ranks of a DDP group with the same losses."""

    ranks: tuple[int, ...]
    steps: int


def groups_of(run: Run) -> Iterator[tuple[Rank, ...]]:
    """Yield the ranks of each DDP group of several ranks, if all of them have written."""
    ranks = {rank.rank: rank for rank in run.last}
    groups = dict.fromkeys(
        tuple(sorted(record.group_ranks))
        for rank in run.last
        for record in rank.records.of(DdpRecord)
    )
    for group in groups:
        if len(group) > 1 and ranks.keys() >= set(group):
            yield tuple(ranks[number] for number in group)


def equal_losses(run: Run) -> EqualLosses | None:
    """Return the first group whose ranks had the same loss in every step that all recorded."""
    for group in groups_of(run):
        # A step that stands for several has the loss of one of them.
        losses = [
            {each.step: each.loss for each in rank.steps if each.steps == 1 and each.loss}
            for rank in group
        ]
        common = sorted(set.intersection(*map(set, losses)))
        if len(common) < MIN_STEPS or any(_may_reduce(rank, len(common)) for rank in group):
            continue
        values = [losses[0][step] or 0.0 for step in common]
        rises = sum(later > before for before, later in pairwise(values))
        if rises < MIN_RISES * len(values) or 2 * len(set(values)) < len(values):
            continue
        if all(each[step] == losses[0][step] for step in common for each in losses):
            return EqualLosses(tuple(rank.rank for rank in group), len(common))
    return None


def _may_reduce(rank: Rank, steps: int) -> bool:
    """Return whether the losses may be the mean over the ranks, or of gathered outputs."""
    ring = rank.ring
    return not rank.counted_collectives or ring is None or 2 * ring.calls >= steps
