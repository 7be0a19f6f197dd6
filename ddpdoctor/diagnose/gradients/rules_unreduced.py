"""Rules for gradients that are never averaged (DDP301 to 303, 308, 322, 326, 330).

A backward that DDP does not reduce may be intended: gradients are accumulated, or averaged by hand.
So these rules also require that gradients differed between ranks at the optimizer's step, and that
the parameters have differed since then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count as counted
from ddpdoctor.core.formatting import named
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose import source_files
from ddpdoctor.diagnose.data.draws import passes_of
from ddpdoctor.diagnose.gradients.reducer import Missing, by_module, listed, missing_gradients
from ddpdoctor.diagnose.replicas.differences import (
    Difference,
    lasting_difference,
    replicas,
    together,
)
from ddpdoctor.diagnose.source_operations import (
    averaging_pending,
    no_sync_lines,
    returned_gradients,
)
from ddpdoctor.run.records.model import (
    DdpRecord,
    NoSyncVainRecord,
    SoloEndRecord,
    SoloRecord,
    UnreducedRecord,
)
from ddpdoctor.run.records.process import DataParallelRecord
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- backwards that DDP did not reduce

GRADIENTS_DIFFER = 1e-6
"""Minimum relative difference of the norms of unaveraged gradients. Averaged ones are equal."""
PARAMETERS_DIFFER = 1e-12
"""The same for parameters, which change little at a small learning rate. Norms are doubles."""
MIN_DIFFERENT_STEPS = 6
"""Minimum number of later steps with different parameters in a running job. One is enough if the
job has ended."""


@dataclass(frozen=True)
class Unreduced:
    """Gradients of one DDP module that each rank's optimizer used without averaging."""

    ddp: int
    cause: str
    record: UnreducedRecord  # The lowest rank's record of the first step in which they differed
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    worst: str  # The parameter whose gradients differed most
    norms: dict[int, float]  # The norm of its gradient, by rank
    drift: str  # Describes a later step with different parameters

    def evidence(self) -> tuple[str, ...]:
        """Describe the gradients that differed, and the harm."""
        norms = ", ".join(f"{norm:.6g} on rank {n}" for n, norm in sorted(self.norms.items())[:4])
        return (
            f"in step {self.record.step} the gradient of {self.worst} had the norm {norms} "
            "when the optimizer used it",
            self.drift,
        )


UnreducedSteps = dict[int, dict[int, UnreducedRecord]]
"""Records of one DDP module and cause, by step and rank."""


def unreduced(run: Run, *causes: str) -> Iterator[Unreduced]:
    """Yield harmful unreduced gradients with one of these causes."""
    grouped: dict[tuple[int, tuple[int, ...], str], UnreducedSteps] = {}
    built: dict[tuple[int, tuple[int, ...]], int] = {}
    for rank in run.last:
        for number, ddp in enumerate(rank.records.of(DdpRecord)):
            key = number, ddp.group_ranks
            built[key] = built.get(key, 0) + 1
        for record in rank.records.of(UnreducedRecord):
            module = rank.ddp(record.ddp)
            # Replicas of different groups are different models.
            members = module.group_ranks if module is not None else ()
            if record.cause in causes:
                steps = grouped.setdefault((record.ddp, members, record.cause), {})
                steps.setdefault(record.step, {}).setdefault(rank.rank, record)
    differences = {
        (each.module, tuple(rank.rank for rank in each.ranks)): lasting_difference(run, each)
        for each in replicas(run)
    }
    for (number, members, cause), steps in sorted(grouped.items()):
        # In a running job, wait until all ranks have written about a step.
        live = run.exit_status is None
        needed = max(2, built.get((number, members), 0)) if live else 2
        complete = {step: steps[step] for step in sorted(steps) if len(steps[step]) >= needed}
        difference = differences.get((number, members))
        found = _harm(number, cause, complete, MIN_DIFFERENT_STEPS if live else 1, difference)
        if found is None or averaging_pending(run):
            continue
        group = [rank for rank in run.last if rank.rank in found.ranks]
        if not together(group, number, found.record.step):
            yield found


def _harm(
    number: int, cause: str, steps: UnreducedSteps, certain: int, difference: Difference | None
) -> Unreduced | None:
    """Return the first step whose gradients made the parameters differ.

    Enough later steps must show this, or fingerprints that have differed since that step.
    """
    for step, records in steps.items():
        spreads = _spreads([each.gradients for each in records.values()])
        worst, widest = _widest(spreads)
        if widest < GRADIENTS_DIFFER:
            continue
        moved = [
            (later, *_widest(_spreads([each.parameters for each in after.values()])))
            for later, after in steps.items()
            if later > step
        ]
        # Adam's first step depends only on the gradient's sign, so parameters may still be equal.
        while moved and moved[0][2] <= PARAMETERS_DIFFER:
            del moved[0]
        # Parameters that are equal again were averaged by hand, as in local SGD.
        if any(spread <= PARAMETERS_DIFFER for _, _, spread in moved):
            return None
        if difference is not None and difference.within(step):
            drift = f"the parameters differ between ranks {difference.since}"
        elif len(moved) < certain:
            return None
        else:
            later, name, spread = moved[0]
            drift = (
                f"in step {later} the norms of the parameter {name} differed by {spread:.1e} "
                "between ranks"
            )
        return Unreduced(
            ddp=number,
            cause=cause,
            record=records[min(records)],
            ranks=tuple(sorted(records)),
            names=tuple(name for name in spreads if spreads[name] >= GRADIENTS_DIFFER),
            worst=worst,
            norms={rank: record.gradients[worst] for rank, record in records.items()},
            drift=drift,
        )
    return None


def _widest(spreads: dict[str, float]) -> tuple[str, float]:
    return max(spreads.items(), key=lambda each: each[1], default=("", 0.0))


def _spreads(norms: list[dict[str, float]]) -> dict[str, float]:
    """Return the relative difference between each parameter's norms. 0 if one is not finite."""
    found: dict[str, float] = {}
    for name in norms[0]:
        if all(name in each for each in norms):
            values = [each[name] for each in norms]
            high = max(values) if all(map(math.isfinite, values)) else 0.0
            found[name] = (high - min(values)) / high if high > 0 else 0.0
    return found


def _finding(
    code: str, found: Unreduced, message: str, fix: str, location: Location | None = None
) -> Finding:
    return Finding(
        code=code,
        severity=Severity.ERROR,
        message=f"{named(found.ranks)} train separate models: {message}",
        ranks=found.ranks,
        location=location or found.record.location,
        evidence=found.evidence(),
        fix=fix,
        about=f"module {found.ddp} {found.cause}",
    )


@rule("DDP301", "forward-around-ddp", Severity.ERROR)
def forward_around_ddp(run: Run) -> Iterator[Finding]:
    """The training forward bypasses DDP, so gradients are not synchronized.

    What it finds
        A backward that reached the parameters of a DDP module without a forward through DDP since
        the last step, gradients that differed between ranks when the optimizer used them, and
        parameters that have differed since then.

    Why it is bad
        DDP prepares the all-reduce in its `forward`. After `ddp.module(x)`, or a call of the model
        that was wrapped, every rank trains a separate model without any error. The model in the
        checkpoint has learned from rank 0's data only.

    How to fix it
        Call the DDP object, and move everything that the loss needs into the module's `forward`.

    Example
        Wrong: `loss = ddp.module.loss(batch)`
        Right: `loss = ddp(batch)`

    When it stays silent
        For evaluation, for gradients that are averaged by hand or set to zero before the step, and
        while the ranks' parameters are equal.
    """
    for found in unreduced(run, "around"):
        yield _finding(
            "DDP301",
            found,
            "this backward's forward bypassed DDP, so its gradients were not averaged",
            "Call the DDP object in training, not .module or the model that was wrapped.",
        )


@rule("DDP302", "second-backward", Severity.ERROR)
def second_backward(run: Run) -> Iterator[Finding]:
    """A second backward after one forward is not synchronized.

    What it finds
        A backward that came after DDP had already reduced for its forwards: forward, forward,
        backward, backward, or two backwards of one forward. Its gradients differed between ranks
        when the optimizer used them, and the parameters have differed since then.

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
    for found in unreduced(run, "second backward"):
        yield _finding(
            "DDP302",
            found,
            "this is a second backward after the one that DDP reduced, and its gradients were "
            "not averaged",
            "Add the losses and call backward once, or call forward and backward in turn.",
        )


@rule("DDP308", "no-sync-scope", Severity.ERROR)
def no_sync_scope(run: Run) -> Iterator[Finding]:
    """`no_sync()` covers only the forward or only the backward, or the last micro-batch of a step.

    What it finds
        A forward inside `no_sync()` with its backward outside, or an optimizer step after a forward
        and a backward inside it: the gradients were not synchronized, differed when the optimizer
        used them, and the parameters have differed since then (error). Or a backward inside
        `no_sync()` with its forward outside: it was synchronized anyway (warning).

    Why it is bad
        The forward decides, and the last backward of a step has to be synchronized: it reduces the
        sum that all of them accumulated. Otherwise replicas diverge without any error. In the
        second case, every backward pays for the all-reduce that `no_sync()` was meant to save.

    How to fix it
        Put both the forward and the backward inside the block, but the last micro-batch of each
        step outside, even in the last and shorter step of an epoch.

    Example
        Wrong:
            with model.no_sync() if i % 4 else nullcontext():
        Right:
            last = (i + 1) % 4 == 0 or i + 1 == len(loader)
            with nullcontext() if last else model.no_sync():

    When it stays silent
        If both are inside, and a later synchronized backward reduces the accumulated gradients
        before the step.
    """
    for found in unreduced(run, "forward in no_sync"):
        yield _finding(
            "DDP308",
            found,
            "this backward's forward was inside no_sync(), so its gradients were not averaged",
            "Put forward and backward into no_sync() while accumulating, and both outside of "
            "it before the optimizer's step.",
        )
    for found in unreduced(run, "step in no_sync"):
        backward = found.record.location
        lines = no_sync_lines(backward) if backward is not None else []
        at = lines[0] if len(lines) == 1 else run.rank(found.ranks[0]).site("optimizer")
        where = f" at {backward}" if backward is not None else ""
        yield _finding(
            "DDP308",
            found,
            f"the last backward before the optimizer's step{where} was inside no_sync() "
            "(require_backward_grad_sync=False), so its gradients were not averaged",
            "Leave no_sync() for the last micro-batch before each optimizer step: forward and "
            "backward with require_backward_grad_sync=True reduce all that was accumulated.",
            at,
        )
    for number, vain in by_module(run, NoSyncVainRecord).items():
        record = vain.record
        yield Finding(
            code="DDP308",
            severity=Severity.WARNING,
            message="no_sync() around this backward does nothing, because its forward was outside: "
            "the gradients were reduced anyway",
            ranks=vain.ranks,
            location=record.location,
            evidence=(
                f"first in step {record.step}: the forward had armed the all-reduce, and "
                "the backward within no_sync() ran it",
            ),
            fix="Put the forward into the no_sync() block, too.",
            about=f"module {number} vain",
        )


@rule("DDP322", "autograd-grad", Severity.ERROR)
def autograd_grad(run: Run) -> Iterator[Finding]:
    """Gradients of a DDP module come from `torch.autograd.grad`, which DDP does not average.

    What it finds
        Optimizer steps after a forward through DDP without a backward, in a job that calls
        `torch.autograd.grad`: the gradients differed between ranks when the optimizer used them,
        and the parameters have differed since then.

    Why it is bad
        DDP all-reduces a gradient when backward accumulates it into a parameter. `autograd.grad`
        returns gradients and accumulates none, so each rank trains a separate model.

    How to fix it
        Call `backward()` for the training loss, or all-reduce the returned gradients.

    Example
        Wrong:
            for p, g in zip(params, torch.autograd.grad(loss, params)):
                p.grad = g
        Right: `loss.backward()`

    When it stays silent
        For gradients with respect to inputs (a gradient penalty), for gradients that are averaged
        by hand, and while the ranks' parameters are equal.
    """
    at = returned_gradients(run)
    for found in unreduced(run, "no backward") if at is not None else ():
        yield _finding(
            "DDP322",
            found,
            "the optimizer uses gradients that autograd.grad has returned, which DDP does not "
            "average",
            "Call backward() for the training loss, or all-reduce the returned gradients.",
            at,
        )


_WRAP_LAST = "Change the model before it is wrapped, or wrap it again after the change."


@rule("DDP303", "changed-after-wrap", Severity.ERROR)
def changed_after_wrap(run: Run) -> Iterator[Finding]:
    """Parameters were frozen, unfrozen, replaced or added after DDP was created.

    What it finds
        Parameters that require gradients but are not among those that DDP reduces: their gradients
        differed between ranks when the optimizer used them, and they have differed since then. Also
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
    for found in unreduced(run, "unfrozen", "added", "replaced"):
        built = _built(run, found.ddp)
        yield _finding(
            "DDP303",
            found,
            f"{listed(found.names)} "
            f"{'was' if len(found.names) == 1 else 'were'} {found.cause} after DDP was built "
            "here, so that DDP does not average the gradients",
            _WRAP_LAST,
            built.location if built is not None else None,
        )
    for missing in missing_gradients(run):
        if missing.altered:
            yield _altered(run, missing)


def _built(run: Run, number: int) -> DdpRecord | None:
    return next((each for rank in run.last if (each := rank.ddp(number))), None)


def _altered(run: Run, missing: Missing) -> Finding:
    record = next(
        record
        for record in missing.records.values()
        if any(each.why != "unused" for each in record.parameters)
    )
    changed = [each for each in record.parameters if each.why != "unused"]
    how = " or ".join(sorted({each.why for each in changed}))
    one = record.count == 1
    return Finding(
        code="DDP303",
        severity=Severity.ERROR,
        message=f"{counted(record.count, 'parameter')} that DDP was built here to reduce "
        f"{'was' if one else 'were'} {how} afterwards: "
        f"{listed([each.name for each in changed], record.count)}",
        ranks=missing.ranks,
        location=(_built(run, missing.ddp) or record).location,
        evidence=(
            f"no gradient reached {'it' if one else 'them'} in step {record.step}",
            *missing.evidence(),
        ),
        fix=_WRAP_LAST,
        traceback=missing.error.traceback if missing.error is not None else "",
        about=f"module {missing.ddp} altered",
    )


@rule("DDP330", "trained-outside-ddp", Severity.ERROR)
def trained_outside_ddp(run: Run) -> Iterator[Finding]:
    """An optimizer trains parameters that belong to no DDP module.

    What it finds
        Parameters of an optimizer that are in no DDP module (weights of the loss, a second network,
        a temperature), get gradients in the backward of one, and were equal on all ranks before the
        first step. Their gradients differed between ranks when the optimizer used them, and the
        parameters have differed since then.

    Why it is bad
        DDP averages the gradients of its module only. Each rank trains a separate copy of the rest,
        without any error. Each rank's loss is a different function, and the checkpoint has rank
        0's copy.

    How to fix it
        Make them part of the module that is wrapped, wrap the second module in DDP too, or
        all-reduce their gradients before each step.

    Example
        Wrong:
            model, weights = DDP(net), nn.Parameter(torch.zeros(2))
            optimizer = Adam([*model.parameters(), weights])
        Right:
            net.weights = nn.Parameter(torch.zeros(2))
            model = DDP(net)

    When it stays silent
        For parameters that differ from the beginning (shards, parts of a pipeline), for a model
        with a separate backward, which may belong to the rank alone, for gradients that are
        averaged by hand, with `all_to_all`, if each rank saves a separate file, and while the
        parameters are equal.
    """
    for found in unreduced(run, "outside"):
        members = [rank for rank in run.last if rank.rank in found.ranks]
        parts = any(map(_exchanges_parts, members)) or _separate_files(members)
        if len(members) < len(run.last) or parts:
            continue
        mine = [
            next(each for each in rank.records.of(UnreducedRecord) if each.ddp == found.ddp)
            for rank in members
        ]
        if len({(each.step, *each.parameters.items()) for each in mine}) > 1:
            continue
        yield Finding(
            code="DDP330",
            severity=Severity.ERROR,
            message=f"{named(found.ranks)} train separate copies: {listed(found.names)} of the "
            "optimizer made here "
            f"{'is' if len(found.names) == 1 else 'are'} in no DDP module, so that nothing "
            "averages the gradients",
            ranks=found.ranks,
            location=found.record.location,
            evidence=(
                f"before step {mine[0].step} they were equal on all ranks",
                *found.evidence(),
            ),
            fix="Make them part of the module that DDP wraps, or wrap their module in DDP, too.",
            about=f"optimizer {found.ddp}",
        )


def _exchanges_parts(rank: Rank) -> bool:
    """Return whether a rank may hold one part of a model that is spread over ranks."""
    calls = rank.ring.collectives if rank.ring is not None else ()
    return not rank.counted_collectives or any(each.name.startswith("all_to_all") for each in calls)


# -- training without DDP

MIN_RECORDED = 4  # Minimum number of steps recorded by all ranks
LONG_RUN_STEPS = 1024  # Number of steps after which a running job is assumed never to average
SoloSteps = dict[int, list[SoloRecord]]  # The ranks' records by step


@rule("DDP326", "nothing-reduced", Severity.ERROR)
def nothing_reduced(run: Run) -> Iterator[Finding]:
    """Each rank trains a separate model: gradients and parameters are never exchanged.

    What it finds
        Ranks of one process group that all train a model of the same shape without
        DistributedDataParallel. Gradients and parameters differ between ranks, and no collective
        carried more than a few numbers. An error if the job shards its data (a DistributedSampler),
        starts from equal weights, or reduces numbers over the ranks; a warning if the group is not
        used for anything.

    Why it is bad
        N ranks train N models, each on its part of the data. The saved model has learned from rank
        0's part only.

    How to fix it
        Wrap the model before training.

    Example
        Wrong:
            dist.init_process_group("nccl")
            model = Net().cuda()
        Right:
            dist.init_process_group("nccl")
            model = DistributedDataParallel(Net().cuda())

    When it stays silent
        If any rank uses DDP or sharded parameters. For gradients or parameters that are averaged by
        hand, even occasionally. If models or hyper-parameters differ between ranks, if each rank
        saves a separate file, or if only some ranks train: then separate models are intended. In a
        running job, before its 1,024th step and its second epoch.
    """
    steps, ranks = _separate_training(run), run.last
    if not steps:
        return
    last_step = max(steps)
    first, last = steps[min(steps)], steps[last_step]
    intended = list(_intended(ranks, first))
    if not intended and not all(map(_unused, ranks)):
        # These may be trials of one search that combine only their results.
        return
    everyone = tuple(rank.rank for rank in ranks)
    ends = [record.steps for rank in ranks for record in rank.records.of(SoloEndRecord)]
    yield Finding(
        code="DDP326",
        about="nothing reduced",
        severity=Severity.ERROR if intended else Severity.WARNING,
        message=f"each rank trains its own model: {named(everyone)} share a process group, and no "
        f"gradient was reduced in {max(min(ends, default=0), last_step)} steps",
        ranks=everyone,
        location=ranks[0].site("optimizer"),
        evidence=(
            *(intended or ["the process group is not used for anything"]),
            f"gradients of {last[0].optimizer} before step {last_step}: norm "
            + _listed(ranks, [each.gradients for each in last]),
            "the parameters that belong to them: norm "
            + _listed(ranks, [each.values for each in last]),
            "no DistributedDataParallel was built, and no collective carried as much as a gradient",
        ),
        fix="Wrap the model in DistributedDataParallel before training, or all-reduce the "
        "gradients before each optimizer step.",
    )


@rule("DDP332", "start-differs", Severity.ERROR)
def start_differs(run: Run) -> Iterator[Finding]:
    """Gradients are averaged by hand, but the ranks began with different weights.

    What it finds
        Ranks without DistributedDataParallel whose optimizers get the same gradients, bit for bit,
        in every step, while the parameters have differed since the first step.

    Why it is bad
        Nothing makes the weights equal: DDP would broadcast them when it is built, averaged
        gradients do not. Each gradient is the average over different models, and the checkpoint
        has rank 0's model.

    How to fix it
        Broadcast the parameters and buffers before the first step, or use DDP.

    Example
        Wrong:
            torch.manual_seed(seed + rank)
            model = Net()
        Right:
            torch.manual_seed(seed + rank)
            model = Net()
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)

    When it stays silent
        With DDP, if models or hyper-parameters differ, for parameters that change between two
        steps, as by averaging, and for gradients that differ in any recorded step.
    """
    steps = _solo_steps(run)
    first = steps[min(steps)] if steps else []
    if not first or not all(map(_averaged_apart, steps.values())):
        return
    last = max(steps)
    if not _differ([each.values for each in steps[last]]):
        return
    ranks = tuple(rank.rank for rank in run.last)
    yield Finding(
        code="DDP332",
        severity=Severity.ERROR,
        message=f"{named(ranks)} average their gradients, but began with different weights, "
        "and nothing makes them equal",
        ranks=ranks,
        location=_widest_sum(run.last[0]) or run.last[0].site("optimizer"),
        evidence=(
            f"the gradients of {first[0].optimizer} were equal on all ranks in {len(steps)} of "
            f"{len(steps)} recorded steps",
            f"the parameters differed before step {min(steps)}, and still before step {last}: norm "
            + _listed(run.last, [each.values for each in steps[last]]),
        ),
        fix="Before the first step, broadcast the weights of one rank: "
        "for each in model.state_dict().values(): dist.broadcast(each, src=0).",
    )


def _widest_sum(rank: Rank) -> Location | None:
    """Return the line of the largest tensor that a rank has reduced lately: of its gradients."""
    calls = rank.ring.collectives if rank.ring is not None else ()
    widest = max((each for each in calls if each.reduce), key=lambda each: each.numel, default=None)
    return source_files.location(widest.site) if widest is not None and widest.site else None


def _averaged_apart(records: list[SoloRecord]) -> bool:
    """Return whether ranks had equal gradients and different parameters before a step."""
    gradients = {each.gradients for each in records}
    return (
        _same_kind(records)
        and len(gradients) == 1
        and any(map(any, gradients))
        and len({each.values for each in records}) == len(records)
        and not any(each.outside for each in records)
    )


def _solo_steps(run: Run) -> SoloSteps:
    """Return the ranks' records if all of them train without DDP. Empty otherwise."""
    ranks = run.last
    if run.world_size < 2 or len(ranks) != run.world_size:
        return {}
    if any(rank.records.of(DdpRecord) or rank.records.of(DataParallelRecord) for rank in ranks):
        # A model wrapped in nn.DataParallel is also meant to be reduced.
        return {}
    written = [{each.step: each for each in rank.records.of(SoloRecord)} for rank in ranks]
    common = set.intersection(*map(set, written))
    steps = {step: [each[step] for each in written] for step in sorted(common)}
    return steps if len(steps) >= MIN_RECORDED else {}


def _separate_training(run: Run) -> SoloSteps:
    """Return the ranks' records if each trains its own model. Empty otherwise."""
    steps, ranks = _solo_steps(run), run.last
    if not steps or not _is_final(run, max(steps)) or not _diverge(steps):
        return {}
    return {} if _exchanged(ranks) or _separate_files(ranks) else steps


def _diverge(steps: SoloSteps) -> bool:
    """Return whether ranks train one kind of model, but differ in gradients and then parameters."""
    first = min(steps)
    for step, records in steps.items():
        if not _same_kind(records) or not _differ([each.gradients for each in records]):
            return False
        if step != first and not _differ([each.values for each in records]):
            return False
    return True


def _same_kind(records: list[SoloRecord]) -> bool:
    """Return whether ranks train models of the same shape in the same way."""
    kinds = {
        (each.optimizer, each.shapes, each.parameters, each.elements, each.hyper)
        for each in records
    }
    return len(kinds) == 1


def _is_final(run: Run, last: int) -> bool:
    """Return whether occasional averaging would have occurred by now."""
    # The record at a rank's end includes exchanges after the last regular record.
    if run.exit_status == 0 and all(rank.records.of(SoloEndRecord) for rank in run.last):
        return True
    if last < LONG_RUN_STEPS:
        return False
    epochs = [[one for one in passes_of(rank) if one.trains] for rank in run.last]
    return all(
        any(one.closed for one in each) and any(one.record.number > 0 for one in each)
        for each in epochs
    )


def _exchanged(ranks: Sequence[Rank]) -> bool:
    """Return whether parameters or gradients may have been exchanged between ranks."""
    for rank in ranks:
        # A partial ring misses collectives of compiled code.
        if not rank.counted_collectives or rank.ring is None:
            return True
        steps = rank.records.of(SoloRecord)
        before = steps[0].before
        if any(each.wide != before or each.outside for each in steps):
            return True
        ends = rank.records.of(SoloEndRecord)
        if any(each.wide != before or each.outside or each.wrapped for each in ends):
            return True
    return False


def _unused(rank: Rank) -> bool:
    """Return whether a rank called no collective other than barriers."""
    ring = rank.ring
    return (
        ring is not None
        and ring.calls == len(ring.collectives)
        and all("barrier" in each.name for each in ring.collectives)
    )


def _separate_files(ranks: Sequence[Rank]) -> bool:
    """Return whether each rank saves its own file."""
    files = [{record.file for record in rank.records.of(SaveRecord)} for rank in ranks]
    return all(
        mine and all(mine.isdisjoint(other) for other in files if other is not mine)
        for mine in files
    )


def _differ(norms: list[tuple[float, ...]]) -> bool:
    """Return whether any tensor's norm is different on each rank."""
    for values in zip(*norms, strict=False):
        high = max(map(abs, values))
        differ = high > 0 and (max(values) - min(values)) / high > GRADIENTS_DIFFER
        if differ and len(set(values)) == len(norms):
            return True
    return False


def _intended(ranks: Sequence[Rank], first: list[SoloRecord]) -> Iterator[str]:
    """Yield evidence that the ranks were meant to train one model."""
    passes = [one for rank in ranks for one in passes_of(rank)]
    idle = next((place for one in passes for place in one.record.idle), None)
    if idle is not None:
        yield f"the DistributedSampler built at {idle} was passed to no loader"
    sampled = (one for one in passes if one.trains and one.shard is not None)
    shard = next((one for one in sampled if one.sampler.num_replicas == len(ranks)), None)
    if shard is not None:
        yield f"the sampler built at {shard.at} gives each rank its part of the data"
    if first[0].values and len({each.values for each in first}) == 1:
        yield f"before step {first[0].step} the parameters were the same on all ranks"
    rings = [rank.ring.collectives if rank.ring is not None else () for rank in ranks]
    if all(any(each.name in ("all_reduce", "reduce") for each in ring) for ring in rings):
        yield "other numbers are reduced over the ranks"


def _listed(ranks: Sequence[Rank], norms: list[tuple[float, ...]]) -> str:
    """List the norms of the first tensor whose norm differs between ranks."""
    column = next(each for each in zip(*norms, strict=False) if len(set(each)) > 1)
    shown = list(zip(column, ranks, strict=True))[:4]
    return ", ".join(f"{norm:.6g} on rank {rank.rank}" for norm, rank in shown)
