"""Rules for speed: slow ranks and stages, waits for data (DDP610 to 612), and growing memory.

The memory is that of ranks (DDP620) and of the workers of loaders (DDP621).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import binary_size, count, duration, named
from ddpdoctor.core.relations import Lapsed, pace
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import brief, files_of
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
from ddpdoctor.diagnose.speed.memory import (
    MIN_UNEXPLAINED,
    MIN_UNEXPLAINED_SHARE,
    Grows,
    Held,
    WorkerGrows,
    allocated_by,
    growing,
    growing_worker,
    heavier,
    held_by,
    kept_by_items,
    looked,
    made_at,
    points_of,
    steps_left,
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
from ddpdoctor.run.records.memory import Holder, HoldersRecord
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


# -- memory that grows


LATE_LOOKS = 5  # Number of samples after which the search for an object ends
MAX_STEPS_LEFT = 10_000_000  # Maximum number of steps until full memory to report


class Words(NamedTuple):
    """The description of a kind of growth, and its fix."""

    said: str
    fix: str


def words_for(holder: Holder) -> Words:
    """Describe an object that holds a rank's memory, and the fix."""
    name, short = f"`{holder.name}`", holder.name.rpartition(".")[2]
    if holder.sort == "hooks":
        return Words(
            f"hooks are added in each step ({name})",
            "Add the hook once, before the loop, or call `.remove()` on the handle that "
            "registering it returns.",
        )
    if holder.sort == "graph":
        return Words(
            f"{name} keeps the graph of each step",
            f"Add numbers: `{short} += loss.item()`, or `.detach()` the tensors that a step passes "
            "on to the next.",
        )
    if holder.graph:
        kept = (
            f"{short}[key] = loss.item()"
            if holder.sort == "dict"
            else f"{short}.append(loss.item())"
        )
        return Words(
            f"the {holder.sort} {name} keeps tensors with the graph of their step",
            f"Keep numbers: `{kept}`, or `.detach()` the tensor that is kept.",
        )
    if holder.sort == "cache":
        return Words(
            f"the cache of {name} keeps every result",
            "Give it a size: `functools.lru_cache(maxsize=128)`.",
        )
    if holder.sort == "dict":
        return Words(
            f"the dict {name} gains {_entries(holder)} and drops none",
            "Drop entries that are not needed any more, use keys that come back, or bound it.",
        )
    if holder.sort in ("tensor", "array", "text"):
        what = {"tensor": "tensor", "array": "array"}.get(holder.sort, holder.holds)
        return Words(
            f"the {what} {name} gets longer in each step",
            "Keep the part that is needed, write the rest to a file, or clear it after each epoch.",
        )
    return Words(
        f"the {holder.sort} {name} gains {_entries(holder)} and drops none",
        "Keep what is needed: a number, the newest entries (`collections.deque(maxlen=100)`), or a "
        "file.",
    )


def _entries(holder: Holder) -> str:
    each = f" of {binary_size(holder.each)}" if holder.each else ""
    return f"entries ({holder.holds}{each})"


def _same_rank(cause: Finding, effect: Finding) -> bool:
    """Return whether the rank that ran out of memory is one with growing memory."""
    return bool({*cause.ranks} & {*effect.ranks})


_ENDS = {"DDP903": _same_rank, "DDP928": _same_rank, "DDP934": _same_rank}


@rule(
    "DDP620", "memory-grows", Severity.WARNING, lapses=pace, twice=True, yields_to=_ENDS, late=True
)
def memory_grows(run: Run) -> Iterator[Finding]:
    """The memory of a rank grows in each step, until it runs out.

    What it finds
        Memory at the end of steps (torch's CUDA allocator, or private memory of the process) that
        rises evenly over the run, and what holds it: losses kept with their graphs, tensors on a
        module, a cache by key, hooks added in each step. The name, its line, and when memory will
        be full. On a GPU also the line that allocates what stays. If no name holds it, it is
        memory of a C or C++ extension.

    Why it is bad
        The job ends with an out-of-memory error after hours, or the kernel kills a rank.

    How to fix it
        Keep numbers rather than tensors (`.item()`, `.detach()`), bound caches and buffers, add
        hooks once.

    Example
        Wrong: history.append(loss)
        Right: history.append(loss.item())

    When it stays silent
        Below 32 MiB (192 MiB and a quarter if no name is found), for growth that slows down or is
        undone, buffers with a maximum size, names that the code truncates, clears, or re-creates in
        each pass, a data set's cache in the first pass, and for steps that get heavier.
    """
    grown = [each for each in map(growing, run.last) if each is not None]
    groups: dict[tuple[object, ...], list[tuple[Grows, Held | None]]] = {}
    for each in grown:
        held = held_by(run, each)
        if held is None and not _surely(run, each):
            continue
        if held is None or not held.bounded:
            key = (held.holder.name, held.line) if held is not None else ()
            groups.setdefault(key, []).append((each, held))
    for group in groups.values():
        yield _finding(run, group, grown)


def _surely(run: Run, found: Grows) -> bool:
    """Return whether growth without a known object is not due to warm-up or larger batches."""
    strict = growing(found.rank, MIN_UNEXPLAINED)
    records = found.rank.records.of(HoldersRecord)
    return (
        strict is not None
        and strict.growth.size >= MIN_UNEXPLAINED_SHARE * strict.growth.low
        and (looked(found.rank, LATE_LOOKS) or not records)
        and not heavier(run, strict)
    )


_UNKNOWN_HOLDER = (
    "Look for a list, a dict or an attribute that keeps results of past steps, and keep `.item()` "
    "or `.detach()` of them. If there is none, run the rank under a heap profiler (`memray run "
    "--native`)."
)


def _finding(
    run: Run, group: Sequence[tuple[Grows, Held | None]], grown: Sequence[Grows]
) -> Finding:
    found, held = max(group, key=lambda each: each[0].growth.per_step)
    ranks = tuple(each.rank.rank for each, _ in group)
    growth = found.growth
    memory = "GPU memory" if found.gpu else "memory"
    left = steps_left(run, found, grown)
    soon = ""
    if left is not None and left < MAX_STEPS_LEFT and run.exit_status is None:
        soon = f"; it is full in about {count(_rounded(left), 'step')}{_time(found, left)}"
    words = Words(
        "no Python object that its code can reach holds it",
        "Suspect a C or C++ extension, or a library that keeps its inputs: leave them out one by "
        "one, or run the rank under a heap profiler (`memray run --native`).",
    )
    evidence = [
        f"{binary_size(growth.low)} at step {growth.start}, {binary_size(growth.high)} at step "
        f"{growth.end}"
    ]
    line: Location | None = None
    if held is not None:
        words, line = words_for(held.holder), held.line
        evidence.append(_evidence(held.holder))
    elif not (scans := found.rank.records.of(HoldersRecord)):
        words = Words("what holds it was not searched for", _UNKNOWN_HOLDER)
    elif not all(each.complete for each in scans):
        words = Words("what holds it is not among the objects examined in time", _UNKNOWN_HOLDER)
    site = allocated_by(found) if found.gpu else None
    if site is not None:
        took = f"{binary_size(site.size)} in {count(site.steps, 'step')}"
        evidence.append(f"what stays is allocated at {brief(site.line)}: {took}")
        line = line or site.line
    if len(group) > 1:
        evidence += [
            f"rank {each.rank.rank}: {binary_size(each.growth.per_step)} a step"
            for each, _ in group[:4]
        ]
    return Finding(
        code="DDP620",
        about=f"memory {held.holder.name if held is not None else ''} {line or ''}",
        severity=Severity.WARNING,
        message=f"the {memory} of {named(ranks)} grows by {binary_size(growth.per_step)} in each "
        f"step: {words.said}{soon}",
        ranks=ranks,
        location=line,
        evidence=tuple(evidence),
        fix=words.fix,
    )


def _evidence(holder: Holder) -> str:
    if holder.sort == "graph":
        return (
            f"its graph has {holder.size} such operations in a row, {holder.grew} more than before"
        )
    if holder.sort in ("tensor", "array", "text"):
        return f"it has {binary_size(holder.size)}, {binary_size(holder.grew)} more than before"
    where = f"in {holder.at.function}" if holder.at.function != "<module>" else "at module level"
    return (
        f"it has {count(holder.size, 'entry', 'entries')} {where}, {holder.grew} more than before"
    )


def _rounded(steps: int) -> int:
    """Round a number to two significant digits."""
    digits = max(len(str(steps)) - 2, 0)
    return round(steps, -digits)


def _time(found: Grows, left: int) -> str:
    points = [each for each in points_of(found.rank) if each.step >= found.growth.start]
    steps = points[-1].step - points[0].step if points else 0
    if steps <= 0:
        return ""
    return f", {duration(left * (points[-1].time - points[0].time) / steps / 1e9)}"


@rule("DDP621", "worker-memory-grows", Severity.WARNING, lapses=pace, twice=True, late=True)
def worker_memory_grows(run: Run) -> Iterator[Finding]:
    """The memory of a DataLoader's workers grows as they read the data set.

    What it finds
        A worker process whose memory rises. Either the data set has a large list, tuple or dict of
        Python objects, and the worker copies pages that it shared with its rank: reading an object
        changes its reference count, and so its page. Or the worker keeps the data that it has
        loaded, and its memory rises evenly.

    Why it is bad
        With 8 ranks and 8 workers each, a list of 2 GB becomes 128 GB, and the kernel kills a rank.

    How to fix it
        Hold large tables in a NumPy array, a tensor, or an Arrow table, whose elements are not
        Python objects. Bound caches in `__getitem__`, and divide their size by the number of
        workers.

    Example
        Wrong: self.paths = [str(p) for p in folder.rglob("*.jpg")]  # millions
        Right: self.paths = numpy.array([str(p) for p in folder.rglob("*.jpg")], dtype=numpy.bytes_)

    When it stays silent
        Below 48 MiB per worker, for growth that slows down unless the worker copies pages, and for
        copies if the data set has no container of 16 MiB or more.
    """
    found = [each for each in map(growing_worker, run.last) if each is not None]
    if not found:
        return
    worst = max(found, key=lambda each: each.growth.size)
    ranks = tuple(each.rank.rank for each in found)
    yield Finding(
        code="DDP621",
        about="workers",
        severity=Severity.WARNING,
        message=f"the memory of the loader workers of {named(ranks)} grows: {_cause(worst)}",
        ranks=ranks,
        location=_place(run, worst),
        evidence=_facts(worst),
        fix="Hold it as a NumPy array or a tensor: their elements have no reference counts."
        if worst.copies
        else "Bound what the data set keeps in `__getitem__`: each worker has a copy.",
    )


def _cause(found: WorkerGrows) -> str:
    if found.dataset is None:
        return "each worker keeps what it has loaded"
    name = f"{found.dataset.type}.{found.dataset.name}"
    return f"each copies the {found.dataset.holds} in `{name}` page by page as it reads it"


def _place(run: Run, found: WorkerGrows) -> Location | None:
    record = found.dataset
    if record is None:
        return kept_by_items(files_of(run))
    return made_at(record.path, record.name) or Location(record.path, record.line)


def _facts(found: WorkerGrows) -> tuple[str, ...]:
    growth = found.growth
    seconds = (growth.end - growth.start) / 1000
    facts = [
        f"a worker's {'own ' if found.copies else ''}memory went from {binary_size(growth.low)} to "
        f"{binary_size(growth.high)} in {duration(seconds)}",
        f"rank {found.rank.rank} has {count(found.children, 'such process', 'such processes')}",
    ]
    if found.dataset is not None:
        facts.append(f"`{found.dataset.name}` has {count(found.dataset.size, 'element')}")
    return tuple(facts)
