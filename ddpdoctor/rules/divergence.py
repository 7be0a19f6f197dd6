"""Divergence (DDP701, DDP319): parameters that stopped being equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis import averaging
from ddpdoctor.analysis.replica_changes import (
    awaits_distances,
    gradients_since,
    hyper_difference,
    is_between,
    rank_only_changes,
)
from ddpdoctor.analysis.replicas import Difference, Replica, replicas
from ddpdoctor.analysis.writes import likely, on_some_ranks, ranks_of
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import LIKELY, PARAMETERS, certain, of_likely, same_subject
from ddpdoctor.rules.replica_evidence import bounds, member, tensors
from ddpdoctor.run.records.replicas import LoadRecord, OutsideRecord
from ddpdoctor.run.snapshot import Run

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
        if averaging.pending(run) or not replica.lasts(difference):
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
            evidence=(*bounds(replica, difference), *tensors(replica, difference), *evidence),
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
        lines = [] if loaded else on_some_ranks(run, "weights")
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
                *bounds(replica, difference),
                f"{named(guilty)} {what} before step {step}{detail}",
                *likely(lines, "weights"),
                *tensors(replica, difference),
            ),
            fix=_ALIKE,
        )


def _likely(run: Run, replica: Replica, difference: Difference, where: Location) -> Finding:
    everyone = tuple(sorted(replica.prints))
    guilty = replica.odd(difference.first, "parameters") or ranks_of(run, [where])
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
            *bounds(replica, difference),
            *likely([where], "weights"),
            *tensors(replica, difference),
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
    lines = [] if seen else on_some_ranks(run, "weights")
    # It is likely only as long as nothing else is known, be it said or not.
    if len(lines) != 1 or any(hyper_difference(each) for each in replicas(run)):
        return None
    state = replica.difference("state")
    return None if state and state.first <= difference.first else lines[0]
