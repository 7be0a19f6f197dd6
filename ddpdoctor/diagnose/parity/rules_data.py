"""The rule for an epoch of all ranks that is not an epoch of one rank (DDP340)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count, percent
from ddpdoctor.core.relations import always
from ddpdoctor.diagnose.parity.training import Training, needs_two_runs

SAME_EPOCH = 0.02  # Part of an epoch's samples that may differ


@rule(
    "DDP340",
    "epoch-differs",
    Severity.WARNING,
    detect=needs_two_runs,
    yields_to=dict.fromkeys(
        ("DDP101", "DDP102", "DDP105", "DDP110", "DDP113", "DDP114", "DDP115", "DDP116", "DDP117"),
        always,
    ),
)
@dataclass(frozen=True)
class EpochDiffers:
    """An epoch of all ranks has other samples than an epoch of one rank, or another order.

    What it finds
        `ddpdoctor parity` ran the job at two sizes. In their first epoch the ranks together drew
        more or fewer samples than one rank, drew samples twice that one rank drew once, left out
        the samples behind the last whole batch, or read in order what one rank shuffled.

    Why it is bad
        With more, N ranks do the same work N times. Fewer or left out samples are never seen, or
        in fewer epochs. Data in order bring batches that are alike.

    How to fix it
        Give the loader a `DistributedSampler`, once: not on data that are already a rank's part.

    Example
        Wrong: `DataLoader(data, shuffle=sampler is None, sampler=sampler)` with
            `DistributedSampler(data, shuffle=False)`
        Right: `DistributedSampler(data)`, and `sampler.set_epoch(epoch)` in each epoch

    When it stays silent
        For epochs that were not finished, for what a sampler pads, for differences below 2 %, and
        for ranks that have more data because each has its own.
        Left out samples that another epoch may draw are information, and so are more samples if
        one rank draws some twice, too.
    """


def epochs(base: Training, other: Training) -> Iterator[Finding]:
    """Yield what an epoch of more ranks has of other samples."""
    one, two = base.epoch, other.epoch
    if one is None or two is None or not one.drawn or two.drawn is None:
        return
    ranks, more = count(base.ranks, "rank"), f"{other.ranks} ranks"
    severity = Severity.WARNING
    ratio = two.drawn / one.drawn
    tolerated = SAME_EPOCH + other.ranks / one.drawn
    # Each rank may have another data set, whose indices say nothing of those of others.
    shared = two.length == one.length and not two.apart
    left = (two.length or 0) * (1 if shared else other.ranks) - two.drawn
    evidence = [
        f"first epoch: {one.drawn} samples with {ranks}, {two.drawn} with {more}",
        f"each rank took {count(two.batches, 'batch', 'batches')}, and {one.batches} before",
    ]
    if ratio > 1 + tolerated and not two.apart:
        # Samples that are drawn at random, and again, are no order that ranks should share.
        severity = Severity.INFO if one.doubled > tolerated * one.drawn else Severity.WARNING
        message = f"an epoch of {more} has {ratio:.2g} times the samples of an epoch of {ranks}"
        fix = "Give the loader a DistributedSampler, so that each rank gets its part."
    elif ratio < 1 - tolerated and 0 < left < two.drawn / max(1, two.batches) + other.ranks:
        # Another epoch leaves out others, if it has another order.
        severity = Severity.INFO if two.shuffled else Severity.WARNING
        message = (
            f"the last {left} of {two.drawn + left} samples of an epoch are left out with {more}, "
            "as they make no whole batch of every rank"
        )
        evidence.append(f"{(one.length or 0) - one.drawn} were left out with {ranks}")
        fix = "Leave drop_last out, or make the batches of the ranks smaller."
    elif ratio < 1 - tolerated:
        message = (
            f"an epoch of {more} has only {percent(ratio)} of the samples of an epoch of {ranks}"
        )
        fix = "Let the data be divided once: a DistributedSampler on the whole data set."
    elif shared and (two.doubled - one.doubled) / two.drawn > tolerated:
        message = (
            f"{two.doubled} samples of an epoch are drawn twice with {more}, and {two.missing} are "
            "left out"
        )
        evidence.append(f"drawn twice with {ranks}: {one.doubled}, left out: {one.missing}")
        fix = "Let all ranks divide one order of the data: a DistributedSampler does."
    elif one.shuffled and two.shuffled is False:
        message = f"{more} read the data in their order, which {ranks} shuffled"
        evidence.append(f"the indices within the batches of each rank rise with {more}")
        fix = "Let the DistributedSampler shuffle, and call its set_epoch in each epoch."
    else:
        return
    yield Finding(
        code="DDP340",
        severity=severity,
        message=message,
        location=two.made,
        evidence=tuple(evidence),
        fix=fix,
        about="epoch",
    )
