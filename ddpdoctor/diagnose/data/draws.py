"""Compare the samples that the ranks drew in their passes over loaders, and their losses.

Bitwise equal losses imply equal batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.model import DdpRecord, SoloRecord
from ddpdoctor.run.records.training import Head, PassRecord, SamplerFacts
from ddpdoctor.run.snapshot import Rank, Run

CLOSED = ("ended", "left")  # States of a finished pass

UNFOLLOWED = "unfollowed"
"""The state of a pass that was recorded only in part, because the overhead budget was spent."""

MIN_WHOLE = 0.9  # Minimum fraction that counts as all
MIN_REPEATED = 0.1  # Minimum fraction of repeated draws that means replacement
MAX_CHANCE = 1e-6  # Maximum probability that different data looks equal by chance
MIN_SAMPLES = 8  # Minimum number of samples to compare orders or splits

_NO_SAMPLER = SamplerFacts()


@dataclass(frozen=True)
class Pass:
    """One pass of one rank over a loader, by its newest record."""

    rank: int
    record: PassRecord
    before: tuple[PassRecord, ...] = ()  # Earlier passes of the rank over the same loader
    heads: frozenset[Head] = frozenset()
    """The first draws in all records of the pass. Older records have fewer."""

    @property
    def read(self) -> Location:
        """The line that reads the loader."""
        return Location(self.record.path, self.record.line)

    @property
    def place(self) -> tuple[Location, Location | None]:
        """The lines that read and build the loader, which identify it."""
        return self.read, self.record.made

    @property
    def made(self) -> Location:
        """The line that built the loader."""
        return self.record.made or self.read

    @property
    def trains(self) -> bool:
        """Whether its batches had backward passes."""
        marks, fetched = self.record.marks, self.record.fetched
        only = marks == fetched == 1 and self.record.state in ("ended", UNFOLLOWED)
        return (marks >= 2 or only) and 8 * marks >= fetched

    @property
    def closed(self) -> bool:
        """Whether the pass is over."""
        return self.record.state in CLOSED

    @property
    def length(self) -> int:
        """Number of samples in the data set, or in the loader's part of it."""
        inner = self.record.subset_length
        return self.whole if inner is None else inner

    @property
    def whole(self) -> int:
        """Number of indices in the space that all ranks share. -1 if unknown."""
        return -1 if self.record.length is None else self.record.length

    @cached_property
    def hits(self) -> frozenset[int]:
        """The followed indices that were drawn. All ranks follow the same ones."""
        return frozenset(self.record.hits)

    @cached_property
    def rows(self) -> dict[int | None, tuple[int | None, ...]]:
        """Hashes of samples' content by index, of this pass and earlier ones."""
        return {row[0]: row[1:] for each in (*self.before, self.record) for row in each.rows}

    @property
    def indexed(self) -> bool:
        """Whether it drew integers from a known index space."""
        return not self.record.iterable and not self.record.opaque and self.whole > 0

    @property
    def sampler(self) -> SamplerFacts:
        """The sampler's attributes."""
        return self.record.sampler or _NO_SAMPLER

    @property
    def shard(self) -> tuple[int, int] | None:
        """The sampler's shard and its number of shards, from its attributes. None without them."""
        rank, of = self.sampler.rank, self.sampler.num_replicas
        return None if rank is None or of is None else (rank, of)

    @property
    def at(self) -> Location:
        """The line that built the sampler, or else the loader."""
        return self.sampler.made or self.made

    @property
    def draws_again(self) -> bool:
        """Whether it drew many indices repeatedly."""
        return self.record.repeats > MIN_REPEATED * len(self.hits)


Passes = dict[int, Pass]  # The same pass on each rank of a DDP group


def passes_of(rank: Rank) -> list[Pass]:
    """Return a rank's passes, oldest first, each by its newest record."""
    newest: dict[int, PassRecord] = {}
    heads: dict[int, set[Head]] = {}
    for record in rank.records.of(PassRecord):
        heads.setdefault(record.pass_, set()).update([record.head] if record.head else [])
        older = newest.get(record.pass_)
        # Only one of the records describes the loop.
        newest[record.pass_] = (
            record if older is None else replace(record, to_end=record.to_end or older.to_end)
        )
    seen: dict[object, tuple[PassRecord, ...]] = {}
    found: list[Pass] = []
    for record in newest.values():
        place = Pass(rank.rank, record).place
        known = frozenset(heads[record.pass_])
        found.append(Pass(rank.rank, record, seen.get(place, ()), known))
        seen[place] = (*seen.get(place, ()), record)
    return found


def groups_of(run: Run) -> Iterator[tuple[Rank, ...]]:
    """Yield the ranks of each DDP group of several ranks, if all of them have records."""
    ranks = {rank.rank: rank for rank in run.last}
    groups = dict.fromkeys(
        tuple(sorted(record.group_ranks))
        for rank in run.last
        for record in rank.records.of(DdpRecord)
    )
    for group in groups:
        if len(group) > 1 and ranks.keys() >= set(group):
            yield tuple(ranks[number] for number in group)


def matched(run: Run) -> Iterator[Passes]:
    """Yield the passes of all ranks of a DDP group over the same loader, begun at one step."""
    for group in groups_of(run):
        # Match passes by number, because some passes of a rank may not have been followed.
        by_rank = [
            {(each.place, each.record.armed, each.record.number): each for each in passes_of(rank)}
            for rank in group
        ]
        for which in by_rank[0]:
            if all(which in mine for mine in by_rank):
                yield {mine[which].rank: mine[which] for mine in by_rank}


def training(run: Run) -> Iterator[Passes]:
    """Yield the matched passes that trained on every rank, over index spaces of one length."""
    for passes in matched(run):
        each = list(passes.values())
        if (
            all(one.trains and one.indexed for one in each)
            and len({one.whole for one in each}) == 1
        ):
            yield passes


def divided(passes: Sequence[Pass]) -> bool:
    """Return whether each rank's sampler takes its shard of data that the group shares."""
    # Accelerate puts this sampler below the one that divides its batches.
    if all(one.sampler.name == "SeedableRandomSampler" for one in passes):
        return True
    return [one.shard for one in passes] == [(i, len(passes)) for i in range(len(passes))]


def same_data(passes: Passes) -> bool:
    """Return whether equal indices held equal samples on all ranks, if ranks drew the same indices.

    One part of the samples is enough (labels, if the images are augmented at random) if it varies
    too much to be equal by chance.
    """
    first, *others = passes.values()
    return all(_same(first, other) is True for other in others)


def other_data(passes: Passes) -> bool:
    """Return whether equal indices held different samples on some rank."""
    first, *others = passes.values()
    return any(_same(first, other) is False for other in others)


def _same(one: Pass, other: Pass) -> bool | None:
    """Return whether the samples are equal. None if unknown."""
    common = one.rows.keys() & other.rows.keys()
    if len(common) < 2:
        return None
    width = min(len(row) for each in (one, other) for row in each.rows.values())
    alike = False
    for column in range(width):
        if all(one.rows[index][column] == other.rows[index][column] for index in common):
            alike = True
            held = {**one.rows, **other.rows}.values()
            shares = [count / len(held) for count in Counter(row[column] for row in held).values()]
            if sum(share * share for share in shares) ** len(common) < MAX_CHANCE:
                return True
    return None if alike else False


def repeatable(one: Pass) -> bool | None:
    """Return whether a sample that a rank drew twice was the same. None if it drew none twice.

    It differs if samples are generated at random, such as synthetic data. Two ranks with the same
    seed then hold equal samples although their indices differ.
    """
    held: dict[int | None, tuple[int | None, ...]] = {}
    again = False
    for record in (*one.before, one.record):
        for index, *row in record.rows:
            again = again or index in held
            if held.setdefault(index, tuple(row)) != tuple(row):
                return False
    return again or None


def same_part(passes: Passes) -> bool:
    """Return whether all ranks have the same subset or no subset, so that indices match."""
    return len({one.record.subset for one in passes.values()}) == 1


def same_order(passes: Passes) -> bool:
    """Return whether all ranks began with the same indices in the same order."""
    draws, same = beginning(*passes.values())
    return same and draws >= MIN_SAMPLES


def beginning(*passes: Pass) -> tuple[int, bool]:
    """Return the number of first draws that all passes recorded, and whether they are equal."""
    known = [{head.draws: head.digest for head in each.heads} for each in passes]
    draws = max(set.intersection(*map(set, known)), default=0)
    return draws, draws > 0 and len({each[draws] for each in known}) == 1


def overlap(passes: Passes) -> tuple[int, int]:
    """Return the number of draws of followed indices that other ranks repeated, and of all."""
    union = frozenset[int]().union(*(each.hits for each in passes.values()))
    total = sum(len(each.hits) for each in passes.values())
    return total - len(union), total


# -- equal losses


MIN_STEPS = 16  # Minimum number of steps with a loss on every rank
MIN_RISES = 0.2
"""Minimum fraction of steps after which the loss rises. It rarely does if the batch never changes,
as in a benchmark."""


@dataclass(frozen=True)
class EqualLosses:
    """Ranks of a DDP group, or ranks that average by hand, with the same losses."""

    ranks: tuple[int, ...]
    steps: int
    at: Location | None  # The line that computes or uses the loss


def _averaging(run: Run) -> Iterator[tuple[Rank, ...]]:
    """Yield all ranks if they average gradients by hand instead of using DDP."""
    complete = 1 < len(run.last) == run.world_size
    if complete and all(map(_averages, run.last)):
        yield tuple(run.last)


def averages_by_hand(rank: Rank) -> bool:
    """Return whether a rank without DDP reduces as much as a gradient in each step."""
    solo = rank.records.of(SoloRecord)
    if not solo or rank.records.of(DdpRecord):
        return False
    first, last = solo[0], solo[-1]
    if first.wide is None or last.wide is None:
        return False
    return last.wide - first.wide >= last.step - first.step > 0


def _averages(rank: Rank) -> bool:
    """Return whether a rank averages gradients by hand, and reduces nothing else."""
    ring, solo = rank.ring, rank.records.of(SoloRecord)
    if not averages_by_hand(rank) or rank.lost or ring is None or ring.partial:
        return False
    first, last = solo[0], solo[-1]
    if None in (first.calls, first.wide, last.calls, last.wide):
        return False
    calls, wide = (last.calls or 0) - (first.calls or 0), (last.wide or 0) - (first.wide or 0)
    # Other collectives may gather the outputs from which the loss is computed.
    return calls == wide and {each.name for each in ring.collectives} == {"all_reduce"}


def equal_losses(run: Run) -> EqualLosses | None:
    """Return the first group whose ranks had the same loss in every step that all recorded."""
    for group in (*groups_of(run), *_averaging(run)):
        # A journal line for several steps has the loss of one of them.
        losses = [
            {each.step: each.loss for each in rank.steps if each.steps == 1 and each.loss}
            for rank in group
        ]
        common = sorted(set.intersection(*map(set, losses)))
        if len(common) < MIN_STEPS or any(
            _may_reduce(rank, len(common)) and not _averages(rank) for rank in group
        ):
            continue
        values = [losses[0][step] or 0.0 for step in common]
        rises = sum(later > before for before, later in pairwise(values))
        if rises < MIN_RISES * len(values) or 2 * len(set(values)) < len(values):
            continue
        if all(each[step] == losses[0][step] for step in common for each in losses):
            at = group[0].site("forward") or group[0].site("backward")
            return EqualLosses(tuple(rank.rank for rank in group), len(common), at)
    return None


def _may_reduce(rank: Rank, steps: int) -> bool:
    """Return whether the losses may be the mean over the ranks, or of gathered outputs."""
    ring = rank.ring
    return not rank.counted_collectives or ring is None or 2 * ring.calls >= steps
