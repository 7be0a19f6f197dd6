"""Data (DDP117): ranks whose parts of the data overlap, whatever they call the samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.analysis.draws import (
    FEW,
    Pass,
    Passes,
    matched,
    other_data,
    overlap,
    repeatable,
    same_data,
    same_part,
)
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.rules.streams import common_stream
from ddpdoctor.run.snapshot import Run

LEAST = 0.02
"""The part of all draws that has to be shared; less may be what fills a last round."""

REPEATED = 0.1
"""The part of a rank's own draws above which it draws with replacement."""

KEPT = 256
"""Hashes that a rank writes of a pass: with fewer, these are all."""


@dataclass(frozen=True)
class _Shared:
    shared: int
    looked: int
    """Draws that could be compared, of which so many were of samples that another rank drew."""
    what: str


@rule("DDP117", "shared-rows", Severity.WARNING)
def shared_rows(run: Run) -> Iterator[Finding]:
    """The ranks' parts of the training data overlap.

    What it finds
        A pass in which ranks of a DDP group drew the same samples although each has a part of the
        data: subsets that overlap, a copy that each rank shuffled differently, slices that reach
        into the next rank's slice. Samples are identified by their content, or by their index in a
        data set that is the same on all ranks.

    Why it is bad
        Samples in several parts count more than others in each epoch, and as many samples are in no
        part and are never used for training.

    How to fix it
        Cut the parts from one order: the same permutation (same seed) on every rank, then
        `order[rank::world_size]`. Or use a `DistributedSampler`.

    Example
        Wrong:
            order = torch.randperm(len(data))  # another seed on each rank
            mine = Subset(data, order[rank::world_size])
        Right:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
            mine = Subset(data, order[rank::world_size])

    When it stays silent
        For draws with replacement, for custom samplers that give ranks the same samples, for data
        that repeats within a rank, below 2 % of the draws, and where inputs are augmented at random
        or are on a GPU. If every rank draws all of one data set, it is DDP102, or DDP115 for an
        iterable data set.
    """
    for passes in matched(run):
        each = list(passes.values())
        if not all(one.trains and one.closed for one in each):
            continue
        if any(one.sampler.replacement for one in each):
            continue
        found = _by_content(passes) or _by_number(passes)
        if found is None:
            continue
        first = each[0]
        at = first.record.split or first.made
        drawn = sum(max(one.record.draws, _looked(one)) for one in each)
        about = round(drawn * found.shared / found.looked)
        count = f"{about}" if found.looked == drawn else f"about {about}"
        yield Finding(
            code="DDP117",
            about=str(at),
            severity=Severity.WARNING,
            message=f"the ranks' parts of the training data overlap: {count} of {drawn} samples "
            f"drawn in one pass at {first.read} were "
            "drawn by another rank, too",
            ranks=tuple(passes),
            location=at,
            evidence=(
                f"of {found.looked} draws that were compared {found.what}, {found.shared} were of "
                "samples that another rank drew in the same pass",
                *(
                    f"rank {one.rank}: {max(one.record.draws, _looked(one))} samples"
                    for one in each[:4]
                ),
            ),
            fix="Cut the ranks' parts from one order that is the same on every rank (one seed), "
            "or give the whole data set to a DistributedSampler.",
        )
        return


def _by_number(passes: Passes) -> _Shared | None:
    """Of subsets of one data set: the samples that several of them gave."""
    each = list(passes.values())
    if (
        not all(one.indexed for one in each)
        or len({one.whole for one in each}) > 1
        or any(one.record.repeats > REPEATED * len(one.hits) for one in each)
    ):
        return None
    if same_part(passes):
        # Which sampler gives ranks the same samples on purpose, its class alone knows.
        names = {(one.sampler.name, one.sampler.torch) for one in each}
        if names != {("SubsetRandomSampler", True)}:
            return None
    elif all(one.shard is not None and one.shard[1] == len(each) for one in each):
        # Shards of other subsets: DDP110.
        return None
    if not same_data(passes):
        return None
    shared, looked = overlap(passes)
    return _enough(shared, looked, len(each), "by their number in the data set")


def _by_content(passes: Passes) -> _Shared | None:
    """Samples that were equal, whatever the ranks call them."""
    each = list(passes.values())
    sketches = [one.record.sketch for one in each if one.record.sketch is not None]
    if not all(_looked(one) for one in each) or not _comparable(passes):
        return None
    hashes = [frozenset(sketch.hashes) for sketch in sketches]
    bounds = [max(known) for known in hashes if len(known) >= KEPT]
    if bounds:
        # Of what is larger, some rank has not written all.
        hashes = [frozenset(value for value in known if value <= min(bounds)) for known in hashes]
    looked = sum(map(len, hashes))
    shared = looked - len(frozenset[int]().union(*hashes))
    # What the data themselves hold several times comes again within a rank as well.
    if 4 * len(each) * sum(sketch.repeats for sketch in sketches) > shared:
        return None
    return _enough(shared, looked, max(FEW, 2 * len(each)), "by their content")


def _comparable(passes: Passes) -> bool:
    """Whether equal samples on several ranks say that the ranks share them by mistake."""
    each = list(passes.values())
    if all(one.record.iterable for one in each):
        return common_stream(each) is None
    same, (shared, _) = same_part(passes), overlap(passes)
    if not other_data(passes) and same and shared >= len(each):
        # The ranks mean the same samples by the same numbers: that is the sampler's affair.
        return False
    if not same:
        # Each rank has its own shard: then that is meant.
        return not all(one.shard and one.shard[1] == len(each) for one in each)
    # Equal samples under other numbers: copies in another order, or samples made at random.
    return bool(shared) or all(map(repeatable, each))


def _enough(shared: int, looked: int, least: int, what: str) -> _Shared | None:
    return _Shared(shared, looked, what) if shared >= max(3, least, LEAST * looked) else None


def _looked(one: Pass) -> int:
    """How many samples a rank hashed."""
    return one.record.sketch.looked if one.record.sketch is not None else 0
