"""Decisions (DDP403) that some ranks took alone: a skipped step, a loop left early."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.departures import Departure, departures
from ddpdoctor.analysis.training_loops import Trace
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import (
    MISPAIRED,
    STANDSTILL,
    STANDSTILLS,
    Lapsed,
    always,
    brings_about,
    fact,
    same_subject,
)
from ddpdoctor.rules import updates
from ddpdoctor.run.snapshot import Run


def _lapses(finding: Finding, run: Run) -> Lapsed | None:
    """A step that was left out shows in the newest steps alone."""
    return fact(finding, run) if STANDSTILL in finding.subjects else None


@rule(
    "DDP403",
    "rank-local-decision",
    Severity.ERROR,
    supersedes={
        "DDP701": always,
        "DDP801": same_subject,
        **dict.fromkeys(STANDSTILLS, brings_about),
    },
    lapses=_lapses,
)
def rank_local_decision(run: Run) -> Iterator[Finding]:
    """One rank alone skipped a step or left the training loop.

    What it finds
        A batch without a backward on some ranks of a DDP group, a training loop that some ranks
        left before its loader's end, or epochs that some ranks did not start, while the other ranks
        continued. Also an `optimizer.step()` that some ranks skipped. The finding names the
        statement: `break`, `return`, `continue` or `if`.

    Why it is bad
        Every backward is a collective. The rank's next backward pairs with another step of the
        others, and at the end the job hangs or fails with "Connection closed by peer", far from the
        cause. A skipped optimizer step makes the rank's parameters different, and nothing fails.

    How to fix it
        Decide on all ranks together: reduce the value over the ranks before you compare it.

    Example
        Wrong:
            if loss.isnan():
                continue
        Right:
            bad = loss.isnan().float()
            dist.all_reduce(bad)  # the same value on every rank
            if bad > 0:
                continue

    When it stays silent
        If all ranks leave after the same step or skip the same batch, inside `join()`, for a loader
        that simply ended (DDP109), for loops that call `next()`, for a rank that failed or was
        stopped, and where a loop that counts its steps makes up for a skipped batch.
    """
    made = departures(run)
    for departure in made:
        yield _finding(departure)
    if not made:
        yield from map(updates.finding, updates.left_out(run))


def _finding(departure: Departure) -> Finding:
    who, others = named(departure.ranks), named(each.rank.rank for each in departure.others)
    loop = departure.place.location
    if departure.kind == "skipped":
        what = f"skipped batch {departure.batch} of the training loop (step {departure.step})"
        went = f"{others} trained on it"
    elif departure.kind == "left":
        after = "" if departure.batch is None else f", after {_batches(departure.batch)}"
        what = f"left the training loop in step {departure.step}{after}"
        went = f"{others} went on"
    else:
        what = f"began no further epoch after {departure.step} steps"
        went = f"{others} did"
    return Finding(
        code="DDP403",
        about=f"{departure.kind} {departure.location}",
        subjects=frozenset((MISPAIRED, STANDSTILL)),
        severity=Severity.ERROR,
        message=f"{who} alone {what} while {went}: the value that decided was not reduced",
        ranks=departure.ranks,
        location=departure.location,
        evidence=(
            *(_did(each, loop) for each in (*departure.traces, *departure.others)[:6]),
            *(
                [f"the training loop is at {_beside(loop, departure.location)}"]
                if loop != departure.location
                else []
            ),
        ),
        fix="Reduce the value over the ranks before the comparison (dist.all_reduce, with MAX for "
        "a flag), so that every rank takes the same branch in the same step.",
    )


def _beside(loop: Location, at: Location) -> str:
    """A loop's place, for who has just read another one."""
    return f"line {loop.line}" if loop.path == at.path else str(loop)


def _did(trace: Trace, loop: Location) -> str:
    reached = trace.reached
    steps = "" if reached is None else f" and began {reached} reduced backwards in it"
    if trace.fetched is None:
        took = "is still in the loop"
    elif trace.recorded_end or trace.state != "left":
        took = f"took {_batches(trace.fetched)}"
    else:
        took = "left the loop"
    return f"rank {trace.rank.rank} {took}{steps}"


def _batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"
