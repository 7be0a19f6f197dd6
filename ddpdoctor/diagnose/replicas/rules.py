"""Rules for replicas that diverge (DDP319, DDP701 to 705), or differ at the start (DDP707)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import LIKELY, MODELS, PARAMETERS, certain, of_likely, same_subject
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.replicas.differences import (
    HYPER,
    Difference,
    Replica,
    awaits_distances,
    common_records,
    cuts,
    elements,
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
from ddpdoctor.run.records.model import BuffersRecord, LoadRecord, ModelRecord, OutsideRecord
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


@rule("DDP702", "hyper-parameters-differ", Severity.ERROR, supersedes={"DDP701": same_subject})
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


@rule("DDP703", "optimizer-state-differs", Severity.ERROR, supersedes={"DDP701": same_subject})
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


# -- models and buffers


@rule("DDP707", "models-differ", Severity.ERROR)
def models_differ(run: Run) -> Iterator[Finding]:
    """The model structure differs between ranks.

    What it finds
        Trainable parameters whose number, order, shape or dtype differs between ranks when
        `DistributedDataParallel` is created.

    Why it is bad
        DDP matches parameters by their order only. It raises on some ranks and leaves the others
        waiting. If only dtype or order differ, it raises no error, and broadcasts and averages
        unrelated bytes.

    How to fix it
        Build the model from the same configuration on every rank. If the data determine a
        vocabulary or a number of classes, use all of the data, or broadcast the result.

    Example
        Wrong: `nn.Linear(512, len(set(my_shard_labels)))`
        Right: `nn.Linear(512, len(set(all_labels)))`

    When it stays silent
        For parameters with `requires_grad=False`, for names that differ while everything else is
        equal, and after the 16th model of a process.
    """
    shared: dict[tuple[int, tuple[int, ...]], dict[int, ModelRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(ModelRecord):
            if rank.rank in record.group:
                shared.setdefault((record.number, record.group), {})[rank.rank] = record
    for (number, group), models in sorted(shared.items()):
        missing = any(rank.rank in group and rank.rank not in models for rank in run.last)
        if missing and run.exit_status is None:
            # The missing rank may change the majority.
            continue
        if not _differ(models):
            continue
        kinds: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for each, record in sorted(models.items()):
            kinds[_kind(record, models)].append(each)
        groups = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
        # Without a majority, each group is compared with that of the lowest rank.
        majority = 2 * len(groups[0]) > len(models)
        usual = groups[0] if majority else min(groups)
        odd = [ranks for ranks in groups if ranks is not usual]
        yield Finding(
            code="DDP707",
            about=f"model {number}",
            subjects=frozenset((MODELS,)),
            severity=Severity.ERROR,
            message=_message(models, usual, odd, majority),
            ranks=tuple(sorted(rank for ranks in (odd if majority else groups) for rank in ranks)),
            location=models[odd[0][0]].location,
            evidence=tuple(
                f"{named(ranks)}: {models[ranks[0]].count} parameters, "
                f"{sum(math.prod(each.shape) for each in models[ranks[0]].parameters):,} elements"
                for ranks in sorted(groups)[:6]
            ),
            fix="Build the model from the same configuration on every rank; count classes and "
            "vocabularies in all of the data, or broadcast them.",
        )


_SHOWN = 4  # Maximum number of groups of ranks in a message


def _message(
    models: dict[int, ModelRecord], usual: list[int], odd: list[list[int]], majority: bool
) -> str:
    """Describe how the model of each group of ranks differs from the usual one."""
    first = models[usual[0]]
    if majority and len(odd) == 1:
        verb = "give" if len(odd[0]) > 1 else "gives"
        return (
            f"{named(odd[0])} {verb} DDP another model than {named(usual)}: "
            f"{_first_difference(models[odd[0][0]], first)}"
        )
    everyone = named(models if not majority else [rank for ranks in odd for rank in ranks])
    head = f"{everyone} give DDP {'other' if majority else 'different'} models"
    than = f" than {named(usual)}" if majority else f", here against {named(usual)}"
    parts = [
        f"on {named(ranks)}, {_first_difference(models[ranks[0]], first)}" for ranks in odd[:_SHOWN]
    ]
    more = f"; {len(odd) - _SHOWN} more kinds" if len(odd) > _SHOWN else ""
    return f"{head}{than}: {'; '.join(parts)}{more}"


def _kind(record: ModelRecord, models: dict[int, ModelRecord]) -> tuple[object, ...]:
    """Return the properties that must be equal. Names only if all ranks have the same."""
    named_alike = {frozenset(each[0] for each in one.parameters) for one in models.values()}
    parameters = record.parameters
    if len(named_alike) > 1:
        return record.count, *(each[1:] for each in parameters)
    return record.count, *parameters


def _differ(models: dict[int, ModelRecord]) -> bool:
    """Return whether more than names differ: shapes, dtypes, counts, or the order of names."""
    found = [record.parameters for record in models.values()]
    if len({record.count for record in models.values()}) > 1:
        return True
    if len({tuple(each[1:] for each in parameters) for parameters in found}) > 1:
        return True
    names = [tuple(name for name, _, _ in parameters) for parameters in found]
    return len(set(names)) > 1 and len({frozenset(each) for each in names}) == 1


def _first_difference(here: ModelRecord, there: ModelRecord) -> str:
    """Describe the first parameter that differs."""
    mine, theirs = here.parameters, there.parameters
    for (name, shape, dtype), (other, shape_there, dtype_there) in zip(mine, theirs, strict=False):
        if shape != shape_there:
            return f"{name or other} is {list(shape)}, not {list(shape_there)}"
        if dtype != dtype_there:
            return f"{name or other} is {dtype}, not {dtype_there}"
        if name != other and here.count == there.count:
            return f"{name} stands in the place of {other}"
    # Only the first parameters of a large model are listed.
    more, fewer = (mine, theirs) if here.count > there.count else (theirs, mine)
    known = {name for name, _, _ in fewer}
    names = ", ".join([name for name, _, _ in more if name not in known][:3]) or "some parameter"
    return f"it has {names}, too" if more is mine else f"it is without {names}"


# -- buffers

MIN_SAMPLES = 3  # Minimum number of consecutive samples with a difference
NEAR = 0.5  # Maximum difference of two ranks' versions of one buffer, relative to the norm
SLOW = 0.75
"""Maximum change of an accumulating buffer per step, relative to the distance between ranks."""

_Sample = tuple[int, list[BuffersRecord], list[int]]
"""A step, the ranks' records, and the buffer's index in each record."""


@rule("DDP704", "buffers-differ", Severity.WARNING)
def buffers_differ(run: Run) -> Iterator[Finding]:
    """A buffer of the model differs between ranks, and DDP does not broadcast it.

    What it finds
        Floating-point buffers of the state dict that differ between ranks when a forward begins,
        after DDP's broadcast, but stay similar and change little per step: a codebook, a center or
        an average that each rank computes from its data. A warning if DDP was meant to broadcast
        them: it does not if the module had no buffers when DDP was created. Information with
        `broadcast_buffers=False`, and for single numbers, which may be a rank's metrics.

    Why it is bad
        The ranks compute with values that differ from the saved ones, which are rank 0's. The
        values of the other ranks are lost.

    How to fix it
        Make the update the same on every rank: all-reduce the values that the buffer is computed
        from. Register buffers in `__init__`, before DDP is created, and let DDP broadcast them.

    Example
        Wrong:
            self.codebook.lerp_(means, 0.01)  # means of this rank's batch
        Right:
            dist.all_reduce(means, op=dist.ReduceOp.AVG)
            self.codebook.lerp_(means, 0.01)

    When it stays silent
        For running statistics (BatchNorm, InstanceNorm, names like `running_mean`), integers,
        buffers that are not saved (`persistent=False`), buffers that DDP ignores by request, and
        buffers that are unrelated or new in every step (hidden states, queues). Without the
        broadcast, for buffers that differ from the start.
    """
    for replica in replicas(run):
        samples = common_records(replica.ranks, BuffersRecord, replica.module)
        names = {
            name for records in samples.values() for record in records for name in record.names
        }
        found = [
            each
            for name in sorted(names)
            if (each := _buffer_difference(replica, samples, name)) is not None
        ]
        if not found:
            continue
        meant = any(each.broadcast for each in found)
        found = [each for each in found if each.broadcast == meant]
        first, built = found[0], replica.ranks[0].ddp(replica.module)
        what = f"{first.name} differs"
        if len(found) > 1:
            what = f"{first.name} and {len(found) - 1} more differ"
        everyone = tuple(rank.rank for rank in replica.ranks)
        why = (
            "DDP broadcasts no buffers, as the module had none when DDP was built"
            if meant
            else "DDP's broadcast of buffers is turned off"
        )
        warns = meant and not all(each.single for each in found)
        yield Finding(
            code="DDP704",
            about=f"module {replica.module}",
            severity=Severity.WARNING if warns else Severity.INFO,
            message=f"buffer {what} between {named(everyone)} since step {first.step}, and {why}",
            ranks=everyone,
            location=built.location if built is not None else None,
            evidence=tuple(each.text for each in found[:3]),
            fix="Register it before DistributedDataParallel(model), which then broadcasts rank 0's,"
            " or all-reduce the values that it is computed from."
            if meant
            else "If it is meant to be one for all ranks, all-reduce what it is computed from; a "
            "checkpoint holds rank 0's alone.",
        )


@dataclass(frozen=True)
class _BufferDifference:
    name: str
    step: int
    broadcast: bool
    single: bool  # Whether it is a single number, such as a rank's average loss
    text: str


def _buffer_difference(
    replica: Replica, written: dict[tuple[int, int], list[BuffersRecord]], name: str
) -> _BufferDifference | None:
    """Return the difference of a buffer if it became different and remained so."""
    samples: list[_Sample] = [
        (step, records, [record.names.index(name) for record in records])
        for (step, _), records in written.items()
        if all(name in record.names for record in records)
    ]
    differs = [
        len({record.hashes[at : at + 1] for record, at in zip(records, places, strict=True)}) > 1
        for _, records, places in samples
    ]
    if True not in differs:
        return None
    first = differs.index(True)
    if len(differs) - first < MIN_SAMPLES or not all(differs[first:]):
        return None
    step, records, places = samples[-1]
    broadcast = all(record.broadcast for record in records)
    if (first == 0 and not broadcast) or not _gathers(samples[first:]):
        return None
    values = [_values(record, at) for record, at in zip(records, places, strict=True)]
    norms = [
        f"{math.hypot(*each):.4g} on rank {rank.rank}"
        for each, rank in zip(values[:4], replica.ranks, strict=False)
    ]
    equal = f"equal before step {samples[first - 1][0]}, " if first else ""
    return _BufferDifference(
        name,
        samples[first][0],
        broadcast,
        len(values[0]) == 1,
        f"{name}: {equal}different at all {len(differs) - first} looks from step "
        f"{samples[first][0]} to {step}; norm of {len(values[0])} elements {', '.join(norms)}",
    )


def _values(record: BuffersRecord, at: int) -> tuple[float, ...]:
    return elements(record.samples[at]) if at < len(record.samples) else ()


def _gathers(samples: list[_Sample]) -> bool:
    """Return whether ranks hold versions of one buffer: similar, and changing little per step.

    A buffer computed from each batch changes per step as much as ranks differ.
    """
    values = {
        step: [_values(record, at) for record, at in zip(records, places, strict=True)]
        for step, records, places in samples
    }
    pairs = [(each, values[step + 1]) for step, each in values.items() if step + 1 in values]
    if not pairs:
        return False
    before, after = pairs[-1]
    differences = [_distance(after[0], other) for other in after[1:]]
    moved = [_distance(one, other) for one, other in zip(before, after, strict=True)]
    size = max(math.hypot(*each) for each in after)
    if not all(map(math.isfinite, (*differences, *moved, size))):
        return False
    return 0 < max(differences) <= NEAR * size and max(moved) <= SLOW * max(differences)


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the distance of two lists of values. Infinity if they cannot be compared."""
    return math.dist(one, other) if len(one) == len(other) else math.inf
