"""Rules for speed (DDP610, DDP611, DDP612): slow ranks and stages, and waits for data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import named
from ddpdoctor.core.relations import Lapsed, pace
from ddpdoctor.diagnose.speed.lag import (
    MIN_NAMED_SURPLUS,
    Lag,
    lags,
    mean_step,
    stage_lags,
    stage_of,
    stages,
    still_slower,
)
from ddpdoctor.diagnose.speed.pace import (
    DATA_SHARE,
    ENOUGH,
    MIN_STAGE_FACTOR,
    MIN_WAIT_NS,
    MIN_WAITED,
    PHASE_NAMES,
    WARM_UP,
)
from ddpdoctor.diagnose.speed.reasons import (
    PERSISTENT,
    asked_lately,
    explain,
    loader_workers,
    restarted,
    shown_ms,
)
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import on_gpu, unclocked

_STRAGGLER_FIX = {
    "data": "Look at this rank's data: its storage, its workers, the cost of its samples.",
    "forward": "Look at this rank's device (throttled, shared, other model?) and its batch shapes.",
    "backward": "Look at this rank's device (throttled, shared?) and at hooks in its backward.",
    "optimizer": "Look at what this rank's optimizer step does that the others' does not.",
    "other": "Look at what only this rank does in the loop: logging, checkpoints, image dumps.",
}


def _caught_up(finding: Finding, run: Run) -> Lapsed | None:
    """Withdraw a finding once the rank is about as fast as the others."""
    return None if any(still_slower(run, rank) for rank in finding.ranks) else pace(finding, run)


@rule("DDP610", "straggler", Severity.WARNING, lapses=_caught_up, late=True)
def straggler(run: Run) -> Iterator[Finding]:
    """One rank is slower than the others, and they wait for it.

    What it finds
        A rank whose own time (data, forward, backward compute, optimizer, and its code in between)
        exceeds the others' by more than 15 % of a step, while they wait that much longer in the
        all-reduce: in three of four steps, or regularly, such as in every 10th step. Stack samples
        show the line, and whether it computes, sleeps, waits for a lock or a disk, or has no core.
        The driver shows how its GPU differs.

    Why it is bad
        DDP runs at the pace of its slowest rank: every other rank idles for the difference.

    How to fix it
        Look at the line in the finding. If there is none, look at the phase. Data: this rank's
        storage, workers or samples. Forward or backward: a GPU that is throttled or shared.

    Example
        Wrong:
            if rank == 0:
                save_images(batch)  # in every step
        Right:
            if rank == 0 and step % 100 == 0:
                save_images(batch)

    When it stays silent
        In the first 30 steps (16 periods), if no rank waits for the difference, for steps with a
        rank in the debugger, and if the other ranks wait for cores as well. In a shorter job, the
        rank must be twice as slow, and 20 ms slower, in 8 steps, at a line that samples show.
        On GPUs, DDP times every hundredth step: a slow backward must show in 6 of them, and take
        twice the others' time if all GPUs are shared with other processes.
    """
    found = list(lags(run))
    slow = {lag.rank.rank for lag in found}
    usual = [rank for rank in run.last if rank.rank not in slow]
    for lag in found:
        if asked_lately(run) or (lag.few and not _over(run)):
            # Stacks are being sampled, or more steps will follow.
            continue
        reason = explain(run, lag, usual)
        if reason is None:
            continue
        rank, name = lag.rank.rank, PHASE_NAMES[lag.phase]
        who, others, waits = f"rank {rank}", "the others", "a step in the all-reduce"
        stage = stage_of(run, rank)
        if stage is not None:
            who, others = f"{who} ({stage.name} of {stage.of})", "the other replicas"
            waits = "a step"
        where = "" if lag.crowded else f", in its {name}"
        evidence: tuple[str, ...] = (
            f"own time {shown_ms(lag.own[0])} a step; {others} {shown_ms(lag.own[1])} "
            f"({'medians' if lag.rhythm is None else 'means'} of {lag.steps} steps)",
            f"{name}: {shown_ms(lag.slow)} against {shown_ms(lag.usual)}",
            f"{others} wait {shown_ms(lag.wait[1])} {waits}, rank {rank} {shown_ms(lag.wait[0])}",
        )
        if lag.rhythm is not None and lag.rhythm.words:
            where += f", {lag.rhythm.words}"
            evidence += (f"{lag.rhythm.words}: {shown_ms(lag.rhythm.gap)} more than the others",)
        if not lag.crowded and not lag.calm:
            evidence += (
                f"not counted: rank {rank} waits {shown_ms(lag.cores[0])} a step for a CPU core, "
                f"{others} {shown_ms(lag.cores[1])}: the machine is crowded",
            )
        yield Finding(
            code="DDP610",
            about=f"rank {rank}",
            severity=Severity.WARNING,
            message=f"{who} holds {others} up by {shown_ms(lag.gap)} a step{where}{reason.words}",
            ranks=(rank,),
            location=reason.location or lag.rank.site(lag.phase),
            evidence=(*reason.evidence, *evidence),
            fix=reason.fix or _STRAGGLER_FIX[lag.phase],
        )


def _over(run: Run) -> bool:
    return run.exit_status is not None or all(rank.ended for rank in run.last)


WAITS_FOR_CORE = 0.05  # Minimum fraction of a step without a core that shows an overloaded machine
PARTS = 8
"""Number of parts into which the steps are divided, so that one long wait affects only one."""
MIN_STARTING_NS = 5_000_000_000
"""Minimum total of waits at the beginning of passes, in nanoseconds. A short job has few passes."""


class DataWait(NamedTuple):
    """A rank's wait for data in a step: medians of steps or of stretches of them."""

    share: float  # As a fraction of the step
    wait: float  # In nanoseconds
    total: float  # The whole step, in nanoseconds
    of_passes: bool  # Whether most of the wait is in the first steps of passes over the data


def _runs_ahead(rank: Rank) -> bool:
    """Return whether the device's times are unknown, which the host's do not show."""
    return bool(unclocked(rank)) or (rank.opened.backend.startswith("nccl") and not on_gpu(rank))


def _data_wait(run: Run, rank: Rank) -> DataWait | None:
    """Return a rank's wait for data. None if it proves nothing about the loader."""
    if _runs_ahead(rank):
        return None
    steps = [
        step
        for step in rank.steps
        if step.step >= WARM_UP and step.total > 0 and run.undisturbed(step)
    ]
    if len(steps) < ENOUGH or _lack_cores(steps):
        # On a crowded machine the loader's workers lack cores as well.
        return None
    found = _median_wait(steps, False)
    if found.share > DATA_SHARE:
        return found
    edges = [len(steps) * each // PARTS for each in range(PARTS + 1)]
    # Time between passes does not count, because it includes evaluations.
    means = [mean_step(steps[begin:end], between=False) for begin, end in itertools.pairwise(edges)]
    data = sum(step.data for step in steps)
    first = sum(step.data for step in steps if step.outside > 0)
    of_passes = first >= MIN_NAMED_SURPLUS * data > 0
    if _lack_cores(means) or (of_passes and data < MIN_STARTING_NS):
        return found
    return _median_wait(means, of_passes)


def _lack_cores(steps: Sequence[StepRecord]) -> bool:
    return median((step.waited or 0) / step.total for step in steps) >= WAITS_FOR_CORE


def _median_wait(steps: Sequence[StepRecord], of_passes: bool) -> DataWait:
    return DataWait(
        median(step.data / step.total for step in steps),
        median(step.data for step in steps),
        median(step.total for step in steps),
        of_passes,
    )


@rule("DDP611", "data-bound", Severity.WARNING, lapses=pace, late=True)
def data_bound(run: Run) -> Iterator[Finding]:
    """The ranks wait for data for more than a fifth of every step.

    What it finds
        Waits for data above 20 % of the time of steps on most ranks, once the job runs steadily:
        in each step, in one of several, or in the first step of each pass.

    Why it is bad
        The GPU, or the CPU that computes, is idle for that time.

    How to fix it
        Use more DataLoader workers (`num_workers`), `persistent_workers=True`, `pin_memory=True`,
        cheaper transforms, a faster disk, or a packed data format.

    Example
        Wrong: `DataLoader(dataset, batch_size=64)` with JPEG decoding in the training process.
        Right: `DataLoader(dataset, batch_size=64, num_workers=8, persistent_workers=True)`

    When it stays silent
        In the first 30 steps, below 1 ms per step, for batches that do not come from a DataLoader,
        if the ranks lack CPU cores, and if only one rank waits for data (DDP610).
    """
    waits: dict[int, DataWait] = {}
    for rank in run.last:
        found = _data_wait(run, rank)
        if found is None:
            return
        waits[rank.rank] = found
    bound = sorted(
        n for n, each in waits.items() if each.share > DATA_SHARE and each.wait >= MIN_WAIT_NS
    )
    if 2 * len(bound) <= len(waits):
        return
    worst = max(bound, key=lambda number: waits[number].share)
    share, wait, total, of_passes = waits[worst]
    workers = loader_workers(run.rank(worst))
    evidence = [
        f"rank {number}: {100 * waits[number].share:.0f} %, {shown_ms(waits[number].wait)} a step"
        for number in bound[:4]
    ]
    if of_passes:
        evidence.append("most of it is in the first step of each pass")
    if of_passes and workers:
        evidence.append(restarted(workers))
    who = f"{named(bound)} {'waits' if len(bound) == 1 else 'wait'}"
    if len(bound) == len(waits) > 1:
        who = "both ranks wait" if len(bound) == 2 else f"all {len(bound)} ranks wait"
    yield Finding(
        code="DDP611",
        about="data",
        severity=Severity.WARNING,
        message=f"{who} for data {100 * share:.0f} % of "
        f"{'the time' if of_passes else 'every step'} ({shown_ms(wait)} of {shown_ms(total)})",
        ranks=tuple(bound),
        location=run.rank(worst).site("data"),
        evidence=tuple(evidence),
        fix=PERSISTENT
        if of_passes and workers
        else "Give the DataLoader more workers (num_workers, persistent_workers=True), or make a "
        "sample cheaper to load.",
    )


CROWDED_STAGE = 1.5
"""Additional factor for a stage that waits longer for a core than it works, because its time
without these waits is not exact."""


@rule("DDP612", "uneven-stages", Severity.WARNING, lapses=pace)
def uneven_stages(run: Run) -> Iterator[Finding]:
    """A stage of a pipeline takes twice as long as the others, and they wait for it.

    What it finds
        A stage (torch.distributed.pipelining) whose own time (data, forward, backward compute,
        optimizer, and the code in between) is at least twice that of the others, which wait for it
        in each micro-batch. With several replicas, the median rank of each stage counts. A rank
        that is slower than the same stage of the other replicas is reported by DDP610.

    Why it is bad
        A pipeline runs at the pace of its slowest stage: all other devices idle for the rest.

    How to fix it
        Move the cut, so that the stage has fewer layers: time the layers, forward and backward, and
        minimize the largest sum, as `--split auto` of sample_jobs/hybrid_pipeline.py does. If the
        stage waits for its data, load them faster.

    Example
        Wrong: cut = 2  # stage 1 has the other 13 layers
        Right: cut = min(range(1, n), key=lambda c: max(sum(times[:c]), sum(times[c:])))

    When it stays silent
        In the first 30 steps (8 if it is plain to see), below twice the time (three times if the
        stage waits longer for a CPU core than it works), and for steps with a rank in the debugger.
    """
    over = _over(run)
    found = [each for each in stage_lags(run) if _counts(each[1], over)]
    if not found:
        return
    stage, lag = max(found, key=lambda each: each[1].own[0])
    others = [each for each in stages(run) if each.numbers != stage.numbers]
    theirs = named((number for each in others for number in each.numbers), "stage")
    ranks = tuple(rank.rank for rank in stage.ranks)
    is_data = lag.phase == "data"
    evidence: tuple[str, ...] = (
        f"own time {shown_ms(lag.own[0])} a step; {theirs} {shown_ms(lag.own[1])} "
        f"(medians of {lag.steps} steps)",
        f"{PHASE_NAMES[lag.phase]}: {shown_ms(lag.slow)} against {shown_ms(lag.usual)}",
        f"{theirs} {'waits' if theirs.startswith('stage ') else 'wait'} "
        f"{shown_ms(lag.wait[1])} a step, {stage.name} {shown_ms(lag.wait[0])}",
    )
    if not lag.calm:
        evidence += (
            f"not counted in its own time: {stage.name} waits {shown_ms(lag.cores[0])} a step for "
            f"a CPU core, {theirs} {shown_ms(lag.cores[1])}: the machine is crowded",
        )
    yield Finding(
        code="DDP612",
        about="stages",
        severity=Severity.WARNING,
        message=f"{stage.name} of {stage.of} ({named(ranks)}) "
        f"{'needs' if len(stage.numbers) == 1 else 'need'} {lag.own[0] / lag.own[1]:.1f}x the time "
        f"of {theirs if len(others) == 1 else 'the others'}"
        + (f", for its {PHASE_NAMES[lag.phase]}" if is_data else ""),
        ranks=ranks,
        location=lag.rank.site("data") if is_data else stage.record.location,
        evidence=evidence,
        fix="Load the data of this stage faster: more loader workers, or lighter samples."
        if is_data
        else f"Move the cut: give {stage.name} fewer layers. To find the cut, time the layers, as "
        "`--split auto` of sample_jobs/hybrid_pipeline.py does.",
    )


def _counts(lag: Lag, over: bool) -> bool:
    """Return whether the stage's own time explains the lag, rather than a crowded machine."""
    works = lag.cpu >= MIN_WAITED * lag.gap
    sure = lag.calm or (lag.sure and lag.phase != "data")
    enough = MIN_STAGE_FACTOR * (CROWDED_STAGE if lag.cores[0] > lag.own[0] else 1)
    uneven = lag.own[0] >= enough * lag.own[1] > 0
    return uneven and not lag.crowded and (works or sure) and (over or not lag.few)
