"""Data (DDP1xx) without indices: streams that ranks or workers do not share out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ddpdoctor.analysis.draws import FEW, WHOLE, Pass, matched, passes_of
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.snapshot import Run


@rule("DDP115", "duplicated-iterable", Severity.ERROR)
def same_stream(run: Run) -> Iterator[Finding]:
    """Every rank gets the same samples from an iterable data set.

    What it finds
        A training loader over an iterable-style data set whose first batches hold the same samples
        on all ranks of a DDP group, by a hash of their content.

    Why it is bad
        The ranks compute the same gradients: N GPUs train no faster than one. A `DataLoader` cannot
        shard an iterable data set and takes no sampler for it.

    How to fix it
        Make `__iter__` skip the samples of other ranks and workers, with `dist.get_rank()` and
        `torch.utils.data.get_worker_info()`, or use your library's `split_by_node`.

    Example
        Wrong:
            def __iter__(self):
                yield from read(self.files)
        Right:
            def __iter__(self):
                yield from read(self.files[self.rank :: self.world_size])

    When it stays silent
        For evaluation loaders, for batches that repeat within a rank (synthetic data), for data
        that is augmented at random in all its parts, and for tensors on a GPU.
    """
    for passes in matched(run):
        each = list(passes.values())
        if not all(one.trains and one.record.iterable for one in each):
            continue
        values = common_stream(each)
        if values is None:
            continue
        first = each[0]
        yield Finding(
            code="DDP115",
            about=str(first.made),
            severity=Severity.ERROR,
            message=f"every rank trains on the same samples of the iterable data set that the "
            f"loader built at {first.made} reads",
            ranks=tuple(passes),
            location=first.made,
            evidence=(
                f"of {len(first.record.rows)} samples hashed on rank {first.rank}, {values} are "
                f"the same on all {len(each)} ranks",
                f"data set {first.record.dataset}, read at {first.read}",
            ),
            fix="Give each rank its own part in the data set's __iter__, by dist.get_rank() and "
            "dist.get_world_size(), and each worker its part of that.",
        )
        return


def _column(one: Pass, number: int) -> list[int | None]:
    return [row[1 + number] for row in one.record.rows]


def _columns(each: Sequence[Pass]) -> range:
    return range(min((len(row) - 1 for one in each for row in one.record.rows), default=0))


def common_stream(each: Sequence[Pass]) -> int | None:
    """How many samples all ranks have in common, if that is nearly all they have."""
    if not all(one.record.rows for one in each):
        return None
    for column in _columns(each):
        streams = [_column(one, column) for one in each]
        distinct = [set(stream) for stream in streams]
        workers = max(1, *(one.record.workers for one in each))
        if any(
            len(values) < 2 * FEW or WHOLE * len(stream) > len(values) * workers
            for values, stream in zip(distinct, streams, strict=True)
        ):
            continue
        common = set.intersection(*distinct)
        if len(common) >= WHOLE * min(map(len, distinct)):
            return len(common)
    return None


@rule("DDP116", "duplicated-between-workers", Severity.ERROR)
def same_workers(run: Run) -> Iterator[Finding]:
    """All workers of a DataLoader give the same samples of an iterable data set.

    What it finds
        A training loader with several workers over an iterable-style data set, whose batches come
        in groups of equal content: one copy from each worker.

    Why it is bad
        Each worker has a copy of the data set and iterates over all of it. An epoch is as many
        times longer as there are workers, and consecutive steps repeat the same samples.

    How to fix it
        In `__iter__`, let each worker take its part with `torch.utils.data.get_worker_info()`.

    Example
        Wrong:
            for i in range(self.start, self.end):
                yield self.load(i)
        Right:
            worker = get_worker_info()
            for i in range(self.start + worker.id, self.end, worker.num_workers):
                yield self.load(i)

    When it stays silent
        For a single worker, for batches that repeat for other reasons (synthetic data), for workers
        that each shuffle differently, for evaluation loaders, and for tensors on a GPU.
    """
    sick: dict[tuple[object, ...], list[tuple[Pass, int, int]]] = {}
    observed: Counter[tuple[object, ...]] = Counter()
    for rank in run.last:
        known: set[tuple[object, ...]] = set()
        for one in passes_of(rank):
            if one.place in known or not one.trains or not one.record.iterable:
                continue
            if one.record.in_order:
                known.add(one.place)
                copied = _copies(one)
                if copied is not None:
                    sick.setdefault(one.place, []).append((one, *copied))
        observed.update(known)
    for place, found in sick.items():
        if observed[place] < len(run.last):
            # The other ranks may be about to report the same.
            continue
        first, doubled, of = found[0]
        ranks = tuple(one.rank for one, _, _ in found)
        yield Finding(
            code="DDP116",
            about=str(first.made),
            severity=Severity.ERROR,
            message=f"the {first.record.workers} workers of the loader built at {first.made} all "
            f"give the same samples, on {named(ranks)}",
            ranks=ranks,
            location=first.made,
            evidence=(
                f"of {of} samples in batches that came at one time from each worker, {doubled} "
                f"came from another worker, too",
                f"data set {first.record.dataset}, read at {first.read}",
            ),
            fix="Give each worker its part in the data set's __iter__, by "
            "torch.utils.data.get_worker_info().",
        )


def _copies(one: Pass) -> tuple[int, int] | None:
    """Samples that came from several workers in one round of batches, of all in such rounds."""
    workers = one.record.workers
    if workers < 2:
        return None
    for column in _columns([one]):
        rounds = _rounds(one, workers, column)
        seen = [value for batches in rounds for batch in batches for value in batch]
        if len(set(seen)) < 2 * FEW or any(
            len(set(batch)) < WHOLE * len(batch) for batches in rounds for batch in batches
        ):
            continue
        doubled = sum(map(_doubled, rounds))
        if doubled >= WHOLE * len(seen) and len(set(seen)) * workers <= 1.2 * len(seen) + workers:
            return doubled, len(seen)
    return None


def _rounds(one: Pass, workers: int, column: int) -> list[list[list[int | None]]]:
    """The hashes of a column in each round that all workers gave a batch in, by batch."""
    rounds: dict[int, dict[int, list[int | None]]] = {}
    for batch, *hashes in one.record.rows:
        if batch is not None:
            of_round = rounds.setdefault(batch // workers, {})
            of_round.setdefault(batch % workers, []).append(hashes[column])
    return [list(each.values()) for each in rounds.values() if len(each) == workers]


def _doubled(batches: list[list[int | None]]) -> int:
    """How many samples of a round are in several of its batches."""
    times = Counter(value for batch in batches for value in set(batch))
    return sum(times[value] > 1 for batch in batches for value in batch)
