"""Rules for what DDP is set up for and does in vain (DDP304, DDP305, DDP307, DDP309, DDP323)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.diagnose.gradients import reducer
from ddpdoctor.diagnose.gradients.reducer import by_module
from ddpdoctor.diagnose.loops.training_loops import traces_of
from ddpdoctor.run.records.model import BatchNormRecord, FindUnusedRecord, NoGradientRecord
from ddpdoctor.run.records.process import ErrorRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- gradients that never come (DDP303, DDP305, DDP323): what DDP prepared for and did not get


PATIENCE = 3_000_000_000
"""Nanoseconds without a change of phase after which a rank is taken to wait for its peers."""

SHOWN = 4
"""Parameters that a message names; it counts the rest."""


def listed(names: Sequence[str], count: int | None = None) -> str:
    """The first few names, and how many more there are."""
    rest = (len(names) if count is None else count) - min(SHOWN, len(names))
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def plural(count: int, word: str = "parameter") -> str:
    """A number of things: ``1 parameter``, ``2 parameters``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class Missing:
    """The parameters of one DDP module that got no gradient on some ranks."""

    ddp: int
    records: dict[int, NoGradientRecord]
    """What the probe saw, by rank."""
    errors: dict[int, ErrorRecord]
    """DDP's own exceptions, by rank."""
    silent: list[int]
    """The ranks seen where every parameter got its gradient."""

    @property
    def ranks(self) -> list[int]:
        """The ranks without some gradients, ascending."""
        return sorted({*self.records, *self.errors})

    @property
    def altered(self) -> bool:
        """Whether the parameters were frozen or replaced after DDP was built."""
        return any(
            each.why in ("frozen", "replaced")
            for record in self.records.values()
            for each in record.parameters
        )

    def fate(self) -> Iterator[str]:
        """What DDP did, or will do, about it."""
        for rank, error in sorted(self.errors.items())[:2]:
            yield (
                f"rank {rank}: DDP raised in step {error.step}, "
                f'"{reducer.UNFINISHED} before starting a new one"'
            )
        if not self.errors:
            yield "DDP has not reduced their bucket, and raises at the next synchronized forward"


def missing_gradients(run: Run) -> Iterator[Missing]:
    """The modules with such parameters, once every rank had its chance to report."""
    records: dict[int, dict[int, NoGradientRecord]] = {}
    for rank in run.last:
        for record in rank.records.of(NoGradientRecord):
            records.setdefault(record.ddp, {}).setdefault(rank.rank, record)
    errors = {
        rank.rank: error for rank, error in reducer.reducer_complaints(run, reducer.UNFINISHED)
    }
    if errors and not records:
        records[0] = {}
    for number, found in sorted(records.items()):
        guilty = {*found, *errors}
        others = [
            rank
            for rank in run.last
            if rank.rank not in guilty and not guilty.isdisjoint(_group(rank, number))
        ]
        if all(_settled(run, rank, found) for rank in others):
            yield Missing(number, found, errors, [rank.rank for rank in others])


def _group(rank: Rank, number: int) -> tuple[int, ...]:
    """The ranks of a DDP module's group, this one among them; none where it has no such module."""
    built = rank.ddp(number)
    return built.group_ranks if built is not None else ()


def _settled(run: Run, rank: Rank, found: dict[int, NoGradientRecord]) -> bool:
    """Whether a rank would have reported by now that it missed a gradient, too."""
    if run.exit_status is not None or rank.ended is not None or rank.status is None:
        return True
    last = max((record.step for record in found.values()), default=0)
    # Its status page is ahead of its journal, in which that would be.
    written = rank.steps[-1].step if rank.steps else -1
    return written >= last or run.waits_for(rank) > PATIENCE


@rule("DDP305", "unused-parameters", Severity.ERROR)
def unused_parameters(run: Run) -> Iterator[Finding]:
    """Parameters got no gradient in a backward that DDP synchronizes.

    What it finds
        The names and modules of parameters that did not take part in the loss, seen in the first
        synchronized backwards, before DDP raises, and later when DDP raises "Expected to have
        finished reduction". Differences between ranks (a branch that only some take) are reported.

    Why it is bad
        DDP waits for every gradient of a bucket. If one is missing, the bucket is never reduced:
        the first iteration uses gradients that are not averaged, and the next forward raises. If
        only some ranks miss it, the others wait for them in the all-reduce.

    How to fix it
        Use the parameters in the loss, or freeze them (`requires_grad_(False)`) before DDP is
        created. If they are unused in some iterations only, set `find_unused_parameters=True`.

    Example
        Wrong: `self.auxiliary = nn.Linear(32, 2)`, which `forward` never calls.
        Right: remove the layer, or add its output to the loss.

    When it stays silent
        With `find_unused_parameters=True` or `static_graph=True` (unless DDP raises), for frozen
        parameters, inside `no_sync()`, for models outside DDP, and if no parameter of the module
        got a gradient.
    """
    for missing in missing_gradients(run):
        if not missing.altered:
            yield _unused(run, missing)


def _unused(run: Run, missing: Missing) -> Finding:
    first = next(iter(missing.records.values()), None)
    error = next((missing.errors[rank] for rank in sorted(missing.errors)), None)
    names, count, total = _unused_names(run, missing, first, error)
    some = bool(missing.silent)
    who = f"on {named(missing.ranks)} only" if some else "on any rank"
    if len(run.last) == 1:
        who = f"on rank {missing.ranks[0]}"
    what = plural(count) if count else "some parameters"
    if total >= count > 0:
        what = f"{count} of {plural(total)}"
    evidence = []
    if first is not None:
        evidence.append(
            f"no gradient reached them in the synchronized backward {first.iteration} "
            f"(step {first.step})"
        )
    if some:
        evidence.append(f"{named(missing.silent)} missed none in that backward")
    source = first if first is not None else error
    return Finding(
        code="DDP305",
        severity=Severity.ERROR,
        message=f"{what} got no gradient {who}" + (f": {listed(names, count)}" if names else ""),
        ranks=tuple(missing.ranks),
        location=source.location if source is not None else None,
        evidence=(*evidence, *missing.fate()),
        fix=_unused_fix(error, some),
        traceback=error.traceback if error is not None else "",
        about=f"module {missing.ddp}",
    )


def _unused_names(
    run: Run, missing: Missing, first: NoGradientRecord | None, error: ErrorRecord | None
) -> tuple[list[str], int, int]:
    """The names of the parameters, as far as known; how many they are, and how many there are."""
    if first is not None:
        names = [
            f"{each.name} ({each.owner})" if each.owner else each.name for each in first.parameters
        ]
        return names, first.count, first.of
    if error is None:
        return [], 0, 0
    number = min(missing.errors)
    rank = next(rank for rank in run.last if rank.rank == number)
    names = reducer.without_gradient(rank, error)
    return names, len(names), len(reducer.parameter_names(rank.ddp(0)))


def _unused_fix(error: ErrorRecord | None, some: bool) -> str:
    """What to do, where ``some`` ranks only miss gradients, or all do."""
    if error is not None and "`find_unused_parameters=True` is enabled" in error.message:
        return "Let every output of forward take part in the loss on every rank, or return fewer."
    if some:
        return "Take the same branch on every rank, or pass find_unused_parameters=True to DDP."
    return (
        "Use them in the loss, freeze them before DDP is built, or pass "
        "find_unused_parameters=True if they are unused now and then."
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
    found = list(reducer.reducer_complaints(run, reducer.TWICE))
    if not found:
        return
    rank, error = found[0]
    names = reducer.ready_twice(rank, error)
    trace = error.traceback
    reentrant = "utils/checkpoint.py" in trace
    why = ", by activation checkpointing with use_reentrant=True" if reentrant else ""
    what = f"the gradient of {listed(names)}" if names else "a gradient"
    ranks = sorted(each.rank for each, _ in found)
    yield Finding(
        code="DDP323",
        severity=Severity.ERROR,
        message=f"{what} was ready twice in one backward on {named(ranks)}{why}",
        ranks=tuple(ranks),
        location=error.location,
        evidence=(f'rank {rank.rank}: DDP raised in step {error.step}, "{reducer.TWICE}"',),
        fix="Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
        if reentrant
        else "Call backward once for each forward through DDP (add the losses), and let no "
        "parameter be used outside of DDP's forward.",
        traceback=trace,
        about="ready twice",
    )


WALK_COST = 2e-3
"""Milliseconds a parameter that the search for unused ones takes; measured on a CPU, torch 2.13."""


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
        If any rank once left a parameter unused, with `static_graph=True`, before the 50th
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
            f"backwards no rank left out any of {plural(count)}",
            ranks=seen.ranks,
            location=seen.built_at,
            evidence=(
                f"about {max(count * WALK_COST, 0.01):.2g} ms a step for the search (an estimate "
                "from the number of parameters), and an all-reduce of the map of used ones",
            ),
            fix="Leave find_unused_parameters=True out.",
            about=f"module {number}",
        )


SMALL_BATCH = 8
"""Samples per rank up to which the statistics of a batch are poor."""

ENOUGH_BATCHES = 10
"""Steps whose batch sizes are looked at before a batch is called small."""


@rule("DDP309", "small-batch-norm", Severity.INFO)
def small_batch_norm(run: Run) -> Iterator[Finding]:
    """BatchNorm computes its statistics from a small batch on each rank.

    What it finds
        BatchNorm layers in training mode inside a DDP module on several ranks, with at most 8
        samples per rank. `SyncBatchNorm` would use the samples of all ranks.

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
    sizes = {rank.rank: _batch(rank) for rank in run.last}
    for number, seen in by_module(run, BatchNormRecord).items():
        size = max(sizes[each] or SMALL_BATCH + 1 for each in seen.ranks)
        if size > SMALL_BATCH or len(seen.ranks) < len(run.last):
            continue
        count = seen.record.count
        yield Finding(
            code="DDP309",
            severity=Severity.INFO,
            message=f"{plural(count, 'BatchNorm layer')} of this module "
            f"{'takes' if count == 1 else 'take'} statistics from {plural(int(size), 'sample')} on "
            "each rank alone",
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


def _batch(rank: Rank) -> float | None:
    """The median number of samples that a rank takes at a time; None if it is not known."""
    sizes = [step.samples / max(1, step.backwards) for step in rank.steps if step.samples]
    return median(sizes) if len(sizes) >= ENOUGH_BATCHES else None


# -- gradient accumulation that reduces in every backward (DDP307)


ENOUGH_OPTIMIZER_STEPS = 4
"""Optimizer steps of a loop that say how many batches each of them takes."""


@rule(
    "DDP307",
    "no-sync-missing",
    Severity.INFO,
    yields_to={"DDP308": relations.always},
)
def no_sync_missing(run: Run) -> Iterator[Finding]:
    """Gradients are accumulated, and every backward is reduced.

    What it finds
        A loop over a DataLoader that is over, took at least twice as many batches as the optimizer
        took steps on every rank, and reduced the gradients of every batch.

    Why it is bad
        Only the sum at the optimizer's step counts. The all-reduce of every other backward of the
        step costs time and brings nothing.

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
        For loops that are left early or take fewer than 4 optimizer steps, if some batches are
        reduced and others not, if an optimizer's step takes one batch, and for parts of a batch.
    """
    found = [(rank, accumulated) for rank in run.last if (accumulated := _accumulated(run, rank))]
    if len(found) < len(run.last) or len(found) < 2:
        return
    rank, first = found[0]
    each = first.batches / first.steps
    yield Finding(
        code="DDP307",
        severity=Severity.INFO,
        message=f"each optimizer step takes {each:.0f} batches, and the gradients of every batch "
        "are reduced: only the last batch of a step needs it",
        ranks=tuple(rank.rank for rank, _ in found),
        location=rank.site("backward"),
        evidence=(
            f"rank {rank.rank}: {first.batches} batches, {first.steps} optimizer steps, "
            f"{first.reduced} reduced backwards in a loop",
            *_waits(rank),
        ),
        fix="Put the forward and the backward of the other batches into `with model.no_sync():`.",
    )


class _Accumulated(NamedTuple):
    """What a loop took and did."""

    batches: int
    steps: int
    reduced: int


def _accumulated(run: Run, rank: Rank) -> _Accumulated | None:
    """The first loop of a rank that accumulates and reduces all the same."""
    for trace in traces_of(rank, run):
        if trace.state != "ended" or trace.fetched is None or trace.reached is None:
            continue
        steps = trace.last.step - trace.first.step
        reduced = trace.reached
        trained = trace.fetched - trace.last.idled
        if steps >= ENOUGH_OPTIMIZER_STEPS and 2 * steps <= trained <= reduced:
            return _Accumulated(trace.fetched, steps, reduced)
    return None


def _waits(rank: Rank) -> Iterator[str]:
    """What the reductions cost, where DDP's own timers tell it."""
    shares = [step.wait / step.total for step in rank.steps if step.split and step.total > 0]
    if shares:
        yield f"rank {rank.rank} waits for reductions {100 * median(shares):.0f} % of a step"
