"""Rules for DDP's reducer and options (DDP304, DDP305, DDP307, DDP309, DDP323)."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count as counted
from ddpdoctor.core.formatting import named
from ddpdoctor.diagnose.gradients.reducer import (
    STATIC,
    TWICE,
    Missing,
    OfModule,
    by_module,
    constant_losses,
    listed,
    mispairs,
    missing_gradients,
    named_parameters,
    reducer_complaints,
)
from ddpdoctor.diagnose.loops.training_loops import traces_of
from ddpdoctor.run.records.model import (
    BatchNormRecord,
    FindUnusedRecord,
    GraphCutRecord,
    NeverUsedRecord,
)
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run

MIN_PART = 0.1  # Minimum fraction of a model whose missing gradients are hardly intended


@rule(
    "DDP305",
    "unused-parameters",
    Severity.ERROR,
    # Under static_graph=True DDP reports a changed graph. Unreduced gradients make parameters
    # differ.
    supersedes={
        "DDP306": relations.same_ranks_afterwards,
        "DDP701": mispairs,
        "DDP319": relations.certain,
    },
)
def unused_parameters(run: Run) -> Iterator[Finding]:
    """Parameters got no gradient in a backward that DDP synchronizes.

    What it finds
        The names and modules of parameters that did not take part in the loss, seen in the first
        synchronized backwards, before DDP raises, and later when DDP raises "Expected to have
        finished reduction". Differences between ranks (a branch that only some take) are reported.
        With `find_unused_parameters=True` or `static_graph=True`, parameters that got none on any
        rank in at least five backwards (a warning if a collective lost their graph, or if they are
        a tenth of the model; otherwise information).
        If the loss of some ranks depends on no parameter, it is reported in any step.

    Why it is bad
        DDP waits for every gradient of a bucket. If one is missing, the bucket is never reduced:
        the first iteration uses gradients that are not averaged, and the next forward raises. If
        only some ranks miss it, the others wait for them in the all-reduce.

    How to fix it
        Use the parameters in the loss, or freeze them (`requires_grad_(False)`) before DDP is
        created. If they are unused in some iterations only, set `find_unused_parameters=True`. If
        `dist.all_gather` lost their graph, use `torch.distributed.nn.functional.all_gather`. A loss
        without boxes is `prediction.sum() * 0`, not a new zero.

    Example
        Wrong: `self.auxiliary = nn.Linear(32, 2)`, which `forward` never calls.
        Right: remove the layer, or add its output to the loss.

    When it stays silent
        For frozen parameters, inside `no_sync()`, for models outside DDP, and if no parameter of
        the module got a gradient on any rank. With these options, for parameters that are sometimes
        used.
    """
    yield from constant_losses(run)
    found = [missing for missing in missing_gradients(run) if not missing.altered]
    for missing in found:
        yield _unused(run, missing)
    yield from _cut_in_static_graph(run)
    known = {missing.ddp for missing in found}
    for number, seen in by_module(run, NeverUsedRecord).items():
        if number not in known:
            yield from _never_used(run, number, seen)


_THEN = " Then find_unused_parameters=True is needed only if others are unused now and then."


def _never_used(run: Run, number: int, seen: OfModule[NeverUsedRecord]) -> Iterator[Finding]:
    """Yield the parameters that no rank ever uses although DDP's options allow it."""
    newest = {rank.rank: record for rank, record in seen.records}
    group = seen.built.group_ranks if seen.built is not None else ()
    if len({(each.count, each.parameters) for each in newest.values()}) > 1:
        return
    if set(newest) != set(group or newest):
        return
    record = newest[min(newest)]
    if not 0 < record.count < record.of:
        return
    if any(each.why == "replaced" for each in record.parameters):
        return  # DDP303 names the parameters that took their place.
    cut = _cut(run)
    names = [
        f"{each.name} ({each.owner})" if each.owner else each.name for each in record.parameters
    ]
    static = seen.built is not None and not seen.built.find_unused_parameters
    option = "static_graph=True" if static else "find_unused_parameters=True"
    evidence = [
        f"in {record.backwards} synchronized backwards looked at; {option} hides it",
        f"they are {record.part:.0%} of the module's elements",
    ]
    yield Finding(
        code="DDP305",
        severity=Severity.WARNING if cut is not None or record.part >= MIN_PART else Severity.INFO,
        message=f"{record.count} of {counted(record.of, 'parameter')} never got a gradient (other "
        f"than zeros) on any rank: {listed(names, record.count)}",
        ranks=tuple(sorted(newest)),
        location=cut.location if cut is not None else record.location,
        evidence=(*evidence, *_cut_evidence(cut)),
        fix=(
            _fix_of_cut(cut)
            if cut is not None
            else "Use them in the loss, or remove them or freeze them before DDP is built."
        )
        + ("" if static else _THEN),
        about=f"module {number} never",
    )


def _fix_of_unused(some: bool, error: ErrorRecord | None, cut: GraphCutRecord | None) -> str:
    if cut is not None:
        return _fix_of_cut(cut)
    if error is not None and "`find_unused_parameters=True` is enabled" in error.message:
        return "Let every output of forward take part in the loss on every rank, or return fewer."
    if some:
        return "Take the same branch on every rank, or pass find_unused_parameters=True to DDP."
    return (
        "Use them in the loss, freeze them before DDP is built, or pass "
        "find_unused_parameters=True if they are unused now and then."
    )


def _cut_in_static_graph(run: Run) -> Iterator[Finding]:
    """Yield a finding for a lost graph if DDP raised under ``static_graph=True`` without names."""
    errors = {
        rank.rank: error
        for rank in run.last
        for error in rank.records.of(ErrorRecord)
        if STATIC in error.message
    }
    cut = _cut(run)
    if cut is None or not errors:
        return
    error = errors[min(errors)]
    yield Finding(
        code="DDP305",
        severity=Severity.ERROR,
        message=f"{cut.call} loses the graph of what it is given, so that parameters get no "
        "gradient in a step, and DDP raised under static_graph=True",
        ranks=tuple(sorted(errors)),
        location=cut.location,
        evidence=(f'rank {min(errors)}: DDP raised in step {error.step}, "{STATIC}"',),
        fix=_fix_of_cut(cut),
        traceback=error.traceback,
        about="cut in a static graph",
        moment=min(each.time for each in errors.values()),
    )


def _cut(run: Run) -> GraphCutRecord | None:
    """Return the first collective that lost the graph of its input."""
    cuts = (record for rank in run.last for record in rank.records.of(GraphCutRecord))
    return next(cuts, None)


def _cut_evidence(cut: GraphCutRecord | None) -> Iterator[str]:
    if cut is not None:
        yield (
            f"{cut.call} at {cut.location} was given a tensor that needs a gradient, and what it "
            "returns has none"
        )


def _fix_of_cut(cut: GraphCutRecord) -> str:
    name = "all_to_all" if cut.call.startswith("all_to_all") else "all_gather"
    return (
        f"Use torch.distributed.nn.functional.{name}, which has a gradient, or put this rank's own "
        "tensor back into the list."
    )


def _unused(run: Run, missing: Missing) -> Finding:
    first, error = next(iter(missing.records.values()), None), missing.error
    names, count, total = [], 0, 0
    if first is not None:
        names = [
            f"{each.name} ({each.owner})" if each.owner else each.name for each in first.parameters
        ]
        count, total = first.count, first.of
    elif error is not None:
        rank = run.rank(min(missing.errors))
        built = rank.ddp(0)
        names = named_parameters(rank, error)
        count, total = len(names), len(built.parameters) if built is not None else 0
    some = bool(missing.silent)
    who = f"on {named(missing.ranks)} only" if some else "on any rank"
    if len(run.last) == 1:
        who = f"on rank {missing.ranks[0]}"
    what = counted(count, "parameter") if count else "some parameters"
    if total >= count > 0:
        what = f"{count} of {counted(total, 'parameter')}"
    evidence = []
    if first is not None:
        evidence.append(
            f"no gradient reached them in the synchronized backward {first.iteration} "
            f"(step {first.step})"
        )
    if some:
        evidence.append(f"{named(missing.silent)} had all gradients in that backward")
    cut = _cut(run) if not some else None
    source = cut or first or error
    return Finding(
        code="DDP305",
        severity=Severity.ERROR,
        message=f"{what} got no gradient {who}" + (f": {listed(names, count)}" if names else ""),
        ranks=missing.ranks,
        location=source.location if source is not None else None,
        evidence=(*evidence, *missing.evidence(), *_cut_evidence(cut)),
        fix=_fix_of_unused(some, error, cut),
        traceback=error.traceback if error is not None else "",
        about=f"module {missing.ddp}",
    )


@rule("DDP323", "ready-twice", Severity.ERROR)
def ready_twice(run: Run) -> Iterator[Finding]:
    """A parameter's gradient was ready twice in one backward.

    What it finds
        DDP's exception "Expected to mark a variable ready only once", with the parameter's name,
        and whether activation checkpointing with `use_reentrant=True` is the reason.

    Why it is bad
        DDP reduces a gradient when it is ready for the first time. A reentrant checkpoint runs a
        separate backward for each part of the graph, so a parameter used in two of them is ready
        twice.

    How to fix it
        Use `checkpoint(..., use_reentrant=False)`. If a parameter takes part in two backwards of
        one forward, add the losses and call `backward()` once.

    Example
        Wrong:
            x = checkpoint(self.block, x, use_reentrant=True)
            x = checkpoint(self.block, x, use_reentrant=True)
        Right:
            x = checkpoint(self.block, x, use_reentrant=False)
            x = checkpoint(self.block, x, use_reentrant=False)

    When it stays silent
        While DDP does not raise.
    """
    found = reducer_complaints(run, TWICE)
    if not found:
        return
    rank, error = found[0]
    names = named_parameters(rank, error)
    reentrant = "utils/checkpoint.py" in error.traceback
    why = ", by activation checkpointing with use_reentrant=True" if reentrant else ""
    what = f"the gradient of {listed(names)}" if names else "a gradient"
    ranks = tuple(sorted(each.rank for each, _ in found))
    yield Finding(
        code="DDP323",
        severity=Severity.ERROR,
        message=f"{what} was ready twice in one backward on {named(ranks)}{why}",
        ranks=ranks,
        location=error.location,
        evidence=(f'rank {rank.rank}: DDP raised in step {error.step}, "{TWICE}"',),
        fix="Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
        if reentrant
        else "Call backward once for each forward through DDP (add the losses), and let no "
        "parameter be used outside of DDP's forward.",
        traceback=error.traceback,
        about="ready twice",
    )


WALK_COST = 2e-3
"""Milliseconds per parameter of the search for unused ones, measured on a CPU with torch 2.13."""


@rule("DDP304", "find-unused-not-needed", Severity.INFO)
def find_unused_not_needed(run: Run) -> Iterator[Finding]:
    """`find_unused_parameters=True` is set, but every parameter is used.

    What it finds
        A DDP module that searches for unused parameters and found none on any rank in its first 50
        synchronized backwards, or in all of a shorter job.

    Why it is bad
        Every step traverses the whole autograd graph and all-reduces a map of the parameters, and
        the all-reduce of the gradients starts later than it could.

    How to fix it
        Remove the argument. If a parameter is unused after all, DDP raises an exception.

    Example
        Wrong: `DDP(model, find_unused_parameters=True)` to be on the safe side.
        Right: `DDP(model)`

    When it stays silent
        If any rank ever left a parameter unused, with `static_graph=True`, before the 50th
        synchronized backward of a running job, and in jobs with fewer than five.
    """
    for number, seen in by_module(run, FindUnusedRecord).items():
        group = seen.built.group_ranks if seen.built is not None else seen.ranks
        if any(record.least != len(group or seen.ranks) for _, record in seen.records):
            continue
        count, iterations = seen.record.parameters, seen.record.iterations
        yield Finding(
            code="DDP304",
            severity=Severity.INFO,
            message=f"find_unused_parameters=True is not needed: in {iterations} synchronized "
            f"backwards no rank left out any of {counted(count, 'parameter')}",
            ranks=seen.ranks,
            location=seen.built_at,
            evidence=(
                f"about {max(count * WALK_COST, 0.01):.2g} ms a step for the search (an estimate "
                "from the number of parameters), and an all-reduce of the map of used ones",
            ),
            fix="Leave find_unused_parameters=True out.",
            about=f"module {number}",
        )


SMALL_BATCH = 8  # Maximum number of samples per rank with poor batch statistics
MIN_BATCHES = 10  # Minimum number of steps with a known batch size


@rule("DDP309", "small-batch-norm", Severity.INFO)
def small_batch_norm(run: Run) -> Iterator[Finding]:
    """BatchNorm computes its statistics from a small batch on each rank.

    What it finds
        BatchNorm layers in training mode inside a DDP module on several ranks, with at most 8
        samples per rank. `SyncBatchNorm` would use the samples of all ranks. `ddpdoctor parity`
        names larger batches, too, if they are smaller than those of fewer ranks.

    Why it is bad
        DDP averages gradients, not batch statistics. Statistics of few samples are noisy, and the
        running averages used for evaluation are those of rank 0 only.

    How to fix it
        Convert to `SyncBatchNorm` before DDP (it needs GPUs), use a normalization without batch
        statistics such as GroupNorm, or use larger batches.

    Example
        Wrong: `DDP(model)` with BatchNorm2d and two images per GPU.
        Right: `DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model))`

    When it stays silent
        For frozen BatchNorm (`eval()`), SyncBatchNorm, a single rank, larger batches, batches of
        unknown size, and in the first ten steps.
    """
    if len(run.last) < 2:
        return
    medians: dict[int, float | None] = {}
    for rank in run.last:
        sizes = [step.samples / max(1, step.backwards) for step in rank.steps if step.samples]
        medians[rank.rank] = median(sizes) if len(sizes) >= MIN_BATCHES else None
    for number, seen in by_module(run, BatchNormRecord).items():
        size = max(medians[each] or SMALL_BATCH + 1 for each in seen.ranks)
        if size > SMALL_BATCH or len(seen.ranks) < len(run.last):
            continue
        count = seen.record.count
        yield Finding(
            code="DDP309",
            severity=Severity.INFO,
            message=f"{counted(count, 'BatchNorm layer')} of this module "
            f"{'takes' if count == 1 else 'take'} statistics from {counted(int(size), 'sample')} "
            "on each rank alone",
            ranks=seen.ranks,
            location=seen.built_at,
            evidence=(
                f"in training mode and no SyncBatchNorm: {listed(seen.record.layers, count)}",
                f"median batch: {int(size)} on each of {len(seen.ranks)} ranks",
            ),
            fix="On GPUs, SyncBatchNorm.convert_sync_batchnorm(model) before DDP; else GroupNorm "
            "or larger batches.",
            about=f"module {number}",
        )


MIN_OPTIMIZER_STEPS = 4  # Minimum number of optimizer steps of a loop to know its batches per step


@rule("DDP307", "no-sync-missing", Severity.INFO, yields_to={"DDP308": relations.always})
def no_sync_missing(run: Run) -> Iterator[Finding]:
    """Gradients are accumulated, and every backward is reduced.

    What it finds
        A finished loop over a DataLoader that on every rank took at least twice as many batches as
        optimizer steps, and reduced the gradients of every batch.

    Why it is bad
        Only the sum at the optimizer's step matters. The all-reduces of the step's other backwards
        cost time without any effect.

    How to fix it
        Put the forward and the backward of all but the last batch of a step into `no_sync()`.

    Example
        Wrong:
            model(batch).mean().backward()
            if number % 4 == 3:
                optimizer.step()
        Right:
            with nullcontext() if number % 4 == 3 else model.no_sync():
                model(batch).mean().backward()

    When it stays silent
        For loops that are left early or take fewer than 4 optimizer steps, if only some batches are
        reduced, if an optimizer's step takes one batch, and for parts of a batch.
    """
    found = [(rank, loop) for rank in run.last if (loop := _accumulating_loop(run, rank))]
    if len(found) < len(run.last) or len(found) < 2:
        return
    rank, first = found[0]
    shares = [step.wait / step.total for step in rank.steps if step.split and step.total > 0]
    evidence = [
        f"rank {rank.rank}: {first.batches} batches, {first.steps} optimizer steps, "
        f"{first.reduced} reduced backwards in a loop"
    ]
    if shares:
        evidence.append(
            f"rank {rank.rank} waits for reductions {100 * median(shares):.0f} % of a step"
        )
    yield Finding(
        code="DDP307",
        severity=Severity.INFO,
        message=f"each optimizer step takes {first.batches / first.steps:.0f} batches, and the "
        "gradients of every batch are reduced: only the last batch of a step needs it",
        ranks=tuple(rank.rank for rank, _ in found),
        location=rank.site("backward"),
        evidence=tuple(evidence),
        fix="Put the forward and the backward of the other batches into `with model.no_sync():`.",
    )


class _AccumulatingLoop(NamedTuple):
    batches: int
    steps: int
    reduced: int


def _accumulating_loop(run: Run, rank: Rank) -> _AccumulatingLoop | None:
    """Return a rank's first loop that accumulates gradients and reduces them for every batch."""
    for trace in traces_of(rank, run):
        if trace.state != "ended" or trace.fetched is None or trace.reached is None:
            continue
        steps = trace.last.step - trace.first.step
        trained = trace.fetched - trace.last.idled
        if steps >= MIN_OPTIMIZER_STEPS and 2 * steps <= trained <= trace.reached:
            return _AccumulatingLoop(trace.fetched, steps, trace.reached)
    return None
