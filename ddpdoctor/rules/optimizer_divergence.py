"""Divergence by the optimizer (DDP702, DDP703, DDP705): its hyper-parameters, state or scale."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.replica_changes import (
    HYPER,
    cuts,
    hyper_difference,
    last_cut,
    resumed_alone,
    value_at,
    who_changed,
)
from ddpdoctor.analysis.replicas import Replica, odd, replicas
from ddpdoctor.analysis.writes import likely, on_some_ranks, ranks_of
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import PARAMETERS, same_subject
from ddpdoctor.rules.replica_evidence import bounds, member, shown
from ddpdoctor.run.snapshot import Run

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
        written_at = on_some_ranks(run, "hyper-parameters")
        everyone = tuple(sorted(values))
        guilty = odd(values) or who_changed(replica, difference, optimizer, group, index)
        if guilty in ((), everyone) and next(cuts(replica, difference), None) is None:
            # A scheduler changes it on all ranks; the line says who did more.
            guilty = ranks_of(run, written_at)
        cut = last_cut(replica, difference, guilty or everyone)
        what = _WORDS[HYPER[index]]
        listed = ", ".join(f"{shown(values[rank])} on rank {rank}" for rank in everyone[:4])
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
                *bounds(replica, difference),
                f"{groups}: {listed}",
                *(
                    f"{named((rank,))} cut it before step {record.step}"
                    for rank, record in cuts(replica, difference)
                ),
                *_parameters_too(replica),
                *likely(lines, "hyper-parameters"),
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
                *bounds(replica, difference),
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
        listed = ", ".join(f"{shown(values[rank])} on rank {rank}" for rank in everyone[:4])
        yield Finding(
            code="DDP705",
            about="scale",
            subjects=_parameters_since(run, difference.first),
            severity=Severity.ERROR,
            message=f"the GradScaler's scale differs between ranks {difference.since}: {listed}",
            ranks=guilty or everyone,
            location=member(replica, guilty).site("optimizer"),
            evidence=(
                *bounds(replica, difference),
                *_parameters_too(replica),
            ),
            fix="Make the scaler with the same arguments, and load its state, on every rank.",
        )
