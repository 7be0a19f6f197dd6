"""Rules for replicas that diverge (DDP319, DDP701, DDP702, DDP703, DDP705)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import LIKELY, PARAMETERS, certain, of_likely, same_subject
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.replicas.differences import (
    HYPER,
    Difference,
    Replica,
    awaits_distances,
    cuts,
    hyper_difference,
    hyper_values,
    is_between,
    lasting_difference,
    odd,
    rank_only_changes,
    replicas,
    resumed_alone,
    who_changed,
)
from ddpdoctor.diagnose.source_operations import (
    guarded_call,
    likely_written,
    ranks_that_write,
    written_after,
    written_on_some_ranks,
)
from ddpdoctor.run.records.model import LoadRecord, OutsideRecord
from ddpdoctor.run.snapshot import Run

# -- evidence


def _optimizer_line(replica: Replica, guilty: tuple[int, ...]) -> Location | None:
    """Return the line of the optimizer's step on a guilty rank, or on any if none is guilty."""
    member = next((rank for rank in replica.ranks if rank.rank in guilty), replica.ranks[0])
    return member.site("optimizer")


def _when_differed(replica: Replica, difference: Difference) -> Iterator[str]:
    if difference.equal is not None:
        yield f"equal after step {difference.equal}, different after step {difference.first}"
    yield (
        f"{difference.seen} fingerprints show it, the last in step {replica.steps[-1]} "
        f"({replica.type}, {len(replica.names)} parameters)"
    )


def _tensor_evidence(replica: Replica, difference: Difference) -> Iterator[str]:
    """Describe the tensors that differ, by the differences of their elements or by their norms."""
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
        norms = [f"{details[rank][index][1]:.6g} on rank {rank}" for rank in everyone[:4]]
        yield f"{replica.names[index]}: norm {', '.join(norms)}"


def _listed(values: dict[int, object]) -> str:
    """List the values of the first ranks."""
    shown = (
        (rank, f"{value:g}" if isinstance(value, (int, float)) else value)
        for rank, value in sorted(values.items())[:4]
    )
    return ", ".join(f"{value} on rank {rank}" for rank, value in shown)


# -- parameters

CAUSES = ("DDP301", "DDP302", "DDP303", "DDP305", "DDP306", "DDP308", "DDP322")
"""Faults that make parameters differ."""


@rule(
    "DDP701",
    "parameters-differ",
    Severity.ERROR,
    yields_to=dict.fromkeys(CAUSES, certain),
    twice=True,
)
def parameters_differ(run: Run) -> Iterator[Finding]:
    """The parameters of a DDP module differ between ranks.

    What it finds
        Fingerprints (hashes of each parameter's bits after the same optimizer step) that were equal
        and now differ: the first step, the first tensors, and whether their gradients already
        differed. In a running job, ranks then compare 16 steps in a row, at most twice, and up to
        4,096 elements of the first three tensors. The finding waits a few seconds for that, and for
        a second examination. If the job has ended, it reports norms.

    Why it is bad
        DDP averages gradients, never parameters: once replicas differ, they stay different. The
        saved model is only rank 0's.

    How to fix it
        Change parameters only in `optimizer.step()`, or in the same way on every rank: broadcast
        values that one rank computes, and draw random numbers with the same seed. Gradients that
        differ did not pass through DDP's all-reduce, or were changed after it.

    Example
        Wrong: `p.grad += torch.randn_like(p)`, with a different seed on each rank.
        Right: `p.grad += torch.randn(p.shape, generator=same_seed)`

    When it stays silent
        For replicas that are averaged, as in local SGD: they are equal again after a collective, or
        a line that averages parameters has not run yet. For parameters that DDP ignores. If another
        finding names the cause (DDP301, 302, 303, 305, 308, 319, 702, 709). Until a second
        fingerprint confirms the first difference, or the job ends.
    """
    found: dict[tuple[str, Location | None], list[tuple[Replica, Finding]]] = {}
    for replica in replicas(run):
        difference = lasting_difference(run, replica)
        if difference is None:
            continue
        cause, evidence = _cause(replica, difference)
        guilty = replica.odd(difference.first, "parameters")
        everyone = tuple(sorted(replica.prints))
        what = f"{named(everyone)} have different parameters"
        if guilty:
            verb = "have" if len(guilty) > 1 else "has"
            what = f"{named(guilty)} {verb} other parameters than the other ranks"
        location, fix = _optimizer_line(replica, guilty), _CHANGE_ALIKE
        if cause == _BEFORE_STEPS:
            built = replica.ranks[0].ddp(replica.module)
            wrapped = built.location if built is not None else None
            location, fix = written_after(wrapped) or wrapped, _WRAP_LAST
        finding = Finding(
            code="DDP701",
            about=f"module {replica.module}",
            subjects=frozenset((f"{PARAMETERS}{replica.module}",)),
            severity=Severity.ERROR,
            message=f"{what} {difference.since}: {cause}",
            ranks=guilty or everyone,
            location=location,
            evidence=(
                *_when_differed(replica, difference),
                *_tensor_evidence(replica, difference),
                *evidence,
            ),
            fix=fix,
        )
        found.setdefault((finding.message, location), []).append((replica, finding))
    for same in found.values():
        yield _of_all([replica for replica, _ in same], [finding for _, finding in same])


_BEFORE_STEPS = (
    "they were changed after DDP was built and before the first step, differently on each rank"
)
_CHANGE_ALIKE = (
    "Change parameters and gradients in the same way on every rank (the same seed, or "
    "a broadcast from one rank), and only between backward and optimizer.step()."
)
_WRAP_LAST = (
    "Initialize the weights before DistributedDataParallel(model), which broadcasts rank 0's."
)


def _of_all(modules: Sequence[Replica], findings: Sequence[Finding]) -> Finding:
    """Return one finding for modules with the same fault, with the facts of the first one."""
    first = findings[0]
    if len(findings) == 1:
        return first
    types = Counter(each.type for each in modules)
    listed = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in types.items())
    return replace(
        first,
        subjects=frozenset().union(*(each.subjects for each in findings)),
        evidence=(f"{len(findings)} modules differ ({listed}); the first one:", *first.evidence),
    )


def _cause(replica: Replica, difference: Difference) -> tuple[str, tuple[str, ...]]:
    """Return the cause, as gradients and changes outside of steps show it, and the evidence."""
    rich = _gradients_since(replica, difference)
    differing = [step for step, values in rich.items() if len(set(values.values())) > 1]
    if differing and differing[0] == next(iter(rich)):
        return (
            "their gradients differ already",
            (
                f"gradients differ at {len(differing)} of {len(rich)} steps looked at, the first "
                f"of them step {differing[0]}: not all-reduced, or changed afterwards",
            ),
        )
    equal: tuple[str, ...] = ()
    if rich and not differing:
        equal = (f"gradients are equal at {len(rich)} of {len(rich)} steps looked at",)
    between = {
        rank.rank: steps
        for rank in replica.ranks
        if (
            steps := [
                each.step
                for each in rank.records.of(OutsideRecord)
                if is_between(each, replica, difference)
            ]
        )
    }
    changed = sorted(between)
    if changed and all(max(steps) < 0 for steps in between.values()):
        return _BEFORE_STEPS, (f"{named(changed)} changed them before step 0", *equal)
    if changed:
        return (
            "they were changed outside of the optimizer's step, differently on each rank",
            (f"{named(changed)} changed them between two optimizer steps", *equal),
        )
    return "they became different within or between optimizer steps", equal


def _gradients_since(replica: Replica, difference: Difference) -> dict[int, dict[int, object]]:
    """Return the hashes of the ranks' gradients by step, from the difference on."""
    return {
        step: values
        for step in replica.steps
        if step >= difference.first and (values := replica.values(step, "gradients"))
    }


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
        gradients. If only some ranks change their weights, they stay different.

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
        if difference is None or awaits_distances(replica):
            continue
        changes = rank_only_changes(replica, difference)
        subjects = {f"{PARAMETERS}{replica.module}"}
        lines: list[Location] = []
        known = ""
        called: tuple[str, ...] = ()
        if changes:
            guilty = tuple(sorted(changes))
            record = changes[guilty[0]]
            others = [rank for rank in sorted(replica.prints) if rank not in guilty]
            if isinstance(record, LoadRecord):
                what, step = "loaded weights", f"{record.step}"
                location, called = guarded_call(run, record.location)
            else:
                what, lines = "changed parameters", written_on_some_ranks(run, "weights")
                names = f": {', '.join(record.names[:3])}" if record.names else ""
                step = f"{record.step + 1}{names}"
                location = lines[0] if len(lines) == 1 else None
            message = (
                f"{named(guilty)} {what} after DDP was built and {named(others)} did not: "
                f"the parameters differ {difference.since}"
            )
            known = f"{named(guilty)} {what} before step {step}"
        else:
            location = _likely_change(run, replica, difference)
            if location is None:
                continue
            subjects.add(LIKELY)
            lines = [location]
            guilty = replica.odd(difference.first, "parameters") or ranks_that_write(run, lines)
            message = (
                f"the parameters differ between ranks {difference.since} though their gradients "
                "are equal: this line, which only some ranks run, likely changes them"
            )
        yield Finding(
            code="DDP319",
            about=f"module {replica.module}",
            subjects=frozenset(subjects),
            severity=Severity.ERROR,
            message=message,
            ranks=guilty or tuple(sorted(replica.prints)),
            location=location,
            evidence=(
                *_when_differed(replica, difference),
                *([known] if known else []),
                *called,
                *likely_written(lines, "weights"),
                *_tensor_evidence(replica, difference),
            ),
            fix="Do it on every rank, or before DistributedDataParallel(model), which broadcasts "
            "rank 0's weights.",
        )


def _likely_change(run: Run, replica: Replica, difference: Difference) -> Location | None:
    """Return the only line of the job that may have changed weights despite equal gradients.

    A write through `.data` can be observed only by its effect.
    """
    rich = _gradients_since(replica, difference).values()
    if not rich or any(len(set(map(str, each.values()))) > 1 for each in rich):
        return None
    seen = any(
        is_between(record, replica, difference)
        for rank in replica.ranks
        for record in rank.records.of(OutsideRecord)
    )
    lines = [] if seen else written_on_some_ranks(run, "weights")
    # The line is a likely cause only if no other cause is known.
    if len(lines) != 1 or any(hyper_difference(each) for each in replicas(run)):
        return None
    state = replica.difference("state")
    return None if state and state.first <= difference.first else lines[0]


# -- hyper-parameters, state and scale of the optimizer

_HYPER_NAMES = {
    "lr": "learning rate",
    "momentum": "momentum",
    "betas": "betas",
    "weight_decay": "weight decay",
}


def _parameters_since(run: Run, step: int) -> frozenset[str]:
    """Return the subjects of parameters that began to differ in this step or later."""
    return frozenset(
        f"{PARAMETERS}{replica.module}"
        for replica in replicas(run)
        if (difference := replica.difference("parameters")) and step <= difference.first
    )


def _parameters_too(replica: Replica) -> tuple[str, ...]:
    """Return the evidence that the parameters differ as well."""
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
        Make the same decision on all ranks: average the metric for the scheduler, and do not derive
        hyper-parameters from the rank.

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
        difference, place = found
        optimizer, group, index = place
        values = hyper_values(replica, difference.first, place)
        listed = _listed(values)
        everyone = tuple(sorted(values))
        all_cuts = cuts(replica, difference)
        written_at = written_on_some_ranks(run, "hyper-parameters")
        guilty = odd(values) or who_changed(replica, difference, place)
        if guilty in ((), everyone) and not all_cuts:
            # A scheduler changes the rate on all ranks. The line shows who else did.
            guilty = ranks_that_write(run, written_at)
        cut = next(
            (record for rank, record in reversed(all_cuts) if rank in (guilty or everyone)), None
        )
        lines = [] if cut else written_at
        written = lines[0] if len(lines) == 1 else _optimizer_line(replica, guilty)
        yield Finding(
            code="DDP702",
            about=f"module {replica.module} {HYPER[index]}",
            subjects=_parameters_since(run, difference.first),
            severity=Severity.ERROR,
            message=f"the {_HYPER_NAMES[HYPER[index]]} differs between ranks {difference.since}: "
            f"{listed}"
            + ("; ReduceLROnPlateau follows a metric that is not averaged" if cut else ""),
            ranks=guilty or everyone,
            location=cut.location if cut else written,
            evidence=(
                *_when_differed(replica, difference),
                f"parameter group {group}, optimizer {optimizer}: {listed}",
                *(f"rank {rank} cut it before step {record.step}" for rank, record in all_cuts),
                *_parameters_too(replica),
                *likely_written(lines, "hyper-parameters"),
            ),
            fix="Average the metric over the ranks (dist.all_reduce) before scheduler.step(metric)."
            if cut
            else "Set the same value on every rank.",
        )


@rule(
    "DDP703",
    "optimizer-state-differs",
    Severity.ERROR,
    supersedes={"DDP701": same_subject},
)
def optimizer_state_differs(run: Run) -> Iterator[Finding]:
    """The optimizer's state was loaded on some ranks only, and has differed since then.

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
        location, called = guarded_call(run, record.location)
        yield Finding(
            code="DDP703",
            about="optimizer state",
            # The first differing step may be reported late: only some fingerprints include state.
            subjects=_parameters_since(run, 0),
            severity=Severity.ERROR,
            message=f"{named(guilty)} loaded the optimizer's state and {named(others)} did not: "
            f"it differs {difference.since}",
            ranks=guilty,
            location=location,
            evidence=(
                *_when_differed(replica, difference),
                f"{named(guilty)} loaded the state of {record.what} before step {record.step}",
                *called,
                *_parameters_too(replica),
            ),
            fix="Load the optimizer's state on every rank.",
        )
        return


@rule("DDP705", "scale-differs", Severity.ERROR, supersedes={"DDP701": same_subject})
def scale_differs(run: Run) -> Iterator[Finding]:
    """The GradScaler's scale differs between ranks.

    What it finds
        Different loss scales at the same step.

    Why it is bad
        DDP averages gradients that are still scaled, and each rank divides the average by its own
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
            # Different replicas overflow at different steps. A relation of rules cannot express
            # this, because averaged replicas differ without a finding.
            continue
        values = replica.values(difference.first, "scale")
        guilty = odd(values)
        yield Finding(
            code="DDP705",
            about="scale",
            subjects=_parameters_since(run, difference.first),
            severity=Severity.ERROR,
            message=f"the GradScaler's scale differs between ranks {difference.since}: "
            f"{_listed(values)}",
            ranks=guilty or tuple(sorted(values)),
            location=_optimizer_line(replica, guilty),
            evidence=(*_when_differed(replica, difference), *_parameters_too(replica)),
            fix="Create the scaler with the same arguments, and load its state, on every rank.",
        )
