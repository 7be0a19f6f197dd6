"""Speed (DDP6xx): who holds the others up, and what a step waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ddpdoctor.finding import Finding, Location, Severity, rule
from ddpdoctor.pace import (
    BORNE_OUT,
    DATA_SHARE,
    NOTICEABLE,
    PHASE_NAMES,
    SLOWER,
    WARM_UP,
)
from ddpdoctor.record import integer
from ddpdoctor.relations import pace
from ddpdoctor.rules.ranks import named
from ddpdoctor.run import PHASES, Rank, Run, Step

ENOUGH = 20
"""Steps that a verdict needs, after the warm-up."""

ENOUGH_SAMPLED = 6
"""The same on a GPU, where DDP times only every hundredth step."""

STEADY = 0.75
"""In what part of the steps the surplus must be there."""


def _steady(run: Run, rank: Rank) -> dict[int, Step]:
    """Steps after the warm-up whose backward was split into compute and wait, by number."""
    return {
        step.step: step
        for step in rank.split_steps
        if step.step >= WARM_UP
        and step.split
        and not step.skipped
        and step.total > 0
        and run.undisturbed(step)
    }


@rule("DDP610", "straggler", Severity.WARNING, lapses=pace)
def straggler(run: Run) -> Iterator[Finding]:
    """One rank is slower than the others, and they wait for it.

    What it finds
        A rank whose own time (data, forward, backward compute, optimizer, and its code in between)
        exceeds the others' by more than 15 % of a step in three of four steps, while the others
        wait in the all-reduce correspondingly longer than it does.

    Why it is bad
        DDP goes at the pace of its slowest rank: every other rank idles for the difference.

    How to fix it
        Look at the phase that is named. Data: this rank's storage, workers or samples. Forward or
        backward: a GPU that throttles or is shared, uneven batch shapes. Between the phases: work
        that only one rank does (logging, checkpoints).

    Example
        Wrong: `if rank == 0: save_images(batch)` in every step.
        Right: every hundredth, or in a thread.

    When it stays silent
        In the first 10 steps, before 20 more were seen, for a single rank, for differences that no
        other rank waits for, and for steps in which a rank was in the debugger. On GPUs DDP times
        every hundredth step, and 6 of them are needed. Where the rank is slow because other
        processes took its CPU core, it is told as an info that says so.

    Since
        0.1.0
    """
    ranks = run.last
    steady = {rank.rank: _steady(run, rank) for rank in ranks}
    if len(ranks) < 2:
        return
    common = sorted(set.intersection(*(set(steps) for steps in steady.values())))
    sampled = any(_on_gpu(rank) for rank in ranks)
    if len(common) < (ENOUGH_SAMPLED if sampled else ENOUGH):
        return
    for rank in ranks:
        mine = steady[rank.rank]
        others = [steps for number, steps in steady.items() if number != rank.rank]
        surplus = [
            mine[number].own - median(steps[number].own for steps in others) for number in common
        ]
        relief = [
            median(steps[number].wait for steps in others) - mine[number].wait for number in common
        ]
        total = median(mine[number].total for number in common)
        gap = median(surplus)
        if gap < SLOWER * total or gap < NOTICEABLE:
            continue
        if median(relief) < BORNE_OUT * gap:
            continue
        if sum(value > gap / 2 for value in surplus) < STEADY * len(surplus):
            continue
        crowded = _waited(rank) - median(_waited(each) for each in ranks if each is not rank)
        if crowded >= BORNE_OUT * gap:
            yield _crowded(rank, gap, crowded)
            continue
        phase, slow, usual = _slow_phase(mine, others, common)
        yield Finding(
            code="DDP610",
            about=f"rank {rank.rank}",
            severity=Severity.WARNING,
            message=f"rank {rank.rank} holds the others up by {_ms(gap)} a step, in its "
            f"{PHASE_NAMES[phase]}",
            ranks=(rank.rank,),
            location=_site(rank, phase),
            evidence=(
                f"own time {_ms(median(mine[n].own for n in common))} a step; the others "
                f"{_ms(median(median(s[n].own for s in others) for n in common))} "
                f"(medians of {len(common)} steps)",
                f"{PHASE_NAMES[phase]}: {_ms(slow)} against {_ms(usual)}",
                f"the others wait {_ms(median(median(s[n].wait for s in others) for n in common))} "
                f"a step in the all-reduce, rank {rank.rank} "
                f"{_ms(median(mine[n].wait for n in common))}",
            ),
            fix=_STRAGGLER_FIX[phase],
        )


def _waited(rank: Rank) -> float:
    """Nanoseconds a step for which the training thread wanted a CPU core; 0 if not known."""
    told = [each for each in rank.of_kind("cores") if integer(each, "step") >= WARM_UP]
    steps = integer(told[-1], "step") - integer(told[0], "step") if told else 0
    return (integer(told[-1], "waited") - integer(told[0], "waited")) / steps if steps else 0.0


def _crowded(rank: Rank, gap: float, waited: float) -> Finding:
    return Finding(
        code="DDP610",
        about=f"rank {rank.rank}",
        severity=Severity.INFO,
        message=f"rank {rank.rank} holds the others up by {_ms(gap)} a step, because other "
        "processes take its CPU core",
        ranks=(rank.rank,),
        evidence=(f"it waits {_ms(waited)} a step longer than the others for a core to run on",),
        fix="See what else runs on this machine, processes that the rank started included; run "
        "fewer ranks, loader workers or threads (OMP_NUM_THREADS) than it has cores.",
    )


def _slow_phase(
    mine: dict[int, Step], others: Sequence[dict[int, Step]], common: Sequence[int]
) -> tuple[str, float, float]:
    """The phase with the largest surplus: its name, its median here, its median elsewhere."""
    found = []
    for phase in PHASES:
        here = median(getattr(mine[number], phase) for number in common)
        there = median(
            median(getattr(steps[number], phase) for steps in others) for number in common
        )
        found.append((here - there, phase, here, there))
    _, phase, here, there = max(found)
    return phase, here, there


@rule("DDP611", "data-bound", Severity.WARNING, lapses=pace)
def data_bound(run: Run) -> Iterator[Finding]:
    """The ranks wait for data in more than a fifth of every step.

    What it finds
        In the steady state, a median data wait above 20 % of the step on most ranks.

    Why it is bad
        The GPU, or the CPU that computes, stands still for that time.

    How to fix it
        More DataLoader workers (`num_workers`), `persistent_workers=True`, `pin_memory=True`,
        cheaper transforms, data on a faster disk or in a packed format.

    Example
        Wrong: `DataLoader(dataset, batch_size=64)` with JPEG decoding in the training process.
        Right: `DataLoader(dataset, batch_size=64, num_workers=8, persistent_workers=True)`.

    When it stays silent
        In the first 10 steps, before 20 more were seen, below 1 ms a step, for batches that do not
        come from a DataLoader, and when a single rank alone is slow in its data (that is DDP610).

    Since
        0.1.0
    """
    shares: dict[int, tuple[float, float, float]] = {}
    for rank in run.last:
        if str(rank.opened.get("backend", "")).startswith("nccl") and not _on_gpu(rank):
            # No DDP module, so no times of the device: the host's say nothing about it.
            return
        steps = [
            step
            for step in rank.steps
            if step.step >= WARM_UP and step.total > 0 and run.undisturbed(step)
        ]
        if len(steps) < ENOUGH:
            return
        wait = median(step.data for step in steps)
        share = median(step.data / step.total for step in steps)
        shares[rank.rank] = (share, wait, median(step.total for step in steps))
    if not shares:
        return
    bound = [
        n for n, (share, wait, _) in shares.items() if share > DATA_SHARE and wait >= NOTICEABLE
    ]
    if 2 * len(bound) <= len(shares):
        return
    worst = max(bound, key=lambda number: shares[number][0])
    share, wait, total = shares[worst]
    rank = next(rank for rank in run.last if rank.rank == worst)
    yield Finding(
        code="DDP611",
        about="data",
        severity=Severity.WARNING,
        message=f"{_ranks(bound, len(shares))} for data {100 * share:.0f} % of "
        f"every step ({_ms(wait)} of {_ms(total)})",
        ranks=tuple(sorted(bound)),
        location=_site(rank, "data"),
        evidence=tuple(
            f"rank {number}: {100 * shares[number][0]:.0f} %, {_ms(shares[number][1])} a step"
            for number in sorted(bound)[:4]
        ),
        fix="Give the DataLoader more workers (num_workers, persistent_workers=True), or make a "
        "sample cheaper to load.",
    )


_STRAGGLER_FIX = {
    "data": "Look at this rank's data: its storage, its workers, the cost of its samples.",
    "forward": "Look at this rank's device (throttled, shared, other model?) and its batch shapes.",
    "backward": "Look at this rank's device (throttled, shared?) and at hooks in its backward.",
    "optimizer": "Look at what this rank's optimizer step does that the others' does not.",
    "other": "Look at what only this rank does in the loop: logging, checkpoints, image dumps.",
}


def _on_gpu(rank: Rank) -> bool:
    """Whether the rank's steps were timed on a GPU."""
    return any(str(record.get("device", "")).startswith("cuda") for record in rank.of_kind("ddp"))


def _ranks(numbers: Sequence[int], of: int) -> str:
    if len(numbers) == of > 1:
        return "both ranks wait" if of == 2 else f"all {of} ranks wait"
    return f"{named(numbers)} {'waits' if len(numbers) == 1 else 'wait'}"


def _ms(nanoseconds: float) -> str:
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def _site(rank: Rank, phase: str) -> Location | None:
    """Where the phase is entered; for the code in between, where the forward is."""
    wanted = "forward" if phase == "other" else phase
    for record in rank.of_kind("site"):
        if record.get("phase") == wanted and record.get("path"):
            return Location(str(record["path"]), integer(record, "line"))
    return None
