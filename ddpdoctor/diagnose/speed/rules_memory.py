"""Rules for memory that grows: of ranks (DDP620) and of the workers of loaders (DDP621)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import binary_size, count, duration, named
from ddpdoctor.core.relations import pace
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import brief, files_of
from ddpdoctor.diagnose.speed.growing_names import kept_by_items, made_at
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
    looked,
    points_of,
    steps_left,
)
from ddpdoctor.run.records.memory import Holder, HoldersRecord
from ddpdoctor.run.snapshot import Run

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
