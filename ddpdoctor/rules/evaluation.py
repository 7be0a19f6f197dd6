"""Evaluation through the DDP wrapper (DDP402): a broadcast that not all ranks take part in."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.finding import Finding, Severity, rule
from ddpdoctor.record import Record, integer
from ddpdoctor.relations import MISPAIRED, STANDSTILL, STANDSTILLS, brings_about
from ddpdoctor.rules.decisions import decisions
from ddpdoctor.rules.ranks import named
from ddpdoctor.rules.replicas import group_of, place
from ddpdoctor.run import Rank, Run

MOST = 64
"""Evaluations that a rank writes down; with that many, later ones are not known."""


@rule(
    "DDP402",
    "forward-under-rank-guard",
    Severity.ERROR,
    supersedes=dict.fromkeys(STANDSTILLS, brings_about),
)
def forward_under_rank_guard(run: Run) -> Iterator[Finding]:
    """Some ranks alone evaluate through the DDP wrapper of a model with buffers.

    What it finds
        A forward of the DDP object without gradients that broadcasts the model's buffers (running
        statistics of BatchNorm, say) on some ranks, at a point that the others have passed without.

    Why it is bad
        The broadcast is a collective. It pairs with another one of the other ranks' next epoch, so
        nothing is seen for long; the one of the last evaluation has no partner, and the job hangs
        or fails at its very end. Before the second training step it fails at once.

    How to fix it
        Evaluate the model itself, `ddp.module(inputs)`, or evaluate on every rank.

    Example
        Wrong: `if rank == 0: evaluate(ddp, validation)`.
        Right: `if rank == 0: evaluate(ddp.module, validation)`.

    When it stays silent
        For models without buffers, with `forward_sync_buffers=False`, where all ranks evaluate, and
        once the ranks have come apart by a decision that some took alone (DDP403).

    Since
        0.1.0
    """
    for present, found in alone_evaluating(run).items():
        point, record, absent = found[0]
        buffers = integer(record, "buffers")
        times = f"{len(found)} times" if len(found) > 1 else "once"
        yield Finding(
            code="DDP402",
            about=f"evaluation {record.get('path')}:{record.get('line')}",
            severity=Severity.ERROR,
            message=f"{named(present)} alone evaluate{'s' if len(present) == 1 else ''} through "
            f"the DDP wrapper, whose broadcast of {buffers} buffers waits for all ranks",
            ranks=present,
            location=place(record),
            subjects=frozenset((MISPAIRED, STANDSTILL)),
            evidence=(
                f"{times}, the first one after {point} synchronized forwards; {named(absent)} "
                "passed that point without it",
                f"the model ({record.get('type')}) has {buffers} buffers, which DDP broadcasts "
                "from rank 0",
            ),
            fix="Evaluate ddp.module instead of the wrapper, or evaluate on all ranks.",
        )


Alone = list[tuple[int, Record, tuple[int, ...]]]
"""Evaluations: after how many synchronized forwards, how they were told, and who made none."""


def alone_evaluating(run: Run) -> dict[tuple[int, ...], Alone]:
    """What some ranks evaluated alone, by these ranks."""
    members = {rank.rank: rank for rank in run.last}
    evaluations = {rank.rank: _evaluations(rank) for rank in run.last}
    alone: dict[tuple[int, ...], Alone] = {}
    for number, told in evaluations.items():
        for point, record in told.items():
            group = [each for each in group_of(record) if each in members]
            present = tuple(each for each in group if point in evaluations[each])
            absent = tuple(each for each in group if each not in present)
            # What several ranks did alone is told once, by the first of them.
            if number != present[0] or not absent:
                continue
            if all(_passed(members[each], point, run) for each in absent):
                alone.setdefault(present, []).append((point, record, absent))
    return {} if alone and decisions(run, suspected=True) else alone


def _evaluations(rank: Rank) -> dict[int, Record]:
    """A rank's evaluations by the synchronized forwards before them."""
    return {
        integer(record, "armed"): record
        for record in rank.of_kind("evaluation")
        if rank.rank in group_of(record)
    }


def _passed(rank: Rank, point: int, run: Run) -> bool:
    """Whether a rank has gone on without that evaluation, or has ended."""
    if len(_evaluations(rank)) >= MOST:
        return False
    if rank.ended is not None or run.exit_status is not None:
        return True
    # Two forwards later, what it wrote before them has arrived.
    fingerprints = [integer(record, "armed") for record in rank.of_kind("fingerprint")]
    return max(fingerprints, default=0) > point + 1
