"""Rules that compare data by content (DDP115 to DDP117): samples that several ranks have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.formatting import count, named
from ddpdoctor.diagnose.data.draws import (
    MIN_SAMPLES,
    MIN_WHOLE,
    Pass,
    Passes,
    groups_of,
    matched,
    other_data,
    overlap,
    passes_of,
    repeatable,
    same_data,
    same_part,
)
from ddpdoctor.run.records.training import FedRecord
from ddpdoctor.run.snapshot import Rank, Run

MIN_BY_HAND = 16  # Minimum number, for each rank, of samples that ranks share without a loader
MIN_PART = 0.05  # Minimum part of the compared samples


@rule("DDP115", "duplicated-iterable", Severity.ERROR)
def same_stream(run: Run) -> Iterator[Finding]:
    """Every rank gets the same samples from an iterable data set.

    What it finds
        A training loader over an iterable-style data set whose first batches hold the same samples
        on all ranks of a DDP group, by a hash of their content.

    Why it is bad
        The ranks compute the same gradients: N GPUs train no faster than one. A `DataLoader` cannot
        shard an iterable data set, and does not accept a sampler for it.

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
        values = _common_samples(each)
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


def _columns(each: Sequence[Pass]) -> range:
    """Return the columns that all rows of hashes have."""
    return range(min((len(row) - 1 for one in each for row in one.record.rows), default=0))


def _common_samples(each: Sequence[Pass]) -> int | None:
    """Return the number of samples that all ranks share, if these are nearly all samples."""
    if not all(one.record.rows for one in each):
        return None
    workers = max(1, *(one.record.workers for one in each))
    for column in _columns(each):
        streams = [[row[1 + column] for row in one.record.rows] for one in each]
        distinct = [set(stream) for stream in streams]
        if any(
            len(values) < 2 * MIN_SAMPLES or MIN_WHOLE * len(stream) > len(values) * workers
            for values, stream in zip(distinct, streams, strict=True)
        ):
            continue
        common = set.intersection(*distinct)
        if len(common) >= MIN_WHOLE * min(map(len, distinct)):
            return len(common)
    return None


@rule("DDP116", "duplicated-between-workers", Severity.ERROR)
def same_workers(run: Run) -> Iterator[Finding]:
    """All workers of a DataLoader yield the same samples of an iterable data set.

    What it finds
        A training loader with several workers over an iterable-style data set, whose batches come
        in groups of equal content: one copy from each worker.

    Why it is bad
        Each worker has a copy of the data set and iterates over all of it. With N workers an epoch
        is N times as long, and consecutive steps repeat the same samples.

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
                f"of {of} samples in rounds with one batch from each worker, {doubled} "
                f"came from another worker as well",
                f"data set {first.record.dataset}, read at {first.read}",
            ),
            fix="Give each worker its part in the data set's __iter__, by "
            "torch.utils.data.get_worker_info().",
        )


def _copies(one: Pass) -> tuple[int, int] | None:
    """Count the samples that several workers yielded in the same round of batches, and all.

    Only rounds with a batch from every worker count.
    """
    workers = one.record.workers
    if workers < 2:
        return None
    for column in _columns([one]):
        by_round: dict[int, dict[int, list[int | None]]] = {}
        for batch, *hashes in one.record.rows:
            if batch is not None:
                of_round = by_round.setdefault(batch // workers, {})
                of_round.setdefault(batch % workers, []).append(hashes[column])
        rounds = [list(each.values()) for each in by_round.values() if len(each) == workers]
        batches = [batch for each in rounds for batch in each]
        seen = [value for batch in batches for value in batch]
        if len(set(seen)) < 2 * MIN_SAMPLES or any(
            len(set(batch)) < MIN_WHOLE * len(batch) for batch in batches
        ):
            continue
        doubled = sum(map(_doubled, rounds))
        if (
            doubled >= MIN_WHOLE * len(seen)
            and len(set(seen)) * workers <= 1.2 * len(seen) + workers
        ):
            return doubled, len(seen)
    return None


def _doubled(batches: list[list[int | None]]) -> int:
    """Return the number of samples of a round that are in several of its batches."""
    times = Counter(value for batch in batches for value in set(batch))
    return sum(times[value] > 1 for batch in batches for value in batch)


MIN_SHARED = 0.02  # Minimum fraction of shared draws. Less may be padding of the last round.
MAX_HASHES = 256
"""Maximum number of hashes that a rank records per pass. Fewer hashes cover all samples."""

Compared = tuple[int, int, str]  # Number of shared draws, number of compared draws, and the method


@rule("DDP117", "shared-rows", Severity.WARNING)
def shared_rows(run: Run) -> Iterator[Finding]:
    """The ranks' parts of the training data overlap.

    What it finds
        A pass in which ranks of a DDP group drew the same samples although each has a part of the
        data: subsets that overlap, a copy that each rank shuffled differently, slices that reach
        into the next rank's slice. Samples are identified by their content, or by their index in a
        data set that is the same on all ranks.

    Why it is bad
        Samples in several parts weigh more than others in each epoch, and other samples are in no
        part and are never used for training.

    How to fix it
        Cut the parts from one order: the same permutation (same seed) on every rank, then
        `order[rank::world_size]`. Or use a `DistributedSampler`.

    Example
        Wrong:
            order = torch.randperm(len(data))  # a different seed on each rank
            mine = Subset(data, order[rank::world_size])
        Right:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
            mine = Subset(data, order[rank::world_size])

    When it stays silent
        For draws with replacement, for custom samplers that give ranks the same samples, for data
        that repeats within a rank, below 2 % of the draws, and where inputs are augmented at random
        or are on a GPU. Of batches cut by hand, only the first 64 are compared. If every rank draws
        all of one data set, it is DDP102, or DDP115 for an iterable data set.
    """
    for passes in matched(run):
        each = list(passes.values())
        if not all(one.trains and one.closed and not one.sampler.replacement for one in each):
            continue
        found = _by_content(passes) or _by_index(passes)
        if found is None:
            continue
        shared, compared, how = found
        first = each[0]
        at = first.record.split or first.made
        samples = {one.rank: max(one.record.draws, _hashed(one)) for one in each}
        drawn = sum(samples.values())
        number_shared = f"{round(drawn * shared / compared)}"
        yield Finding(
            code="DDP117",
            about=str(at),
            severity=Severity.WARNING,
            message=f"the ranks' parts of the training data overlap: "
            f"{'' if compared == drawn else 'about '}{number_shared} of {drawn} samples "
            f"drawn in one pass at {first.read} were drawn by another rank, too",
            ranks=tuple(passes),
            location=at,
            evidence=(
                f"of {compared} draws that were compared {how}, {shared} were of samples that "
                "another rank drew in the same pass",
                *(f"rank {rank}: {number} samples" for rank, number in list(samples.items())[:4]),
            ),
            fix=_ONE_ORDER,
        )
        return
    yield from _shared_by_hand(run)


def _shared_by_hand(run: Run) -> Iterator[Finding]:
    """Yield a finding about ranks that cut their batches by hand, from overlapping parts."""
    for ranks in groups_of(run):
        found = None if any(map(_has_loader, ranks)) else _overlap_by_hand(ranks)
        if found is None:
            continue
        shared, compared, batches = found
        fed = ranks[0].records.first(FedRecord)
        at = fed.location if fed is not None else None
        yield Finding(
            code="DDP117",
            about=str(at),
            severity=Severity.WARNING,
            message=f"the ranks' parts of the training data overlap: {shared} of {compared} "
            "samples of the first batches were trained on by another rank, too",
            ranks=tuple(rank.rank for rank in ranks),
            location=at,
            evidence=(
                f"the first {count(batches, 'batch', 'batches')} of each rank were compared by "
                "their content, and no loader gave them",
            ),
            fix=_ONE_ORDER,
        )
        return


def _has_loader(rank: Rank) -> bool:
    return any(one.trains for one in passes_of(rank))


def _overlap_by_hand(ranks: Sequence[Rank]) -> tuple[int, int, int] | None:
    """Return how many of the first samples of all ranks are shared, and the number of batches.

    Return None if the ranks seem to draw from disjoint parts, to draw with replacement, or to take
    the same batches all of them.
    """
    fed = [next(iter(rank.records.of(FedRecord)), None) for rank in ranks]
    batches = [each.batches for each in fed if each is not None]
    if len(batches) < len(ranks):
        return None
    length = min(_first_pass(each, len(ranks)) for each in batches) // 2
    equal = sum(len(set(step)) == 1 for step in zip(*batches, strict=False))
    if 2 * equal > min(map(len, batches)):
        return None
    drawn = [[row for batch in each[:length] for row in batch] for each in batches]
    parts = [set(rows) for rows in drawn]
    distinct = sum(map(len, parts))
    repeats = sum(map(len, drawn)) - distinct
    owners = Counter(row for part in parts for row in part)
    shared = sum(times for times in owners.values() if times > 1)
    # Draws with replacement repeat within a rank half as often as in another one.
    least = max(MIN_BY_HAND * len(ranks), 4 * len(ranks) * repeats, distinct * MIN_PART)
    return (shared, distinct, length) if shared >= least else None


def _first_pass(batches: Sequence[Sequence[int]], ranks: int) -> int:
    """Return the number of first batches in which few samples come again."""
    seen: set[int] = set()
    drawn = 0
    for number, batch in enumerate(batches):
        drawn += len(batch)
        seen.update(batch)
        if (drawn - len(seen)) * 4 * ranks > drawn:
            return number
    return len(batches)


_ONE_ORDER = (
    "Cut the ranks' parts from one order that is the same on every rank (one seed), or give the "
    "whole data set to a DistributedSampler."
)


def _by_index(passes: Passes) -> Compared | None:
    """Return the overlap of several subsets of one data set, by index."""
    each = list(passes.values())
    if (
        not all(one.indexed and not one.draws_again for one in each)
        or len({one.whole for one in each}) > 1
    ):
        return None
    if same_part(passes):
        # Other samplers may give ranks the same samples on purpose.
        names = {(one.sampler.name, one.sampler.torch) for one in each}
        if names != {("SubsetRandomSampler", True)}:
            return None
    elif _all_sharded(each):
        # Shards of different subsets are DDP110.
        return None
    if not same_data(passes):
        return None
    return _enough(*overlap(passes), len(each), "by their index in the data set")


def _by_content(passes: Passes) -> Compared | None:
    """Return the overlap by content."""
    each = list(passes.values())
    sketches = [one.record.sketch for one in each if one.record.sketch is not None]
    if not all(_hashed(one) for one in each) or not _comparable(passes):
        return None
    hashes = [frozenset(sketch.hashes) for sketch in sketches]
    bounds = [max(known) for known in hashes if len(known) >= MAX_HASHES]
    if bounds:
        # A rank with too many hashes has left out the largest.
        hashes = [frozenset(value for value in known if value <= min(bounds)) for known in hashes]
    compared = sum(map(len, hashes))
    shared = compared - len(frozenset[int]().union(*hashes))
    # Duplicates in the data also repeat within a rank.
    if 4 * len(each) * sum(sketch.repeats for sketch in sketches) > shared:
        return None
    return _enough(shared, compared, max(MIN_SAMPLES, 2 * len(each)), "by their content")


def _comparable(passes: Passes) -> bool:
    """Return whether equal samples on several ranks show that ranks share them by mistake."""
    each = list(passes.values())
    if all(one.record.iterable for one in each):
        return _common_samples(each) is None
    same, (shared, _) = same_part(passes), overlap(passes)
    if not other_data(passes) and same and shared >= len(each):
        # Equal indices are equal samples on all ranks, so the sampler decides.
        return False
    if not same:
        # Sharded subsets may share samples on purpose.
        return not _all_sharded(each)
    # Equal samples with different indices: copies in another order, or randomly generated samples.
    return bool(shared) or all(map(repeatable, each))


def _all_sharded(each: Sequence[Pass]) -> bool:
    return all(one.shard is not None and one.shard[1] == len(each) for one in each)


def _enough(shared: int, compared: int, least: int, how: str) -> Compared | None:
    return (shared, compared, how) if shared >= max(3, least, MIN_SHARED * compared) else None


def _hashed(one: Pass) -> int:
    """Return the number of samples that a rank hashed."""
    return one.record.sketch.looked if one.record.sketch is not None else 0
