"""Rules for evaluations that have other samples or results with more ranks (DDP349, DDP343).

An evaluation whose shards are not combined is DDP106, one with doubled samples DDP107.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count
from ddpdoctor.diagnose.parity.evaluation import Evaluation, evaluations_of
from ddpdoctor.diagnose.parity.metrics import Metric, metrics_of
from ddpdoctor.diagnose.parity.training import needs_two_runs
from ddpdoctor.run.snapshot import Run

SAME_METRIC = 1e-4  # Relative difference of numbers that are the same
CAUSES = ("DDP106", "DDP107", "DDP349")
"""Findings that say why an evaluation has another result."""


@rule("DDP349", "evaluation-drops-samples", Severity.WARNING, detect=needs_two_runs)
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


@rule("DDP343", "metric-differs", Severity.WARNING, detect=needs_two_runs)
@dataclass(frozen=True)
class MetricDiffers:
    """An evaluation of the same weights has another result with more ranks.

    What it finds
        `ddpdoctor parity --evaluate` runs the job at each size once more, with weights that stay
        as they were before the first step. A number that the job prints after an evaluation is the
        same in all its evaluations, and another one at the larger size.

    Why it is bad
        The metric depends on the number of ranks. A model that is better on one rank may be worse
        on eight, early stopping and the choice of the best checkpoint change.

    How to fix it
        Sum losses and counts over samples, all_reduce the sums, and divide once. A mean of the
        batches' means gives the samples of a short last batch more weight, and each size has other
        last batches.

    Example
        Wrong: `total += loss.item()`, and `total / len(loader)`
        Right: `total += loss.item() * len(labels)`, and `total / seen`, both all_reduced

    When it stays silent
        If the sizes begin with other weights, if an evaluation is random or was made once only, and
        if the result is not printed. If DDP106, DDP107 or DDP349 say why, the numbers stand there.
    """


def compared_metrics(base: Run, other: Run) -> Iterator[tuple[Metric, Metric]]:
    """Yield the numbers that evaluations print at both sizes, with weights that stay the same."""
    before = metrics_of(base)
    for place, now in metrics_of(other).items():
        one = before.get(place)
        if one is not None and _settled(one, 1) and _settled(now, other.world_size):
            yield one, now


def _settled(metric: Metric, most: int) -> bool:
    """Return whether a metric has the same value each time, on each rank that prints it."""
    values = set(metric.values)
    # Whole numbers are counts, such as those of the samples that a rank has.
    return (
        any("." in each for each in values)
        and len(values) <= most
        and all(metric.values.count(each) > 1 for each in values)
    )


def metric_differs(pairs: Sequence[tuple[Metric, Metric]], ranks: int, more: int) -> list[Finding]:
    """Return a finding for each evaluation with another result on more ranks."""
    found: dict[Evaluation, Finding] = {}
    for one, now in pairs:
        if all(_same(one.values[0], each) for each in now.values):
            continue
        uneven = one.evaluation.uneven or now.evaluation.uneven
        values = " and ".join(dict.fromkeys(now.values))
        found.setdefault(
            now.evaluation,
            Finding(
                code="DDP343",
                severity=Severity.WARNING,
                message=f"the same weights have another result with {more} ranks: {now.name} is "
                f"{one.values[0]} with {count(ranks, 'rank')}, and {values} with {more}",
                location=now.at,
                evidence=(
                    f"samples with {count(ranks, 'rank')}: {one.evaluation.words}",
                    f"samples with {more}: {now.evaluation.words}",
                ),
                fix="Weigh each batch by its samples: add up loss * len(batch), all_reduce this "
                "and the number of samples, and divide once."
                if uneven
                else "Call model.eval() before the evaluation. Add up losses and counts over "
                "samples, all_reduce both, and divide once.",
                about=f"metric {now.at}",
            ),
        )
    return list(found.values())


def with_metrics(found: list[Finding], metrics: Sequence[Finding]) -> list[Finding]:
    """Return findings with other results, as evidence of their cause where that is known."""
    place = next((n for n, each in enumerate(found) if each.code in CAUSES), None)
    if place is None or not metrics:
        return [*found, *metrics]
    numbers = tuple(each.message for each in metrics)
    found[place] = replace(found[place], evidence=(*found[place].evidence, *numbers))
    return found


def _same(one: str, other: str) -> bool:
    """Return whether two printed numbers are the same within rounding."""
    values = [float(each.replace(",", "")) for each in (one, other)]
    if not all(map(math.isfinite, values)):
        return str(values[0]) == str(values[1])
    rounding = 1.5 * max(_last_digit(one), _last_digit(other))
    return math.isclose(*values, rel_tol=SAME_METRIC, abs_tol=rounding)


def _last_digit(text: str) -> float:
    """Return the value of 1 in the last printed digit of a number."""
    digits, _, exponent = text.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
