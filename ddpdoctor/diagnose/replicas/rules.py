"""Rules for replicas that diverge (DDP319, DDP701, DDP702, DDP703, DDP705)."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import LIKELY, PARAMETERS, certain, of_likely, same_subject
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose import source_operations
from ddpdoctor.diagnose.replicas.differences import (
    HYPER,
    Difference,
    Replica,
    awaits_distances,
    cuts,
    gradients_since,
    hyper_difference,
    is_between,
    last_cut,
    odd,
    rank_only_changes,
    replicas,
    resumed_alone,
    value_at,
    who_changed,
)
from ddpdoctor.diagnose.source_operations import (
    likely_written,
    ranks_that_write,
    written_on_some_ranks,
)
from ddpdoctor.run.records.model import LoadRecord, OutsideRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- evidence that replicas differ: since when, in which tensors, and by how much


def member(replica: Replica, guilty: tuple[int, ...]) -> Rank:
    """One of the guilty ranks, or any if none is."""
    return next((rank for rank in replica.ranks if rank.rank in guilty), replica.ranks[0])


def when_differed(replica: Replica, difference: Difference) -> Iterator[str]:
    """Between which steps they became different, and how many fingerprints show it."""
    if difference.equal is not None:
        yield f"equal after step {difference.equal}, different after step {difference.first}"
    yield (
        f"{difference.seen} fingerprints show it, the last of step {replica.steps[-1]} "
        f"({replica.type}, {len(replica.names)} parameters)"
    )


def tensor_evidence(replica: Replica, difference: Difference) -> Iterator[str]:
    """Which tensors differ, and how far their elements differ, or else their norms."""
    found = next(replica.rich(difference.first), None)
    if found is None:
        return
    step, details = found
    everyone = sorted(details)
    length = min(len(each) for each in details.values())
    differing = [
        index
        for index in range(min(length, len(replica.names)))
        if len({details[rank][index][0] for rank in everyone}) > 1
    ]
    if not differing:
        return
    yield f"{len(differing)} of {len(replica.names)} tensors differ after step {step}"
    distances = {each.name: each for each in replica.distances if each.most and each.step >= step}
    names = {replica.names[index] for index in differing[:3]}
    for each in [*distances.values()][:3]:
        names.discard(each.name)
        looked = (
            f"all {each.count:,} elements"
            if each.looked == each.count
            else f"{each.looked:,} elements looked at (of {each.count:,})"
        )
        yield (
            f"{each.name}: max difference {each.most:.3g} after step {each.step} between "
            f"{named(each.ranks)}, of {looked}"
        )
    for index in (each for each in differing[:3] if replica.names[each] in names):
        norms = [details[rank][index][1] for rank in everyone]
        listed = ", ".join(
            f"{norm:.6g} on rank {rank}"
            for rank, norm in list(zip(everyone, norms, strict=True))[:4]
        )
        yield f"{replica.names[index]}: norm {listed}"


def shown_value(value: object) -> str:
    """A hyper-parameter or a scale, as it is printed."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


# -- divergence (DDP701, DDP319): parameters that stopped being equal on all ranks


CAUSES = ("DDP301", "DDP302", "DDP303", "DDP305", "DDP306", "DDP308")
"""Faults of which parameters that differ are the consequence."""


@rule("DDP701", "parameters-differ", Severity.ERROR, yields_to=dict.fromkeys(CAUSES, certain))
def parameters_differ(run: Run) -> Iterator[Finding]:
    """The parameters of a DDP module differ between ranks.

    What it finds
        Fingerprints (hashes of each parameter's bits after the same optimizer step) that were equal
        and now differ: the first step, the first tensors, and whether their gradients already
        differed. In a running job, ranks then compare 16 steps in a row, twice at most, and up to
        4,096 elements of the first three tensors; the finding waits a few seconds for that. If the
        job has ended, it reports norms.

    Why it is bad
        DDP averages gradients, never parameters: replicas that differ once stay different. The
        saved model was never evaluated as such.

    How to fix it
        Change parameters only in `optimizer.step()`, or in the same way on every rank: broadcast
        what one rank computed, and draw random numbers with the same seed. Gradients that differ
        did not pass through DDP's all-reduce, or were changed after it.

    Example
        Wrong: `p.grad += torch.randn_like(p)`, with another seed on each rank.
        Right: `p.grad += torch.randn(p.shape, generator=same_seed)`

    When it stays silent
        For replicas that are averaged, as in local SGD: they are equal again after a collective, or
        a line that averages parameters has not run yet. For parameters that DDP ignores. If another
        finding names the cause (DDP301, 302, 303, 305, 308, 319, 702, 709). A first difference
        needs a second fingerprint, or the end of the job.
    """
    for replica in replicas(run):
        difference = replica.difference("parameters")
        if difference is None or awaits_distances(replica):
            continue
        if source_operations.averaging_pending(run) or not replica.lasts(difference):
            continue
        cause, evidence = _cause(replica, difference)
        guilty = replica.odd(difference.first, "parameters")
        everyone = tuple(sorted(replica.prints))
        yield Finding(
            code="DDP701",
            about=f"module {replica.module}",
            subjects=frozenset((f"{PARAMETERS}{replica.module}",)),
            severity=Severity.ERROR,
            message=f"{_which(guilty, everyone, 'parameters')} {difference.since}: {cause}",
            ranks=guilty or everyone,
            location=member(replica, guilty).site("optimizer"),
            evidence=(
                *when_differed(replica, difference),
                *tensor_evidence(replica, difference),
                *evidence,
            ),
            fix="Change parameters and gradients in the same way on every rank (the same seed, or "
            "a broadcast from one rank), and only between backward and optimizer.step().",
        )


def _cause(replica: Replica, difference: Difference) -> tuple[str, tuple[str, ...]]:
    """What the gradients and the changes outside of steps say: in the message, and as evidence."""
    rich = [
        (step, values)
        for step in replica.steps
        if step >= difference.first and (values := replica.values(step, "gradients"))
    ]
    differing = [step for step, values in rich if len(set(values.values())) > 1]
    if rich and differing and differing[0] == rich[0][0]:
        return (
            "their gradients differ already",
            (
                f"gradients differ at {len(differing)} of {len(rich)} steps looked at, the first "
                f"of them step {differing[0]}: not all-reduced, or changed afterwards",
            ),
        )
    changed = [
        rank.rank
        for rank in replica.ranks
        if any(is_between(each, replica, difference) for each in rank.records.of(OutsideRecord))
    ]
    equal = (
        (f"gradients are equal at {len(rich)} of {len(rich)} steps looked at",)
        if rich and not differing
        else ()
    )
    if changed:
        return (
            "they were changed outside of the optimizer's step, differently on each rank",
            (f"{named(changed)} changed them between two optimizer steps", *equal),
        )
    return "they became different within or between optimizer steps", equal


def _which(guilty: tuple[int, ...], everyone: tuple[int, ...], what: str) -> str:
    if guilty:
        verb = "have" if len(guilty) > 1 else "has"
        return f"{named(guilty)} {verb} other {what} than the other ranks"
    return f"{named(everyone)} have different {what}"


# -- weights changed on some ranks

_ALIKE = (
    "Do it on every rank, or before DistributedDataParallel(model), which broadcasts rank 0's "
    "weights."
)


@rule(
    "DDP319",
    "rank-only-weight-change",
    Severity.ERROR,
    supersedes={"DDP701": same_subject},
    yields_to=dict.fromkeys((*CAUSES, "DDP403"), of_likely),
)
def rank_only_weight_change(run: Run) -> Iterator[Finding]:
    """Weights were loaded or changed on some ranks only, after DDP was created.

    What it finds
        Parameters that differ between ranks from some step on, and just before it a
        `load_state_dict`, or a change outside the optimizer's step, on some ranks only. The line is
        taken from the source if exactly one line changes weights under a condition on the rank. If
        that line is the only evidence, the finding says "likely".

    Why it is bad
        DDP synchronizes the weights once, when it is created, and afterwards only averages
        gradients. A rank that is changed alone stays different.

    How to fix it
        Load weights before `DistributedDataParallel(model)`, which broadcasts rank 0's; or load
        them on every rank; or broadcast them: `dist.broadcast(parameter.data, src=0)`.

    Example
        Wrong:
            if rank == 0:
                ddp.module.load_state_dict(torch.load("best.pt"))
        Right:
            state = torch.load("best.pt", map_location="cpu")
            ddp.module.load_state_dict(state)  # on every rank

    When it stays silent
        For weights loaded on every rank or before DDP was created, for changes that are undone
        before the next step (weights swapped for an evaluation), and for other copies of the model.
    """
    for replica in replicas(run):
        difference = replica.difference("parameters")
        changes = difference and rank_only_changes(replica, difference)
        if difference is None or awaits_distances(replica):
            continue
        if not changes:
            where = _likely_change(run, replica, difference)
            if where is not None:
                yield _likely(run, replica, difference, where)
            continue
        guilty = tuple(sorted(changes))
        record = changes[guilty[0]]
        loaded = isinstance(record, LoadRecord)
        what = "loaded weights" if loaded else "changed parameters"
        step = record.step + (not loaded)
        others = [rank for rank in sorted(replica.prints) if rank not in guilty]
        names = record.names if isinstance(record, OutsideRecord) else ()
        detail = f": {', '.join(names[:3])}" if names else ""
        lines = [] if loaded else written_on_some_ranks(run, "weights")
        yield Finding(
            code="DDP319",
            about=f"module {replica.module}",
            subjects=frozenset((f"{PARAMETERS}{replica.module}",)),
            severity=Severity.ERROR,
            message=f"{named(guilty)} {what} after DDP was built and {named(others)} did not: "
            f"the parameters differ {difference.since}",
            ranks=guilty,
            location=lines[0] if len(lines) == 1 else getattr(record, "location", None),
            evidence=(
                *when_differed(replica, difference),
                f"{named(guilty)} {what} before step {step}{detail}",
                *likely_written(lines, "weights"),
                *tensor_evidence(replica, difference),
            ),
            fix=_ALIKE,
        )


def _likely(run: Run, replica: Replica, difference: Difference, where: Location) -> Finding:
    everyone = tuple(sorted(replica.prints))
    guilty = replica.odd(difference.first, "parameters") or ranks_that_write(run, [where])
    return Finding(
        code="DDP319",
        about=f"module {replica.module}",
        subjects=frozenset((LIKELY, f"{PARAMETERS}{replica.module}")),
        severity=Severity.ERROR,
        message=f"the parameters differ between ranks {difference.since} though their gradients "
        "are equal: this line, which some ranks alone run, is likely what changes them",
        ranks=guilty or everyone,
        location=where,
        evidence=(
            *when_differed(replica, difference),
            *likely_written([where], "weights"),
            *tensor_evidence(replica, difference),
        ),
        fix=_ALIKE,
    )


def _likely_change(run: Run, replica: Replica, difference: Difference) -> Location | None:
    """The only line of the job by which equal gradients can have led to other weights.

    What is written through `.data` is seen by nothing but its effect.
    """
    rich = [each for step in replica.steps if (each := gradients_since(replica, difference, step))]
    if not rich or any(len(set(map(str, each.values()))) > 1 for each in rich):
        return None
    seen = any(
        is_between(record, replica, difference)
        for rank in replica.ranks
        for record in rank.records.of(OutsideRecord)
    )
    lines = [] if seen else written_on_some_ranks(run, "weights")
    # It is likely only as long as nothing else is known, be it said or not.
    if len(lines) != 1 or any(hyper_difference(each) for each in replicas(run)):
        return None
    state = replica.difference("state")
    return None if state and state.first <= difference.first else lines[0]


# -- divergence by the optimizer (DDP702, DDP703, DDP705): its hyper-parameters, state or scale


_WORDS = {
    "lr": "learning rate",
    "momentum": "momentum",
    "betas": "betas",
    "weight_decay": "weight decay",
}


def _parameters_since(run: Run, step: int) -> frozenset[str]:
    """The parameters, as subjects, that differ from a step on, or a later one."""
    return frozenset(
        f"{PARAMETERS}{replica.module}"
        for replica in replicas(run)
        if (difference := replica.difference("parameters")) and step <= difference.first
    )


def _parameters_too(replica: Replica) -> tuple[str, ...]:
    """That the parameters differ as well, as evidence."""
    parameters = replica.difference("parameters")
    return (f"the parameters differ {parameters.since}",) if parameters else ()


@rule(
    "DDP702",
    "hyper-parameters-differ",
    Severity.ERROR,
    supersedes={"DDP701": same_subject},
)
def hyper_parameters_differ(run: Run) -> Iterator[Finding]:
    """The optimizer's hyper-parameters differ between ranks.

    What it finds
        A learning rate, momentum, betas or weight decay of a parameter group that differs between
        ranks after the same step.

    Why it is bad
        The gradients are equal, but each rank takes a different step: the parameters diverge
        without any error.

    How to fix it
        Make the same decision on all ranks: average the metric that a scheduler gets, and do not
        derive hyper-parameters from the rank.

    Example
        Wrong:
            scheduler.step(validation_loss)  # the loss of this rank's data
        Right:
            dist.all_reduce(validation_loss, op=dist.ReduceOp.AVG)
            scheduler.step(validation_loss)

    When it stays silent
        For values on a GPU, for groups after the fourth, and, in a running job, for a difference in
        a single fingerprint.
    """
    for replica in replicas(run):
        found = hyper_difference(replica)
        if found is None:
            continue
        difference, (optimizer, group, index) = found
        values = {
            rank: value_at(value, optimizer, group, index)
            for rank, value in replica.values(difference.first, "hyper").items()
        }
        written_at = written_on_some_ranks(run, "hyper-parameters")
        everyone = tuple(sorted(values))
        guilty = odd(values) or who_changed(replica, difference, optimizer, group, index)
        if guilty in ((), everyone) and next(cuts(replica, difference), None) is None:
            # A scheduler changes it on all ranks; the line says who did more.
            guilty = ranks_that_write(run, written_at)
        cut = last_cut(replica, difference, guilty or everyone)
        what = _WORDS[HYPER[index]]
        listed = ", ".join(f"{shown_value(values[rank])} on rank {rank}" for rank in everyone[:4])
        groups = f"parameter group {group}, optimizer {optimizer}"
        lines = [] if cut else written_at
        written = lines[0] if len(lines) == 1 else member(replica, guilty).site("optimizer")
        yield Finding(
            code="DDP702",
            about=f"module {replica.module} {HYPER[index]}",
            subjects=_parameters_since(run, difference.first),
            severity=Severity.ERROR,
            message=f"the {what} differs between ranks {difference.since}: {listed}"
            + ("; ReduceLROnPlateau follows a metric that is not averaged" if cut else ""),
            ranks=guilty or everyone,
            location=cut.location if cut else written,
            evidence=(
                *when_differed(replica, difference),
                f"{groups}: {listed}",
                *(
                    f"{named((rank,))} cut it before step {record.step}"
                    for rank, record in cuts(replica, difference)
                ),
                *_parameters_too(replica),
                *likely_written(lines, "hyper-parameters"),
            ),
            fix="Average the metric over the ranks (dist.all_reduce) before scheduler.step(metric)."
            if cut
            else "Set the same value on every rank.",
        )


# -- the optimizer's state


@rule(
    "DDP703",
    "optimizer-state-differs",
    Severity.ERROR,
    supersedes={"DDP701": same_subject},
)
def optimizer_state_differs(run: Run) -> Iterator[Finding]:
    """The optimizer's state was loaded on some ranks only, and differs since then.

    What it finds
        Momentum, moments or step counts (a hash of all tensors in `optimizer.state`) that differ
        between ranks, after an `optimizer.load_state_dict` on some ranks only.

    Why it is bad
        DDP broadcasts the model's weights when it is created, but not the optimizer's state. With
        equal gradients, each rank takes a different step, and the parameters diverge.

    How to fix it
        Load the checkpoint on every rank, including the optimizer's state.

    Example
        Wrong:
            if rank == 0:
                optimizer.load_state_dict(checkpoint["optimizer"])
        Right:
            optimizer.load_state_dict(checkpoint["optimizer"])

    When it stays silent
        For `ZeroRedundancyOptimizer`, whose state is sharded, for states that every rank loaded,
        and for differences of unknown cause (DDP701 reports the parameters).
    """
    for replica in replicas(run):
        found = resumed_alone(replica)
        if not found:
            continue
        difference, resumed = found
        guilty = tuple(sorted(resumed))
        others = [rank for rank in sorted(replica.prints) if rank not in guilty]
        record = resumed[guilty[0]]
        yield Finding(
            code="DDP703",
            about="optimizer state",
            # From which step on it differs is seen late: not each fingerprint has the state.
            subjects=_parameters_since(run, 0),
            severity=Severity.ERROR,
            message=f"{named(guilty)} loaded the optimizer's state and {named(others)} did not: "
            f"it differs {difference.since}",
            ranks=guilty,
            location=record.location,
            evidence=(
                *when_differed(replica, difference),
                f"{named(guilty)} loaded the state of {record.what} before step {record.step}",
                *_parameters_too(replica),
            ),
            fix="Load the optimizer's state on every rank.",
        )
        return


# -- the scale of mixed precision


@rule("DDP705", "scale-differs", Severity.ERROR, supersedes={"DDP701": same_subject})
def scale_differs(run: Run) -> Iterator[Finding]:
    """The GradScaler's scale differs between ranks.

    What it finds
        Different loss scales at the same step.

    Why it is bad
        DDP averages gradients that are still scaled, and each rank divides the average by its
        scale: gradients have the wrong size, ranks skip different steps, and the replicas diverge.

    How to fix it
        Create the scaler with the same arguments and load its state on every rank. Run every
        backward through DDP's all-reduce, so that all ranks see the same overflows.

    Example
        Wrong:
            if rank == 0:
                scaler.load_state_dict(checkpoint["scaler"])
        Right:
            scaler.load_state_dict(checkpoint["scaler"])

    When it stays silent
        For a difference that disappears, and, in a running job, for a difference in a single
        fingerprint.
    """
    for replica in replicas(run):
        difference = replica.difference("scale")
        if difference is None:
            continue
        parameters = replica.difference("parameters")
        if parameters and parameters.first < difference.first:
            # The consequence: replicas that differ overflow at different steps. No relation of
            # rules, since replicas that are averaged differ without a finding.
            continue
        values = replica.values(difference.first, "scale")
        guilty = odd(values)
        everyone = tuple(sorted(values))
        listed = ", ".join(f"{shown_value(values[rank])} on rank {rank}" for rank in everyone[:4])
        yield Finding(
            code="DDP705",
            about="scale",
            subjects=_parameters_since(run, difference.first),
            severity=Severity.ERROR,
            message=f"the GradScaler's scale differs between ranks {difference.since}: {listed}",
            ranks=guilty or everyone,
            location=member(replica, guilty).site("optimizer"),
            evidence=(
                *when_differed(replica, difference),
                *_parameters_too(replica),
            ),
            fix="Make the scaler with the same arguments, and load its state, on every rank.",
        )
