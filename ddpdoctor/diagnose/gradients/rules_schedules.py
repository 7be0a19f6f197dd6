"""Rules for learning rates and the number of ranks (DDP317, DDP331)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.diagnose.source_operations import (
    rate_by_batch,
    scaled_by_world,
    steps_of_all_data,
)
from ddpdoctor.run.records.model import FingerprintRecord, ScheduleRecord
from ddpdoctor.run.snapshot import Rank, Run

NEAR = 0.02
"""How far a number may be from the expected one: epochs are rounded up on every rank."""
MIN_RATES = 4
"""Learning rates that a schedule made by hand must have had."""
FADES = ("CosineAnnealingLR", "LambdaLR", "OneCycleLR", "PolynomialLR")
"""Schedulers that end at a small learning rate."""


@rule("DDP331", "schedule-length", Severity.WARNING)
def schedule_length(run: Run) -> Iterator[Finding]:
    """The learning rate's schedule is longer or shorter than the training by the number of ranks.

    What it finds
        In a job that ended well, a scheduler that was stepped once for each training step, with an
        option (`T_max`, `total_steps`, a number that its function uses) that is as many times the
        number of steps as there are ranks. Or a scheduler of the right length that was stepped as
        many times per step as there are ranks, or one that is shorter by that factor where a line
        divides a number of steps by the number of ranks. Without a scheduler, a rate that changes
        and a line that computes a number of steps from the length of sharded data.

    Why it is bad
        Each rank takes `len(data) / world_size` steps. A schedule made for all the data has come to
        the middle when training ends: warm-up takes too long, and the rate never decays. One that
        is divided twice ends early, and the rest trains with a rate of zero.

    How to fix it
        Compute the length from the loader with the `DistributedSampler`.

    Example
        Wrong: `total = epochs * math.ceil(len(dataset) / batch_size)`
        Right: `total = epochs * len(loader)`

    When it stays silent
        For schedulers that are stepped by epoch, for jobs that failed or were stopped, for fewer
        than twenty steps, and for gradients accumulated over as many batches as there are ranks.
    """
    world = run.world_size
    if run.exit_status != 0 or world < 2 or len(run.last) < world:
        return
    for record in run.last[0].records.of(ScheduleRecord):
        found = _judged(run, record, world)
        if found is not None:
            message, fix = found
            yield Finding(
                code="DDP331",
                severity=Severity.WARNING,
                message=message,
                ranks=tuple(rank.rank for rank in run.last),
                location=record.location,
                evidence=(
                    f"before training step {record.steps}, {record.scheduler} had reached position "
                    f"{record.position}",
                    f"there are {world} ranks",
                ),
                fix=fix,
                about=f"schedule {record.path}:{record.line}",
            )
            return
    yield from _by_hand(run)


def _by_hand(run: Run) -> Iterator[Finding]:
    """Yield a schedule without a scheduler whose length is that of all the data."""
    first = run.last[0]
    rates = list(dict.fromkeys(_rates(first)))
    at = steps_of_all_data(run)
    # A rank writes about its schedulers as it ends.
    known = first.ended is not None and first.watched(ScheduleRecord)
    if at is None or len(rates) < MIN_RATES or not known or first.records.of(ScheduleRecord):
        return
    yield Finding(
        code="DDP331",
        severity=Severity.WARNING,
        message="the job computes its learning rate with a number of steps over all the data, and "
        f"each of {run.world_size} ranks takes only its part of them",
        ranks=tuple(rank.rank for rank in run.last),
        location=at,
        evidence=(
            f"the rates that were recorded go from {max(rates):.4g} to {rates[-1]:.4g}",
            "the line divides the length of the data, and not by the number of ranks",
        ),
        fix="Compute the length from the steps that a rank takes: epochs * len(loader).",
        about="schedule by hand",
    )


def _judged(run: Run, record: ScheduleRecord, world: int) -> tuple[str, str] | None:
    """Return message and fix of a schedule whose length is wrong."""
    steps, position = record.steps, record.position
    if world in {
        round(median([each.backwards for each in rank.steps] or [1])) for rank in run.last
    }:
        return None

    def holds(wanted: float) -> int | None:
        return next((n for n in record.numbers if abs(n - wanted) <= NEAR * wanted + 1), None)

    right = holds(steps)
    if abs(position - steps * world) <= NEAR * steps * world:
        if right is None or holds(steps * world) is not None:
            return None
        return (
            f"{record.scheduler} is stepped {world} times in each training step, as often as there "
            f"are ranks, and ends ({right} steps) {world} times too early",
            "Step the scheduler once for each optimizer step, or make it as many times longer.",
        )
    # Schedulers in a row begin one after another.
    later = max(0, steps - position)
    if right is not None or later > steps / 2:
        return None
    longer = holds(steps * world - later)
    if longer is not None:
        return (
            f"{record.scheduler} is made for {longer} steps, and training took {steps + 1}: each "
            f"of {world} ranks takes only its part of the batches",
            "Compute the length from the steps that a rank takes: epochs * len(loader), with the "
            "loader that has the DistributedSampler.",
        )
    shorter = holds(steps / world - later) if record.scheduler in FADES and not later else None
    divided = None
    if shorter is not None:
        divided = scaled_by_world(run, "len") or scaled_by_world(run, "steps")
    if shorter is not None and divided is not None:
        return (
            f"{record.scheduler} is made for {shorter} steps, and training took {steps + 1}: "
            f"{divided} divides by the {world} ranks what is each rank's part already",
            "Leave the division out: len(loader) is what one rank takes.",
        )
    return None


@rule("DDP317", "rate-by-local-batch", Severity.INFO)
def rate_by_local_batch(run: Run) -> Iterator[Finding]:
    """The learning rate is computed from the batch of one rank, not from that of all ranks.

    What it finds
        A line that scales a learning rate by a batch size (`base * batch_size / 256`) without the
        number of ranks, in a job of several.

    Why it is bad
        An optimizer step averages the samples of all ranks. The linear scaling rule is about these,
        so the rate is too small by the number of ranks.

    How to fix it
        Multiply the batch size by the number of ranks, unless the rate was chosen for this job.

    Example
        Wrong: `lr = 0.1 * batch_size / 256`
        Right: `lr = 0.1 * batch_size * dist.get_world_size() / 256`

    When it stays silent
        For a rate that no batch size is a part of, for a single rank, and if a line divides or
        multiplies a batch size by the number of ranks: it may be that of all.
    """
    if run.world_size < 2 or len(run.last) < run.world_size:
        return
    at, samples, rate = rate_by_batch(run), _samples(run.last[0]), next(_rates(run.last[0]), None)
    if at is None or samples is None or scaled_by_world(run, "batch") is not None:
        return
    yield Finding(
        code="DDP317",
        severity=Severity.INFO,
        message="the learning rate is scaled by the batch of one rank, and an optimizer step "
        f"averages {run.world_size} of them",
        ranks=tuple(rank.rank for rank in run.last),
        location=at,
        evidence=(
            f"{samples} samples in a step of rank {run.last[0].rank}, "
            f"{samples * run.world_size} in one of all ranks",
            *([f"the learning rate began at {rate:g}"] if rate is not None else []),
        ),
        fix="Multiply the batch size by the number of ranks, unless the rate was chosen so.",
        about="rate by batch",
    )


def _samples(rank: Rank) -> int | None:
    sizes = [step.samples for step in rank.steps if step.samples]
    return round(median(sizes)) if sizes else None


def _rates(rank: Rank) -> Iterator[float]:
    """Yield the learning rates of the first parameter group, where they were recorded."""
    for record in rank.records.of(FingerprintRecord):
        group = next((group for groups in record.hyper or () for group in groups), ())
        if group and isinstance(group[0], float):
            yield group[0]
