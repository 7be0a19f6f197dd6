"""Gradient accumulation that reduces in every backward (DDP307)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ddpdoctor.analysis.training_loops import traces_of
from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.run.snapshot import Rank, Run

ENOUGH = 4
"""Optimizer steps of a loop that say how many batches each of them takes."""


@rule(
    "DDP307",
    "no-sync-missing",
    Severity.INFO,
    yields_to={"DDP308": relations.always},
)
def no_sync_missing(run: Run) -> Iterator[Finding]:
    """Gradients are accumulated, and every backward is reduced.

    What it finds
        A loop over a DataLoader that is over, took at least twice as many batches as the optimizer
        took steps on every rank, and reduced the gradients of every batch.

    Why it is bad
        Only the sum at the optimizer's step counts. The all-reduce of every other backward of the
        step costs time and brings nothing.

    How to fix it
        Put the forward and the backward of all but the last batch of a step into `no_sync()`.

    Example
        Wrong:
            model(batch).mean().backward()
            if number % 4 == 3:
                optimizer.step()
        Right:
            with nullcontext() if number % 4 == 3 else model.no_sync():
                model(batch).mean().backward()

    When it stays silent
        For loops that are left early or take fewer than 4 optimizer steps, if some batches are
        reduced and others not, if an optimizer's step takes one batch, and for parts of a batch.
    """
    found = [(rank, accumulated) for rank in run.last if (accumulated := _accumulated(run, rank))]
    if len(found) < len(run.last) or len(found) < 2:
        return
    rank, first = found[0]
    each = first.batches / first.steps
    yield Finding(
        code="DDP307",
        severity=Severity.INFO,
        message=f"each optimizer step takes {each:.0f} batches, and the gradients of every batch "
        "are reduced: only the last batch of a step needs it",
        ranks=tuple(rank.rank for rank, _ in found),
        location=rank.site("backward"),
        evidence=(
            f"rank {rank.rank}: {first.batches} batches, {first.steps} optimizer steps, "
            f"{first.reduced} reduced backwards in a loop",
            *_waits(rank),
        ),
        fix="Put the forward and the backward of the other batches into `with model.no_sync():`.",
    )


class _Accumulated(NamedTuple):
    """What a loop took and did."""

    batches: int
    steps: int
    reduced: int


def _accumulated(run: Run, rank: Rank) -> _Accumulated | None:
    """The first loop of a rank that accumulates and reduces all the same."""
    for trace in traces_of(rank, run):
        if trace.state != "ended" or trace.fetched is None or trace.reached is None:
            continue
        steps = trace.last.step - trace.first.step
        reduced = trace.reached
        trained = trace.fetched - trace.last.idled
        if steps >= ENOUGH and 2 * steps <= trained <= reduced:
            return _Accumulated(trace.fetched, steps, reduced)
    return None


def _waits(rank: Rank) -> Iterator[str]:
    """What the reductions cost, where DDP's own timers tell it."""
    shares = [step.wait / step.total for step in rank.steps if step.split and step.total > 0]
    if shares:
        yield f"rank {rank.rank} waits for reductions {100 * median(shares):.0f} % of a step"
