"""Rules for optimizers and learning rates (DDP311, 312, 316, 317, 324, 325 and 331)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count as counted
from ddpdoctor.diagnose.gradients.reducer import OfModule, by_module, listed
from ddpdoctor.diagnose.source_operations import (
    mentions,
    rate_by_batch,
    scaled_by_world,
    steps_of_all_data,
)
from ddpdoctor.run.records.model import (
    FingerprintRecord,
    LoadRecord,
    MisplacedClipRecord,
    RemadeRecord,
    ScheduleRecord,
    TogetherRecord,
    UnownedRecord,
    UnzeroedRecord,
)
from ddpdoctor.run.snapshot import Rank, Run


def _unowned(run: Run, orphans: bool) -> Iterator[tuple[OfModule[UnownedRecord], str]]:
    """Yield unchanged parameters that are in no optimizer, with the evidence."""
    for found in by_module(run, UnownedRecord).values():
        if found.record.unchanged and bool(found.record.orphans) is orphans:
            first, last = found.record.steps
            yield (
                found,
                f"they got gradients, and their values were the same before step {first} and "
                f"before step {last}",
            )


@rule("DDP324", "not-in-optimizer", Severity.WARNING)
def not_in_optimizer(run: Run) -> Iterator[Finding]:
    """Trainable parameters are in no optimizer.

    What it finds
        Parameters of a DDP module that require gradients and get them, are in no optimizer, and did
        not change over ten steps.

    Why it is bad
        They are not trained. Computing and all-reducing their gradients in every step is wasted
        time.

    How to fix it
        Pass them to the optimizer. If they should not be trained, freeze them before DDP is
        created.

    Example
        Wrong: `SGD(model.head.parameters(), lr=0.1)` with an encoder that requires gradients.
        Right: `SGD(model.parameters(), lr=0.1)`, or `model.encoder.requires_grad_(False)` before
        DDP.

    When it stays silent
        For frozen parameters, for parameters that something else changes (an update by hand, a
        communication hook), and in the first dozen steps.
    """
    for found, unchanged in _unowned(run, orphans=False):
        record = found.record
        yield Finding(
            code="DDP324",
            severity=Severity.WARNING,
            message=f"{record.count} of {counted(record.of, 'parameter')} require gradients and "
            f"are in no optimizer, so that they never learn: "
            f"{listed(record.parameters, record.count)}",
            ranks=found.ranks,
            location=record.location,
            evidence=(unchanged, f"the optimizer made here is {record.optimizer}"),
            fix="Pass them to the optimizer, or freeze them before DDP is built, which saves their "
            "gradients and the all-reduce.",
            about=f"module {record.ddp}",
        )


@rule("DDP325", "optimizer-of-old-parameters", Severity.ERROR)
def optimizer_of_old_parameters(run: Run) -> Iterator[Finding]:
    """The optimizer holds parameters that the model no longer has.

    What it finds
        An optimizer with parameters that never get a gradient and belong to no DDP module, while
        parameters of the DDP module are in no optimizer and do not change: the optimizer was
        created before they were replaced.

    Why it is bad
        `optimizer.step()` updates tensors that nothing uses. The new parameters keep their initial
        values, without any error.

    How to fix it
        Create the optimizer after the last change of the model's parameters, before or after DDP,
        which keeps the parameters.

    Example
        Wrong:
            optimizer = SGD(model.parameters(), lr=0.1)
            model.fc = nn.Linear(512, 10)
        Right:
            model.fc = nn.Linear(512, 10)
            optimizer = SGD(model.parameters(), lr=0.1)

    When it stays silent
        While every trainable parameter is in an optimizer or changes by other means.
    """
    for found, unchanged in _unowned(run, orphans=True):
        record, old = found.record, found.record.orphans
        yield Finding(
            code="DDP325",
            severity=Severity.ERROR,
            message=f"this optimizer holds {counted(old, 'parameter')} that the model no longer "
            f"has, and {record.count} of the model's {counted(record.of, 'parameter')} are in "
            f"none: {listed(record.parameters, record.count)}",
            ranks=found.ranks,
            location=record.location,
            evidence=(
                unchanged,
                f"{counted(old, 'parameter')} of {record.optimizer} never got a gradient and "
                f"{'is' if old == 1 else 'are'} in no DDP module",
            ),
            fix="Create the optimizer after the last change of the model's parameters.",
            about=f"module {record.ddp}",
        )


@rule("DDP311", "optimizer-in-loop", Severity.WARNING)
def optimizer_in_loop(run: Run) -> Iterator[Finding]:
    """The optimizer or the learning-rate scheduler is re-created in every step or every epoch.

    What it finds
        Optimizers that are re-created at the same line for the same parameters, each used for one
        step or one epoch although it keeps state (momentum, Adam's moments). Schedulers of torch
        that are re-created with the same options, each of which only reaches an early part of its
        schedule.

    Why it is bad
        The optimizer's state is lost: Adam repeats its biased first step, and momentum has no
        effect. A schedule that keeps restarting never decays.

    How to fix it
        Create it once, before the loop.

    Example
        Wrong:
            for batch in loader:
                optimizer = Adam(model.parameters())
        Right:
            optimizer = Adam(model.parameters())
            for batch in loader:

    When it stays silent
        For optimizers without state (plain SGD), LBFGS, and optimizers of copies, as in
        meta-learning. Once per epoch: with fewer than three of them, with changed options or
        parameters (a learning rate that changes by a factor below 5 is a schedule), after weights
        are loaded, if each is used for several epochs, and if replicas are averaged, as in
        federated training. For schedulers that reach their end (warm restarts), that are given a
        position (`last_epoch`, a loaded state), or whose factor is constant (`ExponentialLR`), and
        for `LambdaLR` that is stepped more than once.
    """
    for role in ("optimizer", "scheduler"):
        seen = [
            (rank.rank, record)
            for rank in run.last
            for record in rank.records.of(RemadeRecord)
            if getattr(record, role) and not (record.every == "epoch" and _restarts(rank, record))
        ]
        if seen:
            ranks = tuple(sorted({rank for rank, _ in seen}))
            yield _remade(role, ranks, seen[0][1])
            # A scheduler that is re-created with its optimizer is the same fault.
            return


def _restarts(rank: Rank, record: RemadeRecord) -> bool:
    """Return whether loaded or averaged weights have made the old state useless."""
    loads = rank.records.of(LoadRecord)
    return (
        any(each.step > record.since for each in loads)
        or bool(rank.records.of(TogetherRecord))
        or not rank.watched(LoadRecord, TogetherRecord)
    )


def _remade(role: str, ranks: tuple[int, ...], record: RemadeRecord) -> Finding:
    every = "epoch" if record.every == "epoch" else "step"
    if role == "optimizer":
        lost = "its state is lost each time"
        seen = (
            f"{record.times} optimizers of the same parameters in a row by step {record.step}, all "
            f"but the last stepped {'for one epoch' if every == 'epoch' else 'once'}"
        )
    else:
        lost = "its schedule begins again each time"
        of = f" of {record.end:g}" if record.end is not None else ""
        seen = (
            f"{record.times} schedulers of the same optimizer and options in a row by step "
            f"{record.step}; the one before the last reached position "
            f"{record.position or 0:g}{of}"
        )
    return Finding(
        code="DDP311",
        severity=Severity.WARNING,
        message=f"{getattr(record, role)} is re-created here for every {every}, and {lost}",
        ranks=ranks,
        location=record.location,
        evidence=(seen,),
        fix=f"Create the {role} once, before the loop.",
        about="remade",
    )


@rule("DDP312", "zero-grad-missing", Severity.ERROR)
def zero_grad_missing(run: Run) -> Iterator[Finding]:
    """Gradients are never set to zero.

    What it finds
        Gradients that are still there when the next backward begins, after each of an optimizer's
        steps: a watched parameter's gradient has the same norm as at the end of the step, and the
        backward adds to it.

    Why it is bad
        Each step uses the sum of all gradients since the start. The loss falls at first, then the
        steps become too large or point the wrong way. No error is raised.

    How to fix it
        Call `optimizer.zero_grad()` once per step, before the backward or after the step.

    Example
        Wrong:
            loss.backward()
            optimizer.step()
        Right:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    When it stays silent
        If gradients were ever set to zero or None, as in accumulation, if something else changes
        them between steps, and in jobs with fewer than six steps. In a running job it waits for 100
        such steps.
    """
    found: dict[tuple[str, int], list[tuple[int, UnzeroedRecord]]] = {}
    for rank in run.last:
        for record in rank.records.of(UnzeroedRecord):
            found.setdefault((record.path, record.line), []).append((rank.rank, record))
    for (path, line), seen in sorted(found.items()):
        if not all(_keeps_gradients(record) for _, record in seen):
            continue
        first = seen[0][1]
        yield Finding(
            code="DDP312",
            severity=Severity.ERROR,
            message=f"the gradients of {first.optimizer} are never set to zero: each "
            "backward adds to those of all steps before",
            ranks=tuple(sorted({rank for rank, _ in seen})),
            location=first.location,
            evidence=(
                f"{first.carried} steps in a row by step {first.step} whose gradients were still "
                "there when the next backward began",
                f"the norm of one of them is {first.after[0]:.6g} when a step ends, and the same "
                "when the next backward begins",
            ),
            fix="Call optimizer.zero_grad() once for each step, before the backward.",
            about=f"unzeroed {path}:{line}",
        )


def _keeps_gradients(record: UnzeroedRecord) -> bool:
    """Return whether gradients existed and did not change between steps."""
    after = record.after
    return bool(after) and after == record.before and min(*after, *record.edited, math.inf) > 0


@rule("DDP316", "clip-too-early", Severity.WARNING)
def clip_too_early(run: Run) -> Iterator[Finding]:
    """Gradients are clipped before they are unscaled, or before they are computed.

    What it finds
        Calls of `clip_grad_norm_` or `clip_grad_value_` after `scaler.scale(loss).backward()` and
        without `scaler.unscale_(optimizer)`, or before the backward of their step. At least three
        such calls, and none in the right place.

    Why it is bad
        Scaled gradients are thousands of times larger than the limit. After clipping and unscaling
        they are close to zero, and the model hardly learns. A call before the backward limits
        nothing.

    How to fix it
        Unscale, then clip, then step.

    Example
        Wrong:
            scaler.scale(loss).backward()
            clip_grad_norm_(model.parameters(), 1.0)
        Right:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)

    When it stays silent
        With a disabled scaler, if the job divides the gradients itself, if the call's limit is
        multiplied by the scale, and after the first 64 steps.
    """
    for rank in run.last:
        for record in rank.records.of(MisplacedClipRecord):
            at = record.location
            if at is not None and record.what == "scaled" and mentions(at, "scale"):
                continue
            if not rank.watched(MisplacedClipRecord):
                # A failed hook may have missed that gradients were unscaled.
                continue
            yield _misplaced(run, rank, record)
            return


def _misplaced(run: Run, rank: Rank, record: MisplacedClipRecord) -> Finding:
    norms = [each.norm for each in rank.steps if each.norm is not None and each.step <= 64]
    if record.what == "scaled":
        message = f"{record.call} limits gradients that are still multiplied by the GradScaler's "
        message += "scale: after unscaling, next to nothing is left of them"
        fix = "Call scaler.unscale_(optimizer) before clipping."
        evidence = ["no unscale_ between backward and the call, in the first steps"]
        if norms and math.isfinite(max(norms)):
            evidence.append(f"the norms that it returned there: up to {max(norms):.3g}")
    else:
        message = f"{record.call} is called before the step's backward: it limits no gradient"
        fix = "Call it between backward() and optimizer.step()."
        evidence = ["no backward between the last optimizer step and the call, in the first steps"]
    ranks = [
        each.rank
        for each in run.last
        if any(other.what == record.what for other in each.records.of(MisplacedClipRecord))
    ]
    return Finding(
        code="DDP316",
        severity=Severity.WARNING,
        message=message,
        ranks=tuple(ranks),
        location=record.location,
        evidence=tuple(evidence),
        fix=fix,
        about=f"clip {record.what}",
    )


# -- learning rates and the number of ranks


NEAR = 0.02  # Relative tolerance: each rank rounds its epochs up
MIN_RATES = 4  # Minimum number of learning rates in a schedule without a scheduler

FADES = ("CosineAnnealingLR", "LambdaLR", "OneCycleLR", "PolynomialLR")
"""Schedulers that end at a small learning rate."""


@rule("DDP331", "schedule-length", Severity.WARNING)
def schedule_length(run: Run) -> Iterator[Finding]:
    """The learning rate's schedule is too long or too short by a factor of the world size.

    What it finds
        In a job that ended well, a scheduler that was stepped once for each training step, with an
        option (`T_max`, `total_steps`, a number that its function uses) that is the number of steps
        times the world size. Or a scheduler of the right length that was stepped world-size times
        per step, or one that is shorter by that factor while a line divides a number of steps by
        the world size. Without a scheduler, a rate that changes, and a line that computes a number
        of steps from the length of sharded data. `ddpdoctor
        parity` compares the epochs after which it ends, and its warm-up, at two sizes.

    Why it is bad
        Each rank takes `len(data) / world_size` steps. A schedule made for all the data is only
        partly done when training ends: warm-up takes too long, and the rate never decays. One that
        is divided twice ends early, and the rest trains with a rate of zero.

    How to fix it
        Compute the length from the loader with the `DistributedSampler`.

    Example
        Wrong: `total = epochs * math.ceil(len(dataset) / batch_size)`
        Right: `total = epochs * len(loader)`

    When it stays silent
        For schedulers that are stepped once per epoch, for jobs that failed or were stopped, for
        fewer than twenty steps, and for gradients accumulated over world-size batches.
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
    """Yield a finding for a learning rate computed by hand from the steps over all the data."""
    first = run.last[0]
    rates = list(dict.fromkeys(_rates(first)))
    at = steps_of_all_data(run)
    # A rank records its schedulers when it ends.
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
            f"the recorded rates go from {max(rates):.4g} to {rates[-1]:.4g}",
            "the line divides the length of the data, but not by the number of ranks",
        ),
        fix="Compute the length from the steps that a rank takes: epochs * len(loader).",
        about="schedule by hand",
    )


def _judged(run: Run, record: ScheduleRecord, world: int) -> tuple[str, str] | None:
    """Return the message and the fix for a schedule whose length is wrong."""
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
    # In a sequence of schedulers, one may start after the others.
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
            f"{divided} divides by the {world} ranks, but the number is already per rank",
            "Leave the division out: len(loader) is what one rank takes.",
        )
    return None


@rule("DDP317", "rate-by-local-batch", Severity.INFO)
def rate_by_local_batch(run: Run) -> Iterator[Finding]:
    """The learning rate is computed from one rank's batch size, not from the global one.

    What it finds
        A line that scales a learning rate by a batch size (`base * batch_size / 256`) without the
        world size, in a job with several ranks.

    Why it is bad
        An optimizer step averages the samples of all ranks. The linear scaling rule is about these,
        so the rate is too small by a factor of the world size.

    How to fix it
        Multiply the batch size by the world size, unless the rate was chosen for this job.

    Example
        Wrong: `lr = 0.1 * batch_size / 256`
        Right: `lr = 0.1 * batch_size * dist.get_world_size() / 256`

    When it stays silent
        For a rate that does not depend on a batch size, for a single rank, and if a line divides or
        multiplies a batch size by the world size, which may then be the global one.
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
        fix="Multiply the batch size by the number of ranks, unless the rate was chosen for this.",
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
