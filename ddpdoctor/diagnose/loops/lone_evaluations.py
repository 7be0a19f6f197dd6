"""Find evaluations through the DDP wrapper that only some ranks run."""

from __future__ import annotations

from ddpdoctor.diagnose.loops.training_loops import local_decisions
from ddpdoctor.run.records.model import FingerprintRecord
from ddpdoctor.run.records.training import EvaluationRecord
from ddpdoctor.run.snapshot import Rank, Run

Alone = list[tuple[int, EvaluationRecord, tuple[int, ...]]]
"""For each evaluation the number of synchronized forwards before it, its record, and the absent
ranks."""


def alone_evaluating(run: Run) -> dict[tuple[int, ...], Alone]:
    """Return the evaluations that only some ranks run, by these ranks."""
    members = {rank.rank: rank for rank in run.last}
    evaluations = {rank.rank: _evaluations_of_rank(rank) for rank in run.last}
    alone: dict[tuple[int, ...], Alone] = {}
    for number, mine in evaluations.items():
        for point, record in mine.items():
            group = [each for each in record.group if each in members]
            present = tuple(each for each in group if point in evaluations[each])
            absent = tuple(each for each in group if each not in present)
            # An evaluation of several ranks counts once, for the first of them.
            if number != present[0] or not absent:
                continue
            if all(_passed(members[each], point, run) for each in absent):
                alone.setdefault(present, []).append((point, record, absent))
    # Relations between rules cannot express this, because the decision is only suspected.
    return {} if alone and local_decisions(run, suspected=True) else alone


def _evaluations_of_rank(rank: Rank) -> dict[int, EvaluationRecord]:
    """Return a rank's evaluations by the number of synchronized forwards before them."""
    return {
        record.armed: record
        for record in rank.records.of(EvaluationRecord)
        if rank.rank in record.group
    }


def _passed(rank: Rank, point: int, run: Run) -> bool:
    """Return whether a rank continued without the evaluation, or has ended."""
    if not rank.watched(EvaluationRecord):
        return False
    if rank.ended is not None or run.exit_status is not None:
        return True
    # Two forwards later, all earlier records have arrived.
    fingerprints = [record.armed for record in rank.records.of(FingerprintRecord)]
    return max(fingerprints, default=0) > point + 1
