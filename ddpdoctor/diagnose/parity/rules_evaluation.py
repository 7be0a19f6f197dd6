"""A rule for evaluations that have other samples with more ranks (DDP349).

An evaluation whose shards are not combined is DDP106, one with doubled samples DDP107.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count
from ddpdoctor.diagnose.parity.evaluation import evaluations_of
from ddpdoctor.run.snapshot import Run


def _needs_two_runs(run: Run) -> Iterator[Finding]:
    """Find nothing in one run."""
    yield from ()


@rule("DDP349", "evaluation-drops-samples", Severity.WARNING, detect=_needs_two_runs)
@dataclass(frozen=True)
class EvaluationDropsSamples:
    """An evaluation of all ranks leaves out samples that an evaluation of one rank has.

    What it finds
        `ddpdoctor parity` ran the job at two sizes. At the same line, the ranks together evaluated
        fewer samples than one rank did.

    Why it is bad
        The metric is that of other data: its values at the two sizes cannot be compared, also for
        the same weights. What is left out is often the end of the data, in which a class may be.

    How to fix it
        Evaluate the tail: no `drop_last` in the loader or sampler of an evaluation, and no split
        into parts of `len(data) // world_size`.

    Example
        Wrong: `DataLoader(held_out, sampler=part, batch_size=64, drop_last=True)`
        Right: `DataLoader(held_out, sampler=part, batch_size=64)`

    When it stays silent
        For data sets without a length, for evaluations that a run did not finish, and if
        each rank evaluates all samples.
    """


def compared_evaluations(base: Run, other: Run) -> Iterator[Finding]:
    """Yield evaluations in which a larger size leaves samples out."""
    before = evaluations_of(base)
    for at, now in evaluations_of(other).items():
        one = before.get(at)
        if one is None:
            continue
        # With several ranks it is not known whether they share the samples or have the same ones.
        wanted = max(one.drawn)
        if sum(now.drawn) >= wanted:
            continue
        who = f"a rank of {base.world_size}" if base.world_size > 1 else "1 rank"
        yield Finding(
            code="DDP349",
            severity=Severity.WARNING,
            message=f"an evaluation of {count(other.world_size, 'rank')} has "
            f"{count(sum(now.drawn), 'sample')}, one of {who} {wanted}",
            location=now.made,
            evidence=(
                f"the loader is read at {at}",
                f"samples of each rank: {', '.join(map(str, now.drawn[:8]))}",
            ),
            fix="Evaluate the last samples, too: no drop_last in the evaluation's loader and "
            "sampler, and no parts of len(data) // world_size.",
            about="evaluation",
        )
