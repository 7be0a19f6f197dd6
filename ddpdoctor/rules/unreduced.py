"""Gradients that DDP never averaged (DDP301, DDP302, DDP303, DDP308), judged by what came of it.

A backward that DDP does not reduce may be meant: gradients are accumulated, or averaged by hand. So
a rule speaks only if the gradients differed between ranks in the moment of the optimizer's step,
and the parameters have diverged since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.analysis import averaging
from ddpdoctor.analysis.reduction import by_module
from ddpdoctor.analysis.replicas import together
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.rules.model import Missing, listed, missing_gradients, plural
from ddpdoctor.run.records.model import DdpRecord, NoSyncVainRecord, UnreducedRecord
from ddpdoctor.run.snapshot import Run

GRADIENTS_DIFFER = 1e-6
"""Relative difference of two norms above which gradients were not averaged: these are bit-equal."""

PARAMETERS_DIFFER = 1e-12
"""The same for parameters, of which a small learning rate changes little; norms are in doubles."""


CERTAIN = 6
"""Later sightings that must show different parameters, without one that shows them equal again,
before it is said of a job that runs on; of one that has ended, one."""


@dataclass(frozen=True)
class Unreduced:
    """Gradients of one DDP module that an optimizer used as they were, on each rank its own."""

    ddp: int
    cause: str
    record: UnreducedRecord
    """The lowest rank's record of the first step in which they differed."""
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    worst: str
    """The parameter whose gradients differed most."""
    norms: dict[int, float]
    """The norm of its gradient, by rank."""
    drift: tuple[int, str, float]
    """Step and name of the parameter that was seen to differ between ranks, and by how much."""


def _spread(values: list[float]) -> float:
    """The greatest relative difference of some norms; 0 where one is not finite."""
    if not all(math.isfinite(value) for value in values):
        return 0.0
    high = max(values)
    return (high - min(values)) / high if high > 0 else 0.0


Sightings = dict[int, dict[int, UnreducedRecord]]
"""Records of one DDP module and cause: by step, by rank."""


def unreduced(run: Run) -> Iterator[Unreduced]:
    """What was seen on all ranks of a group alike, differed, and did harm."""
    grouped: dict[tuple[int, tuple[int, ...], str], Sightings] = {}
    built: dict[tuple[int, tuple[int, ...]], int] = {}
    for rank in run.last:
        for number, ddp in enumerate(rank.records.of(DdpRecord)):
            key = number, ddp.group_ranks
            built[key] = built.get(key, 0) + 1
        for record in rank.records.of(UnreducedRecord):
            module = rank.ddp(record.ddp)
            # Replicas of different groups are different models.
            members = module.group_ranks if module is not None else ()
            steps = grouped.setdefault((record.ddp, members, record.cause), {})
            steps.setdefault(record.step, {}).setdefault(rank.rank, record)
    for (number, members, cause), steps in sorted(grouped.items()):
        # While the job runs, a step is judged when it has come to all of them.
        live = run.exit_status is None
        needed = max(2, built.get((number, members), 0)) if live else 2
        found = _harm(number, cause, steps, needed, CERTAIN if live else 1)
        if found is None or averaging.pending(run):
            continue
        group = [rank for rank in run.last if rank.rank in found.ranks]
        if not together(group, number, found.record.step):
            yield found


def _harm(number: int, cause: str, steps: Sightings, needed: int, certain: int) -> Unreduced | None:
    together = {step: steps[step] for step in sorted(steps) if len(steps[step]) >= needed}
    for step, records in together.items():
        spreads = _spreads([each.gradients for each in records.values()])
        worst, widest = _widest(spreads)
        if widest < GRADIENTS_DIFFER:
            continue
        moved = [
            (later, *_widest(_spreads([each.parameters for each in after.values()])))
            for later, after in together.items()
            if later > step
        ]
        # Parameters that are equal again were averaged by hand, as in local SGD.
        if len(moved) < certain or any(spread <= PARAMETERS_DIFFER for _, _, spread in moved):
            return None
        return Unreduced(
            ddp=number,
            cause=cause,
            record=records[min(records)],
            ranks=tuple(sorted(records)),
            names=tuple(name for name in spreads if spreads[name] >= GRADIENTS_DIFFER),
            worst=worst,
            norms={rank: record.gradients[worst] for rank, record in records.items()},
            drift=moved[0],
        )
    return None


def _widest(spreads: dict[str, float]) -> tuple[str, float]:
    return max(spreads.items(), key=lambda each: each[1], default=("", 0.0))


def _spreads(norms: list[dict[str, float]]) -> dict[str, float]:
    common = [name for name in norms[0] if all(name in each for each in norms)]
    return {name: _spread([each[name] for each in norms]) for name in common}


def _evidence(found: Unreduced) -> tuple[str, ...]:
    norms = ", ".join(
        f"{norm:.6g} on rank {rank}" for rank, norm in sorted(found.norms.items())[:4]
    )
    step, name, spread = found.drift
    return (
        f"in step {found.record.step} the gradient of {found.worst} had the norm {norms} "
        "when the optimizer used it",
        f"in step {step} the norms of the parameter {name} differed by {spread:.1e} between ranks",
    )


def _finding(
    code: str,
    found: Unreduced,
    message: str,
    fix: str,
    *,
    location: Location | None = None,
    evidence: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        code=code,
        severity=Severity.ERROR,
        message=message,
        ranks=found.ranks,
        location=location or found.record.location,
        evidence=evidence + _evidence(found),
        fix=fix,
        about=f"module {found.ddp} {found.cause}",
    )


@rule("DDP301", "forward-around-ddp", Severity.ERROR)
def forward_around_ddp(run: Run) -> Iterator[Finding]:
    """The training forward bypasses DDP, so gradients are not synchronized.

    What it finds
        A backward that reached the parameters of a DDP module without a forward through DDP since
        the last step, gradients that differed between ranks when the optimizer used them, and
        parameters that differ since then.

    Why it is bad
        DDP prepares the all-reduce in its `forward`. After `ddp.module(x)`, or a call of the model
        that was wrapped, every rank trains a separate model without any error. The checkpoint has
        learned from rank 0's data only.

    How to fix it
        Call the DDP object, and move whatever else the loss needs into the module's `forward`.

    Example
        Wrong: `loss = ddp.module.loss(batch)`
        Right: `loss = ddp(batch)`

    When it stays silent
        For evaluation, for gradients that are averaged by hand or set to zero before the step, and
        while the ranks' parameters are equal.
    """
    for found in unreduced(run):
        if found.cause == "around":
            yield _finding(
                "DDP301",
                found,
                f"{named(found.ranks)} train separate models: this backward's forward bypassed "
                "DDP, so its gradients were not averaged",
                "Call the DDP object in training, not .module or the model that was wrapped.",
            )


@rule("DDP302", "second-backward", Severity.ERROR)
def second_backward(run: Run) -> Iterator[Finding]:
    """A second backward after one forward is not synchronized.

    What it finds
        A backward that came after DDP had already reduced for its forwards: forward, forward,
        backward, backward, or two backwards of one forward. Its gradients differed between ranks
        when the optimizer used them, and the parameters differ since then.

    Why it is bad
        DDP reduces once after each forward. The gradients of a second backward stay local, and the
        replicas diverge without any error.

    How to fix it
        Add the losses and call `backward()` once, or alternate: forward, backward, forward,
        backward.

    Example
        Wrong:
            first.backward(retain_graph=True)
            second.backward()
        Right:
            (first + second).backward()

    When it stays silent
        For several forwards before one backward, for `no_sync()`, for gradients that are averaged
        by hand, and while the ranks' parameters are equal.
    """
    for found in unreduced(run):
        if found.cause == "second backward":
            yield _finding(
                "DDP302",
                found,
                f"{named(found.ranks)} train separate models: this is a second backward after "
                "the one that DDP reduced, and its gradients were not averaged",
                "Add the losses and call backward once, or call forward and backward in turn.",
            )


@rule("DDP308", "no-sync-scope", Severity.ERROR)
def no_sync_scope(run: Run) -> Iterator[Finding]:
    """`no_sync()` covers only the forward or only the backward.

    What it finds
        A forward inside `no_sync()` with its backward outside: it was not synchronized, the
        gradients differed when the optimizer used them, and the parameters differ since then
        (error). Or a backward inside `no_sync()` with its forward outside: it was synchronized
        anyway (warning).

    Why it is bad
        The forward decides. In the first case, replicas diverge without any error; in the second,
        every accumulation step pays for the all-reduce that `no_sync()` was meant to save.

    How to fix it
        Put both the forward and the backward inside the block.

    Example
        Wrong:
            loss = model(x)
            with model.no_sync():
                loss.backward()
        Right:
            with model.no_sync():
                model(x).backward()

    When it stays silent
        If both are inside, and if a later synchronized backward reduces what was accumulated.
    """
    for found in unreduced(run):
        if found.cause == "forward in no_sync":
            yield _finding(
                "DDP308",
                found,
                f"{named(found.ranks)} train separate models: this backward's forward stood within "
                "no_sync(), so its gradients were not averaged",
                "Put forward and backward into no_sync() while accumulating, and both outside of "
                "it before the optimizer's step.",
            )
    for number, vain in by_module(run, NoSyncVainRecord).items():
        record = vain.record
        yield Finding(
            code="DDP308",
            severity=Severity.WARNING,
            message="no_sync() around this backward does nothing, since its forward stood outside: "
            "the gradients were reduced all the same",
            ranks=vain.ranks,
            location=record.location,
            evidence=(
                f"first in step {record.step}: the forward had armed the all-reduce, and "
                "the backward within no_sync() ran it",
            ),
            fix="Put the forward into the no_sync() block, too.",
            about=f"module {number} vain",
        )


@rule("DDP303", "changed-after-wrap", Severity.ERROR)
def changed_after_wrap(run: Run) -> Iterator[Finding]:
    """Parameters were frozen, unfrozen, replaced or added after DDP was created.

    What it finds
        Parameters that require gradients but were not among those that DDP reduces: their gradients
        differed between ranks when the optimizer used them, and they differ since then. Also
        parameters that DDP reduces and that were frozen or replaced: they get no gradient, and DDP
        raises "Expected to have finished reduction".

    Why it is bad
        DDP collects the parameters once, in its constructor. A layer that is unfrozen or added
        later is trained on each rank separately, without any error.

    How to fix it
        Change the model first and wrap it afterwards, or wrap it again.

    Example
        Wrong:
            ddp = DDP(model)
            model.head = nn.Linear(512, 10)
        Right:
            model.head = nn.Linear(512, 10)
            ddp = DDP(model)

    When it stays silent
        For gradients that are averaged by hand, parameters that DDP ignores by request, changes
        that are undone before the next backward, and `p.grad = None`.
    """
    for found in unreduced(run):
        if found.cause in ("unfrozen", "added", "replaced"):
            built = next((each for rank in run.last if (each := rank.ddp(found.ddp))), None)
            yield _finding(
                "DDP303",
                found,
                f"{named(found.ranks)} train separate models: {listed(found.names)} "
                f"{'was' if len(found.names) == 1 else 'were'} {found.cause} after DDP was built "
                "here, so that DDP does not average the gradients",
                "Change the model before it is wrapped, or wrap it again after the change.",
                location=built.location if built is not None else None,
            )
    for missing in missing_gradients(run):
        if missing.altered:
            yield _altered(run, missing)


def _altered(run: Run, missing: Missing) -> Finding:
    record = next(
        record
        for record in missing.records.values()
        if any(each.why != "unused" for each in record.parameters)
    )
    changes = [(each.name, each.why) for each in record.parameters if each.why != "unused"]
    how = " or ".join(sorted({why for _, why in changes}))
    built = next((each for rank in run.last if (each := rank.ddp(missing.ddp))), None)
    error = next((missing.errors[rank] for rank in sorted(missing.errors)), None)
    count = record.count
    return Finding(
        code="DDP303",
        severity=Severity.ERROR,
        message=f"{plural(count)} that DDP was built here to reduce "
        f"{'was' if count == 1 else 'were'} {how} afterwards: "
        f"{listed([name for name, _ in changes], count)}",
        ranks=tuple(missing.ranks),
        location=(built or record).location,
        evidence=(
            f"no gradient reached {'it' if count == 1 else 'them'} in step {record.step}",
            *missing.fate(),
        ),
        fix="Change the model before it is wrapped, or wrap it again after the change.",
        traceback=error.traceback if error is not None else "",
        about=f"module {missing.ddp} altered",
    )
